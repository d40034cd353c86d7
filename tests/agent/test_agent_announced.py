"""The next generation, announced with the stop of the present one."""

from __future__ import annotations

import signal

import pytest

from holdfast.agent.agent_state import Work
from holdfast.agent.commands import (
    Exit,
    Prepare,
    StartWorkers,
)
from holdfast.agent.events import (
    Dialed,
    LinkLost,
    NodePrepared,
    Signalled,
    TreeGone,
    WorkerEnded,
    WorkersFenced,
)
from holdfast.protocol.messages import (
    Join,
    Prepared,
    Start,
    Stop,
    Stopped,
    StopReason,
)
from tests.agent.agent_desk import (
    NPROC,
    Desk,
    assign,
    failure,
    running,
)

STOP = Stop(1, StopReason.WORKER_FAILED, "rank 7 failed on z", assign(2))


def workers_end(desk: Desk) -> None:
    for local_rank in range(NPROC):
        desk.give(WorkerEnded(1, local_rank, failure(after_stop=True)))
    desk.give(TreeGone(1))


def stopped() -> Desk:
    """The order to stop announced the next generation, and the workers are gone."""
    desk = running()
    desk.hear(STOP)
    assert not desk.has(Prepare), "a worker may be alive"
    workers_end(desk)
    return desk


def test_what_was_announced_is_prepared_when_the_workers_are_gone() -> None:
    desk = stopped()
    assert desk.sent() == [Stopped(1)]
    assert desk.has(Prepare)
    desk.give(NodePrepared(2, 40_001))
    assert desk.sent() == [Prepared(2, 40_001)]
    desk.hear(Start(2, "10.0.0.1", 40_001))
    assert desk.has(StartWorkers)


@pytest.mark.parametrize("work", [Work.KILLING, Work.IDLE])
def test_it_is_also_prepared_when_the_workers_were_killed_before_the_order_came(work: Work) -> None:
    desk = running()
    desk.give(WorkersFenced())
    if work is Work.IDLE:
        desk.give(TreeGone(1))
        assert desk.sent() == [Stopped(1)]
    assert desk.machine.work is work
    desk.hear(STOP)
    if work is Work.KILLING:
        desk.give(TreeGone(1))
    assert Prepare(assign(2)) in desk.done


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_newer_assignment_replaces_what_was_announced(is_prepared: bool) -> None:
    desk = stopped()
    if is_prepared:
        desk.give(NodePrepared(2, 40_001))
    assert desk.hear(assign(3)) == [Prepare(assign(3))]
    desk.give(NodePrepared(2, 40_001))
    assert desk.sent() == []
    desk.hear(Start(2, "10.0.0.1", 40_001))
    assert not desk.has(StartWorkers)


def test_nothing_is_prepared_for_a_coordinator_that_is_gone() -> None:
    desk = running()
    desk.hear(STOP)
    desk.give(LinkLost("reset"))
    workers_end(desk)
    assert not desk.has(Prepare)
    assert desk.machine.work is Work.IDLE


def test_a_prepared_node_that_loses_its_coordinator_joins_the_next_one_with_that_number() -> None:
    desk = stopped()
    desk.give(NodePrepared(2, 40_001))
    desk.give(LinkLost("reset"))
    assert desk.machine.work is Work.IDLE
    desk.give(Dialed())
    (join,) = desk.sent()
    assert isinstance(join, Join)
    assert (join.last_generation, join.running) == (2, None)


def test_a_leaving_node_prepares_nothing() -> None:
    desk = running()
    desk.give(Signalled(signal.SIGTERM, "SIGTERM"))
    desk.hear(STOP)
    workers_end(desk)
    assert not desk.has(Prepare)
    assert desk.has(Exit)
