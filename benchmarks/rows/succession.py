"""The coordinator's node is lost and does not return: until the others train, on pretend hosts. One command runs them all:
`python -m benchmarks succession`.

One worker a node, DDP on gloo. The coordinator is on the endpoint's node, node 1, where torchrun has its rendezvous.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.elastic import Job, Trained, job, why_not
from benchmarks.harness import HOLDFAST, TORCHRUN, Launcher, Metric, Row, Sample

LIMIT_S = 60.0
SETTLED_S = 1.0
"""The job trains undisturbed for so long: the voters hold the charter."""
OLD_S = 0.2
"""A step of the generation before may be stamped for so long; none of the next one can."""
MOMENTS = 7
"""The kill comes at different moments between two messages of the coordinator."""
MOMENT_S = 0.11

Lose = Callable[[Job], int]
"""Loses nodes; how many are left (or come back) to train."""


def kill_one(running: Job) -> int:
    running.hosts[1].kill()
    running.forget(1)
    return 2


def unplug(running: Job) -> int:
    running.hosts.unplug(1)
    running.forget(1)
    return 2


def kill_two_of_five(running: Job) -> int:
    for number in (1, 2):
        running.hosts[number].kill()
        running.forget(number)
    return 3


def restart_at_once(running: Job) -> int:
    running.agents[1].signal(signal.SIGKILL)
    running.start(1)
    return 2  # the others train before it has imported torch


class Turn:
    """Counts the repetitions of a row."""

    number = 0


def measure(nodes: int, lose: Lose, turn: Turn, launcher: Launcher, folder: Path) -> Sample:
    with job(launcher, folder, f"1:{nodes}", hosts=nodes) as running:
        running.train(nodes)
        turn.number += 1
        time.sleep(SETTLED_S + turn.number % MOMENTS * MOMENT_S)
        since_s = time.monotonic()
        left = lose(running)
        after: Trained = running.trains(left, since_s + OLD_S, LIMIT_S)
        return {"next step": OLD_S + after.step_s}


def row(name: str, title: str, nodes: int, lose: Lose, seconds: float, repeat: dict[str, int]) -> Row:
    return Row(
        name=f"succession-{name}",
        title=title,
        metrics=(Metric("next step", "s", value_max=seconds, digits=2),),
        measure=partial(measure, nodes, lose, Turn()),
        repeat=repeat,
        group="succession",
        strict=True,
        by_name=True,
        why_not=why_not,
    )


OF_BOTH = {HOLDFAST.name: 40, TORCHRUN.name: 1}
LEASE_S = 6.0
ROWS = (
    row("kill", "3 nodes, SIGKILL of everything on the coordinator's", 3, kill_one, 2.0, OF_BOTH),
    row("silence", "3 nodes, the coordinator's falls silent", 3, unplug, LEASE_S + 3.0, {HOLDFAST.name: 20}),
    row(
        "two", "5 nodes, the coordinator's and one more killed", 5, kill_two_of_five, LEASE_S + 3.0, {HOLDFAST.name: 20}
    ),
    row(
        "restart",
        "3 nodes, the coordinator's agent killed, started at once",
        3,
        restart_at_once,
        2.0,
        {HOLDFAST.name: 20},
    ),
)
