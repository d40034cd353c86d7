"""Nodes that leave on purpose while all run in `ht.survive`: when the others go on without them, and what that costs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from holdfast.coordinator.coordinator_events import LinkClosed
from holdfast.coordinator.world import Phase
from holdfast.protocol.messages import (
    DrainTo,
    Held,
    Leave,
    Regroup,
    ReplacementReady,
    Start,
    Stop,
    Stopped,
    StopReason,
    WorkerDone,
    WorkersFailed,
)
from holdfast.protocol.outcome import Failure
from holdfast.protocol.train_contract import Survive
from tests.coordinator.coordinator_harness import CoordinatorHarness
from tests.coordinator.test_regrouping import all_can_go_on, refusal, went_on


def leaving(**options: Any) -> CoordinatorHarness:
    """Node 2 leaves at safe point 8, and nobody has come there yet."""
    harness = all_can_go_on(**{"least": 1, "max_restarts": 0, **options})
    harness.say(2, Leave("SIGTERM", drain=True))
    harness.both_say(Held(1, 7))
    return harness


def test_the_others_go_on_between_two_steps_without_a_node_that_leaves() -> None:
    harness = leaving()
    orders = [harness.last(link) for link in (1, 2)]
    assert [(order.safe_point, order.assign.local_ranks, order.assign.world_size) for order in orders] == [  # type: ignore[union-attr]
        (8, None, 2),
        (8, (), 2),
    ]
    harness.prepare(1)
    assert harness.machine.phase is Phase.REGROUPING, "its workers have not done their step"
    harness.prepare(2)
    assert harness.last(1) == Start(2, "10.0.0.1", 40_000, job_uid="n1#1")
    assert harness.last(2) == Stop(2, StopReason.MEMBER_LEFT)
    harness.say(2, Stopped(2))
    harness.give(LinkClosed(2, "reset"))
    harness.can_go_on(1)
    assert harness.machine.phase is Phase.RUNNING
    assert (harness.noted("regroup_begun")[0]["text"], len(harness.noted("verdict"))) == ("n2 leaves; 2 ranks go on", 0)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"least": 2}, "nodes"), ({"min_ranks": 3}, "ranks"), ({"survive": Survive.WAIT}, "no place for them")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_all_stop_at_the_safe_point_where_the_others_must_not_go_on(options: dict[str, Any], why: str) -> None:
    harness = leaving(**options)
    assert harness.last(1) == DrainTo(1, 8), why


def test_all_stop_where_the_whole_job_is_to_end() -> None:
    harness = all_can_go_on(least=1)
    harness.ask("stop")
    harness.say(2, Leave("somebody", drain=True))
    harness.both_say(Held(1, 7))
    assert harness.last(1) == DrainTo(1, 8)


def test_a_coordinator_that_nobody_succeeds_leaves_with_all() -> None:
    harness = all_can_go_on(least=1)
    node = harness.machine.members["n2#1"]
    node.node = structs.replace(node.node, hosts_coordinator=True)
    harness.say(2, Leave("SIGTERM", drain=True))
    harness.both_say(Held(1, 7))
    assert harness.last(1) == DrainTo(1, 8)


def test_a_node_that_is_lost_before_its_last_step_is_done_is_not_waited_for() -> None:
    harness = leaving()
    harness.give(LinkClosed(2, "reset"))
    order = harness.last(1)
    assert isinstance(order, Regroup)
    assert (order.assign.generation, order.safe_point, order.text) == (3, 0, "n2 was lost: reset; 2 ranks go on")


@pytest.mark.parametrize("ends", [Stopped(2), Leave("SIGTERM")], ids=["stopped", "gives up"])
def test_neither_is_one_whose_workers_end_before(ends: Any) -> None:
    harness = leaving()
    harness.say(2, ends)
    order = harness.last(1)
    assert isinstance(order, Regroup)
    assert (order.assign.generation, order.safe_point) == (3, 0)
    harness.prepare(1)
    if isinstance(ends, Leave):
        assert harness.machine.phase is Phase.REGROUPING, "its workers may live"
        harness.say(2, Stopped(3))
    assert harness.last(1) == Start(3, "10.0.0.1", 40_000, job_uid="n1#1")


def test_what_its_workers_have_done_their_last_step_for_is_not_disturbed_by_their_end() -> None:
    harness = leaving()
    harness.prepare(2)
    failure = Failure(rank=2, local_rank=0, host="n2", pid=7, exit_code=-9)
    harness.say(2, WorkersFailed(2, (failure,), evidence_follows=True))
    harness.prepare(1)
    assert (harness.machine.phase, harness.machine.generation) == (Phase.RUNNING, 2)


def test_a_loss_on_the_way_costs_nothing_as_all_would_have_been_stopped() -> None:
    for link in (1, 2):
        harness = leaving()
        failure = Failure(rank=1, local_rank=1, host=f"n{link}", pid=7, exit_code=-9)
        harness.say(link, WorkersFailed(2, (failure,), evidence_follows=True))
        assert (harness.machine.phase, harness.machine.generation) == (Phase.REGROUPING, 3)
        assert harness.machine.budget.used == 0
    harness = leaving()
    failure = Failure(rank=1, local_rank=1, host="n1", pid=7, exit_code=1)
    harness.say(1, WorkersFailed(2, (failure,)))
    assert refusal(harness) == "rank 1 exited"
    harness.both_say(Stopped(2))
    assert (harness.machine.outcome, harness.machine.budget.used) == (None, 0)


def test_the_job_may_be_done_before_the_safe_point() -> None:
    harness = leaving()
    for link, local_rank in [(1, 0), (2, 0), (2, 1)]:
        harness.say(link, WorkerDone(2, local_rank))
    assert harness.machine.outcome is None
    harness.say(1, WorkerDone(2, 1))
    assert harness.machine.outcome is not None
    assert harness.machine.outcome.exit_code == 0


def test_workers_that_are_ready_join_when_a_node_leaves() -> None:
    harness = all_can_go_on(least=1)
    harness.kill_worker(1)
    went_on(harness)
    harness.say(2, Leave("SIGTERM", drain=True))
    harness.say(1, ReplacementReady(2, (0,)))
    harness.both_say(Held(2, 7))
    orders = [harness.last(link) for link in (1, 2)]
    assert [order.assign.local_ranks for order in orders] == [None, ()]  # type: ignore[union-attr]
    assert orders[0].text == "n2 leaves; rank 0 was replaced; 2 ranks go on"  # type: ignore[union-attr]
