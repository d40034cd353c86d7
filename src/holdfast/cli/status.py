"""`holdfast status [RUN]`: a running job as its coordinator sees it, from any of its nodes, once or again and again; of
a job that has ended, its last screen. `holdfast stacks [RUN]`: where all its ranks are now, equal stacks once.

Knows the options and the terminal; finding.py finds the job, diagnosis/status_lines.py makes the lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.cli.finding import end_of, ended_run, outcome_of, running_job
from holdfast.cli.printing import Parser, print_json, ranks_of
from holdfast.diagnosis.status_lines import group, stack_lines, status_lines
from holdfast.protocol.errors import NoRunError, UsageError
from holdfast.protocol.messages import Question
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.rank_progress import JobView, StacksView
from holdfast.runtime.running import RunningAgent, ask_any


def main_stacks(argv: Sequence[str]) -> int:
    """Run `holdfast stacks` with these arguments; returns the exit status. Raises HoldfastError."""
    chosen = stacks_parser().parse_args(argv)
    wanted = ranks_of(chosen.rank)
    _, reply = ask_any(running_job(chosen.run), Question.STACKS)
    view = reply.read(StacksView)
    if wanted:
        missing = wanted - {rank.rank for rank in view.ranks}
        if missing:
            raise UsageError(f"no rank {min(missing)} answered; there are {view.world_size} ranks")
        view = msgspec.structs.replace(view, ranks=tuple(rank for rank in view.ranks if rank.rank in wanted))
    if chosen.json:
        groups = [{"ranks": [rank.rank for rank in each.ranks], "place": each.place} for each in group(view)]
        print_json({"whole": reply.whole, **msgspec.to_builtins(view), "groups": groups})
        return 0
    print("\n".join(stack_lines(view, full=chosen.full)))
    if not reply.whole:
        print("\nthe coordinator does not answer: this node's ranks alone")
    return 0


def stacks_parser() -> Parser:
    made = Parser(prog="holdfast stacks", description="Show where a running job's ranks are, now.", allow_abbrev=False)
    made.add_argument("run", nargs="?", metavar="RUN", help="run id, its beginning, or run folder; the only one")
    made.add_argument("--rank", action="append", metavar="N", help="only these ranks: 3, 0-7, 1,5; may be repeated")
    made.add_argument("--full", action="store_true", help="all frames, also those of libraries")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


WATCH_S = "2"
WATCH_S_MIN = 0.1
CLEAR = "\x1b[H\x1b[2J"
SCREEN_ON, SCREEN_OFF = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""A screen of its own without a cursor, and back to what was there."""


def main(argv: Sequence[str]) -> int:
    """Run `holdfast status` with these arguments; returns the exit status. Raises HoldfastError."""
    chosen = parser().parse_args(argv)
    interval_s = watch_interval(chosen)
    try:
        entries = running_job(chosen.run)
    except NoRunError:
        folder = ended_run(chosen.run)
        outcome = outcome_of(folder) if folder is not None else None
        if folder is None or outcome is None:
            raise
        show_end(folder, outcome, chosen)
        return 0
    if interval_s is None:
        show(*look(entries), chosen)
        return 0
    watch(entries, interval_s, chosen)
    return 0


def parser() -> Parser:
    made = Parser(
        prog="holdfast status",
        description="Show a running job, from any of its nodes; or how one that has ended here ended.",
        allow_abbrev=False,
    )
    made.add_argument("run", nargs="?", metavar="RUN", help="run id, its beginning, or run folder; the only one")
    made.add_argument("--ranks", action="store_true", default=None, help="a line for each rank, however many")
    made.add_argument("--watch", nargs="?", const=WATCH_S, metavar="S", help="again every S seconds (2), until it ends")
    made.add_argument("--json", action="store_true", help="print JSON; with --watch a line for each look")
    return made


def watch_interval(chosen: argparse.Namespace) -> float | None:
    """Seconds; None: look once. Of `--watch RUN` the word is the run."""
    if chosen.watch is None:
        return None
    try:
        interval_s = float(chosen.watch)
    except ValueError:
        if chosen.run is not None:
            raise UsageError(f"--watch {chosen.watch}: not a number of seconds") from None
        chosen.run, interval_s = chosen.watch, float(WATCH_S)
    if not WATCH_S_MIN <= interval_s < float("inf"):
        raise UsageError(f"--watch {chosen.watch}: at least {WATCH_S_MIN:g} seconds")
    return interval_s


def look(entries: list[RunningAgent]) -> tuple[JobView, bool]:
    """The known state of the job, and whether it is complete."""
    _, reply = ask_any(entries, Question.STATUS)
    return reply.read(JobView), reply.whole


def show(view: JobView, whole: bool, chosen: argparse.Namespace) -> None:
    if chosen.json:
        print_json({"whole": whole, **msgspec.to_builtins(view)})
    else:
        print("\n".join(status_lines(view, ranks=chosen.ranks)))


def show_end(folder: Path, outcome: Outcome, chosen: argparse.Namespace) -> None:
    """Print the last screen of a run that has ended."""
    if chosen.json:
        print_json({"run": folder.name, "folder": str(folder), "ended": True, **msgspec.to_builtins(outcome)})
    else:
        print(end_of(folder, outcome))


def watch(entries: list[RunningAgent], interval_s: float, chosen: argparse.Namespace) -> None:
    """Show the status until the job ends or Ctrl-C is pressed."""
    live = sys.stdout.isatty() and not chosen.json
    text = ""
    if live:
        print(SCREEN_ON, end="", flush=True)
    try:
        while True:
            began_s = time.monotonic()
            view, whole = look(entries)
            if chosen.json:
                print(json.dumps({"time": time.time(), "whole": whole, **msgspec.to_builtins(view)}), flush=True)
            else:
                text = "\n".join(status_lines(view, ranks=chosen.ranks))
                print(f"{CLEAR}{text}" if live else f"{text}\n", flush=True)
            time.sleep(max(0.0, interval_s - (time.monotonic() - began_s)))
    except NoRunError:
        ending = end_of_any(entries)
        text = f"{text}\n\n{ending}" if live else ending
    except KeyboardInterrupt:
        pass
    finally:
        if live:
            print(SCREEN_OFF, end="", flush=True)
    if text and (live or not chosen.json):
        print(text if live or text.startswith("run ") else "", flush=True)


def end_of_any(entries: list[RunningAgent]) -> str:
    """How the run that was watched ended, from the first of its folders here that tells."""
    for folder in [Path(entry.folder) for entry in entries if entry.folder]:
        outcome = outcome_of(folder)
        if outcome is not None:
            return end_of(folder, outcome)
    return f"run {entries[0].name} has ended"
