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
from tests.agent.agent_harness import (
    LIMITS,
    NPROC,
    SUCCESS,
    AgentHarness,
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
    harness = joining()
    assert harness.sent() == [msg.Join(NodeSpec(member="a#1", host="a", nproc=NPROC))]
    harness.give(ev.LinkLost("reset"))
    harness.give(ev.Dialed())
    (again,) = harness.sent()
    assert isinstance(again, msg.Join)
    assert (again.node.member, again.node.agent) == ("a#1.1", "a#1")


def rejoined() -> AgentHarness:
    """Linked again, to a coordinator that has not confirmed for the generation yet."""
    harness = cut_off_running()
    harness.give(ev.Dialed())
    return harness


def test_it_joins_with_its_workers_alive_and_says_so() -> None:
    harness = rejoined()
    (join,) = harness.sent()
    assert isinstance(join, msg.Join)
    assert (join.node.member, join.last_generation, join.running) == ("a#1.1", 1, msg.Running(1, 0, 1, 0))
    assert harness.machine.work is Work.RUNNING


def test_workers_that_are_being_stopped_are_killed_before_it_joins() -> None:
    harness = stopping()
    harness.give(ev.LinkLost("reset"))
    harness.give(ev.Dialed())
    assert harness.done == [KillTree(1)]
    harness.give(ev.TreeGone(1))
    joins = [message for message in harness.sent() if isinstance(message, msg.Join)]
    assert [(join.last_generation, join.running) for join in joins] == [(1, None)]


def test_workers_on_their_way_to_a_safe_point_get_there_before_it_joins() -> None:
    harness = draining()
    harness.give(ev.LinkLost("reset"))
    harness.give(ev.Dialed())
    assert not harness.done
    harness.all_end(drained=True)
    harness.give(ev.TreeGone(1))
    assert [type(message) for message in harness.sent()] == [msg.Stopped, msg.Join]


def test_what_its_workers_ended_with_meanwhile_is_told_once_somebody_vouches() -> None:
    harness = rejoined()
    harness.hear(JOINED)
    harness.give(ev.WorkerEnded(1, 0, None))
    assert not harness.sent()
    harness.hear(msg.Resume(1))
    assert harness.sent() == [msg.WorkerDone(1, 0)]


def test_a_failure_that_nobody_can_be_told_ends_the_generation_here() -> None:
    harness = cut_off_running()
    harness.give(ev.WorkerEnded(1, 1, failure()))
    assert harness.done == [KillTree(1)]


def test_nobody_vouches_and_the_old_fence_stands() -> None:
    """Neither being linked again nor being answered lets workers live that nobody has confirmed for."""
    harness = cut_off_running()
    harness.wait(1.0)
    harness.give(ev.Dialed())
    harness.hear(JOINED)
    harness.wait(LIMITS.fence_s - 1.0 - 0.01)
    assert harness.machine.work is Work.RUNNING
    assert KillTree(1) in harness.wait(0.02)


def test_resumed_workers_live_on() -> None:
    harness = rejoined()
    harness.hear(JOINED)
    harness.hear(msg.Resume(1))
    harness.wait(10 * LIMITS.fence_s)
    assert harness.machine.work is Work.RUNNING


def test_the_fence_of_resumed_workers_counts_from_what_others_have_confirmed() -> None:
    harness = rejoined()
    harness.hear(structs.replace(JOINED, age_s=0.5))
    harness.hear(msg.Resume(1))
    assert harness.machine.fence_at_s == harness.now - 0.5 + LIMITS.fence_s


def test_abandoned_workers_are_killed() -> None:
    harness = rejoined()
    harness.hear(JOINED)
    assert harness.hear(msg.Abandon(2)) == []
    assert harness.hear(msg.Abandon(1)) == [KillTree(1)]


# --- leaving ----------------------------------------------------------------------------------------------------------


def leaving_saved() -> AgentHarness:
    """All workers have saved and left at the safe point that was agreed on."""
    harness = leaving_drained()
    harness.hear(msg.Drain(1, "a is leaving"))
    harness.hear(msg.DrainTo(1, 9))
    harness.all_end(drained=True)
    harness.give(ev.TreeGone(1))
    return harness


def exit_codes(harness: AgentHarness) -> list[int]:
    return [command.outcome.exit_code for command in harness.done if isinstance(command, Exit)]


def test_a_notice_drains_where_the_workers_ask_for_safe_points() -> None:
    harness = leaving_drained()
    assert harness.sent() == [msg.Leave("SIGTERM", drain=True)]
    harness.hear(msg.Drain(1, "a is leaving"))
    assert harness.sent() == [msg.Held(1, 6)]
    assert harness.hear(msg.DrainTo(1, 9))[-1] == ReleaseWorkers(1, 9)
    harness.all_end(drained=True)
    harness.give(ev.TreeGone(1))
    assert harness.sent() == [msg.Stopped(1)]
    assert not exit_codes(harness), "others may still be saving, and it may be this node that hosts the coordinator"
    harness.hear(msg.Stop(1, msg.StopReason.MEMBER_LEFT, "a is leaving"))
    assert exit_codes(harness) == [75]


def test_a_notice_stops_at_once_where_they_ask_for_none() -> None:
    harness = leaving()
    assert harness.sent() == [msg.Leave("SIGTERM")]
    assert SignalWorkers(signal.SIGTERM) in harness.done


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGQUIT])
def test_the_keyboard_does_not_wait_for_a_safe_point(signum: signal.Signals) -> None:
    harness = running()
    harness.give(ev.Signalled(signum, signum.name))
    assert SignalWorkers(signum) in harness.done


def test_a_preempted_node_asks_to_be_requeued_either_way() -> None:
    harness = running()
    harness.give(ev.Signalled(signal.SIGUSR1, "SIGUSR1", preempt=True))
    harness.give(ev.WorkersHeld(1, 0))
    assert SignalWorkers(signal.SIGTERM) in harness.done, "the workers ignore the signal itself"
    harness.all_end(failure(after_stop=True))
    harness.give(ev.TreeGone(1))
    assert exit_codes(harness) == [75]


def test_a_notice_that_comes_after_the_drain_finds_everything_saved() -> None:
    """A scheduler tells all nodes, one after the other; the first one's notice was everybody's."""
    harness = draining()
    harness.all_end(drained=True)
    harness.give(ev.TreeGone(1))
    harness.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    assert exit_codes(harness) == [75]


def test_a_notice_that_comes_while_the_drained_are_cleaned_too() -> None:
    harness = draining()
    harness.all_end(drained=True)
    harness.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    harness.give(ev.TreeGone(1))
    assert exit_codes(harness) == [75]


def test_a_drained_node_does_not_wait_for_ever() -> None:
    harness = leaving_saved()
    harness.wait(LIMITS.drain_s - 0.1)
    assert harness.machine.outcome is None
    harness.wait(0.2)
    assert harness.machine.outcome.exit_code == 75


def test_a_drained_node_that_loses_the_coordinator_goes() -> None:
    harness = leaving_saved()
    harness.give(ev.LinkLost("gone"))
    assert exit_codes(harness) == [75]


def test_a_save_that_fails_is_not_left_at_a_safe_point() -> None:
    harness = leaving_drained()
    harness.hear(msg.Drain(1, "a is leaving"))
    harness.hear(msg.DrainTo(1, 9))
    harness.give(ev.WorkerEnded(1, 0, None, drained=True))
    harness.give(ev.WorkerEnded(1, 1, failure(after_stop=True)))
    harness.give(ev.TreeGone(1))
    assert exit_codes(harness) == [143]


def test_a_node_whose_ranks_end_while_they_are_held_goes_soon() -> None:
    harness = running()
    harness.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    harness.all_end()
    harness.give(ev.TreeGone(1))
    harness.wait(2.0)
    harness.give(ev.TreeGone(1))
    assert harness.machine.outcome is not None


def test_a_node_that_has_done_its_part_is_not_held() -> None:
    harness = cleaned()
    assert harness.hear(msg.Drain(1, "z is leaving")) == []
    assert harness.machine.work is Work.RUNNING


def test_workers_killed_by_the_supervisor_at_the_fence_are_no_failures() -> None:
    harness = running()
    assert harness.give(ev.WorkersFenced()) == [Note("fenced_by_supervisor", {}), KillTree(1)]
    for local_rank in range(NPROC):
        harness.give(ev.WorkerEnded(1, local_rank, failure(after_stop=True)))
        assert not harness.sent()
    harness.give(ev.TreeGone(1))
    assert harness.sent() == [msg.Stopped(1)]


def test_a_late_resume_is_refused() -> None:
    harness = rejoined()
    harness.hear(JOINED)
    harness.now += LIMITS.fence_s
    assert KillTree(1) in harness.hear(msg.Resume(1))


def test_a_job_that_ends_while_a_node_drains_has_ended_well() -> None:
    harness = leaving_drained()
    harness.hear(msg.Finish(SUCCESS))
    harness.give(ev.TreeGone(1))
    assert exit_codes(harness) == [0]


def test_a_drain_nobody_answers_is_given_up() -> None:
    harness = leaving_drained()
    assert SignalWorkers(signal.SIGTERM) in harness.wait(LIMITS.drain_s + 0.01)


def test_a_second_signal_kills_what_drains() -> None:
    harness = leaving_drained()
    assert KillTree(1) in harness.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))


def test_it_says_how_long_ago_it_lost_its_world() -> None:
    harness = cut_off_running()
    harness.wait(LIMITS.fence_s + 0.5)
    harness.give(ev.TreeGone(1))
    if harness.machine.link is Link.DIALING:
        harness.give(ev.Dialed())
    (join,) = [message for message in harness.sent() if isinstance(message, msg.Join)]
    assert join.unlinked_s == pytest.approx(LIMITS.fence_s + 0.5)


def test_answered_pings_keep_it_alive() -> None:
    harness = running()
    harness.wait(100.0)
    assert harness.machine.work is Work.RUNNING
    assert sum(isinstance(message, msg.Ping) for message in harness.sent()) == 100


def test_silence_ends_the_link_as_well() -> None:
    harness = running()
    harness.wait(LIMITS.fence_s, answered=False)
    assert HangUp("no answer") not in harness.done, "the coordinator takes the end of the link for that of the workers"
    harness.give(ev.TreeGone(1))
    assert HangUp("no answer") in harness.done
    assert not [message for message in harness.sent() if isinstance(message, msg.Stopped)]


def test_the_fence_counts_from_what_was_sent_not_from_what_came_back() -> None:
    """An answer that was long on its way renews the lease only as of when it was asked for."""
    harness = running()
    harness.now = 1.0
    harness.give(Tick())
    (ping,) = harness.sent()
    assert isinstance(ping, msg.Ping)
    harness.now = 3.9
    harness.hear(msg.Pong(ping.number))
    harness.wait(1.1 - 0.01, answered=False)
    assert harness.machine.work is Work.RUNNING
    harness.wait(0.02, answered=False)
    assert harness.machine.work is Work.KILLING


def test_workers_that_ended_while_the_agent_stood_still_are_done_although_the_fence_has_passed() -> None:
    harness = running()
    harness.wait(LIMITS.fence_s, answered=False)
    assert harness.machine.work is Work.KILLING
    for local_rank in range(NPROC):
        harness.give(ev.WorkerEnded(1, local_rank, None))
        assert harness.sent() == [msg.WorkerDone(1, local_rank)]


@pytest.mark.parametrize("age_s", [0.0, 0.8])
def test_with_a_start_the_fence_counts_from_what_others_have_confirmed(age_s: float) -> None:
    """A coordinator that hears all nodes and that none of them hears has a successor after one fence."""
    harness = preparing()
    harness.now = 1.0
    harness.give(ev.NodePrepared(1, 40_000))
    harness.now = 1.5
    harness.hear(msg.Start(1, "10.0.0.1", 40_000, age_s=age_s))
    assert harness.machine.fence_at_s == 1.0 - age_s + LIMITS.fence_s


def test_a_saving_worker_of_a_cut_off_node_is_not_waited_for_beyond_the_fence() -> None:
    harness = stopping()
    harness.wait(LIMITS.fence_s, answered=False)
    assert harness.machine.work is Work.KILLING


# --- work -------------------------------------------------------------------------------------------------------------


def test_done_ranks_are_told_as_it_happens() -> None:
    harness = running()
    harness.give(ev.WorkerEnded(1, 1, None))
    assert harness.sent() == [msg.WorkerDone(1, 1)]


def test_failures_are_told_but_not_those_of_stopped_workers() -> None:
    harness = running()
    harness.give(ev.WorkerEnded(1, 0, failure()))
    assert harness.sent() == [msg.WorkersFailed(1, (failure(),))]
    harness = stopping()
    harness.give(ev.WorkerEnded(1, 0, failure(after_stop=True)))
    assert not harness.sent()


def test_one_that_fell_before_the_order_to_stop_may_be_the_culprit() -> None:
    harness = stopping()
    harness.give(ev.WorkerEnded(1, 0, failure()))
    assert harness.sent() == [msg.WorkersFailed(1, (failure(),))]


def test_an_exception_is_reported_before_the_process_ends_and_once() -> None:
    harness = running()
    harness.give(ev.WorkerRaised(1, 0, failure()))
    assert harness.sent() == [msg.WorkersFailed(1, (failure(),))]
    assert harness.machine.work is Work.RUNNING
    harness.hear(msg.Stop(1, msg.StopReason.WORKER_FAILED))
    harness.give(ev.WorkerEnded(1, 1, failure(after_stop=True)))
    assert harness.machine.work is Work.STOPPING  # its exit functions have the time that every worker has
    harness.give(ev.WorkerEnded(1, 0, failure()))
    assert harness.machine.work is Work.KILLING
    assert not harness.sent()


def test_a_worker_that_raised_and_then_ends_with_zero_has_not_done_its_work() -> None:
    harness = running()
    harness.give(ev.WorkerRaised(1, 0, failure()))
    for late in (ev.WorkerEnded(1, 0, None), ev.WorkerRaised(1, 0, failure())):
        harness.give(late)
        assert not harness.sent()


BARE = failure()
READ = structs.replace(BARE, error_type="ValueError", message="ValueError: nan")


@pytest.mark.parametrize("kind", [ev.WorkerEnded, ev.WorkerRaised])
def test_a_failure_is_reported_before_what_it_left_is_read(kind: type[ev.WorkerEnded | ev.WorkerRaised]) -> None:
    harness = running()
    harness.give(kind(1, 0, failure=BARE, evidence_follows=True))
    assert harness.sent() == [msg.WorkersFailed(1, (BARE,), evidence_follows=True)]
    harness.hear(msg.Stop(1, msg.StopReason.WORKER_FAILED))
    harness.give(ev.FailureRead(1, 0, READ))
    assert harness.sent() == [msg.WorkersFailed(1, (READ,))]


def test_a_worker_that_raised_while_it_was_stopped_is_reported_when_that_is_known() -> None:
    harness = stopping()
    bare, read = (structs.replace(each, after_stop=True) for each in (BARE, READ))
    harness.give(ev.WorkerEnded(1, 0, bare, evidence_follows=True))
    assert not harness.sent()
    harness.give(ev.FailureRead(1, 0, read))
    assert harness.sent() == [msg.WorkersFailed(1, (read,))]


@pytest.mark.parametrize(("exit_code", "reported"), [(17, True), (-8, True), (1, False), (-15, False), (143, False)])
def test_an_exit_status_that_the_stop_cannot_cause_is_reported(exit_code: int, reported: bool) -> None:
    harness = stopping()
    harness.give(ev.FailureRead(1, 0, structs.replace(failure(after_stop=True), exit_code=exit_code)))
    assert bool(harness.sent()) is reported


def test_what_was_read_of_an_older_generation_is_too_late() -> None:
    harness = running()
    harness.give(ev.FailureRead(7, 0, READ))
    assert not harness.sent()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_node_with_an_exception_cannot_offer_its_workers_to_a_new_coordinator(when: str) -> None:
    harness = running()
    events: list[ev.Event] = [ev.WorkerRaised(1, 0, failure()), ev.LinkLost("reset")]
    for event in events if when == "before" else reversed(events):
        harness.give(event)
    harness.give(ev.Dialed())
    assert harness.machine.work is Work.KILLING


def test_a_stop_during_the_sweep_ends_the_generation() -> None:
    harness = sweeping()
    harness.hear(msg.Stop(1, msg.StopReason.MEMBER_LOST, "z was lost"))
    harness.give(ev.TreeGone(1))
    assert harness.sent() == [msg.Stopped(1)]
    assert harness.machine.work is Work.IDLE


def test_a_cleaned_node_stops_at_once() -> None:
    harness = cleaned()
    harness.hear(msg.Stop(1, msg.StopReason.MEMBER_LOST, "z was lost"))
    assert KillTree(1) in harness.done
    harness.give(ev.TreeGone(1))
    assert harness.sent() == [msg.Stopped(1)]


def test_the_end_waits_until_nothing_is_alive() -> None:
    harness = running()
    harness.hear(msg.Finish(SUCCESS))
    assert KillTree(1) in harness.done
    assert not harness.has(Exit)
    harness.give(ev.TreeGone(1))
    assert harness.done[-1] == Exit(SUCCESS)


def test_a_dead_store_is_told() -> None:
    harness = running()
    harness.give(ev.StoreDied(1))
    assert harness.sent() == [msg.StoreLost(1)]


def test_signals_for_workers_are_passed_on() -> None:
    harness = running()
    harness.give(ev.PassSignal(signal.SIGUSR1))
    assert [command.signum for command in harness.done if isinstance(command, SignalWorkers)] == [signal.SIGUSR1]
    assert harness.machine.work is Work.RUNNING


def test_a_second_signal_kills() -> None:
    harness = leaving()
    assert harness.sent() == [msg.Leave("SIGTERM")]
    assert harness.machine.work is Work.STOPPING
    harness.give(ev.Signalled(signal.SIGINT, "SIGINT"))
    assert harness.done == [KillTree(1)]
    harness.give(ev.TreeGone(1))
    assert harness.machine.outcome.exit_code == 128 + signal.SIGTERM
