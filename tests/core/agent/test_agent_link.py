"""How an agent keeps its link and its lease, and what it tells of its workers."""

from __future__ import annotations

import signal

import pytest

from holdfast.core.agent.commands import (
    Dial,
    Exit,
    HangUp,
    KillTree,
    SignalWorkers,
)
from holdfast.core.agent.events import (
    Dialed,
    DialFailed,
    LinkLost,
    PassSignal,
    Signalled,
    StoreDied,
    Tick,
    TreeGone,
    WorkerEnded,
)
from holdfast.core.agent.state import Link, Work
from holdfast.core.outcome import OutcomeKind
from holdfast.core.policy import NodeSpec
from holdfast.core.protocol import (
    Finish,
    Join,
    Leave,
    Ping,
    Pong,
    Stop,
    Stopped,
    StopReason,
    StoreLost,
    WorkerDone,
    WorkersFailed,
)
from tests.core.agent.agent_desk import (
    LIMITS,
    NPROC,
    SUCCESS,
    cut_off_running,
    dialing,
    failure,
    joining,
    leaving,
    running,
    stopping,
    sweeping,
    swept,
)

# --- link and lease ---------------------------------------------------------------------------------------------------


def test_it_joins_with_an_identity_never_used_before() -> None:
    desk = joining()
    assert desk.sent() == [Join(NodeSpec(member="a#1", host="a", nproc=NPROC))]
    desk.give(LinkLost("reset"))
    desk.give(Dialed())
    (again,) = desk.sent()
    assert isinstance(again, Join)
    assert (again.node.member, again.node.agent) == ("a#1.1", "a#1")


def test_it_joins_only_with_empty_hands() -> None:
    desk = cut_off_running()
    desk.give(Dialed())
    assert desk.done == [KillTree(1)]
    desk.give(TreeGone(1))
    joins = [message for message in desk.sent() if isinstance(message, Join)]
    assert [(join.node.member, join.last_generation) for join in joins] == [("a#1.1", 1)]


def test_it_says_how_long_ago_it_lost_its_world() -> None:
    desk = cut_off_running()
    desk.wait(LIMITS.fence_s + 0.5)
    desk.give(TreeGone(1))
    if desk.machine.link is Link.DIALING:
        desk.give(Dialed())
    (join,) = [message for message in desk.sent() if isinstance(message, Join)]
    assert join.unlinked_s == pytest.approx(LIMITS.fence_s + 0.5)


def test_pauses_between_attempts_grow_to_the_limit() -> None:
    desk = dialing()
    times = []
    while desk.now < 8.0:
        desk.give(DialFailed("HF302", 1, "connection refused", final=False))
        due = desk.machine.next_deadline()
        assert due is not None
        times.append(round(due - desk.now, 3))
        desk.now = due
        desk.give(Tick())
        if not desk.has(Dial):  # it was time to say something
            desk.now += times[-1]
            desk.give(Tick())
    assert times[:5] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert max(times) == LIMITS.connect_retry_max_s


def test_it_gives_up_at_the_join_deadline_and_says_why() -> None:
    desk = dialing()
    while desk.machine.outcome is None:
        desk.give(DialFailed("HF110", 2, "no such host", final=False))
        due = desk.machine.next_deadline()
        if due is not None:
            desk.now = due
            desk.give(Tick())
    assert desk.now == 60.0
    outcome = desk.machine.outcome
    assert (outcome.kind, outcome.code, outcome.exit_code) == (OutcomeKind.NO_QUORUM, "HF110", 2)
    assert outcome.message == "no such host (tried for 60 s)"


def test_a_final_refusal_is_not_repeated() -> None:
    desk = dialing()
    desk.give(DialFailed("HF111", 2, "another job", final=True))
    assert desk.has(Exit)


def test_answered_pings_keep_it_alive() -> None:
    desk = running()
    desk.wait(100.0)
    assert desk.machine.work is Work.RUNNING
    assert sum(isinstance(message, Ping) for message in desk.sent()) == 100


def test_silence_ends_the_link_as_well() -> None:
    desk = running()
    desk.wait(LIMITS.fence_s, answered=False)
    assert HangUp("no answer") in desk.done


def test_the_fence_counts_from_what_was_sent_not_from_what_came_back() -> None:
    """An answer that was long on its way renews the lease only as of when it was asked for."""
    desk = running()
    desk.now = 1.0
    desk.give(Tick())
    (ping,) = desk.sent()
    assert isinstance(ping, Ping)
    desk.now = 3.9
    desk.hear(Pong(ping.number))
    desk.wait(1.1 - 0.01, answered=False)
    assert desk.machine.work is Work.RUNNING
    desk.wait(0.02, answered=False)
    assert desk.machine.work is Work.KILLING


def test_a_saving_worker_of_a_cut_off_node_is_not_waited_for_beyond_the_fence() -> None:
    desk = stopping()
    desk.wait(LIMITS.fence_s, answered=False)
    assert desk.machine.work is Work.KILLING


# --- work -------------------------------------------------------------------------------------------------------------


def test_done_ranks_are_told_as_it_happens() -> None:
    desk = running()
    desk.give(WorkerEnded(1, 1, None))
    assert desk.sent() == [WorkerDone(1, 1)]


def test_failures_are_told_but_not_those_of_stopped_workers() -> None:
    desk = running()
    desk.give(WorkerEnded(1, 0, failure()))
    assert desk.sent() == [WorkersFailed(1, (failure(),))]
    desk = stopping()
    desk.give(WorkerEnded(1, 0, failure(after_stop=True)))
    assert not desk.sent()


def test_one_that_fell_before_the_order_to_stop_may_be_the_culprit() -> None:
    desk = stopping()
    desk.give(WorkerEnded(1, 0, failure()))
    assert desk.sent() == [WorkersFailed(1, (failure(),))]


def test_a_stop_during_the_sweep_ends_the_term() -> None:
    desk = sweeping()
    desk.hear(Stop(1, StopReason.MEMBER_LOST, "z was lost"))
    desk.give(TreeGone(1))
    assert desk.sent() == [Stopped(1)]
    assert desk.machine.work is Work.IDLE


def test_a_swept_node_stops_at_once() -> None:
    desk = swept()
    desk.hear(Stop(1, StopReason.MEMBER_LOST, "z was lost"))
    assert KillTree(1) in desk.done
    desk.give(TreeGone(1))
    assert desk.sent() == [Stopped(1)]


def test_the_end_waits_until_nothing_is_alive() -> None:
    desk = running()
    desk.hear(Finish(SUCCESS))
    assert KillTree(1) in desk.done
    assert not desk.has(Exit)
    desk.give(TreeGone(1))
    assert desk.done[-1] == Exit(SUCCESS)


def test_a_dead_store_is_told() -> None:
    desk = running()
    desk.give(StoreDied(1))
    assert desk.sent() == [StoreLost(1)]


def test_signals_for_workers_are_passed_on() -> None:
    desk = running()
    desk.give(PassSignal(signal.SIGUSR1))
    assert [command.signum for command in desk.done if isinstance(command, SignalWorkers)] == [signal.SIGUSR1]
    assert desk.machine.work is Work.RUNNING


def test_a_second_signal_kills() -> None:
    desk = leaving()
    assert desk.sent() == [Leave("SIGTERM")]
    assert desk.machine.work is Work.STOPPING
    desk.give(Signalled(signal.SIGINT, "SIGINT"))
    assert desk.done == [KillTree(1)]
    desk.give(TreeGone(1))
    assert desk.machine.outcome is not None
    assert desk.machine.outcome.exit_code == 128 + signal.SIGTERM
