"""Every transition of an agent's work is taken, and every event is borne in every state."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.agent.agent import WORK, Link
from holdfast.agent.local_generation import Work
from holdfast.protocol import messages as msg
from holdfast.protocol.charter import Polled
from holdfast.protocol.policy import Tick
from holdfast.protocol.rank_progress import RankProgress, Stage
from tests.agent.agent_harness import (
    LIMITS,
    STATES,
    SUCCESS,
    AgentHarness,
    assign,
    failure,
    held,
    idle,
    killing,
    prepared,
    preparing,
    regrouping,
    running,
    stopping,
    survivor,
    sweeping,
)

IN_WORK: dict[Work, Callable[[], AgentHarness]] = {
    Work.IDLE: idle,
    Work.PREPARING: preparing,
    Work.PREPARED: prepared,
    Work.RUNNING: running,
    Work.DRAINING: held,
    Work.REGROUPING: regrouping,
    Work.STOPPING: stopping,
    Work.KILLING: killing,
}


@pytest.mark.parametrize("work", Work)
def test_every_work_is_reached(work: Work) -> None:
    assert IN_WORK[work]().machine.work is work


# --- every transition -------------------------------------------------------------------------------------------------


def gets_newer_assign(harness: AgentHarness) -> None:
    harness.hear(assign(2))
    assert harness.done == [do.Prepare(assign(2))]
    harness.give(ev.NodePrepared(1, 40_001))
    assert not harness.done, "the answer to the older one counts no more"


def is_prepared(harness: AgentHarness) -> None:
    harness.give(ev.NodePrepared(1, 40_000))
    assert harness.sent() == [msg.Prepared(1, 40_000)]


def is_started(harness: AgentHarness) -> None:
    start = msg.Start(1, "10.0.0.1", 40_000)
    assert harness.hear(start) == [do.StartWorkers(assign(1), start)]


def loses_the_link(harness: AgentHarness) -> None:
    harness.give(ev.LinkLost("reset"))
    assert harness.has(do.Dial), "it dials again at once"


def is_stopped(harness: AgentHarness) -> None:
    harness.hear(msg.Stop(1, msg.StopReason.MEMBER_LOST, "z was lost"))
    assert do.Say("z was lost") in harness.done
    assert do.SignalWorkers(signal.SIGTERM) in harness.done


def is_fenced(harness: AgentHarness) -> None:
    harness.wait(LIMITS.fence_s - 0.01, answered=False)
    assert harness.machine.work is Work.RUNNING
    harness.wait(0.02, answered=False)
    assert do.KillTree(1) in harness.done


def is_asked_to_drain(harness: AgentHarness) -> None:
    assert harness.hear(msg.Drain(1, "z is leaving")) == [do.HoldWorkers(1)]
    harness.give(ev.WorkersHeld(1, 6))
    assert harness.sent() == [msg.Held(1, 6)]


def loses_the_link_while_held(harness: AgentHarness) -> None:
    harness.give(ev.LinkLost("reset"))
    assert do.ReleaseWorkers(1, 0) in harness.done


def drain_is_given_up(harness: AgentHarness) -> None:
    harness.hear(msg.Stop(1, msg.StopReason.MEMBER_LOST, "z was lost"))
    assert [c for c in harness.done if isinstance(c, do.ReleaseWorkers | do.SignalWorkers)] == [
        do.ReleaseWorkers(1, 0),
        do.SignalWorkers(signal.SIGTERM),
    ]


def all_leave_at_the_safe_point(harness: AgentHarness) -> None:
    assert harness.hear(msg.DrainTo(1, 9)) == [
        do.Say("z is leaving: the workers stop at their next safe point"),
        do.ReleaseWorkers(1, 9),
    ]
    harness.all_end(drained=True)
    assert harness.done == [do.KillTree(1)]
    assert not harness.machine.current.done


def grace_is_over(harness: AgentHarness) -> None:
    harness.wait(LIMITS.stop_grace_s - 0.01)
    assert harness.machine.work is Work.STOPPING
    harness.wait(0.02)
    assert do.KillTree(1) in harness.done


def tree_is_gone(harness: AgentHarness) -> None:
    harness.give(ev.TreeGone(1))
    assert harness.sent() == [msg.Stopped(1)]


def is_cleaned(harness: AgentHarness) -> None:
    harness.give(ev.TreeGone(1))
    assert not harness.done, "the others may still be at work: not a word"


def is_regrouped(harness: AgentHarness) -> None:
    harness.hear(msg.Regroup(survivor(2, 0), text="rank 1 was lost; 1 rank goes on"))
    assert harness.done == [do.Say("rank 1 was lost; 1 rank goes on"), do.RegroupWorkers(survivor(2, 0), 0)]


def is_regrouped_at_a_safe_point(harness: AgentHarness) -> None:
    harness.hear(msg.Regroup(survivor(2), 9, "rank 7 was replaced; 8 ranks go on"))
    assert do.RegroupWorkers(survivor(2), 9) in harness.done


def is_regrouped_again(harness: AgentHarness) -> None:
    harness.hear(msg.Regroup(survivor(3, 0)))
    harness.give(ev.NodePrepared(2, 40_002))
    assert not harness.done, "the answer to the older one counts no more"


def goes_on(harness: AgentHarness) -> None:
    harness.give(ev.NodePrepared(2, 40_002))
    assert harness.sent() == [msg.Prepared(2, 40_002)]
    start = msg.Start(2, "10.0.0.1", 40_002)
    assert harness.hear(start) == [do.ContinueWorkers(survivor(2, 0), start)]


def is_stopped_while_regrouping(harness: AgentHarness) -> None:
    harness.hear(msg.Stop(2, msg.StopReason.WORKER_FAILED, "the workers cannot go on"))
    assert do.SignalWorkers(signal.SIGTERM) in harness.done


def loses_the_link_while_regrouping(harness: AgentHarness) -> None:
    harness.give(ev.LinkLost("reset"))
    assert do.KillTree(2) in harness.done


WAYS: dict[tuple[Work, Work], tuple[Callable[[], AgentHarness], Callable[[AgentHarness], None]]] = {
    (Work.IDLE, Work.PREPARING): (idle, lambda harness: _check(harness.hear(assign(1)) == [do.Prepare(assign(1))])),
    (Work.PREPARING, Work.PREPARING): (preparing, gets_newer_assign),
    (Work.PREPARED, Work.PREPARING): (prepared, gets_newer_assign),
    (Work.PREPARING, Work.PREPARED): (preparing, is_prepared),
    (Work.PREPARED, Work.RUNNING): (prepared, is_started),
    (Work.PREPARING, Work.IDLE): (preparing, loses_the_link),
    (Work.PREPARED, Work.IDLE): (prepared, loses_the_link),
    (Work.RUNNING, Work.DRAINING): (running, is_asked_to_drain),
    (Work.RUNNING, Work.REGROUPING): (running, is_regrouped),
    (Work.DRAINING, Work.REGROUPING): (held, is_regrouped_at_a_safe_point),
    (Work.REGROUPING, Work.REGROUPING): (regrouping, is_regrouped_again),
    (Work.REGROUPING, Work.RUNNING): (regrouping, goes_on),
    (Work.REGROUPING, Work.STOPPING): (regrouping, is_stopped_while_regrouping),
    (Work.REGROUPING, Work.KILLING): (regrouping, loses_the_link_while_regrouping),
    (Work.DRAINING, Work.RUNNING): (held, loses_the_link_while_held),
    (Work.DRAINING, Work.STOPPING): (held, drain_is_given_up),
    (Work.DRAINING, Work.KILLING): (held, all_leave_at_the_safe_point),
    (Work.RUNNING, Work.STOPPING): (running, is_stopped),
    (Work.RUNNING, Work.KILLING): (running, is_fenced),
    (Work.STOPPING, Work.KILLING): (stopping, grace_is_over),
    (Work.KILLING, Work.RUNNING): (sweeping, is_cleaned),
    (Work.KILLING, Work.IDLE): (killing, tree_is_gone),
}


def _check(condition: bool) -> None:
    assert condition


TRANSITIONS = [(before, after) for before, row in WORK.items() for after in row.to]


def test_the_table_is_covered() -> None:
    assert set(WAYS) == set(TRANSITIONS)


@pytest.mark.parametrize(("before", "after"), TRANSITIONS, ids=lambda work: work.value)
def test_transition(before: Work, after: Work) -> None:
    state, way = WAYS[before, after]
    harness = state()
    assert harness.machine.work is before
    way(harness)
    assert harness.machine.work is after


# --- every event in every state ---------------------------------------------------------------------------------------

MESSAGES: list[msg.FromCoordinator] = [
    msg.Answer(1, b"{}"),
    msg.Extended("stacks", b""),
    msg.Quit(drain=True, by="holdfast stop"),
    msg.Quit(drain=False, by="holdfast kill"),
    msg.Joined(6.0, 4.0, 1.0),
    msg.Waiting("waiting for Godot"),
    Polled(2, granted=True),
    msg.CoordinatorAt(2, "10.0.0.1", 1),
    msg.Pong(1),
    msg.Pong(99),
    msg.Finish(SUCCESS),
    msg.Notice("rank 1 hangs"),
    msg.Refuse("HF103", "no room"),
    *(
        message
        for generation in (1, 2)
        for message in (
            assign(generation),
            msg.Start(generation, "10.0.0.1", 40_000),
            msg.Stop(generation, msg.StopReason.MEMBER_LEFT, "z is leaving"),
            msg.Drain(generation, "z is leaving"),
            msg.DrainTo(generation, 9),
            msg.DrainTo(generation, 9, save=True),
            msg.Resume(generation),
            msg.Abandon(generation),
            msg.Stop(generation, msg.StopReason.HUNG, "rank 1 hangs"),
            msg.Regroup(assign(generation), 0, "z was lost"),
            msg.Regroup(assign(generation), 9),
            msg.Replace(generation, (1,)),
        )
    ),
]
EVENTS: list[ev.Event] = [
    ev.Dialed(),
    ev.DialFailed("HF302", 1, "connection refused", final=False),
    ev.DialFailed("HF111", 2, "another job", final=True),
    ev.LinkLost("reset"),
    *(ev.Received(message) for message in MESSAGES),
    *(
        event
        for generation in (1, 2)
        for event in (
            ev.NodePrepared(generation, None),
            ev.PrepareFailed(generation, "HF108", 2, "disk full"),
            ev.WorkerEnded(generation, 0, None),
            ev.WorkerEnded(generation, 1, failure()),
            ev.WorkerEnded(generation, 0, None, drained=True),
            ev.WorkerRaised(generation, 1, failure()),
            ev.FailureRead(generation, 1, failure()),
            ev.WorkersHeld(generation, 0),
            ev.WorkersHeld(generation, 6),
            ev.WorkersFenced(),
            ev.WorkersCanGoOn(generation, (0, 1)),
            ev.ReplacementsReady(generation, (1,)),
            ev.RegroupRefused(generation, "memory grew"),
            ev.WorkersProgress(generation, (RankProgress(0, Stage.STEPPING, 9), RankProgress(1, Stage.STEPPING, 9))),
            ev.TreeGone(generation),
            ev.StoreDied(generation),
        )
    ),
    ev.Signalled(signal.SIGINT, "SIGINT"),
    ev.Signalled(signal.SIGTERM, "SIGTERM"),
    ev.Signalled(signal.SIGUSR1, "SIGUSR1", preempt=True),
    ev.PassSignal(signal.SIGUSR1),
    Tick(),
]


def lawful(harness: AgentHarness, event: ev.Event) -> bool:
    """A shell speaks of a link only as it is: nothing is heard on one that is not up."""
    match event:
        case ev.Dialed() | ev.DialFailed():
            return harness.machine.link is Link.DIALING
        case ev.LinkLost() | ev.Received():
            return harness.machine.link is Link.UP
        case _:
            return True


def test_nothing_is_forgotten() -> None:
    assert {type(event) for event in EVENTS} == set(ev.Event.__args__)
    assert {type(message) for message in MESSAGES} == {*msg.CoordinatorMessage.__subclasses__(), msg.Extended, Polled}
    assert {link for state in STATES for link in [state().machine.link]} == set(Link)


@pytest.mark.parametrize("late_s", [0.0, 1000.0])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_every_event_is_borne_in_every_state(state: Callable[[], AgentHarness], late_s: float) -> None:
    """Two events in a row, in time and very late; nobody may be left waiting for a past moment."""
    for first in EVENTS:
        for second in (first, *EVENTS[:5], Tick()):
            harness = state()
            harness.now += late_s
            exits = 0
            for event in (first, second, Tick()):
                if lawful(harness, event):
                    harness.give(event)
                    exits += harness.has(do.Exit)
            due = harness.machine.next_deadline()
            assert exits <= 1
            assert due is None or due > harness.now, (first, second)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_signal_ends_it_from_every_state(state: Callable[[], AgentHarness]) -> None:
    harness = state()
    generation = harness.machine.current.generation if harness.machine.current is not None else 1
    harness.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    for _ in range(2):
        harness.give(ev.WorkersHeld(generation, 6))
        harness.wait(LIMITS.drain_s)
        harness.give(ev.TreeGone(generation))
    assert harness.machine.outcome is not None
    assert harness.give(Tick()) == []
    assert harness.machine.next_deadline() is None


# --- the next generation, announced with the stop of the present one --------------------------------------------------

STOP = msg.Stop(1, msg.StopReason.WORKER_FAILED, "rank 7 failed on z", assign(2))


def workers_end(harness: AgentHarness) -> None:
    harness.all_end(failure(after_stop=True))
    harness.give(ev.TreeGone(1))


def stopped() -> AgentHarness:
    """The order to stop announced the next generation, and the workers are gone."""
    harness = running()
    harness.hear(STOP)
    assert not harness.has(do.Prepare), "a worker may be alive"
    workers_end(harness)
    return harness


def test_what_was_announced_is_prepared_when_the_workers_are_gone() -> None:
    harness = stopped()
    assert harness.sent() == [msg.Stopped(1)]
    assert harness.has(do.Prepare)
    harness.give(ev.NodePrepared(2, 40_001))
    assert harness.sent() == [msg.Prepared(2, 40_001)]
    harness.hear(msg.Start(2, "10.0.0.1", 40_001))
    assert harness.has(do.StartWorkers)


@pytest.mark.parametrize("work", [Work.KILLING, Work.IDLE])
def test_it_is_also_prepared_when_the_workers_were_killed_before_the_order_came(work: Work) -> None:
    harness = running()
    harness.give(ev.WorkersFenced())
    if work is Work.IDLE:
        harness.give(ev.TreeGone(1))
        assert harness.sent() == [msg.Stopped(1)]
    assert harness.machine.work is work
    harness.hear(STOP)
    if work is Work.KILLING:
        harness.give(ev.TreeGone(1))
    assert do.Prepare(assign(2)) in harness.done


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_newer_assignment_replaces_what_was_announced(is_prepared: bool) -> None:
    harness = stopped()
    if is_prepared:
        harness.give(ev.NodePrepared(2, 40_001))
    assert harness.hear(assign(3)) == [do.Prepare(assign(3))]
    harness.give(ev.NodePrepared(2, 40_001))
    assert harness.sent() == []
    harness.hear(msg.Start(2, "10.0.0.1", 40_001))
    assert not harness.has(do.StartWorkers)


def test_nothing_is_prepared_for_a_coordinator_that_is_gone() -> None:
    harness = running()
    harness.hear(STOP)
    harness.give(ev.LinkLost("reset"))
    workers_end(harness)
    assert not harness.has(do.Prepare)
    assert harness.machine.work is Work.IDLE


def test_a_prepared_node_that_loses_its_coordinator_joins_the_next_one_with_that_number() -> None:
    harness = stopped()
    harness.give(ev.NodePrepared(2, 40_001))
    harness.give(ev.LinkLost("reset"))
    assert harness.machine.work is Work.IDLE
    harness.give(ev.Dialed())
    (join,) = harness.sent()
    assert isinstance(join, msg.Join)
    assert (join.last_generation, join.running) == (2, None)


def test_a_leaving_node_prepares_nothing() -> None:
    harness = running()
    harness.give(ev.Signalled(signal.SIGTERM, "SIGTERM"))
    harness.hear(STOP)
    workers_end(harness)
    assert not harness.has(do.Prepare)
    assert harness.has(do.Exit)
