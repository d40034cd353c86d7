"""What it costs that replicas are compared while they train (scripts/replica_cost.py)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.harness import HOLDFAST, BenchmarkError, Launcher, Metric, Row, Sample, launched, tail

RANKS = 2
LIMIT_S = 300.0


def measure(launcher: Launcher, folder: Path) -> Sample:
    line = ["--standalone", "--nproc-per-node", str(RANKS)]
    with launched(launcher, line, "replica_cost.py", folder) as (process, _):
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"no end within {LIMIT_S:g} s") from error
    if code != 0:
        raise BenchmarkError(f"exit code {code}: {tail(folder)}")
    found = json.loads((folder / "replica_cost.json").read_text())
    return {"check": found["check"], "step": found["step"], "of a step, every 500": found["share"]}


ROW = Row(
    name="replica-cost",
    title=f"`ht.check_replicas`, DDP on {RANKS} ranks, 1.6 million parameters, AdamW",
    metrics=(
        Metric("check", "ms", digits=2),
        Metric("step", "ms", digits=1),
        Metric("of a step, every 500", "%", value_max=0.2, digits=4),
    ),
    measure=measure,
    repeat={HOLDFAST.name: 3},
)
