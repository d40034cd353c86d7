"""Commands about a job, on any of its nodes: status, dashboard, stacks, profile, save, stop, kill, and about its hosts.

`holdfast status` shows the job as its coordinator sees it, once or repeatedly; for a job that has ended, its last
screen. `holdfast dashboard` shows a job, running or ended, as a page in the browser, or the list of all. `holdfast
stacks` shows where all ranks are now, equal stacks once. `holdfast profile` has ranks profiled, and `holdfast save` has
all of them save. `holdfast stop` ends the job on all nodes, as a signal to every agent would: workers save first.
`holdfast kill` ends it at once, and nothing is saved. drain, exclude and readmit are about the nodes of one host.
finding.py finds the job; diagnosis/screen.py makes the lines. The page's server is the package dashboard, which reads
by means of these commands: it is imported by name, when its packages are known to be there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.cli import say
from holdfast.cli.printing import Parser, named, print_json, print_table
from holdfast.cli.report import safe_text
from holdfast.diagnosis.screen import group, how_it_ended, progress_line, stack_lines, status_lines
from holdfast.protocol.errors import ControlRefusedError, ControlSilentError, NoRunError, UsageError
from holdfast.protocol.options import Endpoint
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.questions import (
    ProfileView,
    Question,
    profile_request,
    ranks_of,
)
from holdfast.protocol.rank_progress import JobView, StacksView
from holdfast.runs.copies_report import COPIES_NEED, copies_of
from holdfast.runs.finding import end_of, ended_run, of_one_job, outcome_of, run_folders, running_job
from holdfast.runs.journal_reader import read_journal
from holdfast.runtime import running
from holdfast.runtime.running import Call, NodeEnd, Reply, RunningAgent, ask, ask_any
from holdfast.text import duration, plural, seconds_of

WATCH_S = "2"
WATCH_S_MIN = 0.1
EXCLUDED = "1h"
CLEAR = "\x1b[H\x1b[2J"
SCREEN_ON, SCREEN_OFF = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Switch to the alternate screen without a cursor, and back."""
EXIT_NOT_STOPPED = EXIT_NOT_PROFILED = 1
SAY_S = 60.0
"""Interval of the notices that the job has not ended: a save may take long."""
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Variables of which one is set where there is a browser outside of the terminal."""


def main(argv: Sequence[str]) -> int:
    """Run `holdfast status` with these arguments. Returns the exit status. Raises HoldfastError."""
    chosen = parser().parse_args(argv)
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
        documents[-1] |= {"why": why} if view is None else {"job": named(view)}
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


def parser() -> Parser:
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
    _, reply = ask_any(entries, Question.STATUS)
    return reply.read(JobView), reply.whole


def show(entries: Sequence[RunningAgent], view: JobView, whole: bool, chosen: argparse.Namespace) -> None:
    if chosen.json:
        print_json({"whole": whole, **named(view), "copies": copies_here(entries)})
    else:
        print(lines_of(entries, view, chosen))


def lines_of(entries: Sequence[RunningAgent], view: JobView, chosen: argparse.Namespace) -> str:
    """The text of the status: the job's lines, and the step from which it would go on after the loss of a node."""
    copies = copies_here(entries)
    safe = [] if copies is None else ["", safe_text(copies)]
    return "\n".join([*status_lines(view, ranks=chosen.ranks), *safe])


def copies_here(entries: Sequence[RunningAgent]) -> dict[str, object] | None:
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
                seen = {"time": time.time(), "whole": whole, **named(view)}
                print(json.dumps({**seen, "copies": copies_here(entries)}), flush=True)
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


def main_dashboard(argv: Sequence[str]) -> int:
    """Run `holdfast dashboard` with these arguments. Returns the exit status. Raises HoldfastError."""
    import asyncio
    import webbrowser
    from importlib import import_module
    from threading import Thread

    from holdfast.cli.resolve import serving_place
    from holdfast.listening import bind_named
    from holdfast.supervisor.dashboard_host import Credentials, check_packages, login_link
    from holdfast.text import is_loopback

    chosen = dashboard_parser().parse_args(argv)
    check_packages()
    try:
        place = serving_place(chosen.port)
    except ValueError as error:
        raise UsageError(f"--port {chosen.port}: {error}") from None
    name, folders, pid = job_of(chosen.run)
    credentials = Credentials.make(once=is_loopback(place.host))
    with contextlib.closing(bind_named(place, "--port")) as sock:
        link = login_link(Endpoint(host=place.host, port=sock.getsockname()[1]), credentials.token)
        print(f"dashboard {link}\n(Ctrl-C ends it; a running job goes on)", flush=True)
        if not chosen.no_open and any(map(os.environ.get, SCREENS)):
            # A browser in a terminal, or one that BROWSER names, may not return before its user leaves it.
            Thread(target=webbrowser.open, args=(link,), daemon=True).start()
        asyncio.run(import_module("holdfast.dashboard.web_app").show(sock, credentials, name, folders, pid))
    return 0


def dashboard_parser() -> Parser:
    made = Parser(prog="holdfast dashboard", description="Show a job, running or ended, as a page in the browser.")
    made.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="run id, its beginning, or run folder; by default the only running job, else a list of all",
    )
    made.add_argument("--port", default="0", metavar="[HOST:]PORT", help="where to serve; by default a free port here")
    made.add_argument("--no-open", action="store_true", help="print the link, and open no browser")
    return made


def job_of(run: str | None) -> tuple[str, list[Path], int | None]:
    """The name of the job, its run folders here, and the pid of its agent if it has no folder; an empty name: all jobs.
    Raises NoRunError."""
    if run is None and len({entry.job for entry in running.entries()}) != 1:
        return "", [], None
    try:
        folders = run_folders(run)
    except NoRunError:
        entries = of_one_job(run, running.entries())
        if not entries:
            raise
        return entries[0].run_id, [], entries[0].pid
    return str(folders[0]), folders, None


def main_stacks(argv: Sequence[str]) -> int:
    """Run `holdfast stacks` with these arguments. Returns the exit status. Raises HoldfastError."""
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
        print_json({"whole": reply.whole, **named(view), "groups": groups})
        return 0
    print("\n".join(stack_lines(view, full=chosen.full)))
    if not reply.whole:
        print("\nthe coordinator does not answer: only this node's ranks are shown")
    return 0


def stacks_parser() -> Parser:
    made = Parser(prog="holdfast stacks", description="Show where the ranks of a running job are now.")
    made.add_run()
    made.add_argument("--rank", action="append", metavar="N", help="only these ranks: 3, 0-7 or 1,5; may be repeated")
    made.add_argument("--full", action="store_true", help="show all frames, also those of libraries")
    made.add_json()
    return made


class Sent(msgspec.Struct, frozen=True):
    """The answer to a question that is passed on to nodes."""

    nodes: int
    """Number of nodes that got it."""
    refused: str = ""
    """The reason why nothing was done; empty: it is being done."""


Body = TypeVar("Body", Sent, ProfileView)


def ask_job(run: str | None, question: Question, kind: type[Body], **more: object) -> tuple[RunningAgent, Body]:
    """Ask a job. Returns the agent that answered, and its answer. Raises ControlRefusedError when it refuses."""
    entry, reply = ask_any(running_job(run), question, **more)
    answer = reply.read(kind)
    if answer.refused:
        raise ControlRefusedError(f"{entry.name}: {answer.refused}")
    return entry, answer


PROFILED_STEPS = 5


def main_profile(argv: Sequence[str]) -> int:
    """Run `holdfast profile` with these arguments. Returns 0 if every rank was profiled. Raises HoldfastError."""
    chosen = profile_parser().parse_args(argv)
    if chosen.steps is not None and chosen.seconds is not None:
        raise UsageError("--steps and --seconds: give one of them")
    steps = PROFILED_STEPS if chosen.steps is None else chosen.steps
    wanted = profile_request(ranks_of([chosen.ranks], "RANKS"), steps, chosen.seconds)
    entry, view = ask_job(chosen.run, Question.PROFILE, ProfileView, **wanted)
    if chosen.json:
        print_json({"run": entry.name, **named(view)})
    else:
        print("\n".join(profile_lines(view)))
    return EXIT_NOT_PROFILED if view.silent or any(rank.why for rank in view.ranks) else 0


def profile_lines(view: ProfileView) -> Iterator[str]:
    """The lines about profiles. Only the operations of the first rank are shown; the others have theirs in a file."""
    first = next((rank for rank in view.ranks if rank.operations), None)
    if first is not None:
        yield f"rank {first.rank}: the most expensive operations"
        yield f"{'own time':>12}  {'with calls':>12}  {'calls':>7}  operation"
        for each in first.operations:
            yield f"{each.self_s * 1e3:9.3f} ms  {each.total_s * 1e3:9.3f} ms  {each.calls:7}  {each.name}"
        yield ""
    for rank in view.ranks:
        for problem in filter(None, (rank.why, rank.note)):
            yield f"rank {rank.rank} on {rank.host}: {problem}"
        yield from (f"rank {rank.rank} on {rank.host}: {file}" for file in rank.files)
    yield from (f"{host} did not answer" for host in view.silent)
    if first is not None:
        yield "open a trace in https://ui.perfetto.dev or chrome://tracing, a *.speedscope.json in https://speedscope.app"


def profile_parser() -> Parser:
    made = Parser(
        prog="holdfast profile",
        description="Profile ranks of a running job with torch's profiler, and with py-spy where it is installed. "
        "Files go to the run folder, below profiles/.",
    )
    made.add_argument("ranks", metavar="RANKS", help="3, 0-7 or 1,5")
    made.add_run()
    made.add_argument("--steps", type=int, metavar="N", help=f"the next N steps of the optimizer ({PROFILED_STEPS})")
    made.add_argument("--seconds", type=float, metavar="S", help="the next S seconds instead, also without steps")
    made.add_json()
    return made


def main_save(argv: Sequence[str]) -> int:
    """Run `holdfast save` with these arguments. Returns 0 when all ranks will save. Raises HoldfastError."""
    chosen = save_parser().parse_args(argv)
    entry, answer = ask_job(chosen.run, Question.SAVE, Sent)
    if chosen.json:
        print_json({"run": entry.name, "nodes": answer.nodes})
    else:
        print(f"{entry.name}: all ranks save at their next safe point, and go on")
    return 0


def save_parser() -> Parser:
    made = Parser(
        prog="holdfast save",
        description="Have all ranks of a running job save to the disk at their next safe point, and go on. "
        "The script needs ht.Snapshots, or holdfast.worker.should_save().",
    )
    made.add_run()
    made.add_json()
    return made


ENDING = {
    Question.STOP: "End a running job on all its nodes. Workers with safe points stop there and save.",
    Question.KILL: "End a running job on all its nodes at once: SIGKILL to every worker.",
}


def end_parser(question: Question) -> Parser:
    made = Parser(prog=f"holdfast {question.value}", description=ENDING[question])
    made.add_run()
    made.add_argument("--no-wait", action="store_true", help="return as soon as all nodes have been asked")
    made.add_json()
    return made


def end_job(question: Question, argv: Sequence[str]) -> int:
    """Ask for the end of the job. Returns 0 when the job has ended in any way; with --no-wait when all nodes were
    asked."""
    chosen = end_parser(question).parse_args(argv)
    entry, waiting = hold(running_job(chosen.run))
    with waiting:
        reply = ask(entry, question)
        nodes = reply.read(Sent).nodes
        text = f"{entry.name}: sent to {plural(nodes, 'node')}"
        document = {"run": entry.name, "nodes": nodes, "whole": reply.whole, "ended": not chosen.no_wait}
        if not chosen.no_wait:
            if not chosen.json:
                print(f"{entry.name}: {question.value} sent to {plural(nodes, 'node')}", flush=True)
            answer = wait(entry, waiting)
            if answer is None:
                say(f"the agent (pid {entry.pid}) ended without a report; see {entry.folder}")
                return EXIT_NOT_STOPPED
            end = answer.read(NodeEnd)
            document |= named(end)
            text = f"{entry.name} has ended: {how_it_ended(end.kind, end.exit_code, end.message or end.cause)}"
    if chosen.json:
        print_json(document)
    else:
        print(text)
    if not reply.whole:
        say("the coordinator does not answer: only this node got the request")
    return 0


# Each command has a `main` and a `parser` of its own name: cli/__init__.py and the reference in docs/ look for them.
main_stop, main_kill = (partial(end_job, question) for question in ENDING)
stop_parser, kill_parser = (partial(end_parser, question) for question in ENDING)


ABOUT_HOST = {
    Question.DRAIN: "Have the nodes of one host leave a running job, after its workers have saved.",
    Question.EXCLUDE: "The same, and let the host take no part for a time.",
    Question.READMIT: "Let a host that is excluded from a running job take part again.",
}


def host_parser(question: Question) -> Parser:
    made = Parser(prog=f"holdfast {question.value}", description=ABOUT_HOST[question])
    made.add_argument("host", metavar="HOST", help="as `holdfast status` shows it")
    made.add_run()
    made.add_json()
    if question is Question.EXCLUDE:
        usual = f"90s, 30min, 1h, 1d; {EXCLUDED}"
        made.add_argument("--for", dest="time", default=EXCLUDED, metavar="TIME", help=usual)
    return made


def ask_about_host(question: Question, argv: Sequence[str]) -> int:
    """Ask the job to drain, exclude or readmit a host. Returns 0 when that is being done, else raises
    ControlRefusedError."""
    chosen = host_parser(question).parse_args(argv)
    text = getattr(chosen, "time", "0")
    for_s = seconds_of(text)
    if question is Question.EXCLUDE and for_s is None:
        raise UsageError(f"--for {text}: write a time like 90s, 30min or 1h")
    entry, answer = ask_job(chosen.run, question, Sent, host=chosen.host, for_s=for_s or 0.0)
    if chosen.json:
        print_json({"run": entry.name, "host": chosen.host, "nodes": answer.nodes})
    else:
        print(f"{entry.name}: {question.value} {chosen.host}: sent to {plural(answer.nodes, 'node')}")
    return 0


main_drain, main_exclude, main_readmit = (partial(ask_about_host, question) for question in ABOUT_HOST)
drain_parser, exclude_parser, readmit_parser = (partial(host_parser, question) for question in ABOUT_HOST)


def wait(entry: RunningAgent, waiting: Call) -> Reply | None:
    """Wait for the job's end, with a line now and then. Returns the agent's last answer; None: it ended without one."""
    while True:
        try:
            return waiting.answer(limit_s=SAY_S)
        except ControlSilentError:
            say(f"{entry.name} (pid {entry.pid}) has not ended yet; Ctrl-C stops waiting")


def hold(entries: list[RunningAgent]) -> tuple[RunningAgent, Call]:
    """The first agent of the job that answers, and a connection that reports the job's end.

    The connection is opened before the job is asked to end, so that the end cannot be missed. Raises the error of the
    last agent if none answers.
    """
    for entry in entries[:-1]:
        try:
            ask(entry, Question.STATUS)
            return entry, Call(entry, None)
        except (ControlSilentError, NoRunError):
            continue
    return entries[-1], Call(entries[-1], None)
