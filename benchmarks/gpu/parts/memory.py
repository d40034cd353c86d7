"""From the SIGKILL of the agent to the moment at which its workers, and their memory on the device, are gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from benchmarks.gpu.measuring import ON_GPU, POLL_S, gpu_memory, left_s, launched, note

RANKS = 4
SLACK_BYTES = 64 << 20


def running(pid: int) -> bool:
    """Whether this process is there, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def main() -> None:
    before = gpu_memory()[0] if ON_GPU else 0
    with launched("holdfast", ["--standalone", "--nproc-per-node", str(RANKS)], "hold_memory.py") as job:
        pids = [int(each) for each in job.await_stamps("pid", RANKS).values()]
        if ON_GPU:
            note("in use by 4 ranks", (gpu_memory()[0] - before) / 2**30, "GiB")
        killed_s = time.monotonic()
        os.kill(job.process.pid, signal.SIGKILL)
        while any(map(running, pids)) and left_s() > 1:
            time.sleep(POLL_S)
        note("agent killed → no worker", time.monotonic() - killed_s, "s")
        while ON_GPU and gpu_memory()[0] > before + SLACK_BYTES and left_s() > 1:
            time.sleep(POLL_S)
        if ON_GPU:
            used_bytes, users = gpu_memory()
            note("agent killed → its memory is free", time.monotonic() - killed_s, "s")
            note("still in use", (used_bytes - before) / 2**20, "MiB")
            if used_bytes > before + SLACK_BYTES or set(users) & set(pids):
                raise RuntimeError(f"{(used_bytes - before) >> 20} MiB are in use, by {users}")
        if left := [pid for pid in pids if running(pid)]:
            raise RuntimeError(f"workers {left} are still there")


if __name__ == "__main__":
    main()
