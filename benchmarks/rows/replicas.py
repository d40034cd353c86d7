"""What it costs that replicas are compared while they train (scripts/replica_cost.py)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import HOLDFAST, Launcher, Metric, Row, Sample, measured_by

RANKS = 2
LIMIT_S = 300.0


def measure(launcher: Launcher, folder: Path) -> Sample:
    found = measured_by("replica_cost.py", launcher, RANKS, folder, LIMIT_S)
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
