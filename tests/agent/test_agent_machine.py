"""Every transition of an agent's work is taken, and every event is borne in every state."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from holdfast.agent.agent_machine import WORK_TRANSITIONS
from holdfast.agent.agent_state import Link, Work
from holdfast.agent.commands import (
    ContinueWorkers,
    Dial,
    Exit,
    HoldWorkers,
    KillTree,
    Prepare,
    RegroupWorkers,
    ReleaseWorkers,
    Say,
    SignalWorkers,
    StartWorkers,
)
from holdfast.agent.events import (
    Dialed,
    DialFailed,
    Event,
    FailureRead,
    LinkLost,
    NodePrepared,
    PassSignal,
    PrepareFailed,
    Received,
    RegroupRefused,
    ReplacementsReady,
    Signalled,
    StoreDied,
    TreeGone,
    WorkerEnded,
    WorkerRaised,
    WorkersAble,
    WorkersFenced,
    WorkersHeld,
    WorkersProgress,
    WorkersSeen,
)
from holdfast.protocol.machines import Tick
from holdfast.protocol.messages import (
    Abandon,
    Answer,
    CoordinatorMessage,
    Drain,
    DrainTo,
    Finish,
    FromCoordinator,
    Held,
    Joined,
    Look,
    Notice,
    Pong,
    Prepared,
    Quit,
    Refuse,
    Regroup,
    Replace,
    Resume,
    Start,
    Stop,
    Stopped,
    StopReason,
    Waiting,
)
from holdfast.protocol.rank_progress import RankProgress, Stage
from tests.agent.agent_desk import (
    LIMITS,
    NPROC,
    SUCCESS,
    Desk,
    able,
    assign,
    bare,
    cleaned,
    cut_off_running,
    dialing,
    down,
    draining,
    ended,
    failure,
    held,
    holding,
    idle,
    joining,
    killing,
    leaving,
    leaving_drained,
    prepared,
    preparing,
    regrouping,
    replaced,
    running,
    shrunk,
    stopping,
    survivor,
    sweeping,
)

STATES: list[Callable[[], Desk]] = [
    down,
    dialing,
    joining,
    idle,
    preparing,
    prepared,
    running,
    stopping,
    killing,
    sweeping,
    cleaned,
    cut_off_running,
    holding,
    held,
    draining,
    leaving,
    leaving_drained,
    ended,
    able,
    regrouping,
    shrunk,
    replaced,
    bare,
]
IN_WORK: dict[Work, Callable[[], Desk]] = {
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


def gets_newer_assign(desk: Desk) -> None:
    desk.hear(assign(2))
    assert desk.done == [Prepare(assign(2))]
    desk.give(NodePrepared(1, 40_001))
    assert not desk.done, "the answer to the older one counts no more"


def is_prepared(desk: Desk) -> None:
    desk.give(NodePrepared(1, 40_000))
    assert desk.sent() == [Prepared(1, 40_000)]


def is_started(desk: Desk) -> None:
    start = Start(1, "10.0.0.1", 40_000)
    assert desk.hear(start) == [StartWorkers(assign(1), start)]


def loses_the_link(desk: Desk) -> None:
    desk.give(LinkLost("reset"))
    assert desk.has(Dial), "it dials again at once"


def is_stopped(desk: Desk) -> None:
    desk.hear(Stop(1, StopReason.MEMBER_LOST, "z was lost"))
    assert Say("z was lost") in desk.done
    assert SignalWorkers(signal.SIGTERM) in desk.done


def is_fenced(desk: Desk) -> None:
    desk.wait(LIMITS.fence_s - 0.01, answered=False)
    assert desk.machine.work is Work.RUNNING
    desk.wait(0.02, answered=False)
    assert KillTree(1) in desk.done


def is_asked_to_drain(desk: Desk) -> None:
    assert desk.hear(Drain(1, "z is leaving")) == [HoldWorkers(1)]
    desk.give(WorkersHeld(1, 6))
    assert desk.sent() == [Held(1, 6)]


def loses_the_link_while_held(desk: Desk) -> None:
    desk.give(LinkLost("reset"))
    assert ReleaseWorkers(1, 0) in desk.done


def drain_is_given_up(desk: Desk) -> None:
    desk.hear(Stop(1, StopReason.MEMBER_LOST, "z was lost"))
    assert [c for c in desk.done if isinstance(c, ReleaseWorkers | SignalWorkers)] == [
        ReleaseWorkers(1, 0),
        SignalWorkers(signal.SIGTERM),
    ]


def all_leave_at_the_safe_point(desk: Desk) -> None:
    assert desk.hear(DrainTo(1, 9)) == [
        Say("z is leaving: the workers stop at their next safe point"),
        ReleaseWorkers(1, 9),
    ]
    for local_rank in range(NPROC):
        desk.give(WorkerEnded(1, local_rank, None, drained=True))
    assert desk.done == [KillTree(1)]
    assert desk.machine.term is not None
    assert not desk.machine.term.done


def grace_is_over(desk: Desk) -> None:
    desk.wait(LIMITS.stop_grace_s - 0.01)
    assert desk.machine.work is Work.STOPPING
    desk.wait(0.02)
    assert KillTree(1) in desk.done


def tree_is_gone(desk: Desk) -> None:
    desk.give(TreeGone(1))
    assert desk.sent() == [Stopped(1)]


def is_cleaned(desk: Desk) -> None:
    desk.give(TreeGone(1))
    assert not desk.done, "the others may still be at work: not a word"


def is_regrouped(desk: Desk) -> None:
    desk.hear(Regroup(survivor(2, 0), text="rank 1 was lost; 1 rank goes on"))
    assert desk.done == [Say("rank 1 was lost; 1 rank goes on"), RegroupWorkers(survivor(2, 0), 0)]


def is_regrouped_at_a_safe_point(desk: Desk) -> None:
    desk.hear(Regroup(survivor(2), 9, "rank 7 was replaced; 8 ranks go on"))
    assert RegroupWorkers(survivor(2), 9) in desk.done


def is_regrouped_again(desk: Desk) -> None:
    desk.hear(Regroup(survivor(3, 0)))
    desk.give(NodePrepared(2, 40_002))
    assert not desk.done, "the answer to the older one counts no more"


def goes_on(desk: Desk) -> None:
    desk.give(NodePrepared(2, 40_002))
    assert desk.sent() == [Prepared(2, 40_002)]
    start = Start(2, "10.0.0.1", 40_002)
    assert desk.hear(start) == [ContinueWorkers(survivor(2, 0), start)]


def is_stopped_while_regrouping(desk: Desk) -> None:
    desk.hear(Stop(2, StopReason.WORKER_FAILED, "the workers cannot go on"))
    assert SignalWorkers(signal.SIGTERM) in desk.done


def loses_the_link_while_regrouping(desk: Desk) -> None:
    desk.give(LinkLost("reset"))
    assert KillTree(2) in desk.done


WAYS: dict[tuple[Work, Work], tuple[Callable[[], Desk], Callable[[Desk], None]]] = {
    (Work.IDLE, Work.PREPARING): (idle, lambda desk: _check(desk.hear(assign(1)) == [Prepare(assign(1))])),
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


def test_the_table_is_covered() -> None:
    assert set(WAYS) == set(WORK_TRANSITIONS)


@pytest.mark.parametrize(("before", "after"), WORK_TRANSITIONS, ids=lambda work: work.value)
def test_transition(before: Work, after: Work) -> None:
    state, way = WAYS[before, after]
    desk = state()
    assert desk.machine.work is before
    way(desk)
    assert desk.machine.work is after


# --- every event in every state ---------------------------------------------------------------------------------------

MESSAGES: list[FromCoordinator] = [
    Answer(1, b"{}"),
    Quit(drain=True, by="holdfast stop"),
    Quit(drain=False, by="holdfast kill"),
    Joined(6.0, 4.0, 1.0),
    Waiting("waiting for Godot"),
    Pong(1),
    Pong(99),
    Finish(SUCCESS),
    Notice("rank 1 hangs"),
    Refuse("HF103", "no room"),
    *(
        message
        for generation in (1, 2)
        for message in (
            assign(generation),
            Start(generation, "10.0.0.1", 40_000),
            Stop(generation, StopReason.MEMBER_LEFT, "z is leaving"),
            Drain(generation, "z is leaving"),
            DrainTo(generation, 9),
            Resume(generation),
            Abandon(generation),
            Look(generation, 1),
            Stop(generation, StopReason.HUNG, "rank 1 hangs"),
            Regroup(assign(generation), 0, "z was lost"),
            Regroup(assign(generation), 9),
            Replace(generation, (1,)),
        )
    ),
]
EVENTS: list[Event] = [
    Dialed(),
    DialFailed("HF302", 1, "connection refused", final=False),
    DialFailed("HF111", 2, "another job", final=True),
    LinkLost("reset"),
    *(Received(message) for message in MESSAGES),
    *(
        event
        for generation in (1, 2)
        for event in (
            NodePrepared(generation, None),
            PrepareFailed(generation, "HF108", 2, "disk full"),
            WorkerEnded(generation, 0, None),
            WorkerEnded(generation, 1, failure()),
            WorkerEnded(generation, 0, None, drained=True),
            WorkerRaised(generation, 1, failure()),
            FailureRead(generation, 1, failure()),
            WorkersHeld(generation, 0),
            WorkersHeld(generation, 6),
            WorkersFenced(),
            WorkersAble(generation, (0, 1)),
            ReplacementsReady(generation, (1,)),
            RegroupRefused(generation, "memory grew"),
            WorkersProgress(generation, (RankProgress(0, Stage.STEPPING, 9), RankProgress(1, Stage.STEPPING, 9))),
            WorkersSeen(generation, 1, ()),
            TreeGone(generation),
            StoreDied(generation),
        )
    ),
    Signalled(signal.SIGINT, "SIGINT"),
    Signalled(signal.SIGTERM, "SIGTERM"),
    Signalled(signal.SIGUSR1, "SIGUSR1", preempt=True),
    PassSignal(signal.SIGUSR1),
    Tick(),
]


def lawful(desk: Desk, event: Event) -> bool:
    """A shell speaks of a link only as it is: nothing is heard on one that is not up."""
    match event:
        case Dialed() | DialFailed():
            return desk.machine.link is Link.DIALING
        case LinkLost() | Received():
            return desk.machine.link is Link.UP
        case _:
            return True


def test_nothing_is_forgotten() -> None:
    assert {type(event) for event in EVENTS} == set(Event.__args__)
    assert {type(message) for message in MESSAGES} == set(CoordinatorMessage.__subclasses__())
    assert {link for state in STATES for link in [state().machine.link]} == set(Link)


@pytest.mark.parametrize("late_s", [0.0, 1000.0])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_every_event_is_borne_in_every_state(state: Callable[[], Desk], late_s: float) -> None:
    """Two events in a row, in time and very late; nobody may be left waiting for a past moment."""
    for first in EVENTS:
        for second in (first, *EVENTS[:5], Tick()):
            desk = state()
            desk.now += late_s
            exits = 0
            for event in (first, second, Tick()):
                if lawful(desk, event):
                    desk.give(event)
                    exits += desk.has(Exit)
            due = desk.machine.next_deadline()
            assert exits <= 1
            assert due is None or due > desk.now, (first, second)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_signal_ends_it_from_every_state(state: Callable[[], Desk]) -> None:
    desk = state()
    generation = desk.machine.term.generation if desk.machine.term is not None else 1
    desk.give(Signalled(signal.SIGTERM, "SIGTERM"))
    for _ in range(2):
        desk.give(WorkersHeld(generation, 6))
        desk.wait(LIMITS.drain_s)
        desk.give(TreeGone(generation))
    assert desk.machine.outcome is not None
    assert desk.give(Tick()) == []
    assert desk.machine.next_deadline() is None
