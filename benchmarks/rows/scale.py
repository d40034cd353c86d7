"""One coordinator and 10 to 10,000 light agents: time, CPU time, memory, messages and bytes of each part of a job's life."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import HOLDFAST, Launcher, Metric, Row, Sample
from benchmarks.rows.formation import python

COUNTS = (10, 100, 1_000, 10_000)
LOAD_MAX = {1_000: 5.0, 10_000: 30.0}
HEARTBEATS = ("Ping", "Pong", "Progress")


def measure(_launcher: Launcher, folder: Path) -> Sample:
    sample: Sample = {}
    for count in COUNTS:
        costs: dict[str, Any] = json.loads(python(["-m", "benchmarks.scale", str(count)], folder))
        for part in ("form", "lose one"):
            sample[f"{count:,}: {part}"] = costs[part]["wall s"]
            sample[f"{count:,}: {part}, CPU"] = costs[part]["CPU s"]
            sample[f"{count:,}: {part}, messages per agent"] = messages(costs[part]) / count
        train = costs["train"]
        sample[f"{count:,}: load"] = 100 * train["CPU s"] / train["wall s"]
        sample[f"{count:,}: load, bytes per agent"] = (
            (train["up_bytes"] + train["down_bytes"]) / count / train["wall s"]
        )
        sample[f"{count:,}: slowest answer"] = max(costs[part]["pong_s_max"] for part in ("form", "train", "lose one"))
        sample[f"{count:,}: memory"] = costs["peak MB"]
    return sample


def messages(cost: dict[str, Any]) -> int:
    """In both directions, without those that are sent all the time."""
    return sum(n for way in ("up", "down") for name, n in cost[way].items() if name not in HEARTBEATS)


def metrics(count: int) -> tuple[Metric, ...]:
    largest = count == COUNTS[-1]
    return (
        Metric(f"{count:,}: form", "s", value_max=12.0 if largest else None),
        Metric(f"{count:,}: form, CPU", "s"),
        Metric(f"{count:,}: form, messages per agent", "", digits=1),
        Metric(f"{count:,}: load", "%", value_max=LOAD_MAX.get(count), digits=1),
        Metric(f"{count:,}: load, bytes per agent", "bytes/s", digits=0),
        Metric(f"{count:,}: lose one", "s"),
        Metric(f"{count:,}: lose one, CPU", "s"),
        Metric(f"{count:,}: lose one, messages per agent", "", digits=1),
        Metric(f"{count:,}: slowest answer", "s"),
        Metric(f"{count:,}: memory", "MB", value_max=400.0 if largest else None, digits=0),
    )


ROW = Row(
    name="scale",
    title="light agents, a connection each, with 8 workers each",
    metrics=tuple(metric for count in COUNTS for metric in metrics(count)),
    measure=measure,
    repeat={HOLDFAST.name: 3},
    strict=True,
    by_name=True,
)
