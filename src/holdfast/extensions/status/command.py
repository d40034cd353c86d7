"""`holdfast status`: shows the job as its coordinator sees it, once or repeatedly; for a job that has ended, its last
screen. finding.py finds the job; diagnosis/screen.py makes the lines.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from holdfast.cli import say
from holdfast.cli.printing import Parser, Whole, named, print_json, print_table
from holdfast.cli.report import safe_text
from holdfast.diagnosis.screen import progress_line, status_lines
from holdfast.protocol.errors import ControlRefusedError, ControlSilentError, NoRunError, UsageError
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.rank_progress import JobView
from holdfast.runs.copies_report import COPIES_NEED, CopiesData, copies_of
from holdfast.runs.finding import end_of, ended_run, outcome_of, running_job
from holdfast.runs.journal_reader import read_journal
from holdfast.runtime import running
from holdfast.runtime.running import RunningAgent, ask_any
from holdfast.text import duration

WATCH_S = "2"
WATCH_S_MIN = 0.1
CLEAR = "\x1b[H\x1b[2J"
SCREEN_ON, SCREEN_OFF = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Switch to the alternate screen without a cursor, and back."""


class CopiesHere(TypedDict):
    """Part of the answer."""

    copies: CopiesData | None
    """CopiesData of states in memory, as far as this host knows of them; null: there are none."""


class WatchedData(TypedDict):
    """Part of a line of --watch."""

    time: float
    """Epoch seconds."""


class RunningJob(TypedDict):
    """One job of this host."""

    run: str
    pids: list[int]
    """The process ids of its agents here."""
    script: str
    why: NotRequired[str]
    """The reason why there is no `job`."""
    job: NotRequired[JobView]


class RunningJobs(TypedDict):
    """Several jobs run on this host."""

    jobs: list[RunningJob]


class EndedRun(TypedDict):
    """A run that has ended, with its outcome."""

    run: str
    """The name of its run folder."""
    folder: str
    ended: bool


JSON_FORMS = {
    "status": (
        (Whole, JobView, CopiesHere),
        (WatchedData, Whole, JobView, CopiesHere),
        (RunningJobs,),
        (EndedRun, Outcome),
    )
}


def main_status(argv: Sequence[str]) -> int:
    """Run `holdfast status` with these arguments. Returns the exit status. Raises HoldfastError."""
    chosen = status_parser().parse_args(argv)
    interval_s = watch_interval(chosen)
    if chosen.run is None and len({entry.job for entry in running.entries()}) > 1:
        if interval_s is not None:
            raise UsageError("--watch: several jobs run on this host; name one of them: `holdfast status` lists them")
        show_jobs(running.entries(), chosen)
        return 0
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
        show(entries, *ask_status(entries), chosen)
        return 0
    watch(entries, interval_s, chosen)
    return 0


def show_jobs(entries: Sequence[RunningAgent], chosen: argparse.Namespace) -> None:
    """Print a line for each job of this host."""
    jobs: dict[tuple[str, str], list[RunningAgent]] = {}
    for entry in entries:
        jobs.setdefault(entry.job, []).append(entry)
    rows = [JOB_HEADINGS]
    documents: list[dict[str, object]] = []
    for agents in jobs.values():
        first, view, why = agents[0], None, ""
        try:
            view, _ = ask_status(agents)
        except (ControlRefusedError, ControlSilentError, NoRunError) as error:
            why = str(error)
        documents.append({"run": first.name, "pids": [agent.pid for agent in agents], "script": first.script})
        documents[-1] |= {"why": why} if view is None else {"job": flat(view)}
        ranks = "" if view is None else str(view.world_size)
        state = why if view is None else f"{view.phase}, {progress_line(view)}"
        age = duration(max(0.0, time.time() - first.began_epoch_s))
        rows.append((first.name, age, str(first.pid), ranks, first.script, state))
    if chosen.json:
        print_json({"jobs": documents})
        return
    print_table(rows)
    print("\nholdfast status RUN shows one of them; the beginning of its name is enough")


JOB_HEADINGS = ("RUN", "FOR", "PID", "RANKS", "SCRIPT", "STATE")


def status_parser() -> Parser:
    made = Parser(prog="holdfast status", description="Show a running job, from any of its nodes, or how a job ended.")
    made.add_run()
    made.add_argument("--ranks", action="store_true", default=None, help="a line for each rank, even for many")
    made.add_argument("--watch", nargs="?", const=WATCH_S, metavar="S", help="every S seconds (2) until the job ends")
    made.add_json("print JSON; with --watch a line for each look")
    return made


def watch_interval(chosen: argparse.Namespace) -> float | None:
    """The seconds of --watch; None: show the status once. In `--watch RUN` the word is the run."""
    if chosen.watch is None:
        return None
    try:
        interval_s = float(chosen.watch)
    except ValueError:
        if chosen.run is not None:
            raise UsageError(f"--watch {chosen.watch}: must be a number of seconds") from None
        chosen.run, interval_s = chosen.watch, float(WATCH_S)
    if not WATCH_S_MIN <= interval_s < float("inf"):
        raise UsageError(f"--watch {chosen.watch}: must be {WATCH_S_MIN:g} seconds or more")
    return interval_s


def ask_status(entries: list[RunningAgent]) -> tuple[JobView, bool]:
    """The state of the job as far as it is known, and whether all nodes are in it."""
    _, reply = ask_any(entries, "status")
    return reply.read(JobView), reply.whole


def flat(view: JobView) -> dict[str, Any]:
    """The view for JSON, with the extensions' figures among its own: `nodes[0].load`."""
    document: dict[str, Any] = named(view)
    document |= document.pop("more")
    for node in document["nodes"]:
        node.update(node.pop("more"))
    return document


def show(entries: Sequence[RunningAgent], view: JobView, whole: bool, chosen: argparse.Namespace) -> None:
    if chosen.json:
        print_json({"whole": whole, **flat(view), "copies": copies_here(entries)})
    else:
        print(lines_of(entries, view, chosen))


def lines_of(entries: Sequence[RunningAgent], view: JobView, chosen: argparse.Namespace) -> str:
    """The text of the status: the job's lines, and the step from which it would go on after the loss of a node."""
    copies = copies_here(entries)
    safe = [] if copies is None else ["", safe_text(copies)]
    return "\n".join([*status_lines(view, ranks=chosen.ranks), *safe])


def copies_here(entries: Sequence[RunningAgent]) -> CopiesData | None:
    """The copies of states in memory that the job's agents on this host know of; None: there are none."""
    journals = []
    for entry in entries:
        with contextlib.suppress(UsageError):  # its folder is gone, or it has none
            journals.append(list(read_journal(Path(entry.folder), say, tuple(COPIES_NEED))))
    return copies_of(journals)


def show_end(folder: Path, outcome: Outcome, chosen: argparse.Namespace) -> None:
    """Print the last screen of a run that has ended."""
    if chosen.json:
        print_json({"run": folder.name, "folder": str(folder), "ended": True, **named(outcome)})
    else:
        print(end_of(folder, outcome))


def watch(entries: list[RunningAgent], interval_s: float, chosen: argparse.Namespace) -> None:
    """Show the status until the job ends or Ctrl-C is pressed."""
    live = sys.stdout.isatty() and not chosen.json
    text, has_ended = "", False
    if live:
        print(SCREEN_ON, end="", flush=True)
    try:
        while True:
            began_s = time.monotonic()
            view, whole = ask_status(entries)
            if chosen.json:
                seen = {"time": time.time(), "whole": whole, **flat(view)}
                print_json({**seen, "copies": copies_here(entries)}, indent=None)
            else:
                text = lines_of(entries, view, chosen)
                print(f"{CLEAR}{text}" if live else f"{text}\n", flush=True)
            time.sleep(max(0.0, interval_s - (time.monotonic() - began_s)))
    except NoRunError:
        ending, has_ended = end_of_any(entries), True
        text = f"{text}\n\n{ending}" if live else ending
    except KeyboardInterrupt:
        pass
    finally:
        if live:
            print(SCREEN_OFF, end="", flush=True)
    if text and (live or not chosen.json):
        print(text if live or has_ended else "", flush=True)


def end_of_any(entries: list[RunningAgent]) -> str:
    """The text about the end of the watched run, from the first of its folders here with an outcome."""
    for folder in [Path(entry.folder) for entry in entries if entry.folder]:
        outcome = outcome_of(folder)
        if outcome is not None:
            return end_of(folder, outcome)
    return f"run {entries[0].name} has ended"
