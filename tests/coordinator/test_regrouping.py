"""Which losses the other workers survive, what that costs, and how replacements and new nodes join them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from holdfast.coordinator.coordinator_events import LinkClosed, LinkOpened
from holdfast.coordinator.world import Phase
from holdfast.protocol.messages import (
    Assign,
    CanGoOn,
    CannotRegroup,
    Drain,
    Held,
    Join,
    Leave,
    Notice,
    Prepared,
    Progress,
    Regroup,
    Replace,
    ReplacementFailed,
    ReplacementReady,
    Start,
    Stop,
    Stopped,
    StoreLost,
    WorkerDone,
    WorkersFailed,
)
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import Grow, NodeSpec
from holdfast.protocol.rank_progress import RankProgress, Stage
from holdfast.protocol.train_contract import Survive
from tests.coordinator.coordinator_harness import (
    LIMITS,
    CoordinatorHarness,
    at_safe_point,
    growing,
    regrouping,
    running,
    two_of_three,
)


def all_can_go_on(**options: Any) -> CoordinatorHarness:
    """Two nodes of two workers each; all run in `ht.survive`."""
    harness = running(**{"nproc": 2, "max_restarts": 3, **options})
    harness.can_go_on(1, 2)
    return harness


def refusal(harness: CoordinatorHarness) -> str:
    """Why the job was restarted instead."""
    assert harness.machine.phase is Phase.STOPPING
    notes = harness.noted("regroup_refused")
    return str(notes[-1]["reason"]) if notes else ""


def went_on(harness: CoordinatorHarness) -> None:
    """All nodes are prepared, and their workers are able to go on from there."""
    harness.prepare(1, 2)
    assert harness.machine.phase is Phase.RUNNING
    harness.can_go_on(1, 2)


# --- a loss -----------------------------------------------------------------------------------------------------------


def test_ranks_have_no_gap_after_a_loss() -> None:
    harness = all_can_go_on()
    harness.kill_worker(1, 0)
    places = [harness.last(link).assign for link in (1, 2)]  # type: ignore[union-attr]
    assert [(place.rank_base, place.local_ranks) for place in places] == [(0, (1,)), (1, None)]
    assert [place.world_size for place in places] == [3, 3]


def test_a_job_without_ht_survive_is_restarted_without_a_word_about_it() -> None:
    harness = running(nproc=2, max_restarts=3)
    harness.kill_worker(2)
    assert refusal(harness) == ""
    assert harness.last(1).text == "rank 2 failed on n2"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("exit_code", "kind", "why"),
    [
        (1, {}, "rank 2 exited"),
        (-9, {"out_of_memory": True}, "rank 2 ran out of memory"),
        (-6, {"error_type": "RuntimeError"}, "rank 2 exited"),
        (-9, {"started": False}, "rank 2 exited"),
    ],
)
def test_what_the_others_may_do_as_well_is_no_accident(exit_code: int, kind: dict[str, Any], why: str) -> None:
    harness = all_can_go_on()
    failure = Failure(rank=2, local_rank=0, host="n2", pid=1, exit_code=exit_code)
    harness.say(2, WorkersFailed(1, (structs.replace(failure, **kind),)))
    assert refusal(harness) == why


def test_out_of_memory_is_known_only_from_the_evidence_and_refused_then() -> None:
    harness = all_can_go_on()
    harness.kill_worker(2)
    assert harness.machine.phase is Phase.REGROUPING
    failure = Failure(rank=2, local_rank=0, host="n2", pid=102, exit_code=-9, out_of_memory=True)
    harness.say(2, WorkersFailed(1, (failure,)))
    assert refusal(harness) == "rank 2 ran out of memory"
    assert harness.machine.budget.used == 1
    for link in (1, 2):
        harness.say(link, Stopped(2))
    assert harness.machine.budget.used == 1, "one loss costs one restart"


def test_a_rank_that_is_done_or_not_able_is_not_left_behind() -> None:
    harness = all_can_go_on()
    harness.say(1, WorkerDone(1, 1))
    harness.kill_worker(2)
    assert refusal(harness) == "rank 1 ended"
    harness = all_can_go_on()
    harness.say(1, CanGoOn(1, (0,)))
    harness.kill_worker(2)
    assert refusal(harness) == "not every rank runs in ht.survive"


def test_a_rank_that_ends_while_the_others_regroup_stops_them() -> None:
    harness = all_can_go_on()
    harness.kill_worker(2)
    harness.say(1, WorkerDone(1, 1))  # it crossed the order
    assert refusal(harness) == "rank 1 ended"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"survive": Survive.OFF}, ""),
        ({"min_ranks": 4}, "3 of at least 4 ranks left"),
        ({"max_restarts": 0}, "no restarts were allowed (--max-restarts 0)"),
    ],
)
def test_what_the_job_does_not_want(options: dict[str, Any], why: str) -> None:
    harness = all_can_go_on(**options)
    harness.kill_worker(2)
    assert refusal(harness) == why


def test_a_lost_node_is_survived_if_enough_nodes_are_left() -> None:
    harness = all_can_go_on(least=1)
    harness.give(LinkClosed(2, "reset"))
    (regroup,) = told(harness, Regroup)
    assert regroup.text == "n2 was lost: reset; 2 ranks go on"
    assert harness.machine.budget.used == 0
    harness = all_can_go_on()
    harness.give(LinkClosed(2, "reset"))
    assert refusal(harness) == "1 of at least 2 nodes left"


def test_a_node_that_had_to_stop_its_workers_ends_the_generation() -> None:
    harness = all_can_go_on()
    harness.kill_worker(2)
    harness.say(1, Stopped(2))
    assert harness.machine.phase is Phase.STOPPING


def test_a_refusal_of_a_worker_stops_all() -> None:
    harness = all_can_go_on()
    harness.kill_worker(2)
    harness.say(1, CannotRegroup(1, "about a generation that is over"))
    assert harness.machine.phase is Phase.REGROUPING
    harness.say(1, CannotRegroup(2, "its memory grew"))
    assert refusal(harness) == "its memory grew"
    assert harness.last(2).following.restart_count == 1  # type: ignore[union-attr]


def test_a_rank_lost_before_all_are_able_again_costs_no_other_process() -> None:
    harness = all_can_go_on(nproc=3)
    harness.kill_worker(2)
    harness.prepare(1, 2)
    harness.can_go_on(1)
    harness.kill_worker(2, 1)
    assert harness.last(2).assign.local_ranks == (2,)  # type: ignore[union-attr]
    assert not told(harness, Stop)
    went_on(harness)
    assert harness.machine.budget.used == 2, "each of the two is a loss of its own"


def test_a_rank_that_went_on_and_has_left_its_training_function_is_not_left_behind() -> None:
    harness = all_can_go_on(nproc=3)
    harness.kill_worker(2)
    harness.prepare(1, 2)
    harness.can_go_on(1)
    harness.say(1, CanGoOn(2, (0, 1)))
    harness.kill_worker(2, 1)
    assert refusal(harness) == "not every rank runs in ht.survive"


def test_losses_in_a_row_are_counted_until_all_are_able_again() -> None:
    harness = all_can_go_on(nproc=4, max_restarts=9)
    for local_rank in (0, 1, 2):
        harness.kill_worker(2, local_rank)
        harness.prepare(1, 2)
        assert harness.machine.phase is Phase.RUNNING
    harness.kill_worker(1, 0)
    assert refusal(harness) == "3 losses in a row while regrouping"
    assert harness.machine.budget.used == 3, "the restart of all costs nothing more"
    harness = all_can_go_on(nproc=4, max_restarts=9)
    for local_rank in (0, 1, 2):
        harness.kill_worker(2, local_rank)
        went_on(harness)
    harness.kill_worker(1, 0)
    assert harness.machine.phase is Phase.REGROUPING


def test_what_the_budget_does_not_allow_in_a_row_restarts_all_as_one_loss() -> None:
    harness = all_can_go_on(nproc=3, max_restarts=1)
    harness.kill_worker(2)
    harness.prepare(1, 2)
    harness.kill_worker(2, 1)
    assert refusal(harness) == "the one restart is used"
    for link in (1, 2):
        harness.say(link, Stopped(2))
    assert (harness.machine.phase, harness.machine.budget.used) == (Phase.PREPARING, 1), "it costs nothing more"


def test_losses_in_a_row_are_counted_until_one_generation_is_started() -> None:
    harness = all_can_go_on(nproc=4, max_restarts=9)
    for local_rank in (0, 1, 2):
        harness.kill_worker(2, local_rank)
    assert harness.machine.phase is Phase.REGROUPING
    harness.kill_worker(1, 0)
    assert refusal(harness) == "3 losses in a row while regrouping"
    assert harness.machine.budget.used == 1


def test_a_failure_that_crossed_the_order_is_a_loss() -> None:
    harness = all_can_go_on()
    harness.kill_worker(2)
    failure = Failure(rank=1, local_rank=1, host="n1", pid=7, exit_code=-9)
    harness.say(1, WorkersFailed(1, (failure,), evidence_follows=True))
    assert harness.machine.generation == 3
    assert harness.last(1).assign.local_ranks == (0,)  # type: ignore[union-attr]


def test_workers_go_on_with_another_store() -> None:
    harness = all_can_go_on()
    harness.say(1, StoreLost(1))
    assert harness.machine.phase is Phase.REGROUPING
    went_on(harness)
    assert (harness.machine.generation, harness.machine.budget.used, harness.noted("verdict")) == (2, 0, [])
    harness.say(1, StoreLost(2))
    harness.prepare(1, 2)
    harness.say(1, StoreLost(3))
    assert harness.machine.phase is Phase.REGROUPING, "they come back, and go on with the next one"
    went_on(harness)
    assert (harness.machine.generation, harness.machine.budget.used) == (4, 0)


# --- what it costs, and what is reported ------------------------------------------------------------------------------


def test_the_verdict_follows_the_evidence() -> None:
    harness = all_can_go_on()
    harness.kill_worker(2)
    went_on(harness)
    assert not harness.noted("verdict")
    harness.say(2, WorkersFailed(1, (Failure(rank=2, local_rank=0, host="n2", pid=102, exit_code=-9),)))
    assert [note["generation"] for note in harness.noted("verdict")] == [1]
    assert Notice("HF200: exit code -9; it counts as restart 1 of 3") in [message for _, message in harness.told]
    assert harness.machine.phase is Phase.RUNNING


@pytest.mark.parametrize("read", [True, False], ids=["judged", "not judged"])
def test_a_second_loss_has_a_verdict_of_its_own_if_the_first_one_was_judged(read: bool) -> None:
    harness = all_can_go_on(nproc=3)
    first = Failure(rank=3, local_rank=0, host="n2", pid=103, exit_code=-9)
    harness.kill_worker(2)
    if read:
        harness.say(2, WorkersFailed(1, (first,)))
    harness.kill_worker(2, 2, exit_code=-11)
    harness.say(2, WorkersFailed(2, (structs.replace(first, rank=4, local_rank=2, pid=104, exit_code=-11),)))
    if not read:
        harness.say(2, WorkersFailed(1, (first,)))
    codes = ["exit code -9", "exit code -11"] if read else ["exit code -9"]
    assert [note["cause"] for note in harness.noted("verdict")] == codes
    assert harness.machine.budget.used == 1, "without ht.survive, too, it would be one restart"


def test_each_survived_loss_is_charged_until_nothing_is_left() -> None:
    harness = all_can_go_on(max_restarts=1)
    harness.kill_worker(2)
    went_on(harness)
    assert harness.machine.budget.used == 1
    harness.kill_worker(1)
    assert refusal(harness) == "the one restart is used"


def test_the_back_off_delays_the_replacement_and_not_the_others() -> None:
    harness = all_can_go_on()
    for link in (1, 2):
        harness.kill_worker(link)
        harness.prepare(1, 2)
        assert harness.machine.phase is Phase.RUNNING
        harness.can_go_on(1, 2)
    assert not [message for message in told(harness, Replace) if message.generation == 3]
    harness.wait(LIMITS.backoff_first_s)
    assert [message for message in told(harness, Replace) if message.generation == 3] == [Replace(3, (0,))]


def told(harness: CoordinatorHarness, kind: type[Any]) -> list[Any]:
    return [message for _, message in harness.told if isinstance(message, kind)]


def test_a_host_that_is_excluded_gets_its_replacement_later() -> None:
    harness = all_can_go_on(exclude_after=1)
    harness.kill_worker(2)
    harness.say(2, WorkersFailed(1, (Failure(rank=2, local_rank=0, host="n2", pid=102, exit_code=-9),)))
    went_on(harness)
    assert not told(harness, Replace)
    harness.wait(LIMITS.exclude_first_s)
    assert told(harness, Replace) == [Replace(2, (0,))]


def test_steps_are_counted_from_the_beginning_after_a_regroup() -> None:
    harness = all_can_go_on()
    for link in (1, 2):
        ranks = tuple(RankProgress(rank, Stage.STEPPING, 50) for rank in (0, 1))
        harness.say(link, Progress(1, ranks))
    harness.kill_worker(1)
    went_on(harness)
    harness.say(1, Progress(2, tuple(RankProgress(rank, Stage.STEPPING, 3) for rank in (0, 1))))
    views = {view.host: view.ranks for view in harness.machine.view(harness.now).nodes}
    assert [(rank.rank, rank.local_rank, rank.steps) for rank in views["n1"]] == [(0, 1, 3)]
    assert [(rank.rank, rank.steps) for rank in views["n2"]] == [(1, 0), (2, 0)]


def test_workers_that_do_not_go_on_are_restarted() -> None:
    harness = all_can_go_on()
    harness.kill_worker(1)
    harness.prepare(1, 2)
    harness.can_go_on(1)
    harness.wait(LIMITS.rejoin_s - 0.1)
    assert harness.machine.phase is Phase.RUNNING
    harness.wait(0.2)
    assert refusal(harness) == "ranks 1-2 did not go on within 30 s"


def test_workers_that_went_on_and_are_done_with_training_are_left_alone() -> None:
    harness = all_can_go_on()
    harness.kill_worker(1)
    harness.prepare(1, 2)
    harness.can_go_on(1)
    harness.say(1, CanGoOn(harness.machine.generation, ()))  # its training function has returned already
    harness.can_go_on(2)
    harness.wait(LIMITS.rejoin_s + 1)
    assert harness.machine.phase is Phase.RUNNING


def test_users_see_that_workers_regroup() -> None:
    harness = all_can_go_on()
    harness.kill_worker(2)
    view = harness.machine.view(harness.now)
    assert (view.phase, view.world_size) == ("regrouping", 3)
    assert {node.state for node in view.nodes} == {"regrouping"}


def test_a_replacement_that_joins_does_not_make_the_next_loss_a_quick_one() -> None:
    """The back-off grows with losses that follow each other quickly. This one comes long after the one before."""
    harness = all_can_go_on()
    harness.kill_worker(2)
    went_on(harness)
    harness.wait(LIMITS.healthy_s - 10.0)
    harness.say(2, ReplacementReady(2, (0,)))
    for link in (1, 2):
        harness.say(link, Held(2, 7))
    went_on(harness)
    harness.wait(10.0)
    harness.kill_worker(1)
    harness.prepare(1, 2)
    assert told(harness, Replace)[-1] == Replace(4, (0,)), "at once"


# --- replacements -----------------------------------------------------------------------------------------------------


def test_a_replacement_that_fails_is_charged_once_and_started_again() -> None:
    harness = all_can_go_on()
    harness.kill_worker(2)
    went_on(harness)
    failures = tuple(Failure(rank=0, local_rank=rank, host="n2", pid=9, exit_code=1) for rank in (0, 1))
    harness.say(2, ReplacementFailed(2, failures))
    assert [note["local_ranks"] for note in harness.noted("replacement_failed")] == [[0]], (
        "the other one was not ordered"
    )
    assert harness.machine.budget.used == 2
    harness.wait(LIMITS.backoff_first_s)
    assert told(harness, Replace) == [Replace(2, (0,))] * 2


def test_those_that_are_ready_do_not_wait_long_for_the_others() -> None:
    harness = all_can_go_on(nproc=3)
    harness.kill_worker(1)
    harness.kill_worker(2)
    went_on(harness)
    harness.say(1, ReplacementReady(3, (0,)))
    assert harness.machine.phase is Phase.RUNNING
    harness.wait(LIMITS.gather_s)
    assert harness.machine.phase is Phase.DRAINING
    for link in (1, 2):
        harness.say(link, Held(3, 5))
    assert harness.last(1).assign.world_size == 5  # type: ignore[union-attr]


def test_replacements_do_not_join_before_all_others_are_able() -> None:
    harness = all_can_go_on()
    harness.kill_worker(2)
    harness.prepare(1, 2)
    harness.say(2, ReplacementReady(2, (0,)))
    harness.can_go_on(1)
    assert harness.machine.phase is Phase.RUNNING
    harness.can_go_on(2)
    assert harness.machine.phase is Phase.DRAINING


def test_ranks_do_not_wait_at_the_safe_point_for_one_that_has_ended_before_it() -> None:
    """Without that they waited until the limit of a hang (seed 1513 of questions-succession)."""
    harness = all_can_go_on()
    harness.kill_worker(2)
    went_on(harness)
    harness.say(2, ReplacementReady(2, (0,)))
    for link in (1, 2):
        harness.say(link, Held(2, 7))
    harness.say(2, WorkerDone(3, 1))
    assert harness.machine.phase is Phase.REGROUPING, "all may end before it"
    harness.prepare(1)
    assert refusal(harness) == "rank 3 ended before the safe point at which others wait"


def test_a_rank_lost_while_replacements_join_is_survived_too() -> None:
    harness = all_can_go_on()
    harness.kill_worker(2)
    went_on(harness)
    harness.say(2, ReplacementReady(2, (0,)))
    assert harness.machine.phase is Phase.DRAINING
    harness.kill_worker(1, 1)
    assert harness.machine.phase is Phase.REGROUPING
    assert harness.last(1).assign.world_size == 2  # type: ignore[union-attr]
    went_on(harness)
    assert harness.machine.phase is Phase.DRAINING, "the one that was ready joins now"


def test_a_node_that_leaves_ends_the_way_of_the_replacements() -> None:
    harness = growing()
    harness.say(1, Leave("SIGTERM", drain=True))
    harness.say(1, Held(2, 7))
    assert harness.machine.phase is Phase.DRAINING
    assert harness.machine.world is not None
    assert harness.machine.world.drain_agreed


def test_a_worker_killed_by_the_stop_of_such_a_drain_is_no_loss_to_survive() -> None:
    harness = growing(nproc=2)
    harness.wait(LIMITS.safe_point_s)
    assert harness.machine.phase is Phase.STOPPING
    harness.kill_worker(1)
    assert harness.machine.phase is Phase.STOPPING


def test_a_safe_point_is_awaited_until_the_limit_of_a_hang() -> None:
    """Nobody was lost: the step before it may be as long as an evaluation."""
    harness = at_safe_point()
    harness.wait(LIMITS.hang_timeout_s - 1.0)
    assert harness.machine.phase is Phase.REGROUPING
    harness.wait(1.0)
    assert refusal(harness) == "not every worker was ready within 300 s"


def test_replacements_join_after_the_first_step_where_no_rank_has_done_one() -> None:
    """The first step of a generation may be longer than any limit of a loss."""
    harness = growing(nproc=2)
    harness.both_say(Held(2, 0))
    assert harness.machine.phase is Phase.REGROUPING
    assert [harness.last(link).safe_point for link in (1, 2)] == [1, 1]  # type: ignore[union-attr]


def test_a_node_of_which_no_worker_is_left_may_go() -> None:
    harness = regrouping()
    harness.prepare(1, 2)
    harness.can_go_on(1)
    harness.give(LinkClosed(2, "reset"))
    assert harness.machine.phase is Phase.RUNNING
    harness.kill_worker(1)
    assert refusal(harness) == "", "nobody is left who could go on"


# --- --survive wait ---------------------------------------------------------------------------------------------------


def test_survivors_wait_as_long_as_nodes_are_awaited() -> None:
    harness = all_can_go_on(survive=Survive.WAIT)
    harness.kill_worker(2)
    harness.prepare(1, 2)
    assert harness.machine.phase is Phase.REGROUPING
    harness.wait(LIMITS.join_s)
    assert refusal(harness) == "no replacement was ready within 60 s"


def test_nobody_waits_for_ranks_that_have_no_node() -> None:
    harness = all_can_go_on(least=1, survive=Survive.WAIT)
    harness.give(LinkClosed(2, "reset"))
    assert refusal(harness) == "the nodes that are left have no place for the lost ranks"


def test_a_node_that_leaves_ends_the_wait() -> None:
    harness = all_can_go_on(survive=Survive.WAIT)
    harness.kill_worker(2)
    harness.prepare(1, 2)
    harness.say(1, Leave("SIGTERM", drain=True))
    assert harness.machine.phase is Phase.STOPPING


# --- nodes that arrive ------------------------------------------------------------------------------------------------


def test_a_new_node_starts_its_workers_beside_the_others() -> None:
    harness = two_of_three(max_restarts=3)
    harness.can_go_on(1, 2)
    harness.join(3)
    harness.wait(LIMITS.gather_s)
    place = harness.last(3)
    assert isinstance(place, Assign)
    assert (place.generation, place.local_ranks, place.world_size) == (1, (), 2)
    harness.say(3, Prepared(1))
    assert harness.told_to(3)[-2:] == [Start(1, "10.0.0.1", 40_000, job_uid="n1#1"), Replace(1, (0,))]
    harness.say(3, ReplacementReady(1, (0,)))
    assert isinstance(harness.last(1), Drain)
    for link in (1, 2):
        harness.say(link, Held(1, 4))
    assert [harness.last(link).assign.world_size for link in (1, 2, 3)] == [3, 3, 3]  # type: ignore[union-attr]


def test_a_new_node_does_not_restart_workers_that_are_starting_if_they_ran_in_survive_before() -> None:
    harness = two_of_three(max_restarts=3)
    harness.can_go_on(1, 2)
    harness.fail(2)
    for link in (1, 2):
        harness.say(link, Stopped(1))
    harness.prepare(1, 2)
    harness.join(3)
    harness.wait(3 * LIMITS.gather_s)
    assert harness.machine.phase is Phase.RUNNING
    harness.can_go_on(1, 2)
    harness.wait(LIMITS.gather_s)
    assert isinstance(harness.last(3), Assign)


def test_a_new_node_that_is_lost_before_it_takes_part_disturbs_nobody() -> None:
    for said in ([], [Prepared(1)], [Prepared(1), ReplacementFailed(1, ())]):
        harness = two_of_three(max_restarts=3)
        harness.can_go_on(1, 2)
        harness.join(3)
        harness.wait(LIMITS.gather_s)
        for message in said:
            harness.say(3, message)
        harness.give(LinkClosed(3, "reset"))
        assert harness.machine.phase is Phase.RUNNING
        assert harness.machine.world is not None
        assert len(harness.machine.world.order) == 2


def test_with_grow_now_a_node_joins_by_a_stop() -> None:
    harness = two_of_three(max_restarts=3, grow=Grow.NOW)
    harness.can_go_on(1, 2)
    harness.give(LinkOpened(3, "10.0.0.3", "10.0.0.9"))
    harness.say(3, Join(NodeSpec(member="n3#1", host="n3", nproc=1)))
    harness.wait(LIMITS.gather_s)
    assert isinstance(harness.last(1), Stop)
