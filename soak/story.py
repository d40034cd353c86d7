"""The whole story of a run, line by line in one order: what the rig did, what the journals say, how the workers fared.

    python -m soak story FOLDER      FOLDER: what a chaos soak left, with rig.jsonl in it

For people who look for the cause of a violation; judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from soak import ledger

TEXT_MAX = 180
DULL = ("time", "monotonic", "event")

Line = tuple[float, str, str, str]
"""When, where, what, details."""


def story(site: Path) -> str:
    lines = sorted([*_rig(site), *_journals(site), *_workers(site)])
    begin = lines[0][0] if lines else 0.0
    return "".join(f"{t - begin:8.2f} {where:6} {what:24} {details[:TEXT_MAX]}\n" for t, where, what, details in lines)


def _rig(site: Path) -> Iterator[Line]:
    for event in ledger.read_events(site / "rig.jsonl"):
        yield event.t, "RIG", event.name, _words(event.fields)


def _journals(site: Path) -> Iterator[Line]:
    for path in (site / "logs").glob("*/*/events.jsonl"):
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # torn by a full disk
            fields = {name: value for name, value in line.items() if name not in DULL}
            yield line["monotonic"], path.parent.parent.name, line["event"], _words(fields)


def _workers(site: Path) -> Iterator[Line]:
    for path in (site / "ledger").glob("*.jsonl"):
        for life in ledger.read_lives(path):
            who = f"rank {life.rank} of {life.world}, pid {life.pid}"
            yield life.born_s, life.host, "· worker born", who
            if life.steps:
                first = min(life.steps)
                details = f"{first}, generation {life.generation}, {who}"
                yield life.steps[first].began_s, life.host, "· first step", details
            yield life.alive_s, life.host, "· last alive", f"{who}, step {max(life.steps, default=0)}"


def _words(fields: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value not in (None, "", [], {}))
