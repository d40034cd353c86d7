"""Every transition of the coordinator is taken, and every event is borne in every phase."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.core.coordinator.commands import Conclude, DropLink, Tell
from holdfast.core.coordinator.events import Event, Heard, LinkClosed, LinkOpened, Tick
from holdfast.core.coordinator.machine import TRANSITIONS, CoordinatorMachine
from holdfast.core.coordinator.state import Phase
from holdfast.core.outcome import Failure, OutcomeKind
from holdfast.core.policy import JobSpec, Limits, NodeSpec
from holdfast.core.protocol import (
    AgentMessage,
    Assign,
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
from holdfast.testing.cluster import simple_judge

LIMITS = Limits(join_s=60.0, settle_s=2.0, prepare_s=30.0, stop_grace_s=5.0, stop_slack_s=15.0)


class Desk:
    """A coordinator, and hands that speak for the agents on links 1, 2, 3 …"""

    def __init__(self, least: int = 2, most: int = 2, *, max_restarts: int = 0, fixed_ranks: bool = False) -> None:
        job = JobSpec(
            run_id="t",
            min_nodes=least,
            max_nodes=most,
            backend="c10d",
            max_restarts=max_restarts,
            fixed_ranks=fixed_ranks,
        )
        self.now = 0.0
        self.machine = CoordinatorMachine(job, LIMITS, simple_judge, self.now)
        self.told: list[tuple[int, FromCoordinator]] = []
        self.dropped: list[int] = []
        self.concluded = 0

    def give(self, event: Event) -> None:
        for command in self.machine.handle(self.now, event):
            match command:
                case Tell(link, message):
                    self.told.append((link, message))
                case DropLink(link):
                    self.dropped.append(link)
                case Conclude():
                    self.concluded += 1
        self.machine.check_invariants()

    def say(self, link: int, message: FromAgent) -> None:
        self.give(Heard(link, message))

    def join(self, *links: int, last_generation: int = 0, address: str = "10.0.0.") -> None:
        for link in links:
            self.give(LinkOpened(link, f"{address}{link}", "10.0.0.9"))
            node = NodeSpec(member=f"n{link}#1", host=f"n{link}", nproc=1)
            self.say(link, Join(node, last_generation))

    def prepare(self, *links: int) -> None:
        for link in links:
            self.say(link, Prepared(self.machine.generation, 40_000 if link == 1 else None))

    def wait(self, seconds: float) -> None:
        """Time passes; everybody who is a member pings, and Ticks come when they are due."""
        until = self.now + seconds
        while (due := self.machine.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            for link in [member.link for member in self.machine.members.values()]:
                self.say(link, Ping(1))
            self.give(Tick())
        self.now = until

    def last(self, link: int) -> FromCoordinator:
        return [message for to, message in self.told if to == link and not isinstance(message, Pong)][-1]

    def fail(self, link: int, exit_code: int = 1) -> None:
        failure = Failure(rank=link - 1, local_rank=0, host=f"n{link}", pid=1, exit_code=exit_code)
        self.say(link, WorkersFailed(self.machine.generation, (failure,)))


def gathering(**options: int) -> Desk:
    return Desk(**options)


def preparing(**options: int) -> Desk:
    desk = Desk(**options)
    desk.join(1, 2)
    return desk


def running(**options: int) -> Desk:
    desk = preparing(**options)
    desk.prepare(1, 2)
    return desk


def stopping(**options: int) -> Desk:
    desk = running(**options)
    desk.fail(2)
    return desk


def over() -> Desk:
    desk = running()
    for link in (1, 2):
        desk.say(link, WorkerDone(1, 0))
    return desk


IN_PHASE: dict[Phase, Callable[[], Desk]] = {
    Phase.GATHERING: gathering,
    Phase.PREPARING: preparing,
    Phase.RUNNING: running,
    Phase.STOPPING: stopping,
    Phase.OVER: over,
}


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_is_reached(phase: Phase) -> None:
    assert IN_PHASE[phase]().machine.phase is phase


# --- every transition -------------------------------------------------------------------------------------------------


def too_few(desk: Desk) -> None:
    desk.join(1)
    desk.wait(60.0)
    assert isinstance(desk.last(1), Finish)


def all_here(desk: Desk) -> None:
    desk.join(1, 2)
    assert [type(desk.last(link)) for link in (1, 2)] == [Assign, Assign]


def all_prepared(desk: Desk) -> None:
    desk.prepare(2, 1)
    assert desk.last(2) == Start(1, "10.0.0.1", 40_000)


def dies_in_phase_one(desk: Desk) -> None:
    desk.give(LinkClosed(2, "reset"))


def a_worker_fails(desk: Desk) -> None:
    desk.fail(2)
    assert desk.last(1) == Stop(1, StopReason.WORKER_FAILED, "rank 1 failed on n2")


def every_rank_is_done(desk: Desk) -> None:
    for link in (1, 2):
        desk.say(link, WorkerDone(1, 0))
    assert desk.machine.outcome is not None
    assert desk.machine.outcome.kind is OutcomeKind.SUCCEEDED


def all_stopped_budget_left(desk: Desk) -> None:
    desk.machine.budget.max_restarts = 1
    desk.give(LinkClosed(1, "reset"))
    desk.say(2, Stopped(1))


def all_stopped_budget_spent(desk: Desk) -> None:
    for link in (1, 2):
        desk.say(link, Stopped(1))
    assert isinstance(desk.last(2), Finish)


WAYS: dict[tuple[Phase, Phase], Callable[[Desk], None]] = {
    (Phase.GATHERING, Phase.PREPARING): all_here,
    (Phase.GATHERING, Phase.OVER): too_few,
    (Phase.PREPARING, Phase.RUNNING): all_prepared,
    (Phase.PREPARING, Phase.GATHERING): dies_in_phase_one,
    (Phase.RUNNING, Phase.STOPPING): a_worker_fails,
    (Phase.RUNNING, Phase.OVER): every_rank_is_done,
    (Phase.STOPPING, Phase.GATHERING): all_stopped_budget_left,
    (Phase.STOPPING, Phase.OVER): all_stopped_budget_spent,
}


def test_the_table_is_covered() -> None:
    assert set(WAYS) == set(TRANSITIONS)


@pytest.mark.parametrize(("before", "after"), TRANSITIONS, ids=lambda phase: phase.value)
def test_transition(before: Phase, after: Phase) -> None:
    desk = IN_PHASE[before]()
    WAYS[before, after](desk)
    assert desk.machine.phase is after


# --- every event in every phase ---------------------------------------------------------------------------------------

FAILURE = Failure(rank=0, local_rank=0, host="n1", pid=1, exit_code=1)
MESSAGES: list[FromAgent] = [
    Join(NodeSpec(member="n9#1", host="n9", nproc=1)),
    Join(NodeSpec(member="n1#1", host="n1", nproc=1), 7),
    Ping(3),
    Leave("SIGTERM"),
    *(
        message
        for generation in (0, 1, 2)
        for message in (
            Prepared(generation),
            Prepared(generation, 40_000),
            WorkerDone(generation, 0),
            WorkersFailed(generation, (FAILURE,)),
            Stopped(generation),
            StoreLost(generation),
        )
    ),
]
EVENTS: list[Event] = [
    LinkOpened(9, "10.0.0.9", "10.0.0.1"),
    *(LinkClosed(link, "reset") for link in (1, 2, 9)),
    *(Heard(link, message) for link in (1, 2, 9) for message in MESSAGES),
    Tick(),
]


def test_no_message_is_forgotten() -> None:
    assert {type(message) for message in MESSAGES} == set(AgentMessage.__subclasses__())


@pytest.mark.parametrize("late_s", [0.0, 1000.0])
@pytest.mark.parametrize("phase", Phase)
def test_every_event_is_borne_in_every_phase(phase: Phase, late_s: float) -> None:
    """Twice each, with and without a newcomer, in time and very late; nobody may be left waiting for a past moment."""
    for event in EVENTS:
        for newcomer in (False, True):
            desk = IN_PHASE[phase]()
            if newcomer:
                desk.give(LinkOpened(9, "10.0.0.9", "10.0.0.1"))
                desk.join(7)
            desk.now += late_s
            for _ in range(2):
                desk.give(event)
                desk.give(Tick())
                due = desk.machine.next_deadline()
                assert (due is None) == (desk.machine.phase is Phase.OVER), event
                assert due is None or due > desk.now, event
            assert desk.concluded <= 1


@pytest.mark.parametrize("phase", Phase)
def test_left_alone_it_ends_or_waits_for_workers(phase: Phase) -> None:
    """Agents that do nothing but ping: each phase but RUNNING has an end of its own."""
    desk = IN_PHASE[phase]()
    desk.wait(300.0)
    assert desk.machine.phase is (Phase.RUNNING if phase is Phase.RUNNING else Phase.OVER)


# --- what the tables do not show --------------------------------------------------------------------------------------


def test_numbers_go_above_all_that_any_agent_has_seen() -> None:
    desk = Desk()
    desk.join(1)
    desk.join(2, last_generation=41)
    desk.wait(10.0)
    assert desk.machine.generation == 42
    assert desk.machine.knows_predecessor


def test_a_stranger_speaks_in_vain() -> None:
    desk = running()
    desk.give(LinkOpened(9, "10.0.0.9", "10.0.0.1"))
    for message in MESSAGES[2:]:
        desk.say(9, message)
    assert desk.machine.phase is Phase.RUNNING
    assert not [message for link, message in desk.told if link == 9]


def test_whoever_comes_after_the_end_is_told_of_it() -> None:
    desk = over()
    desk.join(9)
    assert desk.last(9) == desk.last(1)


def test_two_joins_on_one_link_lose_it() -> None:
    desk = running()
    desk.say(1, Join(NodeSpec(member="n1#2", host="n1", nproc=1)))
    assert desk.dropped == [1]
    assert desk.machine.phase is Phase.STOPPING


def test_a_used_identity_is_refused() -> None:
    desk = Desk()
    desk.join(1)
    desk.give(LinkClosed(1, "reset"))
    desk.join(1)
    assert isinstance(desk.last(1), Refuse)


def test_who_waits_is_told_for_what() -> None:
    desk = Desk()
    desk.join(1)
    desk.wait(6.0)
    assert desk.last(1) == Waiting("waiting: 1 of 2 nodes are here (n1)")


def test_stale_words_change_nothing() -> None:
    desk = running(max_restarts=1)
    desk.fail(2)
    for link in (1, 2):
        desk.say(link, Stopped(1))
    desk.prepare(1, 2)
    assert desk.machine.generation == 2
    desk.say(1, WorkerDone(1, 0))
    desk.say(1, Stopped(1))
    desk.say(2, StoreLost(1))
    desk.say(2, WorkersFailed(1, (FAILURE,)))
    assert desk.machine.phase is Phase.RUNNING
    assert desk.machine.world is not None
    assert not desk.machine.world.done


def test_a_stale_stopped_does_not_stand_for_a_newer_one() -> None:
    """It may have been on its way since before the node took part in the present generation."""
    desk = running(max_restarts=2)
    desk.fail(2)
    for link in (1, 2):
        desk.say(link, Stopped(1))
    desk.prepare(1, 2)
    desk.fail(2)
    desk.say(1, Stopped(1))
    desk.say(2, Stopped(2))
    assert desk.machine.phase is Phase.STOPPING
    desk.say(1, Stopped(2))
    assert desk.machine.phase is Phase.GATHERING, "the second restart in a row is not immediate"


def test_a_quorum_that_comes_after_the_back_off_waits_for_the_future() -> None:
    """The coordinator once asked for a Tick at the end of a back-off that was long over, again and again."""
    desk = Desk(least=2, most=3)
    desk.join(1, last_generation=1)
    desk.wait(10.0)
    desk.join(2)
    assert desk.machine.phase is Phase.GATHERING
    due = desk.machine.next_deadline()
    assert due is not None
    assert due > desk.now
    desk.wait(LIMITS.settle_s)
    assert desk.machine.phase is Phase.PREPARING


def test_one_that_does_not_stop_in_time_is_dropped() -> None:
    desk = stopping(max_restarts=1)
    desk.say(1, Stopped(1))
    desk.wait(LIMITS.stop_grace_s + LIMITS.stop_slack_s)
    assert desk.dropped == [2]
    assert desk.machine.phase is Phase.GATHERING


def test_it_never_forms_while_workers_may_live() -> None:
    desk = stopping(max_restarts=1)
    desk.say(1, Stopped(1))
    assert desk.machine.phase is Phase.STOPPING
    desk.say(2, Stopped(1))
    assert desk.machine.phase is Phase.PREPARING


@pytest.mark.parametrize(
    ("addresses", "local", "master"),
    [("127.0.0.", True, "127.0.0.1"), ("10.0.0.", False, "10.0.0.1")],
)
def test_a_world_on_one_machine_is_local(addresses: str, local: bool, master: str) -> None:
    desk = Desk()
    desk.join(1, 2, address=addresses)
    assign = desk.last(1)
    assert isinstance(assign, Assign)
    assert assign.local_world is local
    desk.prepare(1, 2)
    assert desk.last(1) == Start(1, master, 40_000)


def test_members_are_told_the_lease() -> None:
    desk = Desk()
    desk.join(1)
    assert desk.told == [(1, Joined(LIMITS.lease_s, LIMITS.fence_s, LIMITS.ping_interval_s))]
