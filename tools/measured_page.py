"""docs/measured.md: the newest measurement of each row of the benchmarks, from benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Row
from benchmarks.report import FOLDER, Stored, errors, facts_line, stored, table
from benchmarks.rows import ALL

PATH = Path(__file__).resolve().parent.parent / "docs" / "measured.md"
HEAD = """# Measurements

This page is made by `make fmt` from `benchmarks/results`, which has every sample. `make bench` runs the same scripts with holdfast and torchrun, in turn, in
one run, so that a slow minute of the machine meets both. Each table says on which machine, with which versions, at which load and when its rows were measured.
A row has a bound where holdfast promises one. NO in the last column means that the newest measurement did not keep it. Figures are medians of all repetitions,
unless the row says otherwise; in tables with three launchers each repetition has to keep the bound, and the range of all is shown.

- torchrun, tuned: with `last_call_timeout=1` and `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`
- the unit "copies" is the time in which torch copies the same state once in memory
- what was tried for a figure and not kept: [decisions](internals/decisions.md)
"""

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Start": (
        "install",
        "help",
        "start",
        "preflight",
        "warm-reduce",
        "warm-ddp",
        "warm-memory",
        "executed-reduce",
        "executed-ddp",
        "compiled-start",
        "compile-processes",
        "descriptors",
        "ssh",
        "tutorial",
    ),
    "Failure and restart": (
        "restart",
        "warm-restart-reduce",
        "warm-restart-importing",
        "warm-restart-ddp",
        "executed-restart",
        "recovery",
        "raised",
        "orphans",
        "full-disk",
    ),
    "Survivors": (
        "survive-kill",
        "survive-kill-slow-start",
        "survive-quick",
        "survive-node",
        "survive-random",
        "survive-cost",
        "survive-sharded",
    ),
    "Nodes that join, leave and fail": ("elastic",),
    "Loss of the coordinator's node": ("succession",),
    "Many nodes": ("form8", "form32", "form64", "form128", "form-shared", "scale"),
    "Snapshots": ("train", "store"),
    "Hangs and verdicts": ("diagnosis", "no-alarm"),
    "Cost while training": ("idle", "progress", "profile", "replica-cost", "tee"),
}
"""The rows of each section, by name or by group."""

SOAK = """
## Faults at random

Four pretend hosts, one rank each, DDP on gloo, `--nnodes 2:4`. Kills, suspensions, partitions, slow links, full disks and lost nodes come at random times
(`make soak-chaos`). Effective is the time in steps that belong to the surviving history; a step that waited for a fault counts for no more than twice the median step.
A violation is a broken promise: a sample that was lost or trained twice, two generations at once, a process that was left.

| script | launcher | minutes | faults | effective time | violations | measured |
|---|---|---:|---:|---:|---:|---|
"""


def render() -> str:
    """The page."""
    return "".join(_parts())


def _of_gpus() -> str:
    """A line about the campaigns on GPUs (benchmarks/gpu)."""
    pages = sorted(path.name for path in FOLDER.glob("gpu-*.md"))
    if not pages:
        return "\nNo figure of a GPU exists yet.\n"
    return f"\nFigures of GPUs: {', '.join(f'`benchmarks/results/{name}`' for name in pages)}.\n"


def _parts() -> Iterator[str]:
    yield HEAD
    yield _of_gpus()
    for title, names in SECTIONS.items():
        found = list(stored(row for row in ALL if row.called(names)))
        if found:
            yield f"\n## {title}\n"
        for facts, measured in _by_machine(found):
            results = [each.result for each in measured]
            failed = errors(results)
            yield f"\n{facts}:\n\n{table(results, main_only=True)}" + (
                f"\nFailed repetitions:\n\n{failed}" if failed else ""
            )
    yield SOAK
    for path in sorted(FOLDER.glob("soak-*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        for launcher, run in data["runs"].items():
            yield _soak_line(launcher, run, data["facts"])


def _by_machine(found: Iterable[Stored]) -> list[tuple[str, list[Stored]]]:
    """Measurements by what `facts_line` says of them, the newest first."""
    groups: dict[str, list[Stored]] = {}
    for each in sorted(found, key=lambda each: each.facts["date"], reverse=True):
        groups.setdefault(facts_line(each.facts), []).append(each)
    return list(groups.items())


def _soak_line(launcher: str, run: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    script, faults = facts.get("script", "train.py"), sum(run["faults"].values())
    return (
        f"| `{script}` | {launcher} | {facts['minutes']:g} | {faults} | {run['share']:.1%} "
        f"| {len(run['violations'])} | {facts_line(facts)} |\n"
    )


def without_section(rows: Iterable[Row] = ALL) -> list[str]:
    """Names of the rows that no section shows."""
    shown = [name for names in SECTIONS.values() for name in names]
    return [row.name for row in rows if not row.called(shown)]
