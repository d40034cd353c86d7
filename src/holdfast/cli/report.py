"""`holdfast report [FOLDER ...]`: a run's generations and how long each part of their starts took, running or ended.

Knows where runs are kept and what is printed; what the journals mean knows insight/timeline.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.cli.printing import Parser, print_json, print_table
from holdfast.core.errors import UsageError
from holdfast.insight.timeline import PHASES, Generation, Timeline, timeline
from holdfast.runtime.journal import FILE_NAME as JOURNAL

HEADINGS = {"process_group": "group", "first_step": "step 1"}
MIB = 2**20


def main(argv: Sequence[str]) -> int:
    """Runs `holdfast report` with these arguments; returns the exit status. Raises HoldfastError."""
    chosen = parser().parse_args(argv)
    folders = [Path(folder) for folder in chosen.folders] or [newest_run()]
    told = timeline([list(read_journal(folder)) for folder in folders])
    if chosen.json:
        print_json(as_json(told))
    else:
        print_report(told)
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="holdfast report", description="Show how a run went, also while it runs.", allow_abbrev=False)
    made.add_argument(
        "folders",
        nargs="*",
        metavar="FOLDER",
        help="the run folder of each node (<log dir>/<run id>_<8 characters>); the newest run here when none is given",
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def newest_run() -> Path:
    """Raises UsageError where there is none."""
    from holdfast.runtime.workers.log_layout import default_log_dir

    log_dir = Path(default_log_dir())
    runs = [folder for folder in log_dir.glob("*") if (folder / JOURNAL).is_file()]
    if not runs:
        raise UsageError(f"no run in {log_dir}; name a run folder: holdfast report FOLDER")
    return max(runs, key=lambda folder: (folder / JOURNAL).stat().st_ctime)


def read_journal(folder: Path) -> Iterator[dict[str, Any]]:
    """Its events; a last line that is still being written is left out. Raises UsageError."""
    try:
        lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UsageError(f"{folder} is no run folder: {JOURNAL} in it: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            event = json.loads(line)
            event["event"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{folder / JOURNAL}, line {number}, is no event of holdfast's") from None
        yield event


def as_json(told: Timeline) -> dict[str, Any]:
    generations = [
        {
            "generation": each.number,
            "restart_count": each.restart_count,
            "world_size": each.world_size,
            "began_epoch_s": each.began_epoch_s,
            "why": each.why,
            "phases_s": each.phases_s,
            "total_s": round(each.total_s, 4),
        }
        for each in told.generations
    ]
    return {
        "run_id": told.run_id,
        "nodes": told.nodes,
        "end": told.end,
        "generations": generations,
        "preloaded": told.preloaded,
        "standbys": told.standbys,
        "standby_own_bytes": told.standby_own_bytes,
    }


def print_report(told: Timeline) -> None:
    number = len(told.generations)
    print(
        f"run {told.run_id} on {', '.join(told.nodes)}: {number} generation{'' if number == 1 else 's'}, {ending(told)}"
    )
    if told.preloaded:
        print(f"preloaded: {'; '.join(told.preloaded)}")
    if told.standbys:
        print(f"standby: {told.standbys} workers parked, {told.standby_own_bytes / MIB:.1f} MiB of their own")
    if told.generations:
        print("\nseconds until the first step, by phase (the slowest of these nodes):")
        titles = [HEADINGS.get(phase, phase) for phase in PHASES]
        rows = [("GEN", "BEGAN", "RANKS", *(title.upper() for title in titles), "TOTAL", "WHY")]
        print_table([*rows, *(row(each) for each in told.generations)])


def ending(told: Timeline) -> str:
    return f"ended: {told.end}" if told.end else "not ended"


def row(generation: Generation) -> tuple[str, ...]:
    began = time.strftime("%H:%M:%S", time.localtime(generation.began_epoch_s)) if generation.began_epoch_s else ""
    ranks = str(generation.world_size or "")
    phases = [f"{generation.phases_s[phase]:.3f}" if phase in generation.phases_s else "" for phase in PHASES]
    why = generation.why or ("start" if generation.number == 1 else "")
    return (str(generation.number), began, ranks, *phases, f"{generation.total_s:.3f}", why)
