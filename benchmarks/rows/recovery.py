"""A crash inside DDP on gloo with one restart allowed: how many jobs train to the end."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Launcher, Metric, Row, Sample, end, launched, stamps, tail

LIMIT_S = 60.0
"""A job that is not done by then counts as not recovered."""


def measure(launcher: Launcher, folder: Path) -> Sample:
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    with launched(launcher, flags, "ddp_crash.py", folder, extra={"OMP_NUM_THREADS": "1"}) as (process, began_ns):
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
            end(process)
    seconds = (time.monotonic_ns() - began_ns) / 1e9
    recovered = code == 0 and len(stamps(folder, "done")) == 2
    if not recovered:
        print(f"  {launcher.name} did not recover (exit code {code}): {tail(folder, 2000)}", file=sys.stderr)
    return {"recovered (mean)": 100.0 * recovered, "seconds": seconds}


ROW = Row(
    name="recovery",
    title="crash inside DDP on gloo, one restart allowed",
    metrics=(
        Metric("recovered (mean)", "%", value_min=100.0, digits=0, summary=statistics.mean),
        Metric("seconds", "s"),
    ),
    measure=measure,
    repeat={"holdfast": 50, "torchrun": 8},
)
