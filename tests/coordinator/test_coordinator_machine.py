"""Every transition of the coordinator is taken, and every event is borne in every phase."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.coordinator.coordinator_machine import Coordinator
from holdfast.coordinator.coordinator_state import (
    TRANSITIONS,
    Event,
    Heard,
    HostAsked,
    LinkClosed,
    LinkOpened,
    Phase,
    QuitAsked,
    SaveAsked,
)
from holdfast.coordinator.formation import FENCE
from holdfast.protocol import messages as msg
from holdfast.protocol.charter import Charter, CharterPosition, Poll, Seat
from holdfast.protocol.outcome import Failure, OutcomeKind
from holdfast.protocol.policy import NodeSpec, Tick
from holdfast.protocol.questions import OF_A_HOST, Question
from holdfast.protocol.rank_progress import RankProgress, Stage
from holdfast.protocol.train_contract import Survive
from tests.coordinator.coordinator_desk import (
    LIMITS,
    Desk,
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

IN_PHASE: dict[Phase, Callable[[], Desk]] = {
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


def too_few(desk: Desk) -> None:
    desk.join(1)
    desk.wait(60.0)
    assert isinstance(desk.last(1), msg.Finish)


def all_here(desk: Desk) -> None:
    desk.join(1, 2)
    assert [type(desk.last(link)) for link in (1, 2)] == [msg.Assign, msg.Assign]


def all_prepared(desk: Desk) -> None:
    desk.prepare(2, 1)
    assert desk.last(2) == msg.Start(1, "10.0.0.1", 40_000, job_uid="n1#1")


def dies_in_phase_one(desk: Desk) -> None:
    desk.give(LinkClosed(2, "reset"))


def a_worker_fails(desk: Desk) -> None:
    desk.fail(2)
    assert desk.last(1) == msg.Stop(1, msg.StopReason.WORKER_FAILED, "rank 1 failed on n2")


def every_rank_is_done(desk: Desk) -> None:
    desk.both_say(msg.WorkerDone(1, 0))
    assert desk.machine.outcome.kind is OutcomeKind.SUCCEEDED


def a_whole_generation_comes(desk: Desk) -> None:
    desk.join_running(1, 2)
    assert [desk.last(link) for link in (1, 2)] == [msg.Resume(7), msg.Resume(7)]


def one_wants_to_leave(desk: Desk) -> None:
    desk.say(2, msg.Leave("SIGTERM", drain=True))
    assert [desk.last(link) for link in (1, 2)] == [msg.Drain(1, "n2 is leaving (SIGTERM)")] * 2


def nobody_asks_for_safe_points(desk: Desk) -> None:
    desk.both_say(msg.Held(1, 0))
    assert desk.last(1) == msg.Stop(1, msg.StopReason.MEMBER_LEFT, "n2 is leaving (SIGTERM)")


def all_stopped_budget_left(desk: Desk) -> None:
    desk.machine.budget.max_restarts = 1
    desk.give(LinkClosed(1, "reset"))
    desk.say(2, msg.Stopped(1))


def all_stopped_budget_spent(desk: Desk) -> None:
    desk.both_say(msg.Stopped(1))
    assert isinstance(desk.last(2), msg.Finish)


def a_rank_is_lost(desk: Desk) -> None:
    desk.able(1, 2)
    desk.kill_worker(2)
    regroup = desk.last(1)
    assert isinstance(regroup, msg.Regroup)
    assert (regroup.assign.world_size, regroup.safe_point) == (1, 0)
    assert regroup.text == "rank 1 on n2 was lost (killed by SIGKILL); 1 rank goes on"


def all_are_prepared_again(desk: Desk) -> None:
    desk.prepare(1, 2)
    assert desk.last(1) == msg.Start(desk.machine.generation, "10.0.0.1", 40_000, job_uid="n1#1")


def nobody_is_prepared_in_time(desk: Desk) -> None:
    desk.wait(LIMITS.regroup_s)
    assert desk.last(1).text == "the workers cannot go on: not every worker was ready within 5 s"  # type: ignore[union-attr]


def a_rank_ends_before_others_join(desk: Desk) -> None:
    desk.say(1, msg.WorkerDone(2, 0))
    desk.both_say(msg.Held(2, 7))
    assert desk.last(1) == msg.DrainTo(2, 0)


def replacements_join(desk: Desk) -> None:
    desk.say(1, msg.Held(2, 7))
    regroup = desk.last(2)
    assert isinstance(regroup, msg.Regroup)
    assert (regroup.assign.world_size, regroup.safe_point) == (2, 8)
    assert regroup.text == "rank 1 was replaced; 2 ranks go on"


def all_finish_before_the_safe_point(desk: Desk) -> None:
    desk.say(1, msg.WorkerDone(3, 0))
    assert desk.machine.outcome is not None
    assert desk.machine.outcome.kind is OutcomeKind.SUCCEEDED


def the_replacement_is_ready(desk: Desk) -> None:
    desk.prepare(1, 2)
    assert desk.last(2) == msg.Replace(2, (0,)), "no Start: the survivors wait"
    desk.say(2, msg.ReplacementReady(2, (0,)))
    assert [desk.last(link).assign.world_size for link in (1, 2)] == [2, 2]  # type: ignore[union-attr]


WAYS: dict[tuple[Phase, Phase], Callable[[Desk], None]] = {
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


BEGINS: dict[tuple[Phase, Phase], Callable[[], Desk]] = {
    (Phase.RUNNING, Phase.REGROUPING): lambda: running(max_restarts=1),
    (Phase.DRAINING, Phase.RUNNING): lambda: growing(nproc=2),
    (Phase.DRAINING, Phase.REGROUPING): growing,
    (Phase.REGROUPING, Phase.REGROUPING): lambda: regrouping(survive=Survive.WAIT),
    (Phase.REGROUPING, Phase.OVER): at_safe_point,
}
"""Where a transition does not begin with the ordinary desk of its phase."""


def test_the_table_is_covered() -> None:
    assert set(WAYS) == set(TRANSITIONS)


@pytest.mark.parametrize(("before", "after"), TRANSITIONS, ids=lambda phase: phase.value)
def test_transition(before: Phase, after: Phase) -> None:
    desk = BEGINS.get((before, after), IN_PHASE[before])()
    assert desk.machine.phase is before
    WAYS[before, after](desk)
    assert desk.machine.phase is after


# --- every event in every phase ---------------------------------------------------------------------------------------

FAILURE = Failure(rank=0, local_rank=0, host="n1", pid=1, exit_code=1)
MESSAGES: list[msg.FromAgent] = [
    msg.Join(NodeSpec(member="n9#1", host="n9", nproc=1)),
    msg.Join(NodeSpec(member="n1#1", host="n1", nproc=1), 7),
    msg.Ping(3),
    msg.Ask(1, Question.STATUS),
    Poll(2, Seat("n9#1", "n9", "10.0.0.9", 1), CharterPosition(1, 1)),
    msg.Supersede(2, "10.0.0.9", 1),
    msg.Recall(Charter(CharterPosition(1, 1), ()), 1, 0.0),
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
            msg.Looked(generation, 1),
            msg.Profiled(generation, 1),
            msg.Able(generation, (0,)),
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
    QuitAsked(drain=True, by="holdfast stop"),
    QuitAsked(drain=False, by="holdfast kill"),
    *(HostAsked(question, "b", "a user", 60.0) for question in OF_A_HOST),
    SaveAsked("a user"),
    Tick(),
]


def test_no_message_is_forgotten() -> None:
    assert {type(message) for message in MESSAGES} == {*msg.AgentMessage.__subclasses__(), Poll}


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


def test_the_state_is_examined_once_for_many_messages_that_wait_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand agents send each of them, and to examine all transitions costs as much as the rest of a message."""
    examined: list[float] = []
    advance = Coordinator._advance

    def count(machine: Coordinator, now: float) -> None:
        examined.append(now)
        advance(machine, now)

    monkeypatch.setattr(Coordinator, "_advance", count)
    desk, links = Desk(least=8, most=8, max_restarts=1), range(1, 9)

    def examinations(event: Callable[[int], Event], phase: Phase) -> int:
        """After each but the last event the phase is the same."""
        examined.clear()
        for link in links:
            assert desk.machine.phase is phase
            desk.machine.next_deadline()  # as the shell does
            desk.give(event(link))
        return len(examined)

    desk.give(Tick())
    assert examinations(lambda link: LinkOpened(link, f"10.0.0.{link}", "10.0.0.9"), Phase.GATHERING) == 0
    specs = {link: NodeSpec(member=f"n{link}#1", host=f"n{link}", nproc=1) for link in links}
    joins = {link: msg.Join(specs[link]) for link in links}
    assert examinations(lambda link: Heard(link, joins[link]), Phase.GATHERING) == 8
    prepared = {link: msg.Prepared(1, 40_000 if link == 1 else None) for link in links}
    assert examinations(lambda link: Heard(link, prepared[link]), Phase.PREPARING) == 1
    assert examinations(lambda link: Heard(link, msg.Ping(1)), Phase.RUNNING) == 0
    desk.fail(1)
    assert examinations(lambda link: Heard(link, msg.Stopped(1)), Phase.STOPPING) == 1
    assert desk.machine.phase is Phase.PREPARING


def test_the_reason_for_a_wait_changes_when_a_link_opens_after_its_pause() -> None:
    desk = Desk(least=3, most=3)
    desk.join(1, last_generation=7)
    assert desk.noted("gathering")[-1] == {"reason": f"1 of 3 nodes are here; {FENCE}"}
    desk.now = LIMITS.fence_s + LIMITS.kill_s - 0.1
    desk.give(Tick())
    desk.now += 0.2
    assert desk.machine.next_deadline() > desk.now, "no Tick comes in between"
    desk.give(LinkOpened(2, "10.0.0.2", "10.0.0.9"))
    assert desk.noted("gathering")[-1] == {"reason": "1 of 3 nodes are here"}
