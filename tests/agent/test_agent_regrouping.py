"""Workers of one node that go on in another generation, and replacements that wait for a place in it."""

from __future__ import annotations

import signal

import pytest
from msgspec import structs

from holdfast.agent.agent_state import Work
from holdfast.agent.commands import (
    Exit,
    HoldWorkers,
    KillTree,
    Prepare,
    RegroupWorkers,
    ReleaseWorkers,
    Say,
    SignalWorkers,
    StartReplacements,
)
from holdfast.agent.events import (
    Dialed,
    FailureRead,
    LinkLost,
    NodePrepared,
    Signalled,
    TreeGone,
    WorkerEnded,
    WorkerRaised,
    WorkersHeld,
)
from holdfast.protocol.errors import EXIT_REQUEUE
from holdfast.protocol.messages import (
    DrainTo,
    Join,
    Leave,
    Prepared,
    Regroup,
    Replace,
    ReplacementFailed,
    ReplacementReady,
    Start,
    Stop,
    Stopped,
    StopReason,
    WorkersFailed,
)
from tests.agent.agent_desk import (
    LIMITS,
    Desk,
    able,
    assign,
    bare,
    failure,
    held,
    idle,
    killed,
    killing,
    leaving_drained,
    replaced,
    shrunk,
    stopping,
    survivor,
    sweeping,
)


def test_a_node_that_wanted_to_leave_before_its_workers_regrouped_asks_for_a_safe_point_again() -> None:
    desk = able()
    desk.give(Signalled(signal.SIGTERM, "SIGTERM"))
    desk.hear(Regroup(survivor(2), 0, "rank 7 was lost"))
    desk.give(WorkersHeld(1, 6))
    assert not desk.sent(), "they have left the generation in which they were held"
    desk.give(NodePrepared(2, 40_002))
    desk.hear(Start(2, "10.0.0.1", 40_002))
    assert desk.has(HoldWorkers)
    desk.give(WorkersHeld(2, 1))
    assert Leave("SIGTERM", drain=True) in desk.sent()


def parting() -> Desk:
    """This node leaves, and its workers are on their way to the safe point from which the others go on without it."""
    desk = leaving_drained()
    desk.hear(Regroup(structs.replace(assign(2), local_ranks=(), world_size=4), 7, "a leaves; 4 ranks go on"))
    assert desk.done == [Say("a leaves; 4 ranks go on"), RegroupWorkers(desk.machine.current.assign, 7)]
    return desk


def test_the_workers_of_a_node_that_leaves_wait_for_the_order_to_stop_and_get_their_grace() -> None:
    desk = parting()
    desk.give(NodePrepared(2, None))
    assert desk.sent() == [Prepared(2)]
    desk.hear(Stop(2, StopReason.MEMBER_LEFT))
    assert desk.done == [SignalWorkers(signal.SIGTERM)]
    for local_rank in (0, 1):
        desk.give(WorkerEnded(2, local_rank, failure(after_stop=True)))
    assert desk.has(KillTree)
    desk.give(TreeGone(2))
    assert Stopped(2) in desk.sent()
    (end,) = [command.outcome for command in desk.done if isinstance(command, Exit)]
    assert end.exit_code == EXIT_REQUEUE, "nothing that they have done is lost"


def test_a_worker_that_is_lost_on_the_way_there_is_reported() -> None:
    desk = parting()
    desk.give(WorkerEnded(2, 1, killed()))
    assert desk.sent() == [WorkersFailed(2, (killed(),))]
    desk.hear(Regroup(structs.replace(assign(3), local_ranks=(), world_size=3), 0, "rank 1 was lost"))
    desk.give(NodePrepared(3, None))
    desk.hear(Stop(3, StopReason.MEMBER_LEFT))
    desk.give(WorkerEnded(3, 0, failure(after_stop=True)))
    assert desk.has(KillTree)


def test_a_signal_while_the_workers_regroup_is_heeded_when_they_have_gone_on() -> None:
    """They would lose their last step otherwise. They have just gone on: the first safe point is waited for."""
    desk = held()
    desk.hear(Regroup(assign(2), 8, "z leaves"))
    desk.give(Signalled(signal.SIGTERM, "SIGTERM"))
    assert desk.sent() == [Leave("SIGTERM", drain=True)]
    desk.give(NodePrepared(2, 40_002))
    desk.hear(Start(2, "10.0.0.1", 40_002))
    for _ in range(3):
        assert desk.has(HoldWorkers)
        assert not desk.has(SignalWorkers)
        desk.give(WorkersHeld(2, 0))
    desk.give(WorkersHeld(2, 1))
    assert Leave("SIGTERM", drain=True) in desk.sent()


def test_the_evidence_of_a_lost_worker_keeps_its_generation() -> None:
    desk = shrunk()
    desk.give(FailureRead(1, 1, killed()))
    assert desk.sent() == [WorkersFailed(1, (killed(),))]


def test_a_replacement_is_started_once_and_a_new_coordinator_is_told_that_it_is_ready() -> None:
    desk = replaced()
    desk.hear(Replace(2, (1,)))
    assert not desk.has(StartReplacements)
    assert desk.sent() == [ReplacementReady(2, (1,))]


@pytest.mark.parametrize("raises", [False, True])
def test_a_replacement_that_fails_is_no_failure_of_the_generation(raises: bool) -> None:
    desk = replaced()
    error = failure()
    if raises:
        desk.give(WorkerRaised(2, 1, error, evidence_follows=True))
        desk.give(FailureRead(2, 1, error))
        assert not desk.sent(), "its process has not ended"
        desk.give(WorkerEnded(2, 1, error))
    else:
        desk.give(WorkerEnded(2, 1, error, evidence_follows=True))
        assert not desk.sent()
        desk.give(FailureRead(2, 1, error))
    assert desk.sent() == [ReplacementFailed(2, (error,))]
    desk.hear(Replace(2, (1,)))
    assert desk.done == [StartReplacements(2, (1,))]


def test_a_replacement_that_ends_with_0_has_failed() -> None:
    desk = replaced()
    desk.give(WorkerEnded(2, 1, None))
    (sent,) = desk.sent()
    assert isinstance(sent, ReplacementFailed)
    assert sent.failures[0].message == "it ended before it had a place"


def test_an_order_to_regroup_that_comes_too_late_is_answered_when_no_worker_is_left() -> None:
    """The coordinator waits for it under the newer number."""
    for desk in (stopping(), killing(), sweeping()):
        desk.hear(Regroup(survivor(2)))
        assert not desk.done
        desk.wait(LIMITS.stop_grace_s)
        desk.give(TreeGone(1))
        assert Stopped(2) in desk.sent()
    desk = idle()
    desk.hear(Regroup(survivor(2)))
    assert desk.sent() == [Stopped(2)]


def test_a_node_whose_workers_are_being_killed_prepares_what_follows_a_regroup_that_was_refused() -> None:
    """The order to stop names the generation that this node was to take part in, and not the one of its workers."""
    for desk in (killing(), sweeping()):
        desk.hear(Regroup(survivor(2)))
        desk.hear(Stop(2, StopReason.WORKER_FAILED, "the workers cannot go on: its memory grew", following=assign(3)))
        desk.give(TreeGone(1))
        assert Stopped(2) in desk.sent()
        assert Prepare(assign(3)) in desk.done


def test_a_node_without_a_worker_joins_afresh_after_it_lost_its_link() -> None:
    desk = bare()
    desk.give(LinkLost("reset"))
    desk.give(Dialed())
    assert KillTree(1) in desk.done
    desk.give(TreeGone(1))
    assert [message.running for message in desk.sent() if isinstance(message, Join)] == [None]


def test_workers_are_let_go_when_nobody_joins_after_all() -> None:
    desk = held()
    desk.hear(DrainTo(1, 0))
    assert desk.done == [ReleaseWorkers(1, 0)]
    assert desk.machine.work is Work.RUNNING
    desk = leaving_drained()
    desk.hear(DrainTo(1, 0))
    assert desk.machine.work is Work.DRAINING, "this node wants to leave: its workers stay held"
