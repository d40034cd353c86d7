"""Steps as the coordinator sees them: durations, own parts, training time, and who is slow."""

from __future__ import annotations

import pytest

from holdfast.protocol.messages import Progress
from holdfast.protocol.rank_progress import RankProgress, Stage
from holdfast.protocol.throughput import STEPS_TO_COUNT, WINDOWS_MAX, Throughput

NODES = [("a#1", "a", (0, 1)), ("b#1", "b", (0,))]


def throughput(began_s: float = 100.0) -> Throughput:
    return Throughput(NODES, began_s, 60.0)


def steps(local_rank: int, number: int, age_s: float = 0.0, own_s: float = 0.0) -> RankProgress:
    return RankProgress(local_rank, Stage.STEPPING, number, age_s, own_s)


def test_a_rank_is_found_by_its_node_and_its_place_there() -> None:
    world = throughput()
    assert [(pace.rank, pace.host, pace.local_rank) for pace in world.ranks] == [(0, "a", 0), (1, "a", 1), (2, "b", 0)]
    assert world.of("b#1", 0) is world.ranks[2]
    for member, local_rank in (("a#1", 2), ("b#1", 1), ("a#1", -1), ("c#1", 0)):
        assert world.of(member, local_rank) is None


def test_a_rank_counts_from_its_third_step_on() -> None:
    world = throughput()
    for number in range(STEPS_TO_COUNT):
        world.heard("a#1", [steps(0, number)], 101.0 + number)
        assert world.newest_s is None
    world.heard("a#1", [steps(0, STEPS_TO_COUNT, 0.25)], 110.0)
    assert world.newest_s == 109.75


def test_the_time_left_comes_from_the_jobs_own_count_and_rank_zeros_node() -> None:
    """Its steps are batches: two of them make one step of the optimizer."""
    world = throughput()
    for second in range(120):
        for member, behind in (("a#1", 0), ("b#1", 2)):
            message = Progress(1, (steps(0, second * 5),), 4000 + second * 10 - behind, 10_000)
            world.follow_job(100.0 + second, member, message)
            world.heard(member, message.ranks, 100.0 + second)
    assert (world.job.steps, world.job_steps) == (5190, 10_000)
    assert world.left_s == pytest.approx(481.0)
    world.follow_job(300.0, "a#1", Progress(1, (steps(0, 600),), 10_001, 10_000))
    assert world.left_s == 0, "more steps than were announced"
    untold = throughput()
    untold.follow_job(101.0, "a#1", Progress(1, (steps(0, 9),)))
    assert (untold.job_steps, untold.left_s) == (0, 0)


def test_the_same_steps_again_are_no_progress() -> None:
    world = throughput()
    assert world.heard("a#1", [steps(0, 50), steps(1, 50)], 110.0)
    assert not world.heard("a#1", [steps(0, 50, 1.01), steps(1, 50, 0.99)], 111.0)
    assert world.newest_s == 110.0
    assert world.heard("a#1", [steps(0, 50, 2.0), steps(1, 51)], 112.0)


def test_steps_from_before_the_generation_was_ours_are_as_old_as_it() -> None:
    world = throughput(began_s=100.0)
    world.heard("a#1", [steps(0, 900, age_s=75.0)], 101.0)
    assert world.newest_s == 100.0


def test_the_median_step_is_that_of_the_last_minute() -> None:
    world = throughput()
    now = done = 0.0
    for duration in [9.0] * 20 + [0.5] * 600:
        now, done = now + duration, done + 1
        world.heard("b#1", [steps(0, int(done), own_s=done * 0.1)], 100.0 + now)
    assert world.ranks[2].step_s == pytest.approx(0.5)
    assert world.ranks[2].own_step_s == pytest.approx(0.1)
    assert len(world.ranks[2].window_steps_s) == WINDOWS_MAX


def test_a_pause_is_no_step() -> None:
    """One evaluation of five minutes among ordinary steps does not move the median."""
    world = throughput()
    now = 100.0
    for number in range(4, 100):
        now += 300.0 if number == 50 else 1.0
        world.heard("b#1", [steps(0, number)], now)
    assert world.step_s() == pytest.approx(1.0)


def test_a_rough_value_is_there_before_the_first_window_is_over() -> None:
    world = throughput()
    assert world.ranks[2].step_s == 0.0
    world.heard("b#1", [steps(0, 10)], 101.0)
    world.heard("b#1", [steps(0, 20, own_s=0.5)], 102.0)
    assert world.ranks[2].step_s == pytest.approx(0.1)


def test_training_time_leaves_out_what_is_too_long_for_a_step() -> None:
    world = throughput()
    for at_s in (110.0, 111.0, 112.0, 412.0, 413.0):
        world.heard("b#1", [steps(0, int(at_s))], at_s)
    assert world.training_s == pytest.approx(3.0)


def test_several_ranks_train_at_the_same_time() -> None:
    world = throughput()
    for at_s in (110.0, 111.0, 112.0):
        world.heard("a#1", [steps(0, int(at_s)), steps(1, int(at_s))], at_s)
        world.heard("b#1", [steps(0, int(at_s))], at_s)
    assert world.training_s == pytest.approx(2.0)


def test_stages_are_counted() -> None:
    world = throughput()
    assert not world.grouping
    assert world.heard("a#1", [RankProgress(0, Stage.MEETING)], 105.0)
    assert world.grouping
    assert world.stage_newest_s == 105.0
    assert not world.heard("a#1", [RankProgress(0, Stage.MEETING)], 106.0)
    assert world.heard("a#1", [RankProgress(0, Stage.READY)], 107.0)
    assert not world.grouping
    assert sum(world.in_stage.values()) == 3


def test_who_has_ended_makes_no_progress() -> None:
    world = throughput()
    world.heard("b#1", [steps(0, 9)], 110.0)
    world.enter(world.ranks[2], Stage.DONE, 111.0)
    assert not world.heard("b#1", [steps(0, 12)], 112.0)
    assert not world.heard("a#1", [RankProgress(0, Stage.DONE)], 112.0), "an end is no step"
    assert [pace.rank for pace in world.alive()] == [1]


def test_a_spare_neither_trains_nor_hides_that_nobody_does() -> None:
    world = throughput()
    world.heard("b#1", [steps(0, 9)], 110.0)
    assert world.heard("b#1", [RankProgress(0, Stage.SPARE, 9, pid=7)], 111.0), "a stage"
    assert not world.heard("b#1", [RankProgress(0, Stage.SPARE, 900, beats=900, pid=7)], 120.0)
    assert (world.newest_s, world.ranks[2].steps, world.ranks[2].pid) == (110.0, 9, 7)
    assert ([pace.rank for pace in world.alive()], [pace.rank for pace in world.spares()]) == ([0, 1], [2])


@pytest.mark.parametrize("nonsense", [steps(0, -5), steps(99, 50), steps(-1, 50), steps(0, 50, age_s=-7.0)])
def test_nonsense_harms_nobody(nonsense: RankProgress) -> None:
    world = throughput()
    world.heard("b#1", [nonsense], 110.0)
    assert world.newest_s in (None, 110.0)


def test_beats_of_a_rank_that_makes_no_steps_meanwhile_are_progress() -> None:
    """An evaluation says by beat() that it goes on."""
    world = throughput()
    world.heard("a#1", [steps(0, 50)], 110.0)
    assert world.heard("a#1", [RankProgress(0, Stage.STEPPING, 50, 0.5, 0.0, beats=1)], 200.0)
    assert (world.newest_s, world.ranks[0].newest_s) == (199.5, 199.5)
    assert not world.heard("a#1", [RankProgress(0, Stage.STEPPING, 50, 1.5, 0.0, beats=1)], 201.0)
    assert world.ranks[0].step_s == 0.0, "a beat is no step"


def test_an_optimizer_that_begins_after_beats_is_counted_from_its_first_step() -> None:
    world = throughput()
    for second in range(1, 21):
        world.heard("b#1", [RankProgress(0, Stage.STEPPING, second * 100, beats=second * 100)], 100.0 + second)
    for second in range(1, 21):
        assert world.heard("b#1", [RankProgress(0, Stage.STEPPING, second, beats=2000)], 120.0 + second)
    assert world.newest_s == 140.0
    assert (world.ranks[2].steps, world.ranks[2].step_s) == (20, pytest.approx(1.0))


def test_the_steps_that_do_not_count_tell_how_long_one_is_until_one_counts() -> None:
    """Steps of ten minutes: after the third one nobody shall wonder a minute later."""
    world = throughput()
    for number in (1, 2, 3):
        world.heard("b#1", [steps(0, number)], 100.0 + 600.0 * number)
    assert world.newest_s == 1900.0
    assert world.step_s() == pytest.approx(600.0)
    world.heard("b#1", [steps(0, 4)], 1960.0)
    assert world.step_s() == pytest.approx(60.0)
