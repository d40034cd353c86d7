"""What a training step pays for being counted and timed: the hook of the optimizer's step and what is around backward."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.harness import HOLDFAST, BenchmarkError, Launcher, Metric, Row, Sample, launched, tail

LIMIT_S = 120.0


def measure(launcher: Launcher, folder: Path) -> Sample:
    with launched(launcher, ["--standalone", "--nproc-per-node", "1"], "step_cost.py", folder) as (process, _):
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"no end within {LIMIT_S:g} s") from error
    if code != 0:
        raise BenchmarkError(f"exit code {code}: {tail(folder)}")
    found = json.loads((folder / "step_cost.json").read_text())
    return {"step without": found["without"] / 1000, "added": found["with"] - found["without"]}


ROW = Row(
    name="progress",
    title="one training step, counted and timed",
    metrics=(
        Metric("added", "ns", value_max=1000.0, digits=0),
        Metric("step without", "µs", digits=1),
    ),
    measure=measure,
    repeat={HOLDFAST.name: 5},
)
