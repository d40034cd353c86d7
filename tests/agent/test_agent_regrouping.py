"""Workers of one node that go on in another generation, and replacements that wait for a place in it."""

from __future__ import annotations

import signal

import pytest
from msgspec import structs

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
from holdfast.agent.local_generation import Work
from holdfast.protocol.exit_codes import EXIT_REQUEUE
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
from tests.agent.agent_harness import (
    LIMITS,
    AgentHarness,
    all_can_go_on,
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
    harness = all_can_go_on()
    harness.give(Signalled(signal.SIGTERM, "SIGTERM"))
    harness.hear(Regroup(survivor(2), 0, "rank 7 was lost"))
    harness.give(WorkersHeld(1, 6))
    assert not harness.sent(), "they have left the generation in which they were held"
    harness.give(NodePrepared(2, 40_002))
    harness.hear(Start(2, "10.0.0.1", 40_002))
    assert harness.has(HoldWorkers)
    harness.give(WorkersHeld(2, 1))
    assert Leave("SIGTERM", drain=True) in harness.sent()


def leaving_regrouping() -> AgentHarness:
    """This node leaves, and its workers are on their way to the safe point from which the others go on without it."""
    harness = leaving_drained()
    harness.hear(Regroup(structs.replace(assign(2), local_ranks=(), world_size=4), 7, "a leaves; 4 ranks go on"))
    assert harness.done == [Say("a leaves; 4 ranks go on"), RegroupWorkers(harness.machine.current.assign, 7)]
    return harness


def test_the_workers_of_a_node_that_leaves_wait_for_the_order_to_stop_and_get_their_grace() -> None:
    harness = leaving_regrouping()
    harness.give(NodePrepared(2, None))
    assert harness.sent() == [Prepared(2)]
    harness.hear(Stop(2, StopReason.MEMBER_LEFT))
    assert harness.done == [SignalWorkers(signal.SIGTERM)]
    for local_rank in (0, 1):
        harness.give(WorkerEnded(2, local_rank, failure(after_stop=True)))
    assert harness.has(KillTree)
    harness.give(TreeGone(2))
    assert Stopped(2) in harness.sent()
    (end,) = [command.outcome for command in harness.done if isinstance(command, Exit)]
    assert end.exit_code == EXIT_REQUEUE, "nothing that they have done is lost"


def test_a_worker_that_is_lost_on_the_way_there_is_reported() -> None:
    harness = leaving_regrouping()
    harness.give(WorkerEnded(2, 1, killed()))
    assert harness.sent() == [WorkersFailed(2, (killed(),))]
    harness.hear(Regroup(structs.replace(assign(3), local_ranks=(), world_size=3), 0, "rank 1 was lost"))
    harness.give(NodePrepared(3, None))
    harness.hear(Stop(3, StopReason.MEMBER_LEFT))
    harness.give(WorkerEnded(3, 0, failure(after_stop=True)))
    assert harness.has(KillTree)


def test_a_signal_while_the_workers_regroup_is_heeded_when_they_have_gone_on() -> None:
    """They would lose their last step otherwise. They have just gone on: the first safe point is waited for."""
    harness = held()
    harness.hear(Regroup(assign(2), 8, "z leaves"))
    harness.give(Signalled(signal.SIGTERM, "SIGTERM"))
    assert harness.sent() == [Leave("SIGTERM", drain=True)]
    harness.give(NodePrepared(2, 40_002))
    harness.hear(Start(2, "10.0.0.1", 40_002))
    for _ in range(3):
        assert harness.has(HoldWorkers)
        assert not harness.has(SignalWorkers)
        harness.give(WorkersHeld(2, 0))
    harness.give(WorkersHeld(2, 1))
    assert Leave("SIGTERM", drain=True) in harness.sent()


def test_the_evidence_of_a_lost_worker_keeps_its_generation() -> None:
    harness = shrunk()
    harness.give(FailureRead(1, 1, killed()))
    assert harness.sent() == [WorkersFailed(1, (killed(),))]


def test_a_replacement_is_started_once_and_a_new_coordinator_is_told_that_it_is_ready() -> None:
    harness = replaced()
    harness.hear(Replace(2, (1,)))
    assert not harness.has(StartReplacements)
    assert harness.sent() == [ReplacementReady(2, (1,))]


@pytest.mark.parametrize("raises", [False, True])
def test_a_replacement_that_fails_is_no_failure_of_the_generation(raises: bool) -> None:
    harness = replaced()
    error = failure()
    if raises:
        harness.give(WorkerRaised(2, 1, error, evidence_follows=True))
        harness.give(FailureRead(2, 1, error))
        assert not harness.sent(), "its process has not ended"
        harness.give(WorkerEnded(2, 1, error))
    else:
        harness.give(WorkerEnded(2, 1, error, evidence_follows=True))
        assert not harness.sent()
        harness.give(FailureRead(2, 1, error))
    assert harness.sent() == [ReplacementFailed(2, (error,))]
    harness.hear(Replace(2, (1,)))
    assert harness.done == [StartReplacements(2, (1,))]


def test_a_replacement_that_ends_with_0_has_failed() -> None:
    harness = replaced()
    harness.give(WorkerEnded(2, 1, None))
    (sent,) = harness.sent()
    assert isinstance(sent, ReplacementFailed)
    assert sent.failures[0].message == "it ended before it had a place"


def test_an_order_to_regroup_that_comes_too_late_is_answered_when_no_worker_is_left() -> None:
    """The coordinator waits for it under the newer number."""
    for harness in (stopping(), killing(), sweeping()):
        harness.hear(Regroup(survivor(2)))
        assert not harness.done
        harness.wait(LIMITS.stop_grace_s)
        harness.give(TreeGone(1))
        assert Stopped(2) in harness.sent()
    harness = idle()
    harness.hear(Regroup(survivor(2)))
    assert harness.sent() == [Stopped(2)]


def test_a_node_whose_workers_are_being_killed_prepares_what_follows_a_regroup_that_was_refused() -> None:
    """The order to stop names the generation that this node was to take part in, and not the one of its workers."""
    for harness in (killing(), sweeping()):
        harness.hear(Regroup(survivor(2)))
        harness.hear(
            Stop(2, StopReason.WORKER_FAILED, "the workers cannot go on: its memory grew", following=assign(3))
        )
        harness.give(TreeGone(1))
        assert Stopped(2) in harness.sent()
        assert Prepare(assign(3)) in harness.done


def test_a_node_without_a_worker_joins_afresh_after_it_lost_its_link() -> None:
    harness = bare()
    harness.give(LinkLost("reset"))
    harness.give(Dialed())
    assert KillTree(1) in harness.done
    harness.give(TreeGone(1))
    assert [message.running for message in harness.sent() if isinstance(message, Join)] == [None]


def test_workers_are_let_go_when_nobody_joins_after_all() -> None:
    harness = held()
    harness.hear(DrainTo(1, 0))
    assert harness.done == [ReleaseWorkers(1, 0)]
    assert harness.machine.work is Work.RUNNING
    harness = leaving_drained()
    harness.hear(DrainTo(1, 0))
    assert harness.machine.work is Work.DRAINING, "this node wants to leave: its workers stay held"
