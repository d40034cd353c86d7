"""Progress, looks, hangs and stragglers as the coordinator deals with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from holdfast.coordinator.complaints import AGREED_S, REASON_S
from holdfast.coordinator.stop_delay import EVIDENCE_S, PLACES_S
from holdfast.coordinator.world import Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.errors import EXIT_HUNG
from holdfast.protocol.outcome import Evidence, Failure, OutcomeKind
from holdfast.protocol.rank_progress import Finding, Frame, RankSample, RanksAtPlace, RankStory, Standing
from tests.coordinator.coordinator_harness import CoordinatorHarness, gathering, preparing, running, steps, training
from tests.support.simulator.nodes import simple_judge
from tests.support.simulator.stalls import simple_examine


def looks(harness: CoordinatorHarness, link: int) -> list[msg.Look]:
    return [message for to, message in harness.told if to == link and isinstance(message, msg.Look)]


def notices(harness: CoordinatorHarness, link: int) -> list[str]:
    return [message.text for to, message in harness.told if to == link and isinstance(message, msg.Notice)]


def answer(harness: CoordinatorHarness, link: int, function: str = "all_reduce") -> None:
    """To the newest look."""
    sample = RankSample(0, 100 + link, "S", 0.0, (Frame("t.py", 1, function),), file=f"/run/{link}.txt")
    harness.say(link, msg.Looked(harness.machine.generation, looks(harness, link)[-1].number, (sample,)))


def look_on(harness: CoordinatorHarness, seconds: float, *links: int, second: str = "sleep") -> None:
    """Time passes, and these nodes answer every look; the worker on the second one is elsewhere."""
    until = harness.now + seconds
    answered = {link: len(looks(harness, link)) for link in links}
    while harness.now < until and harness.machine.phase is Phase.RUNNING:
        harness.wait(min(0.5, until - harness.now))
        for link in links:
            if len(looks(harness, link)) > answered[link]:
                answered[link] = len(looks(harness, link))
                answer(harness, link, second if link == 2 else "all_reduce")


def test_a_hang_is_told_to_every_node_and_stands_in_the_view() -> None:
    harness = training()
    look_on(harness, 70.0, 1, 2)
    for link in (1, 2):
        (text,) = notices(harness, link)
        assert text.startswith("rank 1 is in sleep; 1 others wait in all_reduce\nstacks of rank 1, on n2: /run/2.txt")
    (note,) = harness.noted("hang")
    assert (note["kind"], note["code"], note["culprits"]) == ("hung", "HF240", [1])
    assert note["files"] == {1: "/run/2.txt"}
    assert harness.machine.view(harness.now).notices == ("rank 1 is in sleep; 1 others wait in all_reduce",)
    steps(harness, 30)
    assert notices(harness, 2)[1:] == ["the job goes on after 70 s without a step"]
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

    harness = training(examine=examine)
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


def test_a_node_that_does_not_answer_is_waited_for_once() -> None:
    harness = training()
    harness.wait(60.0)
    answer(harness, 1)
    harness.wait(4.9)
    assert len(looks(harness, 1)) == 1
    harness.wait(0.2)
    assert len(looks(harness, 1)) == 2
    assert harness.noted("look_unanswered")[0]["members"] == ["n2#1"]
    answer(harness, 1)
    harness.wait(2.0)
    assert len(looks(harness, 1)) == 3, "asked, and not awaited"
    assert len(looks(harness, 2)) == 3


def test_an_answer_to_an_older_look_is_too_late() -> None:
    harness = training()
    harness.wait(60.0)
    answer(harness, 1)
    harness.wait(5.1)
    harness.say(2, msg.Looked(1, 1, (RankSample(0, 1, "S", 0.0),)))
    assert harness.machine._monitor._round.samples == {}


@pytest.mark.parametrize("state", [gathering, preparing])
def test_progress_where_nothing_runs_is_nothing(state: Any) -> None:
    harness = state()
    steps(harness, 50, generation=1)
    assert harness.machine.view(harness.now).training_s == 0.0


def test_progress_of_another_generation_is_nothing() -> None:
    harness = running()
    steps(harness, 50, generation=7)
    harness.wait(500.0)
    assert looks(harness, 1) == []


def test_nobody_is_watched_on_the_way_to_a_safe_point_and_between_generations() -> None:
    harness = training(max_restarts=1)
    harness.fail(2)
    harness.wait(4.0)
    harness.say(1, msg.Stopped(1))
    harness.say(2, msg.Stopped(1))
    harness.prepare(1, 2)
    harness.wait(500.0)
    assert looks(harness, 1) == []


def test_a_rank_that_has_ended_is_not_looked_at() -> None:
    harness = training()
    harness.say(2, msg.WorkerDone(1, 0))
    look_on(harness, 100.0, 1)
    assert looks(harness, 2) == []
    assert harness.noted("look_unanswered") == []


def test_a_straggler_is_told_and_stands_in_the_view() -> None:
    harness = running()
    for number in range(1, 40):
        harness.wait(1.0)
        for link in (1, 2):
            steps(harness, number * 10, own_s=0.08 if link == 2 else 0.05, links=(link,))
    (text,) = notices(harness, 1)
    assert text.startswith("rank 1 on n2 is slow: 80 ms of its own in each step of 100 ms, the others 50 ms")
    (note,) = harness.noted("straggler")
    assert (note["code"], note["host"], note["ranks"]) == ("HF250", "n2", [1])
    assert harness.machine.view(harness.now).notices == (text,)


# --- a wait in vain ---------------------------------------------------------------------------------------------------


def fails(harness: CoordinatorHarness, link: int, says: str) -> None:
    harness.say(link, msg.WorkersFailed(harness.machine.generation, (bare(link, 1, says),)))


def bare(link: int, exit_code: int, says: str = "") -> Failure:
    return Failure(rank=link - 1, local_rank=0, host=f"n{link}", pid=1, exit_code=exit_code, message=says)


def times_out(harness: CoordinatorHarness, link: int) -> None:
    fails(harness, link, "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete")


def judged_training() -> tuple[CoordinatorHarness, list[Evidence]]:
    """A job that trains and may not restart, and what its judge is given."""
    judged: list[Evidence] = []
    return training(judge=lambda evidence: judged.append(evidence) or simple_judge(evidence)), judged


def stops(harness: CoordinatorHarness) -> list[msg.Stop]:
    return [message for to, message in harness.told if to == 2 and isinstance(message, msg.Stop)]


@pytest.mark.parametrize(
    "says",
    [
        "RuntimeError: NCCL operation timed out",
        "torch.distributed.DistBackendError: NCCL operation timed out",
        "[rank0]:[E1125 10:00:00] [default_pg] Operation timed out after 600012 ms",
        "[rank0]:[E1125 10:00:00] Aborting process on rank 0 due to timeout - collective operation timed out",
        "[rank0]:[E1125 10:00:00] Aborting process due to timeout on rank 0 - timeout watchdog detected operation timeout",
    ],
)
def test_what_the_newer_nccl_backend_says_of_a_wait_in_vain_is_known(says: str) -> None:
    harness, _ = judged_training()
    fails(harness, 1, says)
    assert len(looks(harness, 2)) == 1
    assert stops(harness) == []


def test_the_survivors_of_a_wait_in_vain_are_looked_at_before_they_are_stopped() -> None:
    harness, judged = judged_training()
    times_out(harness, 1)
    assert len(looks(harness, 2)) == 1
    assert stops(harness) == []
    harness.say(1, msg.Looked(1, looks(harness, 1)[-1].number, ()))
    answer(harness, 2, "sleep")
    assert stops(harness) == []
    harness.wait(PLACES_S + 0.1)
    assert [stop.reason for stop in stops(harness)] == [msg.StopReason.WORKER_FAILED]
    harness.both_say(msg.Stopped(1))
    (story,) = judged[0].survivors
    assert (story.rank, story.samples[0].frames[0].function) == (1, "sleep")


def test_a_survivor_that_waits_in_vain_too_may_say_so() -> None:
    harness, judged = judged_training()
    times_out(harness, 1)
    harness.say(1, msg.Looked(1, looks(harness, 1)[-1].number, ()))
    answer(harness, 2)
    times_out(harness, 2)
    assert len(stops(harness)) == 1
    harness.both_say(msg.Stopped(1))
    assert [failure.rank for failure in judged[0].failures] == [0, 1]
    assert judged[0].survivors == ()


def test_those_that_do_not_answer_are_stopped_all_the_same() -> None:
    harness = training()
    times_out(harness, 1)
    harness.wait(PLACES_S + 0.1)
    assert len(stops(harness)) == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_failure_with_a_reason_of_its_own_stops_them_at_once(first: bool) -> None:
    harness = training()
    if not first:
        times_out(harness, 1)
    harness.fail(2)
    assert len(stops(harness)) == 1


# --- a bare failure ---------------------------------------------------------------------------------------------------


def reports(harness: CoordinatorHarness, failure: Failure, *, evidence_follows: bool = False) -> None:
    harness.say(failure.rank + 1, msg.WorkersFailed(harness.machine.generation, (failure,), evidence_follows))


@pytest.mark.parametrize("exit_code", [-9, -11, 75])
def test_an_exit_status_that_needs_no_words_stops_the_others_at_once(exit_code: int) -> None:
    harness, judged = judged_training()
    failure = bare(1, exit_code)
    reports(harness, failure, evidence_follows=True)
    assert [stop.text for stop in stops(harness)] == ["rank 0 failed on n1"]
    read = structs.replace(failure, stderr_tail="the last words")
    reports(harness, read)
    assert len(harness.noted("workers_failed")) == 1
    harness.both_say(msg.Stopped(1))
    if exit_code != 75:
        assert judged[0].failures == (read,), "the verdict is made of all that is known"


@pytest.mark.parametrize("exit_code", [1, 7, -6])
def test_what_an_exception_says_decides_when_the_others_are_stopped(exit_code: int) -> None:
    harness = training()
    failure = bare(1, exit_code)
    reports(harness, failure, evidence_follows=True)
    assert stops(harness) == []
    reports(harness, structs.replace(failure, message="ValueError: nan"))
    assert len(stops(harness)) == 1


def test_evidence_that_does_not_come_is_not_waited_for_long() -> None:
    harness = training()
    reports(harness, bare(1, 1), evidence_follows=True)
    harness.wait(EVIDENCE_S + 0.1)
    assert len(stops(harness)) == 1


def test_evidence_of_a_wait_in_vain_keeps_the_others_for_their_stacks() -> None:
    harness = training()
    reports(harness, bare(1, 1), evidence_follows=True)
    times_out(harness, 1)
    assert len(looks(harness, 2)) == 1
    assert stops(harness) == []
    harness.wait(PLACES_S + 0.1)
    assert len(stops(harness)) == 1


def test_the_first_that_failed_stays_the_first_when_its_evidence_is_the_last() -> None:
    harness, judged = judged_training()
    first, second = bare(1, -9), bare(2, 1)
    reports(harness, first, evidence_follows=True)
    reports(harness, second, evidence_follows=True)
    first, second = (structs.replace(each, message=f"rank {each.rank}") for each in (first, second))
    reports(harness, second)
    reports(harness, first)
    harness.both_say(msg.Stopped(1))
    assert judged[0].failures == (first, second)


# --- a lost connection ------------------------------------------------------------------------------------------------

CLOSED = (
    "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:39846",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:3690, remote process exited or there was a network error",
    "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.",
)


@pytest.mark.parametrize("says", CLOSED)
def test_whoever_closed_a_connection_may_say_why_before_it_is_stopped(says: str) -> None:
    harness = training()
    fails(harness, 1, says)
    assert stops(harness) == []
    harness.fail(2)
    assert len(stops(harness)) == 1


def test_whoever_closed_a_connection_may_end_with_0() -> None:
    harness, judged = judged_training()
    fails(harness, 1, CLOSED[0])
    harness.say(2, msg.WorkerDone(1, 0))
    assert harness.machine.phase is Phase.STOPPING
    harness.say(1, msg.Stopped(1))
    harness.say(2, msg.Stopped(1))
    assert judged[0].done == (1,)


def test_after_a_lost_connection_nobody_is_waited_for_for_long() -> None:
    harness = training()
    fails(harness, 1, CLOSED[0])
    harness.wait(REASON_S + 0.1)
    assert len(stops(harness)) == 1


def test_where_all_have_lost_their_peers_nobody_is_waited_for() -> None:
    harness = training()
    fails(harness, 1, CLOSED[0])
    fails(harness, 2, CLOSED[0])
    assert len(stops(harness)) == 1


def test_a_wait_in_vain_after_a_lost_connection_is_looked_at() -> None:
    harness = training()
    fails(harness, 1, CLOSED[0])
    times_out(harness, 1)
    assert len(looks(harness, 2)) == 1


# --- ranks that agreed to end ------------------------------------------------------------------------------------------


RAISED = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    raise RuntimeError("stop")\n'


def raises(harness: CoordinatorHarness, node: int, says: str) -> None:
    reports(harness, bare(node, 1), evidence_follows=True)
    reports(harness, structs.replace(bare(node, 1), message=says, traceback=RAISED + says))


@pytest.mark.parametrize(
    "says", ["RuntimeError: another rank failed", "RuntimeError: error on rank 1: op.preamble.length"]
)
def test_the_rank_that_the_others_report_may_say_why_before_it_is_stopped(says: str) -> None:
    harness = training()
    raises(harness, 1, says)
    harness.wait(REASON_S / 2)
    assert stops(harness) == []
    harness.fail(2)
    assert len(stops(harness)) == 1


def test_a_rank_that_reports_another_one_is_not_kept_for_ever() -> None:
    harness = training()
    raises(harness, 1, "RuntimeError: not all ranks succeeded")
    harness.wait(REASON_S + 0.1)
    assert len(stops(harness)) == 1


def test_ranks_that_all_raise_on_purpose_are_all_heard() -> None:
    harness, judged = judged_training()
    raises(harness, 1, "RuntimeError: stop")
    assert stops(harness) == []
    raises(harness, 2, "RuntimeError: stop")
    assert len(stops(harness)) == 1
    harness.both_say(msg.Stopped(1))
    assert len(judged[0].failures) == 2


def test_one_rank_that_raises_on_purpose_stops_the_others_shortly_later() -> None:
    harness = training()
    raises(harness, 1, "RuntimeError: stop")
    harness.wait(AGREED_S + 0.1)
    assert len(stops(harness)) == 1


# --- faults of those who only look ------------------------------------------------------------------------------------


def broken(_: object) -> Any:
    raise KeyError("x")


def test_an_examination_that_fails_is_noted_and_finds_nothing() -> None:
    harness = training()
    harness.machine._monitor._examine = broken
    look_on(harness, 500.0, 1, 2)
    assert harness.machine.phase is Phase.RUNNING
    assert harness.noted("observer_fault")[0] == {"what": "examine", "error": "KeyError: 'x'"}
    assert notices(harness, 1) == []


def test_a_judge_that_fails_is_noted_and_the_first_failure_is_to_blame() -> None:
    harness = training(max_restarts=1)
    harness.machine._endings._judge = broken
    harness.fail(2, 3)
    harness.both_say(msg.Stopped(1))
    assert (harness.machine.phase, harness.machine.budget.used) == (Phase.PREPARING, 1)
    assert harness.noted("observer_fault")[0]["what"] == "judge"
    assert harness.noted("verdict")[0]["cause"] == "rank 1 on n2 ended with exit code 3"
