"""Looks and hangs as the coordinator deals with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from holdfast.coordinator.world import Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.exit_codes import EXIT_HUNG
from holdfast.protocol.outcome import Evidence, Failure, OutcomeKind, Verdict
from holdfast.protocol.rank_progress import Finding, RanksAtPlace, RankStory, Standing
from tests.coordinator.coordinator_harness import CoordinatorHarness, gathering, preparing, running, steps, training
from tests.support.simulator.nodes import simple_judge
from tests.support.simulator.stalls import examined_by, simple_examine


def look_on(harness: CoordinatorHarness, seconds: float, *links: int, second: str = "sleep") -> None:
    """Time passes, and these nodes answer every look; the worker on the second one is elsewhere."""
    until = harness.now + seconds
    answered = {link: len(harness.looks_at(link)) for link in links}
    while harness.now < until and harness.machine.phase is Phase.RUNNING:
        harness.wait(min(0.5, until - harness.now))
        for link in links:
            if len(harness.looks_at(link)) > answered[link]:
                answered[link] = len(harness.looks_at(link))
                harness.looked(link, second if link == 2 else "all_reduce")


def test_a_hang_is_told_to_every_node_and_stands_in_the_view() -> None:
    harness = training()
    look_on(harness, 70.0, 1, 2)
    for link in (1, 2):
        (text,) = harness.notices(link)
        assert text.startswith("rank 1 is in sleep; 1 others wait in all_reduce\nstacks of rank 1, on n2: /run/2.txt")
    (note,) = harness.noted("hang")
    assert (note["kind"], note["code"], note["culprits"]) == ("hung", "HF240", [1])
    assert note["files"] == {1: "/run/2.txt"}
    assert harness.machine.view(harness.now).notices == ("rank 1 is in sleep; 1 others wait in all_reduce",)
    steps(harness, 30)
    assert harness.notices(2)[1:] == ["the job goes on after 70 s without a step"]
    assert len(harness.noted("hang_over")) == 1
    assert harness.machine.view(harness.now).notices == ()


def test_in_a_hang_each_rank_is_where_it_was_found_and_its_age_grows() -> None:
    def examine(stories: Sequence[RankStory]) -> Finding:
        places = (
            RanksAtPlace((1,), "is in sleep at data.py:17", Standing.STILL),
            RanksAtPlace((0,), "waits in all_reduce at train.py:42", Standing.WAITING),
        )
        text = f"rank 1 is in sleep for {max(story.age_s for story in stories):.0f} s"
        return structs.replace(simple_examine(stories), text=text, groups=places)

    harness = training(extensions=examined_by(examine))
    look_on(harness, 70.0, 1, 2)
    ranks = [rank for node in harness.machine.view(harness.now).nodes for rank in node.ranks]
    assert [(rank.standing, rank.place) for rank in ranks] == [
        (Standing.WAITING, "waits in all_reduce at train.py:42"),
        (Standing.HUNG, "is in sleep at data.py:17"),
    ]
    assert harness.machine.view(harness.now).notices == ("rank 1 is in sleep for 70 s",)
    assert harness.machine.view(harness.now + 50.0).notices == ("rank 1 is in sleep for 120 s",)
    steps(harness, 30)
    view = harness.machine.view(harness.now)
    assert all(rank.standing is None for node in view.nodes for rank in node.ranks)
    assert view.notices == ()


def test_the_end_of_a_hang_costs_a_restart_and_names_the_culprit() -> None:
    harness = training(max_restarts=1)
    look_on(harness, 400.0, 1, 2)
    stop = harness.last(1)
    assert isinstance(stop, msg.Stop)
    assert stop.reason is msg.StopReason.HUNG
    assert stop.text.startswith("nothing has moved for 300 s (--hang-timeout 300): rank 1 is in sleep")
    harness.both_say(msg.Stopped(1))
    assert (harness.machine.phase, harness.machine.generation, harness.machine.budget.used) == (Phase.PREPARING, 2, 1)
    assert harness.noted("verdict")[0]["code"] == "HF240"
    assert harness.machine.view(harness.now).why == stop.text
    harness.prepare(1, 2)
    for number in (10, 20):
        harness.wait(1.0)
        steps(harness, number)
    look_on(harness, 400.0, 1, 2)
    harness.both_say(msg.Stopped(2))
    outcome = harness.machine.outcome
    assert (outcome.kind, outcome.code, outcome.exit_code) == (OutcomeKind.FAILED, "HF240", EXIT_HUNG)
    assert (outcome.verdict.culprit.rank, outcome.verdict.culprit.host, outcome.verdict.culprit.pid) == (1, "n2", 102)


def test_the_host_of_a_culprit_is_blamed() -> None:
    harness = training(max_restarts=1, exclude_after=1)
    look_on(harness, 400.0, 1, 2)
    harness.both_say(msg.Stopped(1))
    assert [note["host"] for note in harness.noted("excluded")] == ["n2"]


def test_where_nobody_can_be_named_it_costs_a_restart_all_the_same() -> None:
    harness = training(max_restarts=1)
    look_on(harness, 400.0, 1, 2, second="all_reduce")
    harness.both_say(msg.Stopped(1))
    assert harness.machine.budget.used == 1
    assert harness.noted("verdict")[0]["code"] == "HF241"


def test_a_worker_that_fails_while_the_job_hangs_takes_the_hang_into_the_verdict() -> None:
    """As when a collective's own time-out strikes first, in a rank that only waited."""
    harness = training()
    look_on(harness, 100.0, 1, 2)
    harness.fail(1)
    harness.both_say(msg.Stopped(1))
    assert harness.machine.outcome.code == "HF240"


def test_one_that_went_on_and_failed_later_did_not_hang() -> None:
    harness = training()
    look_on(harness, 100.0, 1, 2)
    steps(harness, 30)
    harness.fail(1)
    harness.both_say(msg.Stopped(1))
    assert harness.machine.outcome.code == "HF200"


def hanging_survivors() -> tuple[CoordinatorHarness, list[Evidence]]:
    """Two ranks in `ht.survive` that hang, and all that is given to the judge."""
    judged: list[Evidence] = []

    def judge(evidence: Evidence) -> Verdict:
        judged.append(evidence)
        return simple_judge(evidence)

    harness = training(least=1, max_restarts=2, judge=judge)
    harness.can_go_on(1, 2)
    look_on(harness, 100.0, 1, 2)
    return harness, judged


def test_a_hang_that_a_regroup_ended_is_in_the_verdict_on_the_loss_and_in_no_later_one() -> None:
    """As when somebody kills the rank for which the others wait."""
    harness, judged = hanging_survivors()
    harness.kill_worker(2)
    assert harness.machine.phase is Phase.REGROUPING
    harness.say(2, msg.WorkersFailed(1, (Failure(rank=1, local_rank=0, host="n2", pid=101, exit_code=-9),)))
    harness.prepare(1, 2)
    harness.can_go_on(1)
    harness.fail(1)
    harness.both_say(msg.Stopped(harness.machine.generation))
    assert [evidence.hang is not None for evidence in judged] == [True, False]


def test_a_loss_while_the_others_regroup_after_a_hang_is_judged_without_it() -> None:
    harness, judged = hanging_survivors()
    harness.kill_worker(2)
    harness.fail(1)
    assert harness.machine.phase is Phase.STOPPING
    harness.both_say(msg.Stopped(harness.machine.generation))
    assert [evidence.hang for evidence in judged] == [None]


def test_a_node_that_does_not_answer_is_waited_for_once() -> None:
    harness = training()
    harness.wait(60.0)
    harness.looked(1, "all_reduce")
    harness.wait(4.9)
    assert len(harness.looks_at(1)) == 1
    harness.wait(0.2)
    assert len(harness.looks_at(1)) == 2
    assert harness.noted("look_unanswered")[0]["members"] == ["n2#1"]
    harness.looked(1, "all_reduce")
    harness.wait(2.0)
    assert len(harness.looks_at(1)) == 3, "asked, and not awaited"
    assert len(harness.looks_at(2)) == 3


def test_where_nobody_is_awaited_a_round_is_over_with_the_first_answer() -> None:
    """Both nodes were late once. Without any answer the next round would find nothing."""
    harness = training()
    harness.wait(60.0 + 5.1)
    assert harness.noted("look_unanswered")[0]["members"] == ["n1#1", "n2#1"]
    harness.wait(4.0)
    assert len(harness.looks_at(1)) == 2
    harness.looked(2, "sleep")
    harness.wait(0.1)
    assert len(harness.looks_at(1)) == 3


def test_an_answer_to_an_older_look_is_too_late() -> None:
    harness = training()
    harness.wait(60.0)
    harness.looked(1, "all_reduce")
    harness.wait(5.1)
    harness.looked(2, "all_reduce", number=1)
    harness.looked(1, "all_reduce")
    assert len(harness.looks_at(1)) == 2


@pytest.mark.parametrize("state", [gathering, preparing])
def test_progress_where_nothing_runs_is_nothing(state: Any) -> None:
    harness = state()
    steps(harness, 50, generation=1)
    assert harness.machine.view(harness.now).training_s == 0.0


def test_progress_of_another_generation_is_nothing() -> None:
    harness = running()
    steps(harness, 50, generation=7)
    harness.wait(500.0)
    assert harness.looks_at(1) == []


def test_nobody_is_watched_on_the_way_to_a_safe_point_and_between_generations() -> None:
    harness = training(max_restarts=1)
    harness.fail(2)
    harness.wait(4.0)
    harness.say(1, msg.Stopped(1))
    harness.say(2, msg.Stopped(1))
    harness.prepare(1, 2)
    harness.wait(500.0)
    assert harness.looks_at(1) == []


def test_a_rank_that_has_ended_is_not_looked_at() -> None:
    harness = training()
    harness.say(2, msg.WorkerDone(1, 0))
    look_on(harness, 100.0, 1)
    assert harness.looks_at(2) == []
    assert harness.noted("look_unanswered") == []


# --- faults of those who only look ------------------------------------------------------------------------------------


def broken(_: object) -> Any:
    raise KeyError("x")


def test_an_examination_that_fails_is_noted_and_finds_nothing() -> None:
    harness = training(extensions=examined_by(broken))
    look_on(harness, 500.0, 1, 2)
    assert harness.machine.phase is Phase.RUNNING
    assert harness.noted("observer_fault")[0] == {"what": "examine", "error": "KeyError: 'x'"}
    assert harness.notices(1) == []


def test_a_judge_that_fails_is_noted_and_the_first_failure_is_to_blame() -> None:
    harness = training(max_restarts=1)
    harness.machine._endings._judge = broken
    harness.fail(2, 3)
    harness.both_say(msg.Stopped(1))
    assert (harness.machine.phase, harness.machine.budget.used) == (Phase.PREPARING, 1)
    assert harness.noted("observer_fault")[0]["what"] == "judge"
    assert harness.noted("verdict")[0]["cause"] == "rank 1 on n2 ended with exit code 3"
