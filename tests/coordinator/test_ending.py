"""What follows when a generation has ended: each row of the table in `after_stop`."""

from __future__ import annotations

from holdfast.coordinator.coordinator_state import LEFT_MAX, World
from holdfast.coordinator.ending import Again, Budget, after_stop
from holdfast.protocol.messages import StopReason
from holdfast.protocol.outcome import Evidence, Failure, Outcome, OutcomeKind
from holdfast.protocol.policy import Limits
from tests.support.simulator.nodes import simple_judge


def failure(exit_code: int, *, after_stop: bool = False) -> Failure:
    return Failure(rank=2, local_rank=0, host="b", pid=7, exit_code=exit_code, after_stop=after_stop)


def ended(
    *failures: Failure, reason: StopReason = StopReason.WORKER_FAILED, lost: tuple[str, ...] = (), lived_s: float = 1.0
) -> World:
    return World(
        generation=4,
        order=("a#1", "b#1"),
        nproc={"a#1": 2, "b#1": 1},
        started_s=10.0,
        stop_began_s=10.0 + lived_s,
        failures=list(failures),
        lost_nodes=list(lost),
        stop_reason=reason,
    )


def decided(world: World, max_restarts: int = 3, *, before: int = 0) -> tuple[Again | Outcome, Budget]:
    """`before`: so many other quick failures came first."""
    budget = Budget(max_restarts + before, Limits())
    for n in range(before):
        budget.charge(f"earlier {n}", 1.0)
    return after_stop(world, budget, simple_judge), budget


def test_a_worker_that_asks_to_be_requeued_ends_the_job() -> None:
    outcome, budget = decided(ended(failure(1), failure(75), lost=("c",)))
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.exit_code) == (OutcomeKind.PREEMPTED, 75)
    assert budget.used == 0


def test_75_of_a_worker_that_was_stopped_is_no_request() -> None:
    decision, _ = decided(ended(failure(1), failure(75, after_stop=True)))
    assert isinstance(decision, Again)


def test_a_lost_node_explains_the_failures_of_its_peers() -> None:
    decision, budget = decided(ended(failure(1), lost=("c (connection reset)",)), 0, before=3)
    assert isinstance(decision, Again)
    assert decision.backoff_s == 0.0
    assert budget.used == 3


def test_a_dead_store_host_is_free_but_backs_off() -> None:
    decision, budget = decided(ended(failure(1), reason=StopReason.STORE_LOST), 0, before=2)
    assert isinstance(decision, Again)
    assert decision.backoff_s == 0.5
    assert budget.used == 2


def test_arrivals_and_leaves_are_free() -> None:
    for reason in (StopReason.MEMBER_JOINED, StopReason.MEMBER_LEFT):
        decision, budget = decided(ended(failure(-15, after_stop=True), reason=reason), 0, before=3)
        assert isinstance(decision, Again)
        assert (decision.backoff_s, budget.used) == (0.0, 3)


def test_a_failed_worker_costs_one() -> None:
    decision, budget = decided(ended(failure(1), failure(1), failure(-6)), 1)
    assert isinstance(decision, Again)
    assert decision.verdict.culprit == failure(1)
    assert budget.used == 1, "one for all ranks that fell"


def test_a_failed_worker_ends_the_job_when_the_budget_is_spent() -> None:
    outcome, _ = decided(ended(failure(-9)), 0)
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.exit_code) == (OutcomeKind.FAILED, 137)
    assert outcome.verdict.gave_up == "no restarts were allowed (--max-restarts 0)"
    assert (outcome.verdict.generation, outcome.code) == (4, "HF200")


def test_a_long_life_counts_from_the_start_of_the_workers() -> None:
    decision, _ = decided(ended(failure(1), lived_s=61.0), before=5)
    assert isinstance(decision, Again)
    assert decision.backoff_s == 0.0
    decision, _ = decided(ended(failure(1), lived_s=59.0), before=5)
    assert isinstance(decision, Again)
    assert decision.backoff_s > 1.0


def test_the_judge_learns_who_left_and_which_ranks_are_lost() -> None:
    world = ended(failure(1))
    left = Failure(rank=1, local_rank=1, host="a", pid=9, exit_code=0, step=20)
    for _ in range(2):
        world.mark_done("a#1", 1, left)
    world.lost("b#1", "b", "silent")
    seen: list[Evidence] = []
    after_stop(world, Budget(0, Limits()), lambda evidence: seen.append(evidence) or simple_judge(evidence))
    assert (seen[0].done, seen[0].left, seen[0].lost_ranks) == ((1,), (left,), (2,))
    assert seen[0].lost_nodes == ("b (silent)",)


def test_of_a_large_job_only_some_of_those_that_left_are_kept() -> None:
    world = World(generation=1, order=("a#1",), nproc={"a#1": 100})
    for local_rank in range(100):
        world.mark_done("a#1", local_rank, failure(0))
    assert (len(world.left), world.done_count) == (LEFT_MAX, 100)
