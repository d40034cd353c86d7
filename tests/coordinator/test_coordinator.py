"""Every transition of the coordinator is taken, and every event is borne in every phase."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.coordinator.coordinator import PHASES, Coordinator
from holdfast.coordinator.coordinator_events import Event, Heard, LinkClosed, LinkOpened
from holdfast.coordinator.formation import FENCE
from holdfast.coordinator.world import Phase
from holdfast.extension_list import EXTENSIONS
from holdfast.extensions.hangs.messages import Looked
from holdfast.protocol import messages as msg
from holdfast.protocol.charter import Charter, CharterPosition, Poll, Seat
from holdfast.protocol.codec import encode_extended
from holdfast.protocol.outcome import Failure, OutcomeKind
from holdfast.protocol.policy import NodeSpec, Tick
from holdfast.protocol.rank_progress import RankProgress, Stage
from holdfast.protocol.train_contract import Survive
from tests.coordinator.coordinator_harness import (
    LIMITS,
    CoordinatorHarness,
    at_safe_point,
    draining,
    gathering,
    growing,
    over,
    preparing,
    regrouping,
    running,
    stopping,
)

IN_PHASE: dict[Phase, Callable[[], CoordinatorHarness]] = {
    Phase.GATHERING: gathering,
    Phase.PREPARING: preparing,
    Phase.RUNNING: running,
    Phase.DRAINING: draining,
    Phase.REGROUPING: regrouping,
    Phase.STOPPING: stopping,
    Phase.OVER: over,
}


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_is_reached(phase: Phase) -> None:
    assert IN_PHASE[phase]().machine.phase is phase


# --- every transition -------------------------------------------------------------------------------------------------


def too_few(harness: CoordinatorHarness) -> None:
    harness.join(1)
    harness.wait(60.0)
    assert isinstance(harness.last(1), msg.Finish)


def all_here(harness: CoordinatorHarness) -> None:
    harness.join(1, 2)
    assert [type(harness.last(link)) for link in (1, 2)] == [msg.Assign, msg.Assign]


def all_prepared(harness: CoordinatorHarness) -> None:
    harness.prepare(2, 1)
    assert harness.last(2) == msg.Start(1, "10.0.0.1", 40_000, job_uid="n1#1")


def dies_in_phase_one(harness: CoordinatorHarness) -> None:
    harness.give(LinkClosed(2, "reset"))


def a_worker_fails(harness: CoordinatorHarness) -> None:
    harness.fail(2)
    assert harness.last(1) == msg.Stop(1, msg.StopReason.WORKER_FAILED, "rank 1 failed on n2")


def every_rank_is_done(harness: CoordinatorHarness) -> None:
    harness.both_say(msg.WorkerDone(1, 0))
    assert harness.machine.outcome.kind is OutcomeKind.SUCCEEDED


def a_whole_generation_comes(harness: CoordinatorHarness) -> None:
    harness.join_running(1, 2)
    assert [harness.last(link) for link in (1, 2)] == [msg.Resume(7), msg.Resume(7)]


def one_wants_to_leave(harness: CoordinatorHarness) -> None:
    harness.say(2, msg.Leave("SIGTERM", drain=True))
    assert [harness.last(link) for link in (1, 2)] == [msg.Drain(1, "n2 is leaving (SIGTERM)")] * 2


def nobody_asks_for_safe_points(harness: CoordinatorHarness) -> None:
    harness.both_say(msg.Held(1, 0))
    assert harness.last(1) == msg.Stop(1, msg.StopReason.MEMBER_LEFT, "n2 is leaving (SIGTERM)")


def all_stopped_budget_left(harness: CoordinatorHarness) -> None:
    harness.machine.budget.max_restarts = 1
    harness.give(LinkClosed(1, "reset"))
    harness.say(2, msg.Stopped(1))


def all_stopped_budget_spent(harness: CoordinatorHarness) -> None:
    harness.both_say(msg.Stopped(1))
    assert isinstance(harness.last(2), msg.Finish)


def a_rank_is_lost(harness: CoordinatorHarness) -> None:
    harness.can_go_on(1, 2)
    harness.kill_worker(2)
    regroup = harness.last(1)
    assert isinstance(regroup, msg.Regroup)
    assert (regroup.assign.world_size, regroup.safe_point) == (1, 0)
    assert regroup.text == "rank 1 on n2 was lost (killed by SIGKILL); 1 rank goes on"


def all_are_prepared_again(harness: CoordinatorHarness) -> None:
    harness.prepare(1, 2)
    assert harness.last(1) == msg.Start(harness.machine.generation, "10.0.0.1", 40_000, job_uid="n1#1")


def nobody_is_prepared_in_time(harness: CoordinatorHarness) -> None:
    harness.wait(LIMITS.regroup_s)
    assert harness.last(1).text == "the workers cannot go on: not every worker was ready within 5 s"  # type: ignore[union-attr]


def a_rank_ends_before_others_join(harness: CoordinatorHarness) -> None:
    harness.say(1, msg.WorkerDone(2, 0))
    harness.both_say(msg.Held(2, 7))
    assert harness.last(1) == msg.DrainTo(2, 0)


def replacements_join(harness: CoordinatorHarness) -> None:
    harness.say(1, msg.Held(2, 7))
    regroup = harness.last(2)
    assert isinstance(regroup, msg.Regroup)
    assert (regroup.assign.world_size, regroup.safe_point) == (2, 8)
    assert regroup.text == "rank 1 was replaced; 2 ranks go on"


def all_finish_before_the_safe_point(harness: CoordinatorHarness) -> None:
    harness.say(1, msg.WorkerDone(3, 0))
    assert harness.machine.outcome is not None
    assert harness.machine.outcome.kind is OutcomeKind.SUCCEEDED


def the_replacement_is_ready(harness: CoordinatorHarness) -> None:
    harness.prepare(1, 2)
    assert harness.last(2) == msg.Replace(2, (0,)), "no Start: the survivors wait"
    harness.say(2, msg.ReplacementReady(2, (0,)))
    assert [harness.last(link).assign.world_size for link in (1, 2)] == [2, 2]  # type: ignore[union-attr]


WAYS: dict[tuple[Phase, Phase], Callable[[CoordinatorHarness], None]] = {
    (Phase.GATHERING, Phase.PREPARING): all_here,
    (Phase.GATHERING, Phase.OVER): too_few,
    (Phase.GATHERING, Phase.RUNNING): a_whole_generation_comes,
    (Phase.RUNNING, Phase.DRAINING): one_wants_to_leave,
    (Phase.DRAINING, Phase.STOPPING): nobody_asks_for_safe_points,
    (Phase.DRAINING, Phase.OVER): every_rank_is_done,
    (Phase.PREPARING, Phase.RUNNING): all_prepared,
    (Phase.PREPARING, Phase.GATHERING): dies_in_phase_one,
    (Phase.RUNNING, Phase.STOPPING): a_worker_fails,
    (Phase.RUNNING, Phase.OVER): every_rank_is_done,
    (Phase.RUNNING, Phase.REGROUPING): a_rank_is_lost,
    (Phase.DRAINING, Phase.RUNNING): a_rank_ends_before_others_join,
    (Phase.DRAINING, Phase.REGROUPING): replacements_join,
    (Phase.REGROUPING, Phase.REGROUPING): the_replacement_is_ready,
    (Phase.REGROUPING, Phase.RUNNING): all_are_prepared_again,
    (Phase.REGROUPING, Phase.STOPPING): nobody_is_prepared_in_time,
    (Phase.REGROUPING, Phase.OVER): all_finish_before_the_safe_point,
    (Phase.STOPPING, Phase.GATHERING): all_stopped_budget_left,
    (Phase.STOPPING, Phase.OVER): all_stopped_budget_spent,
}


BEGINS: dict[tuple[Phase, Phase], Callable[[], CoordinatorHarness]] = {
    (Phase.RUNNING, Phase.REGROUPING): lambda: running(max_restarts=1),
    (Phase.DRAINING, Phase.RUNNING): lambda: growing(nproc=2),
    (Phase.DRAINING, Phase.REGROUPING): growing,
    (Phase.REGROUPING, Phase.REGROUPING): lambda: regrouping(survive=Survive.WAIT),
    (Phase.REGROUPING, Phase.OVER): at_safe_point,
}
"""Where a transition does not begin with the ordinary harness of its phase."""


TRANSITIONS = [(before, after) for before, row in PHASES.items() for after in row.to]


def test_the_table_is_covered() -> None:
    assert set(WAYS) == set(TRANSITIONS)


@pytest.mark.parametrize(("before", "after"), TRANSITIONS, ids=lambda phase: phase.value)
def test_transition(before: Phase, after: Phase) -> None:
    harness = BEGINS.get((before, after), IN_PHASE[before])()
    assert harness.machine.phase is before
    WAYS[before, after](harness)
    assert harness.machine.phase is after


# --- every event in every phase ---------------------------------------------------------------------------------------

FAILURE = Failure(rank=0, local_rank=0, host="n1", pid=1, exit_code=1)
MESSAGES: list[msg.FromAgent] = [
    msg.Join(NodeSpec(member="n9#1", host="n9", nproc=1)),
    msg.Join(NodeSpec(member="n1#1", host="n1", nproc=1), 7),
    msg.Ping(3),
    *(msg.Ask(1, question, "a user") for each in EXTENSIONS for question in each.questions),
    *(msg.Ask(1, question, "a user", b'{"host": "b", "for_s": 60.0}') for question in ("drain", "exclude", "readmit")),
    msg.Ask(1, "profile", "a user", b'{"ranks": [0], "steps": 5}'),
    *(msg.Extended(each.name, body) for each in EXTENSIONS for body in (b"", b"\x92\x01\x90")),
    Poll(2, Seat("n9#1", "n9", "10.0.0.9", 1), CharterPosition(1, 1)),
    msg.ContestEndpoint(2, "10.0.0.9", 1),
    msg.ReportCharter(Charter(CharterPosition(1, 1), ()), 1, 0.0),
    msg.Join(NodeSpec(member="n9#2", host="n9", nproc=1), 1, 0.0, msg.Running(1, 0, 1, 0)),
    msg.Leave("SIGTERM"),
    msg.Leave("SIGTERM", drain=True),
    *(
        message
        for generation in (0, 1, 2)
        for message in (
            msg.Prepared(generation),
            msg.Prepared(generation, 40_000),
            msg.WorkerDone(generation, 0),
            msg.WorkersFailed(generation, (FAILURE,)),
            msg.Stopped(generation),
            msg.StoreLost(generation),
            msg.Held(generation, 0),
            msg.Held(generation, 5),
            msg.Held(generation, 5, saves=True),
            msg.Progress(generation, (RankProgress(0, Stage.STEPPING, 9, 0.1), RankProgress(7, Stage.STEPPING, 9))),
            msg.Progress(generation, (RankProgress(0, Stage.MEETING),)),
            msg.Extended("hangs", encode_extended(Looked(generation, 1))),
            msg.CanGoOn(generation, (0,)),
            msg.ReplacementReady(generation, (0,)),
            msg.ReplacementFailed(generation, (FAILURE,)),
            msg.CannotRegroup(generation, "memory grew"),
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
    assert {type(message) for message in MESSAGES} == {*msg.AgentMessage.__subclasses__(), msg.Extended, Poll}


@pytest.mark.parametrize("late_s", [0.0, 1000.0])
@pytest.mark.parametrize("phase", Phase)
def test_every_event_is_borne_in_every_phase(phase: Phase, late_s: float) -> None:
    """Twice each, with and without a newcomer, in time and very late; nobody may be left waiting for a past moment."""
    for event in EVENTS:
        for newcomer in (False, True):
            harness = IN_PHASE[phase]()
            if newcomer:
                harness.give(LinkOpened(9, "10.0.0.9", "10.0.0.1"))
                harness.join(7)
            harness.now += late_s
            for _ in range(2):
                harness.give(event)
                harness.give(Tick())
                due = harness.machine.next_deadline()
                assert (due is None) == (harness.machine.phase is Phase.OVER), event
                assert due is None or due > harness.now, event
            assert harness.concluded <= 1


@pytest.mark.parametrize("phase", Phase)
def test_left_alone_it_ends_or_waits_for_workers(phase: Phase) -> None:
    """Agents that do nothing but ping: each phase but RUNNING has an end of its own."""
    harness = IN_PHASE[phase]()
    harness.wait(300.0)
    assert harness.machine.phase is (Phase.RUNNING if phase is Phase.RUNNING else Phase.OVER)


def test_the_state_is_examined_once_for_many_messages_that_wait_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand agents send each of them, and to examine all transitions costs as much as the rest of a message."""
    examined: list[float] = []
    advance = Coordinator._advance

    def count(machine: Coordinator, now: float) -> None:
        examined.append(now)
        advance(machine, now)

    monkeypatch.setattr(Coordinator, "_advance", count)
    harness, links = CoordinatorHarness(least=8, most=8, max_restarts=1), range(1, 9)

    def examinations(event: Callable[[int], Event], phase: Phase) -> int:
        """After each but the last event the phase is the same."""
        examined.clear()
        for link in links:
            assert harness.machine.phase is phase
            harness.machine.next_deadline()  # as the shell does
            harness.give(event(link))
        return len(examined)

    harness.give(Tick())
    assert examinations(lambda link: LinkOpened(link, f"10.0.0.{link}", "10.0.0.9"), Phase.GATHERING) == 0
    specs = {link: NodeSpec(member=f"n{link}#1", host=f"n{link}", nproc=1) for link in links}
    joins = {link: msg.Join(specs[link]) for link in links}
    assert examinations(lambda link: Heard(link, joins[link]), Phase.GATHERING) == 8
    prepared = {link: msg.Prepared(1, 40_000 if link == 1 else None) for link in links}
    assert examinations(lambda link: Heard(link, prepared[link]), Phase.PREPARING) == 1
    assert examinations(lambda link: Heard(link, msg.Ping(1)), Phase.RUNNING) == 0
    harness.fail(1)
    assert examinations(lambda link: Heard(link, msg.Stopped(1)), Phase.STOPPING) == 1
    assert harness.machine.phase is Phase.PREPARING


def test_the_reason_for_a_wait_changes_when_a_link_opens_after_its_pause() -> None:
    harness = CoordinatorHarness(least=3, most=3)
    harness.join(1, last_generation=7)
    assert harness.noted("gathering")[-1] == {"reason": f"1 of 3 nodes are here; {FENCE}"}
    harness.now = LIMITS.fence_s + LIMITS.kill_s - 0.1
    harness.give(Tick())
    harness.now += 0.2
    assert harness.machine.next_deadline() > harness.now, "no Tick comes in between"
    harness.give(LinkOpened(2, "10.0.0.2", "10.0.0.9"))
    assert harness.noted("gathering")[-1] == {"reason": "1 of 3 nodes are here"}
