"""How an agent keeps its link and its lease, and what it tells of its workers."""

from __future__ import annotations

import signal

import pytest
from msgspec import structs

from holdfast.agent import events as ev
from holdfast.agent.agent_state import Link, Work
from holdfast.agent.commands import Exit, HangUp, KillTree, ReleaseWorkers, SignalWorkers
from holdfast.protocol import messages as msg
from holdfast.protocol.policy import NodeSpec, Note, Tick
from tests.agent.agent_desk import (
    LIMITS,
    NPROC,
    SUCCESS,
    Desk,
    cleaned,
    cut_off_running,
    draining,
    failure,
    joining,
    leaving,
    leaving_drained,
    preparing,
    running,
    stopping,
    sweeping,
)

JOINED = msg.Joined(LIMITS.lease_s, LIMITS.fence_s, LIMITS.ping_interval_s)

# --- link and lease ---------------------------------------------------------------------------------------------------


def test_it_joins_with_an_identity_never_used_before() -> None:
    desk = joining()
    assert desk.sent() == [msg.Join(NodeSpec(member="a#1", host="a", nproc=NPROC))]
    desk.give(ev.LinkLost("reset"))
    desk.give(ev.Dialed())
    (again,) = desk.sent()
    assert isinstance(again, msg.Join)
    assert (again.node.member, again.node.agent) == ("a#1.1", "a#1")


def rejoined() -> Desk:
    """Linked again, to a coordinator that has not confirmed for the generation yet."""
    desk = cut_off_running()
    desk.give(ev.Dialed())
    return desk


def test_it_joins_with_its_workers_alive_and_says_so() -> None:
    desk = rejoined()
    (join,) = desk.sent()
    assert isinstance(join, msg.Join)
    assert (join.node.member, join.last_generation, join.running) == ("a#1.1", 1, msg.Running(1, 0, 1, 0))
    assert desk.machine.work is Work.RUNNING


def test_workers_that_are_being_stopped_are_killed_before_it_joins() -> None:
    desk = stopping()
    desk.give(ev.LinkLost("reset"))
    desk.give(ev.Dialed())
    assert desk.done == [KillTree(1)]
    desk.give(ev.TreeGone(1))
    joins = [message for message in desk.sent() if isinstance(message, msg.Join)]
    assert [(join.last_generation, join.running) for join in joins] == [(1, None)]


def test_workers_on_their_way_to_a_safe_point_get_there_before_it_joins() -> None:
    desk = draining()
    desk.give(ev.LinkLost("reset"))
    desk.give(ev.Dialed())
    assert not desk.done
    desk.all_end(drained=True)
    desk.give(ev.TreeGone(1))
    assert [type(message) for message in desk.sent()] == [msg.Stopped, msg.Join]


def test_what_its_workers_ended_with_meanwhile_is_told_once_somebody_vouches() -> None:
    desk = rejoined()
    desk.hear(JOINED)
    desk.give(ev.WorkerEnded(1, 0, None))
    assert not desk.sent()
    desk.hear(msg.Resume(1))
    assert desk.sent() == [msg.WorkerDone(1, 0)]


def test_a_failure_that_nobody_can_be_told_ends_the_generation_here() -> None:
    desk = cut_off_running()
    desk.give(ev.WorkerEnded(1, 1, failure()))
    assert desk.done == [KillTree(1)]


def test_nobody_vouches_and_the_old_fence_stands() -> None:
    """Neither being linked again nor being answered lets workers live that nobody has confirmed for."""
    desk = cut_off_running()
    desk.wait(1.0)
    desk.give(ev.Dialed())
    desk.hear(JOINED)
    desk.wait(LIMITS.fence_s - 1.0 - 0.01)
    assert desk.machine.work is Work.RUNNING
    assert KillTree(1) in desk.wait(0.02)


def test_resumed_workers_live_on() -> None:
    desk = rejoined()
    desk.hear(JOINED)
    desk.hear(msg.Resume(1))
    desk.wait(10 * LIMITS.fence_s)
    assert desk.machine.work is Work.RUNNING


def test_the_fence_of_resumed_workers_counts_from_what_others_have_confirmed() -> None:
    desk = rejoined()
    desk.hear(structs.replace(JOINED, age_s=0.5))
    desk.hear(msg.Resume(1))
    assert desk.machine.fence_at_s == desk.now - 0.5 + LIMITS.fence_s


def test_abandoned_workers_are_killed() -> None:
    desk = rejoined()
    desk.hear(JOINED)
    assert desk.hear(msg.Abandon(2)) == []
    assert desk.hear(msg.Abandon(1)) == [KillTree(1)]


# --- leaving ----------------------------------------------------------------------------------------------------------


def leaving_saved() -> Desk:
    """All workers have saved and left at the safe point that was agreed on."""
    desk = leaving_drained()
    desk.hear(msg.Drain(1, "a is leaving"))
    desk.hear(msg.DrainTo(1, 9))
    desk.all_end(drained=True)
    desk.give(ev.TreeGone(1))
    return desk


def exit_codes(desk: Desk) -> list[int]:
    return [command.outcome.exit_code for command in desk.done if isinstance(command, Exit)]


def test_a_notice_drains_where_the_workers_ask_for_safe_points() -> None:
    desk = leaving_drained()
    assert desk.sent() == [msg.Leave("SIGTERM", drain=True)]
    desk.hear(msg.Drain(1, "a is leaving"))
    assert desk.sent() == [msg.Held(1, 6)]
    assert desk.hear(msg.DrainTo(1, 9))[-1] == ReleaseWorkers(1, 9)
    desk.all_end(drained=True)
    desk.give(ev.TreeGone(1))
    assert desk.sent() == [msg.Stopped(1)]
    assert not exit_codes(desk), "others may still be saving, and it may be this node that hosts the coordinator"
    desk.hear(msg.Stop(1, msg.StopReason.MEMBER_LEFT, "a is leaving"))
    assert exit_codes(desk) == [75]


def test_a_notice_stops_at_once_where_they_ask_for_none() -> None:
    desk = leaving()
    assert desk.sent() == [msg.Leave("SIGTERM")]
    assert SignalWorkers(signal.SIGTERM) in desk.done


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGQUIT])
def test_the_keyboard_does_not_wait_for_a_safe_point(signum: signal.Signals) -> None:
    desk = running()
    desk.give(ev.Signalled(signum, signum.name))
    assert SignalWorkers(signum) in desk.done


def test_a_preempted_node_asks_to_be_requeued_either_way() -> None:
    desk = running()
    desk.give(ev.Signalled(signal.SIGUSR1, "SIGUSR1", preempt=True))
    desk.give(ev.WorkersHeld(1, 0))
    assert SignalWorkers(signal.SIGTERM) in desk.done, "the workers ignore the signal itself"
    desk.all_end(failure(after_stop=True))
    desk.give(ev.TreeGone(1))
    assert exit_codes(desk) == [75]


def test_a_notice_that_comes_after_the_drain_finds_everything_saved() -> None:
    """A scheduler tells all nodes, one after the other; the first one's notice was everybody's."""
    desk = draining()
    desk.all_end(drained=True)
    desk.give(ev.TreeGone(1))
    desk.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    assert exit_codes(desk) == [75]


def test_a_notice_that_comes_while_the_drained_are_cleaned_too() -> None:
    desk = draining()
    desk.all_end(drained=True)
    desk.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    desk.give(ev.TreeGone(1))
    assert exit_codes(desk) == [75]


def test_a_drained_node_does_not_wait_for_ever() -> None:
    desk = leaving_saved()
    desk.wait(LIMITS.drain_s - 0.1)
    assert desk.machine.outcome is None
    desk.wait(0.2)
    assert desk.machine.outcome.exit_code == 75


def test_a_drained_node_that_loses_the_coordinator_goes() -> None:
    desk = leaving_saved()
    desk.give(ev.LinkLost("gone"))
    assert exit_codes(desk) == [75]


def test_a_save_that_fails_is_not_left_at_a_safe_point() -> None:
    desk = leaving_drained()
    desk.hear(msg.Drain(1, "a is leaving"))
    desk.hear(msg.DrainTo(1, 9))
    desk.give(ev.WorkerEnded(1, 0, None, drained=True))
    desk.give(ev.WorkerEnded(1, 1, failure(after_stop=True)))
    desk.give(ev.TreeGone(1))
    assert exit_codes(desk) == [143]


def test_a_node_whose_ranks_end_while_they_are_held_goes_soon() -> None:
    desk = running()
    desk.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    desk.all_end()
    desk.give(ev.TreeGone(1))
    desk.wait(2.0)
    desk.give(ev.TreeGone(1))
    assert desk.machine.outcome is not None


def test_a_node_that_has_done_its_part_is_not_held() -> None:
    desk = cleaned()
    assert desk.hear(msg.Drain(1, "z is leaving")) == []
    assert desk.machine.work is Work.RUNNING


def test_workers_killed_by_the_supervisor_at_the_fence_are_no_failures() -> None:
    desk = running()
    assert desk.give(ev.WorkersFenced()) == [Note("fenced_by_supervisor", {}), KillTree(1)]
    for local_rank in range(NPROC):
        desk.give(ev.WorkerEnded(1, local_rank, failure(after_stop=True)))
        assert not desk.sent()
    desk.give(ev.TreeGone(1))
    assert desk.sent() == [msg.Stopped(1)]


def test_a_late_resume_is_refused() -> None:
    desk = rejoined()
    desk.hear(JOINED)
    desk.now += LIMITS.fence_s
    assert KillTree(1) in desk.hear(msg.Resume(1))


def test_a_job_that_ends_while_a_node_drains_has_ended_well() -> None:
    desk = leaving_drained()
    desk.hear(msg.Finish(SUCCESS))
    desk.give(ev.TreeGone(1))
    assert exit_codes(desk) == [0]


def test_a_drain_nobody_answers_is_given_up() -> None:
    desk = leaving_drained()
    assert SignalWorkers(signal.SIGTERM) in desk.wait(LIMITS.drain_s + 0.01)


def test_a_second_signal_kills_what_drains() -> None:
    desk = leaving_drained()
    assert KillTree(1) in desk.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))


def test_it_says_how_long_ago_it_lost_its_world() -> None:
    desk = cut_off_running()
    desk.wait(LIMITS.fence_s + 0.5)
    desk.give(ev.TreeGone(1))
    if desk.machine.link is Link.DIALING:
        desk.give(ev.Dialed())
    (join,) = [message for message in desk.sent() if isinstance(message, msg.Join)]
    assert join.unlinked_s == pytest.approx(LIMITS.fence_s + 0.5)


def test_answered_pings_keep_it_alive() -> None:
    desk = running()
    desk.wait(100.0)
    assert desk.machine.work is Work.RUNNING
    assert sum(isinstance(message, msg.Ping) for message in desk.sent()) == 100


def test_silence_ends_the_link_as_well() -> None:
    desk = running()
    desk.wait(LIMITS.fence_s, answered=False)
    assert HangUp("no answer") not in desk.done, "the coordinator takes the end of the link for that of the workers"
    desk.give(ev.TreeGone(1))
    assert HangUp("no answer") in desk.done
    assert not [message for message in desk.sent() if isinstance(message, msg.Stopped)]


def test_the_fence_counts_from_what_was_sent_not_from_what_came_back() -> None:
    """An answer that was long on its way renews the lease only as of when it was asked for."""
    desk = running()
    desk.now = 1.0
    desk.give(Tick())
    (ping,) = desk.sent()
    assert isinstance(ping, msg.Ping)
    desk.now = 3.9
    desk.hear(msg.Pong(ping.number))
    desk.wait(1.1 - 0.01, answered=False)
    assert desk.machine.work is Work.RUNNING
    desk.wait(0.02, answered=False)
    assert desk.machine.work is Work.KILLING


def test_workers_that_ended_while_the_agent_stood_still_are_done_although_the_fence_has_passed() -> None:
    desk = running()
    desk.wait(LIMITS.fence_s, answered=False)
    assert desk.machine.work is Work.KILLING
    for local_rank in range(NPROC):
        desk.give(ev.WorkerEnded(1, local_rank, None))
        assert desk.sent() == [msg.WorkerDone(1, local_rank)]


@pytest.mark.parametrize("age_s", [0.0, 0.8])
def test_with_a_start_the_fence_counts_from_what_others_have_confirmed(age_s: float) -> None:
    """A coordinator that hears all nodes and that none of them hears has a successor after one fence."""
    desk = preparing()
    desk.now = 1.0
    desk.give(ev.NodePrepared(1, 40_000))
    desk.now = 1.5
    desk.hear(msg.Start(1, "10.0.0.1", 40_000, age_s=age_s))
    assert desk.machine.fence_at_s == 1.0 - age_s + LIMITS.fence_s


def test_a_saving_worker_of_a_cut_off_node_is_not_waited_for_beyond_the_fence() -> None:
    desk = stopping()
    desk.wait(LIMITS.fence_s, answered=False)
    assert desk.machine.work is Work.KILLING


# --- work -------------------------------------------------------------------------------------------------------------


def test_done_ranks_are_told_as_it_happens() -> None:
    desk = running()
    desk.give(ev.WorkerEnded(1, 1, None))
    assert desk.sent() == [msg.WorkerDone(1, 1)]


def test_failures_are_told_but_not_those_of_stopped_workers() -> None:
    desk = running()
    desk.give(ev.WorkerEnded(1, 0, failure()))
    assert desk.sent() == [msg.WorkersFailed(1, (failure(),))]
    desk = stopping()
    desk.give(ev.WorkerEnded(1, 0, failure(after_stop=True)))
    assert not desk.sent()


def test_one_that_fell_before_the_order_to_stop_may_be_the_culprit() -> None:
    desk = stopping()
    desk.give(ev.WorkerEnded(1, 0, failure()))
    assert desk.sent() == [msg.WorkersFailed(1, (failure(),))]


def test_an_exception_is_reported_before_the_process_ends_and_once() -> None:
    desk = running()
    desk.give(ev.WorkerRaised(1, 0, failure()))
    assert desk.sent() == [msg.WorkersFailed(1, (failure(),))]
    assert desk.machine.work is Work.RUNNING
    desk.hear(msg.Stop(1, msg.StopReason.WORKER_FAILED))
    desk.give(ev.WorkerEnded(1, 1, failure(after_stop=True)))
    assert desk.machine.work is Work.STOPPING  # its exit functions have the time that every worker has
    desk.give(ev.WorkerEnded(1, 0, failure()))
    assert desk.machine.work is Work.KILLING
    assert not desk.sent()


def test_a_worker_that_raised_and_then_ends_with_zero_has_not_done_its_work() -> None:
    desk = running()
    desk.give(ev.WorkerRaised(1, 0, failure()))
    for late in (ev.WorkerEnded(1, 0, None), ev.WorkerRaised(1, 0, failure())):
        desk.give(late)
        assert not desk.sent()


BARE = failure()
READ = structs.replace(BARE, error_type="ValueError", message="ValueError: nan")


@pytest.mark.parametrize("kind", [ev.WorkerEnded, ev.WorkerRaised])
def test_a_failure_is_reported_before_what_it_left_is_read(kind: type[ev.WorkerEnded | ev.WorkerRaised]) -> None:
    desk = running()
    desk.give(kind(1, 0, failure=BARE, evidence_follows=True))
    assert desk.sent() == [msg.WorkersFailed(1, (BARE,), evidence_follows=True)]
    desk.hear(msg.Stop(1, msg.StopReason.WORKER_FAILED))
    desk.give(ev.FailureRead(1, 0, READ))
    assert desk.sent() == [msg.WorkersFailed(1, (READ,))]


def test_a_worker_that_raised_while_it_was_stopped_is_reported_when_that_is_known() -> None:
    desk = stopping()
    bare, read = (structs.replace(each, after_stop=True) for each in (BARE, READ))
    desk.give(ev.WorkerEnded(1, 0, bare, evidence_follows=True))
    assert not desk.sent()
    desk.give(ev.FailureRead(1, 0, read))
    assert desk.sent() == [msg.WorkersFailed(1, (read,))]


@pytest.mark.parametrize(("exit_code", "reported"), [(17, True), (-8, True), (1, False), (-15, False), (143, False)])
def test_an_exit_status_that_the_stop_cannot_cause_is_reported(exit_code: int, reported: bool) -> None:
    desk = stopping()
    desk.give(ev.FailureRead(1, 0, structs.replace(failure(after_stop=True), exit_code=exit_code)))
    assert bool(desk.sent()) is reported


def test_what_was_read_of_an_older_generation_is_too_late() -> None:
    desk = running()
    desk.give(ev.FailureRead(7, 0, READ))
    assert not desk.sent()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_node_with_an_exception_cannot_offer_its_workers_to_a_new_coordinator(when: str) -> None:
    desk = running()
    events: list[ev.Event] = [ev.WorkerRaised(1, 0, failure()), ev.LinkLost("reset")]
    for event in events if when == "before" else reversed(events):
        desk.give(event)
    desk.give(ev.Dialed())
    assert desk.machine.work is Work.KILLING


def test_a_stop_during_the_sweep_ends_the_generation() -> None:
    desk = sweeping()
    desk.hear(msg.Stop(1, msg.StopReason.MEMBER_LOST, "z was lost"))
    desk.give(ev.TreeGone(1))
    assert desk.sent() == [msg.Stopped(1)]
    assert desk.machine.work is Work.IDLE


def test_a_cleaned_node_stops_at_once() -> None:
    desk = cleaned()
    desk.hear(msg.Stop(1, msg.StopReason.MEMBER_LOST, "z was lost"))
    assert KillTree(1) in desk.done
    desk.give(ev.TreeGone(1))
    assert desk.sent() == [msg.Stopped(1)]


def test_the_end_waits_until_nothing_is_alive() -> None:
    desk = running()
    desk.hear(msg.Finish(SUCCESS))
    assert KillTree(1) in desk.done
    assert not desk.has(Exit)
    desk.give(ev.TreeGone(1))
    assert desk.done[-1] == Exit(SUCCESS)


def test_a_dead_store_is_told() -> None:
    desk = running()
    desk.give(ev.StoreDied(1))
    assert desk.sent() == [msg.StoreLost(1)]


def test_signals_for_workers_are_passed_on() -> None:
    desk = running()
    desk.give(ev.PassSignal(signal.SIGUSR1))
    assert [command.signum for command in desk.done if isinstance(command, SignalWorkers)] == [signal.SIGUSR1]
    assert desk.machine.work is Work.RUNNING


def test_a_second_signal_kills() -> None:
    desk = leaving()
    assert desk.sent() == [msg.Leave("SIGTERM")]
    assert desk.machine.work is Work.STOPPING
    desk.give(ev.Signalled(signal.SIGINT, "SIGINT"))
    assert desk.done == [KillTree(1)]
    desk.give(ev.TreeGone(1))
    assert desk.machine.outcome.exit_code == 128 + signal.SIGTERM
