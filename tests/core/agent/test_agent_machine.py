"""Every transition of an agent's work is taken, and every event is borne in every state."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from holdfast.core.agent.commands import (
    Command,
    Dial,
    Exit,
    HangUp,
    KillTree,
    Prepare,
    Say,
    Send,
    SignalWorkers,
    StartWorkers,
)
from holdfast.core.agent.events import (
    Dialed,
    DialFailed,
    Event,
    LinkLost,
    NodePrepared,
    PassSignal,
    PrepareFailed,
    Received,
    Signalled,
    StoreDied,
    Tick,
    TreeGone,
    WorkerEnded,
)
from holdfast.core.agent.machine import WORK_TRANSITIONS, AgentMachine
from holdfast.core.agent.state import Link, Work
from holdfast.core.outcome import Failure, Outcome, OutcomeKind
from holdfast.core.policy import Limits, NodeSpec
from holdfast.core.protocol import (
    Assign,
    CoordinatorMessage,
    Finish,
    FromAgent,
    FromCoordinator,
    Join,
    Joined,
    Leave,
    Ping,
    Pong,
    Prepared,
    Refuse,
    Start,
    Stop,
    Stopped,
    StopReason,
    StoreLost,
    Waiting,
    WorkerDone,
    WorkersFailed,
)

LIMITS = Limits(join_s=60.0, stop_grace_s=5.0)
NPROC = 2
SUCCESS = Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0)


def assign(generation: int) -> Assign:
    return Assign(
        generation=generation,
        restart_count=0,
        group_rank=0,
        group_world_size=1,
        rank_base=0,
        world_size=NPROC,
        role_rank_base=0,
        role_world_size=NPROC,
        hosts_store=True,
    )


def failure(*, after_stop: bool = False) -> Failure:
    return Failure(rank=0, local_rank=0, host="a", pid=1, exit_code=1, after_stop=after_stop)


class Desk:
    """An agent's machine, and hands that do what its shell and the coordinator do."""

    def __init__(self) -> None:
        self.now = 0.0
        self.machine = AgentMachine(NodeSpec(member="a#1", host="a", nproc=NPROC), LIMITS, self.now)
        self.done: list[Command] = []
        """What the latest event brought about."""

    def give(self, event: Event) -> list[Command]:
        self.done = self.machine.handle(self.now, event)
        self.machine.check_invariants()
        return self.done

    def hear(self, message: FromCoordinator) -> list[Command]:
        return self.give(Received(message))

    def sent(self) -> list[FromAgent]:
        return [command.message for command in self.done if isinstance(command, Send)]

    def has(self, kind: type[Command]) -> bool:
        return any(isinstance(command, kind) for command in self.done)

    def wait(self, seconds: float, *, answered: bool = True) -> list[Command]:
        """Time passes, Ticks come when they are due, pings are answered or not; all that was done meanwhile."""
        until, everything = self.now + seconds, list[Command]()
        while (due := self.machine.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            everything += self.give(Tick())
            for message in self.sent():
                if answered and isinstance(message, Ping):
                    everything += self.hear(Pong(message.number))
        self.now = until
        self.done = everything
        return everything


def down() -> Desk:
    return Desk()


def dialing() -> Desk:
    desk = down()
    desk.give(Tick())
    return desk


def joining() -> Desk:
    desk = dialing()
    desk.give(Dialed())
    return desk


def idle() -> Desk:
    desk = joining()
    desk.hear(Joined(LIMITS.lease_s, LIMITS.fence_s, LIMITS.ping_interval_s))
    return desk


def preparing() -> Desk:
    desk = idle()
    desk.hear(assign(1))
    return desk


def prepared() -> Desk:
    desk = preparing()
    desk.give(NodePrepared(1, 40_000))
    return desk


def running() -> Desk:
    desk = prepared()
    desk.hear(Start(1, "10.0.0.1", 40_000))
    return desk


def stopping() -> Desk:
    desk = running()
    desk.hear(Stop(1, StopReason.WORKER_FAILED, "rank 7 failed on z"))
    return desk


def killing() -> Desk:
    desk = stopping()
    for local_rank in range(NPROC):
        desk.give(WorkerEnded(1, local_rank, failure(after_stop=True)))
    return desk


def sweeping() -> Desk:
    desk = running()
    for local_rank in range(NPROC):
        desk.give(WorkerEnded(1, local_rank, None))
    return desk


def swept() -> Desk:
    desk = sweeping()
    desk.give(TreeGone(1))
    return desk


def cut_off_running() -> Desk:
    desk = running()
    desk.give(LinkLost("reset"))
    return desk


def leaving() -> Desk:
    desk = running()
    desk.give(Signalled(signal.SIGTERM, "SIGTERM"))
    return desk


def ended() -> Desk:
    desk = idle()
    desk.hear(Finish(SUCCESS))
    return desk


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
    swept,
    cut_off_running,
    leaving,
    ended,
]
IN_WORK: dict[Work, Callable[[], Desk]] = {
    Work.IDLE: idle,
    Work.PREPARING: preparing,
    Work.PREPARED: prepared,
    Work.RUNNING: running,
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


def grace_is_over(desk: Desk) -> None:
    desk.wait(LIMITS.stop_grace_s - 0.01)
    assert desk.machine.work is Work.STOPPING
    desk.wait(0.02)
    assert KillTree(1) in desk.done


def tree_is_gone(desk: Desk) -> None:
    desk.give(TreeGone(1))
    assert desk.sent() == [Stopped(1)]


def is_swept(desk: Desk) -> None:
    desk.give(TreeGone(1))
    assert not desk.done, "the others may still be at work: not a word"


WAYS: dict[tuple[Work, Work], tuple[Callable[[], Desk], Callable[[Desk], None]]] = {
    (Work.IDLE, Work.PREPARING): (idle, lambda desk: _check(desk.hear(assign(1)) == [Prepare(assign(1))])),
    (Work.PREPARING, Work.PREPARING): (preparing, gets_newer_assign),
    (Work.PREPARED, Work.PREPARING): (prepared, gets_newer_assign),
    (Work.PREPARING, Work.PREPARED): (preparing, is_prepared),
    (Work.PREPARED, Work.RUNNING): (prepared, is_started),
    (Work.PREPARING, Work.IDLE): (preparing, loses_the_link),
    (Work.PREPARED, Work.IDLE): (prepared, loses_the_link),
    (Work.RUNNING, Work.STOPPING): (running, is_stopped),
    (Work.RUNNING, Work.KILLING): (running, is_fenced),
    (Work.STOPPING, Work.KILLING): (stopping, grace_is_over),
    (Work.KILLING, Work.RUNNING): (sweeping, is_swept),
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
    Joined(6.0, 4.0, 1.0),
    Waiting("waiting for Godot"),
    Pong(1),
    Pong(99),
    Finish(SUCCESS),
    Refuse("HF103", "no room"),
    *(
        message
        for generation in (1, 2)
        for message in (
            assign(generation),
            Start(generation, "10.0.0.1", 40_000),
            Stop(generation, StopReason.MEMBER_LEFT, "z is leaving"),
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
            TreeGone(generation),
            StoreDied(generation),
        )
    ),
    Signalled(signal.SIGINT, "SIGINT"),
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
    desk.give(Signalled(signal.SIGTERM, "SIGTERM"))
    for _ in range(2):
        desk.wait(30.0)
        desk.give(TreeGone(1))
    assert desk.machine.outcome is not None
    assert desk.give(Tick()) == []
    assert desk.machine.next_deadline() is None


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
