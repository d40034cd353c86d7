"""The last save meets a full disk: how long from the last step of two ranks to the end of the job.

torchrun has no snapshots: it is not measured.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from benchmarks.harness import BenchmarkError, Launcher, Metric, Row, Sample, end, launched, stamps, tail

LIMIT_S = 200.0


def why_not() -> str:
    return "" if os.geteuid() == 0 else "a full disk is a small tmpfs, which root alone can mount"


def measure(launcher: Launcher, folder: Path) -> Sample:
    disk = folder / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)], check=True)
    try:
        flags = ["--standalone", "--nproc-per-node", "2"]
        extra = {"OMP_NUM_THREADS": "1"}
        with launched(launcher, flags, "full_save.py", folder, str(disk), extra=extra) as (process, _):
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                end(process)
                raise BenchmarkError(f"it did not end within {LIMIT_S:g} s") from None
        ended_ns, last = time.monotonic_ns(), stamps(folder, "last")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    text = tail(folder, 4000)
    if code == 0 or len(last) < 2 or "HF214" not in text or "No space left on device" not in text:
        raise BenchmarkError(f"exit code {code}: {text}")
    return {"seconds": (ended_ns - max(last.values())) / 1e9}


ROW = Row(
    name="full-disk",
    title="the last save on a full disk, 2 ranks: last step until the end of the job, with the reason",
    metrics=(Metric("seconds", "s", value_max=3.0, digits=2),),
    measure=measure,
    repeat={"holdfast": 5},
    why_not=why_not,
)
