"""SIGKILL of the agent: which of 6 processes live one second later (2 ranks, each with a plain child and one with its own session)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from benchmarks.harness import Launcher, Metric, Row, Sample, launched, wait_for_stamps


def alive(pid: int) -> bool:
    """A zombie is dead: PID 1 of a container may take its time to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def measure(launcher: Launcher, folder: Path) -> Sample:
    flags = ["--standalone", "--nproc-per-node", "2"]
    with launched(launcher, flags, "stamp.py", folder, extra={"BENCH_MODE": "children"}) as (process, _):
        wait_for_stamps(folder, "main", 2, process)
        pids = [
            pid for name in ("pid", "plain", "session") for pid in wait_for_stamps(folder, name, 2, process).values()
        ]
        process.kill()
        process.wait()
        time.sleep(1.0)
        left = [pid for pid in pids if alive(pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return {"left (worst)": len(left)}


ROW = Row(
    name="orphans",
    title="processes left 1 s after SIGKILL of the agent, of 6",
    metrics=(Metric("left (worst)", "", value_max=0, digits=0, summary=max),),
    measure=measure,
    repeat={"holdfast": 5, "torchrun": 3},
)
