"""`holdfast stop` and `holdfast kill`: end the job on all nodes, as a signal to every agent would. Before a stop the
workers save; a kill ends them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypedDict

from holdfast.cli import say
from holdfast.cli.printing import Parser, SentToNodes, Whole, named, print_json
from holdfast.diagnosis.screen import how_it_ended
from holdfast.protocol.errors import ControlSilentError, NoRunError
from holdfast.protocol.extension import Sent
from holdfast.runs.finding import running_job
from holdfast.runtime.running import Call, NodeEnd, Reply, RunningAgent, ask
from holdfast.text import plural

EXIT_NOT_STOPPED = 1
SAY_S = 60.0
"""Interval of the notices that the job has not ended (s): a save may take long."""

ENDING = {
    "stop": "End a running job on all its nodes. Workers with safe points stop there and save.",
    "kill": "End a running job on all its nodes at once: SIGKILL to every worker.",
}


class Asked(TypedDict):
    """Part of the answer."""

    ended: bool
    """True: the job has ended. False with --no-wait, which only asks it to."""


JSON_FORMS = dict.fromkeys(
    ENDING,
    ((SentToNodes, Whole, Asked), (SentToNodes, Whole, Asked, NodeEnd)),
)


def end_parser(question: str) -> Parser:
    made = Parser(prog=f"holdfast {question}", description=ENDING[question])
    made.add_run()
    made.add_argument("--no-wait", action="store_true", help="return as soon as all nodes have been asked")
    made.add_json()
    return made


def end_job(question: str, argv: Sequence[str]) -> int:
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
                print(f"{entry.name}: {question} sent to {plural(nodes, 'node')}", flush=True)
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


main_stop, main_kill = (partial(end_job, question) for question in ENDING)
stop_parser, kill_parser = (partial(end_parser, question) for question in ENDING)


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
            ask(entry, "status")
            return entry, Call(entry, None)
        except (ControlSilentError, NoRunError):
            continue
    return entries[-1], Call(entries[-1], None)
