"""While the coordinator does not answer, workers in `ht.survive` are suspended: the others may go on without them."""

from __future__ import annotations

import signal

import pytest
from msgspec import structs

from holdfast.agent import events as ev
from holdfast.agent.commands import HangUp, Say
from holdfast.agent.local_generation import Work
from holdfast.protocol import messages as msg
from holdfast.protocol.policy import PINGS_PER_SUSPENSION, Note
from tests.agent.agent_harness import LIMITS, AgentHarness, all_can_go_on, assign, idle, killed, running, survivor

SUSPEND_S = LIMITS.suspend_of(2)
JOINED = msg.Joined(LIMITS.lease_s, LIMITS.fence_s, LIMITS.ping_interval_s, suspend_s=SUSPEND_S)


def granted(harness: AgentHarness) -> AgentHarness:
    """As if it had joined a coordinator that knows of this."""
    harness.hear(JOINED)
    return harness


def surviving() -> AgentHarness:
    harness = granted(running())
    harness.give(ev.WorkersCanGoOn(1, (0, 1)))
    return harness


def silence(harness: AgentHarness) -> AgentHarness:
    harness.wait(SUSPEND_S, answered=False)
    return harness


def noted(harness: AgentHarness) -> list[str]:
    return [each.event for each in harness.done if isinstance(each, Note)]


def test_the_time_is_as_old_as_the_newest_answered_ping() -> None:
    harness = surviving()
    assert harness.machine.suspend_at_s == harness.now + SUSPEND_S
    harness.wait(10.0)
    assert harness.machine.suspend_at_s is not None
    assert (
        harness.now + SUSPEND_S - SUSPEND_S / PINGS_PER_SUSPENSION
        <= harness.machine.suspend_at_s
        <= harness.now + SUSPEND_S
    )


def test_pings_are_frequent_from_then_on_and_in_later_generations() -> None:
    harness = surviving()
    pings = [each for each in harness.wait(3.0) if isinstance(getattr(each, "message", None), msg.Ping)]
    assert len(pings) == 3.0 / (SUSPEND_S / PINGS_PER_SUSPENSION)
    harness.hear(msg.Regroup(survivor(2, 0), 0, ""))
    assert harness.machine.suspend_at_s is not None, "until the others go on, these still belong to the old generation"


def test_a_silent_coordinator_is_reported_and_the_workers_are_suspended_once() -> None:
    harness = silence(surviving())
    assert noted(harness) == ["workers_suspended"]
    assert [each.text for each in harness.done if isinstance(each, Say)] == [
        f"no answer from the coordinator for {SUSPEND_S:.1f} s: until it answers this node's workers are suspended"
    ]
    harness.wait(0.5, answered=False)
    assert noted(harness) == []


def test_they_continue_with_an_answer_to_a_new_ping_and_not_to_an_old_one() -> None:
    harness = surviving()
    harness.wait(2.0, answered=False)
    pings = [each.message.number for each in harness.done if isinstance(getattr(each, "message", None), msg.Ping)]
    harness.hear(msg.Pong(pings[0]))
    assert noted(harness) == [], "it was sent before the others could go on"
    harness.hear(msg.Pong(pings[-1]))
    assert noted(harness) == ["workers_continued"]
    assert harness.machine.suspend_at_s is not None
    assert harness.machine.suspend_at_s > harness.now


def test_an_answer_of_a_coordinator_without_authority_lets_nobody_continue() -> None:
    harness = silence(surviving())
    harness.hear(msg.Pong(PINGS_PER_SUSPENSION, SUSPEND_S))
    assert noted(harness) == []


def test_without_an_answer_they_are_killed_when_the_lease_is_over_and_do_not_run_before() -> None:
    """Not at the fence: a successor may let them continue."""
    harness = silence(surviving())
    assert harness.machine.fence_at_s == harness.now - SUSPEND_S + LIMITS.lease_s
    harness.wait(LIMITS.lease_s - SUSPEND_S - 0.01, answered=False)
    assert harness.machine.work is Work.RUNNING
    harness.wait(0.02, answered=False)
    assert harness.machine.work is Work.KILLING
    assert harness.machine.suspend_at_s is not None
    assert harness.machine.suspend_at_s <= harness.now


def test_a_lost_link_suspends_them_too_until_a_coordinator_lets_them_continue() -> None:
    harness = surviving()
    harness.give(ev.LinkLost("closed"))
    at_s = harness.machine.suspend_at_s
    assert at_s == harness.now + SUSPEND_S
    harness.now += SUSPEND_S
    harness.give(ev.Tick())
    assert noted(harness) == ["workers_suspended"]
    harness.give(ev.Dialed())
    granted(harness)
    assert harness.machine.suspend_at_s == at_s, "it has joined, and the generation is not confirmed"
    harness.hear(msg.Resume(1))
    assert noted(harness) == ["resumed", "workers_continued"]


@pytest.mark.parametrize(
    "make", [running, all_can_go_on], ids=["not in ht.survive", "a coordinator that grants no time"]
)
def test_others_are_not_suspended(make) -> None:
    harness = make() if make is all_can_go_on else granted(make())
    assert harness.machine.suspend_at_s is None
    harness.wait(SUSPEND_S, answered=False)
    assert noted(harness) == []
    assert not any(isinstance(each, Say) for each in harness.done)


def test_replacements_that_wait_for_their_place_are_suspended_too() -> None:
    harness = granted(running())
    for local_rank in (0, 1):
        harness.give(ev.WorkerEnded(1, local_rank, killed(local_rank)))
    harness.hear(msg.Regroup(structs.replace(survivor(2, 0), local_ranks=()), 0, ""))
    harness.give(ev.NodePrepared(2, None))
    harness.hear(msg.Start(2, "10.0.0.1", 40_000))
    assert harness.machine.suspend_at_s is None, "no worker takes part"
    harness.hear(msg.Replace(2, (0, 1)))
    harness.give(ev.ReplacementsReady(2, (0, 1)))
    harness.hear(msg.Regroup(survivor(3), 0, ""))
    assert harness.machine.suspend_at_s is not None


def test_one_worker_that_is_able_is_not_enough() -> None:
    harness = granted(running())
    harness.give(ev.WorkersCanGoOn(1, (0,)))
    assert harness.machine.suspend_at_s is None


def test_it_holds_for_the_whole_generation() -> None:
    """The coordinator may not have heard yet that one of them has left `ht.survive`."""
    harness = surviving()
    harness.give(ev.WorkersCanGoOn(1, ()))
    assert harness.machine.suspend_at_s is not None


@pytest.mark.parametrize(
    "event", [ev.Received(msg.Stop(1, msg.StopReason.WORKER_FAILED)), ev.Signalled(signal.SIGINT, "SIGINT")], ids=repr
)
def test_workers_that_are_being_stopped_are_no_exception(event: ev.Event) -> None:
    """A coordinator that has a successor may have stopped them; or none knows that this node leaves."""
    harness = surviving()
    at_s = harness.machine.suspend_at_s
    harness.give(event)
    assert harness.machine.work is Work.STOPPING
    assert harness.machine.suspend_at_s == at_s is not None


@pytest.mark.parametrize(("agents", "suspends"), [(1, 1.5), (250, 1.5), (400, 2.4), (500, 3.0), (501, 0.0)])
def test_large_jobs_suspend_later_or_never(agents: int, suspends: float) -> None:
    assert LIMITS.suspend_of(agents) == pytest.approx(suspends)
    if suspends:
        assert suspends < LIMITS.short_lease_of(suspends) < LIMITS.lease_s


@pytest.mark.parametrize(("lease_s", "suspends", "lost"), [(60.0, 15.0, 25.0), (3.0, 1.5, 2.0)])
def test_times_follow_lease_and_fence(lease_s: float, suspends: float, lost: float) -> None:
    limits = structs.replace(LIMITS, lease_s=lease_s, fence_s=lease_s * 2 / 3)
    assert limits.suspend_of(2) == suspends
    assert limits.short_lease_of(suspends) == lost


def test_a_short_lease_suspends_nothing() -> None:
    assert structs.replace(LIMITS, lease_s=2.0, fence_s=4 / 3).suspend_of(2) == 0.0


def test_a_node_without_workers_has_nothing_to_suspend() -> None:
    assert granted(idle()).machine.suspend_at_s is None


def test_a_silent_coordinator_is_given_up_at_the_fence_and_suspended_workers_are_kept_for_its_successor() -> None:
    harness = surviving()
    harness.wait(LIMITS.fence_s - 0.01, answered=False)
    assert not harness.has(HangUp)
    harness.wait(0.02, answered=False)
    assert harness.has(HangUp)
    assert harness.machine.work is Work.RUNNING
    harness.give(ev.Dialed())
    granted(harness)
    harness.hear(msg.Resume(1))
    assert noted(harness) == ["resumed", "workers_continued"]


@pytest.mark.parametrize(("late_s", "gives_up"), [(0.3, False), (0.9, False), (1.2, True), (1.6, True), (3.0, True)])
def test_where_all_answers_come_too_late_workers_are_not_suspended_any_more(late_s: float, gives_up: bool) -> None:
    """Else they would be suspended most of the time, or for ever, and nobody would be lost."""
    harness, sent = surviving(), list[tuple[float, int]]()
    everything: list[object] = []
    while harness.now < 30.0:
        while sent and harness.now >= sent[0][0] + late_s:
            everything += harness.hear(msg.Pong(sent.pop(0)[1]))
        everything += harness.wait(0.05, answered=False)
        sent += [
            (harness.now, each.message.number)
            for each in harness.done
            if isinstance(getattr(each, "message", None), msg.Ping)
        ]
    events = [each.event for each in everything if isinstance(each, Note)]
    assert ("suspends_no_more" in events) is gives_up
    if not gives_up:
        assert "workers_suspended" not in events
        return
    assert harness.machine.work is Work.KILLING
    harness.give(ev.TreeGone(1))
    harness.give(ev.Dialed())
    (join,) = [each for each in harness.sent() if isinstance(each, msg.Join)]
    assert not join.suspends
    granted(harness)
    harness.hear(assign(2))
    harness.give(ev.NodePrepared(2, 40_000))
    harness.hear(msg.Start(2, "10.0.0.1", 40_000))
    harness.give(ev.WorkersCanGoOn(2, (0, 1)))
    assert harness.machine.suspend_at_s is None
