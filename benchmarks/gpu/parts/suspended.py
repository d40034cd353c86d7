"""A worker is suspended while its kernels run: for a moment, which ends no process; then for good, and it is replaced."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.gpu.measuring import note
from benchmarks.gpu.surviving import surviving

MOMENT_S = 1.5


def main() -> None:
    with surviving() as job:
        before = job.await_warm()
        suspended_s = time.monotonic()
        os.kill(before[1], signal.SIGSTOP)
        time.sleep(MOMENT_S)
        os.kill(before[1], signal.SIGCONT)
        continued_s = time.monotonic()
        note(f"suspended for {MOMENT_S:g} s → all train", job.await_training(continued_s) - continued_s, "s")
        if job.processes() != before:
            raise RuntimeError(f"a process was replaced: {before} → {job.processes()}")
        suspended_s = time.monotonic()
        os.kill(before[1], signal.SIGSTOP)
        next_s = job.next_step_s(suspended_s + MOMENT_S, before[1])
        note("suspended for good → next step of the others", next_s - suspended_s, "s")
        note("suspended for good → all train again", job.await_training(suspended_s, before[1]) - suspended_s, "s")
        job.stop()


if __name__ == "__main__":
    main()
