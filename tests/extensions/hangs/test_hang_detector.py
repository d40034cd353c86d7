"""When a job is suspected to stand still, and what follows from what is seen: tables over pretend stacks."""

from __future__ import annotations

import itertools
import re

import pytest
from msgspec import structs

from holdfast.extensions.hangs.hang_detector import EndHung, HangDetector, HangOver, ReportHang, ReportStill
from holdfast.protocol.policy import Limits
from holdfast.protocol.rank_progress import Finding, HangKind, Stage
from tests.extensions.hangs.hang_harness import ALONE, HUNG, LIVELY, MOVING, PAUSED, STUCK, Hall, training

# --- suspicion --------------------------------------------------------------------------------------------------------


def test_steps_are_made_and_nobody_looks() -> None:
    hall = training()
    for number in range(200, 400):
        assert hall.wait(59.0) == []
        hall.steps(number)
    assert hall.looks == []


def test_three_looks_begin_when_the_newest_step_is_a_minute_old() -> None:
    hall = training()
    hall.wait(59.9)
    assert hall.looks == []
    hall.wait(5.0)
    assert hall.looks == [70.0, 72.0, 74.0]
    (story_a, story_b) = hall.stories[0]
    assert (story_a.rank, story_a.host, story_b.rank, story_b.host) == (0, "a", 1, "b")
    assert len(story_a.samples) == 3
    assert story_a.age_s == pytest.approx(64.5)


def test_a_slow_answer_puts_the_next_look_off() -> None:
    hall = training(answers_after_s=5.0)
    hall.wait(80.0)
    assert hall.looks[:3] == [70.0, 75.0, 80.0]


@pytest.mark.parametrize(("number", "again_s"), [(0, 124.5), (1, 94.5), (2, 94.5)])
def test_the_first_steps_may_take_as_long_as_they_like_while_somebody_works(number: int, again_s: float) -> None:
    """They are looked at every minute: a compilation moves."""
    hall = Hall(finding=MOVING)
    hall.progress(Stage.STEPPING if number else Stage.READY, number)
    assert hall.wait(4000.0) == []
    assert hall.looks[:4] == [60.0, 62.0, 64.0, again_s]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_hang_before_the_third_step_is_reported_and_ended_by_the_time_out(number: int) -> None:
    hall = Hall(report_s=15.0)
    hall.progress(Stage.STEPPING if number else Stage.READY, number)
    assert hall.wait(14.0) == []
    report = hall.report(8.0)
    assert "if nothing moves for another 296 s" in report.text
    assert isinstance(hall.wait(400.0)[-1], EndHung)


def test_a_hang_that_is_ended_says_no_more_how_its_process_goes_on() -> None:
    hall = Hall(report_s=15.0)
    stopped = "rank 1 on a is stopped by a signal"
    hall.finding = structs.replace(hall.finding, text=f"{stopped} (kill -CONT 77 lets it go on) for 9 s")
    hall.progress(Stage.READY, 0)
    assert "kill -CONT 77" in hall.report(20.0).text
    end = hall.wait(400.0)[-1]
    assert isinstance(end, EndHung)
    assert end.text.endswith(f"{stopped} for 9 s")
    assert end.finding.text == f"{stopped} for 9 s"


def test_one_of_the_first_steps_puts_the_looks_off() -> None:
    hall = Hall()
    for number in (0, 1, 2):
        hall.progress(Stage.STEPPING if number else Stage.READY, number)
        hall.wait(50.0)
    assert hall.looks == []
    hall.wait(20.0)
    assert hall.looks[0] == 160.0


def test_a_hang_of_a_script_that_counts_no_steps_is_over_when_somebody_works() -> None:
    hall = Hall()
    hall.progress(Stage.READY)
    hall.report(70.0)
    hall.finding = MOVING
    (over,) = hall.wait(15.0)
    assert isinstance(over, HangOver)
    assert hall.watch.standing(hall.now) is None
    assert hall.wait(1000.0) == []


def test_a_pause_before_the_first_step_is_reported_and_ends_nothing() -> None:
    """A server that waits for requests: nothing shows that it trains at all."""
    hall = Hall(finding=PAUSED)
    hall.progress(Stage.READY)
    report = hall.report(3000.0)
    assert "it is left alone before its first step" in report.text


@pytest.mark.parametrize("number", [1, 2])
def test_a_pause_after_one_step_is_ended(number: int) -> None:
    hall = Hall(finding=PAUSED)
    hall.progress(Stage.STEPPING, number)
    assert isinstance(hall.wait(3000.0)[-1], EndHung)


def test_the_last_rank_is_ended_although_no_step_was_made() -> None:
    """All others have ended, so no request can come: a thread that does not end, in a script without an optimizer."""
    hall = Hall(finding=ALONE)
    hall.progress(Stage.READY)
    done = hall.throughput.of("a#1", 0)
    assert done is not None
    hall.throughput.enter(done, Stage.DONE, hall.now)
    assert isinstance(hall.wait(3000.0)[-1], EndHung)


def test_a_rank_that_waits_as_a_spare_hides_no_hang_and_is_no_part_of_it() -> None:
    """It makes no steps, and nobody waits for it."""
    hall = Hall(finding=structs.replace(PAUSED, culprits=(0,), text="rank 0 is in sleep"))
    for second in range(1, 11):
        hall.now = float(second)
        hall.progress(Stage.STEPPING, second * 10, ranks="a")
        hall.progress(Stage.SPARE, ranks="b")
    report = hall.wait(400.0)[0]
    assert isinstance(report, ReportHang)
    assert {story.rank for stories in hall.stories for story in stories} == {0}
    assert report.finding.kind is HangKind.PAUSED, "the other rank has not ended"


class TestLively:
    """A rank that may go on by itself."""

    def test_it_is_ended_after_six_times_the_time_out(self) -> None:
        hall = training(finding=LIVELY, timeout_s=100.0)
        (report,) = hall.wait(60.0 + 590.0)
        assert isinstance(report, ReportHang)
        assert "another 596 s" in report.text
        (end,) = hall.wait(30.0)
        assert isinstance(end, EndHung)
        assert "(--hang-timeout 100, 6 times)" in end.text

    def test_it_is_reported_at_the_time_out_if_it_pauses(self) -> None:
        hall = training(finding=structs.replace(PAUSED, lively=True), timeout_s=100.0)
        assert hall.wait(60.0 + 95.0) == []
        hall.report(30.0)

    def test_the_time_out_counts_from_the_newest_sign_of_life(self) -> None:
        hall = training(finding=LIVELY, timeout_s=100.0)
        hall.wait(60.0 + 200.0)
        hall.finding = HUNG
        assert hall.wait(70.0) == []
        assert isinstance(hall.wait(50.0)[-1], EndHung)

    def test_signs_of_life_that_come_and_go_put_the_end_off_but_not_for_ever(self) -> None:
        hall = training(finding=LIVELY, timeout_s=100.0)
        hall.wait(60.0)
        while not hall.orders or not isinstance(hall.orders[-1], EndHung):
            hall.finding = LIVELY if hall.finding is HUNG else HUNG
            hall.wait(30.0)
        assert 60.0 + 600.0 <= hall.now <= 60.0 + 700.0


class TestWorkWithoutSteps:
    """Traffic and processor time show work, and may be noise."""

    def test_the_time_without_a_step_is_reported_and_again_when_it_has_doubled(self) -> None:
        hall = training(finding=MOVING)
        reports = hall.wait(2000.0)
        assert all(isinstance(report, ReportStill) for report in reports)
        times = [report.still_s for report in reports if isinstance(report, ReportStill)]
        assert len(times) == 3
        assert times[0] >= 300.0
        assert all(later >= 2 * earlier for earlier, later in itertools.pairwise(times))
        assert reports[0].text.endswith(": rank 1 works")

    def test_it_is_no_hang(self) -> None:
        hall = training(finding=MOVING)
        hall.wait(2000.0)
        assert hall.watch.standing(hall.now) is None


def test_a_start_may_take_as_long_as_it_likes() -> None:
    hall = Hall()
    hall.wait(4000.0)
    assert hall.looks == []


def test_long_steps_have_more_patience() -> None:
    """Steps of 10 s: 20 of them are 200 s."""
    hall = Hall()
    for number in range(1, 12):
        hall.now = number * 10.0
        hall.steps(number)
    hall.wait(199.0)
    assert hall.looks == []
    hall.wait(2.0)
    assert hall.looks == [310.0]


def minutes_long(step_s: float) -> Hall:
    hall = Hall(report_s=15.0)
    for number in range(1, 12):
        hall.now = number * step_s
        hall.steps(number)
    return hall


def test_steps_of_a_minute_are_waited_for_five_minutes_and_not_twenty() -> None:
    hall = minutes_long(60.0)
    hall.wait(299.0)
    assert hall.looks == []
    hall.report(10.0)


def test_three_steps_are_always_waited_for() -> None:
    hall = minutes_long(400.0)
    hall.wait(1199.0)
    assert hall.looks == []
    hall.wait(2.0)
    assert len(hall.looks) == 1


def test_any_rank_that_steps_is_enough() -> None:
    hall = training()
    for number in range(101, 120):
        hall.wait(40.0)
        hall.progress(Stage.STEPPING, number, ranks="b")
    assert hall.looks == []


def test_one_that_still_runs_after_the_others_have_ended_is_watched() -> None:
    hall = training()
    hall.throughput.enter(hall.throughput.ranks[0], Stage.DONE, hall.now)
    hall.report(70.0)
    assert [story.rank for story in hall.stories[0]] == [1]


# --- what follows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finding", [HUNG, STUCK], ids=["hung", "stuck"])
def test_a_hang_is_told_once_and_stands(finding: Finding) -> None:
    hall = training(finding=finding, timeout_s=0.0)
    report = hall.report(60.0 + 15.0)
    assert report.finding == finding
    assert report.still_s == pytest.approx(64.5)
    assert len(report.text.splitlines()) <= 4
    assert hall.wait(5000.0) == []
    assert hall.watch.standing(hall.now) == finding


def test_what_is_told_of_a_hang() -> None:
    hall = training()
    report = hall.report(70.0)
    assert report.text.splitlines() == [
        "rank 1 on b is in sleep at data.py:17 for 64 s",
        "1 other waits in all_reduce",
        "stacks of rank 1, on b: /run/rank1.txt",
        "if nothing moves for another 296 s its workers are ended (--hang-timeout)",
    ]
    assert report.files == {1: "/run/rank1.txt", 0: "/run/rank0.txt"}


def test_what_may_only_be_slow_is_told_after_a_minute() -> None:
    hall = training(finding=structs.replace(HUNG, slow=True), report_s=15.0, timeout_s=0.0)
    assert hall.wait(59.0) == []
    report = hall.report(5.0)
    assert report.still_s < 65.0


def test_what_may_only_be_slow_is_told_before_it_is_ended() -> None:
    hall = training(finding=structs.replace(HUNG, slow=True), report_s=15.0, timeout_s=20.0)
    report, end = hall.wait(60.0)
    assert isinstance(report, ReportHang)
    assert isinstance(end, EndHung)


def test_one_long_call_that_computes_is_not_told_for_minutes() -> None:
    hall = training(finding=structs.replace(HUNG, busy=True), report_s=15.0, timeout_s=300.0)
    assert hall.wait(310.0) == []
    hall.report(20.0)


def test_the_only_rank_that_is_left_is_named_and_ended() -> None:
    hall = training(finding=ALONE, report_s=15.0, timeout_s=100.0)
    hall.throughput.enter(hall.throughput.ranks[0], Stage.DONE, hall.now)
    report, end = hall.wait(150.0)
    assert isinstance(report, ReportHang)
    assert (report.finding.kind, report.still_s) == (HangKind.HUNG, pytest.approx(19.5, abs=5.0))
    assert report.text.startswith("rank 1 on b is in _shutdown for 31 s; all other ranks have ended\n")
    assert isinstance(end, EndHung)
    assert end.culprit.rank == 1


def test_who_computes_is_told_and_not_ended_until_it_stands_still() -> None:
    busy = structs.replace(HUNG, busy=True, signature="computes")
    hall = training(finding=busy, report_s=15.0, timeout_s=20.0)
    report = hall.report(3000.0)
    assert "it is left alone while it is at work" in report.text
    hall.finding = HUNG
    (end,) = hall.wait(60.0)
    assert isinstance(end, EndHung)


def test_with_the_defaults_a_hang_is_told_within_20_seconds() -> None:
    hall = training()
    hall.watch = HangDetector(Limits(), hall.throughput, hall.examine)
    hall.report(20.0)


def test_a_hang_that_stands_is_found_again_with_ages_that_grow() -> None:
    hall = training()
    hall.wait(70.0)
    assert hall.watch.standing(hall.now) == HUNG
    ages = []
    for _ in range(3):
        hall.now += 20.0
        assert hall.watch.standing(hall.now) is not None
        ages.append([story.age_s for story in hall.stories[-1]])
    assert ages == [[hall.now - 40 - 10] * 2, [hall.now - 20 - 10] * 2, [hall.now - 10] * 2]
    hall.finding = MOVING
    assert hall.watch.standing(hall.now) == HUNG, "it is over with a step, or as the watch says"
    hall.steps(500)
    assert hall.watch.standing(hall.now) is None


def test_it_is_looked_at_again_and_again() -> None:
    hall = training()
    hall.wait(110.0)
    assert hall.looks == [70.0, 72.0, 74.0, 84.5, 95.0, 105.5, 116.0]


def test_a_step_ends_it() -> None:
    hall = training()
    hall.wait(100.0)
    hall.steps(101)
    assert hall.orders[-1] == HangOver(HUNG, pytest.approx(100.0))  # type: ignore[arg-type]
    assert hall.watch.standing(hall.now) is None
    assert hall.wait(59.0) == []
    hall.wait(2.0)
    assert hall.looks[-1] == 170.0, "and begins another minute"


def test_a_step_before_it_was_told_ends_it_in_silence() -> None:
    hall = training()
    hall.wait(61.0)
    hall.steps(101)
    assert hall.orders == []
    assert hall.wait(50.0) == []


def test_who_moves_is_looked_at_later() -> None:
    hall = training(finding=MOVING)
    assert hall.wait(290.0) == []
    assert hall.looks[:6] == [70.0, 72.0, 74.0, 104.5, 106.5, 108.5]


@pytest.mark.parametrize("finding", [PAUSED, ALONE], ids=["of all", "of the only rank there is"])
def test_a_pause_is_not_told_until_the_time_out(finding: Finding) -> None:
    hall = training(finding=finding, timeout_s=300.0)
    assert hall.wait(60.0 + 299.0) == []
    report, end = hall.wait(10.0)
    assert isinstance(report, ReportHang)
    assert isinstance(end, EndHung)


def test_without_a_time_out_a_pause_is_told_all_the_same() -> None:
    hall = training(finding=PAUSED, timeout_s=0.0)
    assert hall.wait(60.0 + 299.0) == []
    report = hall.report(20.0)
    assert "it is left alone (--hang-timeout 0)" in report.text
    looks = len(hall.looks)
    assert hall.wait(1000.0) == []
    assert len(hall.looks) - looks <= 1000.0 / 10.0


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [1.0, 5.0, 30.0, 300.0])
def test_the_generation_is_ended_when_nobody_has_moved_for_the_time_out(timeout_s: float) -> None:
    hall = training(timeout_s=timeout_s)
    *_, end = hall.wait(1000.0)
    assert isinstance(end, EndHung)
    assert end.finding == HUNG
    assert (end.culprit.rank, end.culprit.samples[-1].pid) == (1, 11)
    assert re.fullmatch(
        r"nothing has moved for \d+ s \(--hang-timeout [\d]+\): rank 1 on b is in sleep at .*", end.text
    )
    assert hall.looks[-1] - 70.0 == pytest.approx(max(timeout_s, 4.0))


def test_never_by_time_out_0() -> None:
    hall = training(timeout_s=0.0)
    assert len(hall.wait(100_000.0)) == 1


def test_other_stacks_begin_the_time_out_anew() -> None:
    hall = training(timeout_s=100.0)
    for n in range(20):
        hall.finding = Finding(kind=HangKind.HUNG, code="HF240", text="t", culprits=(1,), signature=f"{n}")
        assert all(isinstance(order, ReportHang) for order in hall.wait(60.0))
    (end,) = hall.wait(100.0)
    assert isinstance(end, EndHung)


def test_one_that_moves_in_between_begins_it_anew() -> None:
    hall = training(timeout_s=100.0)
    hall.wait(60.0 + 80.0)
    hall.finding = MOVING
    hall.wait(15.0)
    hall.finding = HUNG
    assert hall.wait(80.0) == []
    assert isinstance(hall.wait(40.0)[-1], EndHung)


def test_nobody_who_answers_is_no_reason_to_end_anything() -> None:
    hall = training(answer=(), finding=PAUSED)
    assert hall.wait(5000.0) == []


def test_one_node_that_never_answers_is_told_without() -> None:
    hall = training(answer=(0,))
    hall.report(80.0)
    assert [len(story.samples) for story in hall.stories[0]] == [3, 0]


def test_a_rank_seen_once_only_is_looked_at_once_more() -> None:
    """One sample does not tell who moves from who does not."""
    hall = training()
    hall.answer = (0,)
    hall.wait(63.0)
    hall.answer = (0, 1)
    hall.wait(2.0)
    assert hall.stories == []
    hall.wait(2.0)
    assert [len(story.samples) for story in hall.stories[0]] == [3, 2]


# --- when a process group does not come to stand: who is suspected, and what is told ----------------------------------


def test_a_process_group_that_does_not_come_to_stand_is_told_with_who_has_not_come() -> None:
    hall = Hall(finding=STUCK, timeout_s=0.0)
    hall.now = 20.0
    hall.progress(Stage.MEETING, ranks="a")
    assert hall.wait(59.0) == []
    report = hall.report(10.0)
    assert hall.store, "the nodes try to reach the store"
    assert report.text.splitlines()[0] == "rank 0 waits in init_process_group for 64 s; rank 1 on b has not come"
    assert (report.finding.code, report.finding.culprits, report.finding.kind) == ("HF245", (1,), HangKind.HUNG)


def test_ranks_that_have_ended_meanwhile_are_no_part_of_the_group_that_others_wait_for() -> None:
    hall = Hall(finding=STUCK, timeout_s=0.0)
    hall.now = 20.0
    hall.progress(Stage.MEETING, ranks="a")
    hall.wait(62.0)
    hall.progress(Stage.DONE, ranks="a")
    assert "init_process_group" not in hall.report(60.0).text


def test_the_node_that_cannot_reach_the_store_is_told() -> None:
    hall = Hall(finding=STUCK, reach=("b cannot reach a:29500: timed out",))
    hall.progress(Stage.MEETING)
    report = hall.report(70.0)
    assert report.text.splitlines()[:2] == [
        "ranks 0, 1 wait in init_process_group for 64 s",
        "b cannot reach a:29500: timed out (firewall? wrong address?)",
    ]
    assert report.finding.code == "HF245"


def test_who_works_before_it_comes_is_left_in_peace() -> None:
    """Rank 1 unpacks a data set before it asks for the process group."""
    hall = Hall(finding=MOVING)
    hall.progress(Stage.MEETING, ranks="a")
    assert hall.wait(3000.0) == []


def test_a_rank_that_comes_further_is_progress() -> None:
    hall = Hall(finding=STUCK)
    hall.progress(Stage.MEETING)
    hall.wait(50.0)
    hall.progress(Stage.GROUPING, ranks="a")
    hall.wait(50.0)
    assert hall.looks == []
    hall.progress(Stage.READY)
    hall.wait(59.0)
    assert hall.looks == [], "before the first step there is no hurry"


def test_who_is_waited_for_and_pauses_may_be_slow() -> None:
    hall = Hall(finding=PAUSED, report_s=15.0)
    hall.progress(Stage.MEETING, ranks="a")
    assert hall.wait(59.0) == []
    hall.report(8.0)


def test_the_group_stands_at_last() -> None:
    hall = Hall(finding=STUCK)
    hall.progress(Stage.GROUPING)
    hall.wait(100.0)
    hall.progress(Stage.READY)
    assert isinstance(hall.orders[-1], HangOver)
