"""`holdfast stop [RUN]`: end a running job on all its nodes, as a signal to every agent would; its workers save first.

`holdfast kill [RUN]`: at once; nothing is saved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from holdfast.cli.finding import running_job
from holdfast.cli.printing import Parser, print_json
from holdfast.diagnosis.screen import how_it_ended
from holdfast.protocol.errors import ControlSilentError, NoRunError
from holdfast.protocol.messages import Question
from holdfast.runtime.running import Call, Reply, RunningAgent, ask
from holdfast.text import plural

EXIT_NOT_STOPPED = 1
SAY_S = 60.0
"""Between two notices that it still waits: a save may take long."""


class End(msgspec.Struct, frozen=True):
    """As runtime/control.py sends it."""

    kind: str
    exit_code: int
    message: str = ""
    cause: str = ""


class StopReply(msgspec.Struct, frozen=True):
    nodes: int


def main(argv: Sequence[str]) -> int:
    """Run `holdfast stop` with these arguments; returns the exit status. Raises HoldfastError."""
    return end_job(parser(), argv, Question.STOP)


def main_kill(argv: Sequence[str]) -> int:
    """Run `holdfast kill` with these arguments; returns the exit status. Raises HoldfastError."""
    return end_job(kill_parser(), argv, Question.KILL)


def parser() -> Parser:
    return parser_of(
        "stop", "End a running job on all its nodes. Workers that ask for safe points stop there and save."
    )


def kill_parser() -> Parser:
    return parser_of("kill", "End a running job on all its nodes at once: SIGKILL to every worker.")


def parser_of(command: str, description: str) -> Parser:
    made = Parser(prog=f"holdfast {command}", description=description, allow_abbrev=False)
    made.add_argument("run", nargs="?", metavar="RUN", help="run id, its beginning, or run folder; the only one")
    made.add_argument("--no-wait", action="store_true", help="return when all nodes are told")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def end_job(made: Parser, argv: Sequence[str], question: Question) -> int:
    """Ask for the end. 0: the job has ended, in any way, or with --no-wait: every node was asked to end it."""
    chosen = made.parse_args(argv)
    entry, waiting = hold(running_job(chosen.run))
    with waiting:
        reply = ask(entry, question)
        nodes = reply.read(StopReply).nodes
        whole = reply.whole
        if chosen.no_wait:
            tell(chosen.json, {"run": entry.name, "nodes": nodes, "whole": whole, "ended": False})
            return 0
        if not chosen.json:
            print(f"{entry.name}: {plural(nodes, 'node')} told to {question.value}", flush=True)
        answer = wait(entry, waiting)
    if answer is None:
        print(f"holdfast: the agent (pid {entry.pid}) ended without a word; see {entry.folder}", file=sys.stderr)
        return EXIT_NOT_STOPPED
    end = answer.read(End)
    tell(chosen.json, {"run": entry.name, "nodes": nodes, "whole": whole, "ended": True, **msgspec.to_builtins(end)})
    return 0


def wait(entry: RunningAgent, waiting: Call) -> Reply | None:
    """How the job ended; None: its agent ended without an answer. Says now and then that it waits."""
    while True:
        try:
            return waiting.answer(limit_s=SAY_S)
        except ControlSilentError:
            print(f"holdfast: {entry.name} (pid {entry.pid}) has not ended yet; Ctrl-C leaves", file=sys.stderr)


def hold(entries: list[RunningAgent]) -> tuple[RunningAgent, Call]:
    """The first agent of the job that answers, and a connection that will report the job's end. The connection is made
    before the job is asked to end, so that the end is not missed. Raises the error of the last agent that does not
    answer."""
    for entry in entries[:-1]:
        try:
            ask(entry, Question.STATUS)
            return entry, Call(entry, None)
        except (ControlSilentError, NoRunError):
            continue
    return entries[-1], Call(entries[-1], None)


def tell(as_json: bool, end: dict[str, object]) -> None:
    if as_json:
        print_json(end)
    elif not end["ended"]:
        print(f"{end['run']}: {plural(int(str(end['nodes'])), 'node')} told")
    else:
        why = end["message"] or end["cause"]
        print(f"{end['run']} has ended: {how_it_ended(str(end['kind']), int(str(end['exit_code'])), str(why))}")
    if not end["whole"]:
        print("holdfast: the coordinator does not answer: this node alone was told", file=sys.stderr)
