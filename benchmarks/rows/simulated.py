"""10,000 simulated agents: what a formation, a join, a loss and a restart cost each agent in messages and the coordinator in CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import HOLDFAST, Launcher, Metric, Row, Sample
from benchmarks.rows.formation import python

COUNTS = (100, 1_000, 10_000)
MOST = COUNTS[-1]
CHANGES = ("formation", "join", "loss", "regroup")


def measure(_launcher: Launcher, folder: Path) -> Sample:
    sample: Sample = {}
    costs: dict[int, Any] = {n: json.loads(python(["-m", "benchmarks.simulated", str(n)], folder)) for n in COUNTS}
    for change in CHANGES:
        sample[f"{change}, CPU with codec"] = costs[MOST][change]["machine and codec"]
        sample[f"{change}, CPU of the machine"] = costs[MOST][change]["machine"]
        for count in COUNTS:
            cost = costs[count][change]
            sample[f"{change}, messages per agent of {count:,}"] = cost["up per agent"] + cost["down per agent"]
        sample[f"{change}, {MOST:,} against {COUNTS[0]}"] = (
            sample[f"{change}, messages per agent of {MOST:,}"] / sample[f"{change}, messages per agent of {COUNTS[0]}"]
        )
    return sample


def metrics(change: str) -> tuple[Metric, ...]:
    return (
        Metric(f"{change}, CPU with codec", "s", value_max=3.0 if change == "formation" else None),
        Metric(f"{change}, CPU of the machine", "s"),
        *(Metric(f"{change}, messages per agent of {count:,}", "") for count in COUNTS),
        Metric(f"{change}, {MOST:,} against {COUNTS[0]}", "×", value_max=1.01),
    )


ROW = Row(
    name="elastic-simulated",
    title=f"{MOST:,} simulated agents",
    metrics=tuple(metric for change in CHANGES for metric in metrics(change)),
    measure=measure,
    repeat={HOLDFAST.name: 3},
    group="elastic",
    strict=True,
)
