"""What follows when a generation has ended, and the restart budget."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.coordinator.ending import UNBOUNDED, Again, Budget, GiveUp, Retry, after_stop, around, previous_end
from holdfast.coordinator.incident import Incident, Incidents
from holdfast.coordinator.membership import HostBackoff
from holdfast.coordinator.world import LEFT_MAX, World
from holdfast.protocol.exit_codes import REQUESTS, ExitCode, Scheduler
from holdfast.protocol.extension import DeviceFault
from holdfast.protocol.messages import StopReason
from holdfast.protocol.outcome import Evidence, Failure, Outcome, OutcomeKind, Verdict
from holdfast.protocol.policy import Limits
from tests.support.simulator.nodes import simple_judge


def failure(exit_code: int, *, after_stop: bool = False) -> Failure:
    return Failure(rank=2, local_rank=0, host="b", pid=7, exit_code=exit_code, after_stop=after_stop)


def ended(
    *failures: Failure, reason: StopReason = StopReason.WORKER_FAILED, lost: tuple[str, ...] = (), lived_s: float = 1.0
) -> tuple[World, Incident]:
    world = World(
        generation=4,
        order=("a#1", "b#1"),
        places={"a#1": (0, 1), "b#1": (0,)},
        started_s=10.0,
        stop_began_s=10.0 + lived_s,
        stop_reason=reason,
    )
    return world, Incident(failures=list(failures), lost_nodes=list(lost), lost_hosts=list(lost))


def decided(end: tuple[World, Incident], max_restarts: int = 3, *, before: int = 0) -> tuple[Again | Outcome, Budget]:
    """`before`: so many other quick failures came first."""
    budget = Budget(max_restarts + before, Limits())
    for n in range(before):
        budget.charge(f"earlier {n}", 1.0)
    return after_stop(*end, budget, simple_judge), budget


def test_a_pause_stays_at_its_limit_however_often_a_job_or_a_host_fails() -> None:
    """For days, as in a crash loop."""
    limits = Limits()
    budget, hosts = Budget(10_000, limits), HostBackoff(limits, exclude_after=1)
    for number in range(5_000):
        again = budget.charge(f"error {number}", 1.0)
        hosts.lost("b", lived_s=0.0)
        excluded_s = hosts.blamed("b", 0.0)
    assert again == Retry(limits.backoff_max_s)
    assert excluded_s == limits.exclude_max_s


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=str)
def test_a_worker_that_asks_for_it_by_its_exit_code_ends_the_job_whatever_restarts_are_left(asked: ExitCode) -> None:
    outcome, budget = decided(ended(failure(1), failure(asked.number), lost=("c",)))
    assert isinstance(outcome, Outcome)
    kind = OutcomeKind.PREEMPTED if asked.scheduler is Scheduler.AGAIN else OutcomeKind.FAILED
    assert (outcome.kind, outcome.exit_code) == (kind, asked.number)
    assert budget.used == 0


def test_to_be_started_again_comes_before_the_other_requests() -> None:
    outcome, _ = decided(ended(failure(93), failure(75)))
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.exit_code) == (OutcomeKind.PREEMPTED, 75)


@pytest.mark.parametrize(
    ("culprit", "told"),
    [
        (structs.replace(failure(1), message="ValueError: one\ntwo", step=7), "failed 7 ValueError: one"),
        (structs.replace(failure(-11), step=7), "failed 7 exit code -11"),
        (failure(3), "failed 0 exit code 3"),
        (failure(-9), "lost"),
        (structs.replace(failure(-9), out_of_memory=True), "failed 0 exit code -9"),
        (None, "lost"),
    ],
)
def test_workers_are_told_how_the_ones_before_them_ended(culprit: Failure | None, told: str) -> None:
    verdict = Verdict(code="HF201", cause="x", culprit=culprit)
    assert previous_end(verdict, charged=True, hung=False) == told
    assert previous_end(verdict, charged=False, hung=False) == "lost"
    assert previous_end(verdict, charged=True, hung=True) == ("lost" if culprit is None else f"hung {culprit.step}")


@pytest.mark.parametrize("number", REQUESTS)
def test_the_exit_code_of_a_worker_that_was_stopped_is_no_request(number: int) -> None:
    decision, _ = decided(ended(failure(1), failure(number, after_stop=True)))
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
    world, incident = ended(failure(1))
    left = Failure(rank=1, local_rank=1, host="a", pid=9, exit_code=0, step=20)
    for _ in range(2):
        world.mark_done("a#1", 1, left)
    incidents = Incidents(incident)
    incidents.lost("b", "silent", world.ranks_of("b#1"))
    seen: list[Evidence] = []
    after_stop(world, incident, Budget(0, Limits()), lambda evidence: seen.append(evidence) or simple_judge(evidence))
    assert (seen[0].done, seen[0].left, seen[0].lost_ranks) == ((1,), (left,), (2,))
    assert seen[0].lost_nodes == ("b (silent)",)


def test_of_a_large_job_only_some_of_those_that_left_are_kept() -> None:
    world = World(generation=1, order=("a#1",), places={"a#1": tuple(range(100))})
    for local_rank in range(100):
        world.mark_done("a#1", local_rank, failure(0))
    assert (len(world.left), world.done_count) == (LEFT_MAX, 100)


# --- the restart budget: what costs, when it is patient, when it gives up ---------------------------------------------


QUICK_S, HEALTHY_S = 1.0, 60.0


def budget(max_restarts: int = 100) -> Budget:
    limits = Limits(backoff_first_s=0.25, backoff_max_s=30.0, healthy_s=HEALTHY_S, identical_failures_max=8)
    return Budget(max_restarts, limits)


def test_pauses_grow_from_none_to_the_limit() -> None:
    own = budget()
    pauses = [own.charge(f"error {n}", QUICK_S) for n in range(11)]
    assert pauses == [Retry(s) for s in (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0)]
    assert own.used == 11


def test_a_healthy_generation_ends_the_streak() -> None:
    own = budget()
    for n in range(4):
        own.charge(f"error {n}", QUICK_S)
    assert own.charge("error", HEALTHY_S) == Retry(0.0)
    assert own.charge("other error", HEALTHY_S - 0.1) == Retry(0.25)
    assert own.used == 6, "patience comes back, the budget does not"


def test_the_same_error_is_not_repeated_for_ever() -> None:
    own = budget()
    decisions = [own.charge("ValueError", QUICK_S) for _ in range(8)]
    assert all(isinstance(decision, Retry) for decision in decisions[:7])
    assert decisions[7] == GiveUp("the same error 8 times in a row, each within 60 s")
    assert own.used == 7, "giving up costs nothing"


def test_a_restart_is_certain_while_even_the_same_error_again_would_get_one() -> None:
    own = budget()
    for _ in range(7):
        assert own.allows_restart
        own.charge("ValueError", QUICK_S)
    assert not own.allows_restart
    assert not budget(max_restarts=0).allows_restart


@pytest.mark.parametrize(
    ("signature", "lived_s"),
    [pytest.param("another", QUICK_S, id="another error"), pytest.param("ValueError", HEALTHY_S, id="a healthy run")],
)
def test_what_ends_a_row_of_identical_errors(signature: str, lived_s: float) -> None:
    own = budget()
    for _ in range(7):
        own.charge("ValueError", QUICK_S)
    assert isinstance(own.charge(signature, lived_s), Retry)
    for _ in range(6):
        assert isinstance(own.charge("ValueError", QUICK_S), Retry)


@pytest.mark.parametrize(
    ("max_restarts", "reason"),
    [
        (0, "no restarts were allowed (--max-restarts 0)"),
        (1, "the one restart is used"),
        (3, "all 3 restarts are used"),
    ],
)
def test_a_spent_budget_says_so(max_restarts: int, reason: str) -> None:
    own = budget(max_restarts)
    for n in range(max_restarts):
        assert isinstance(own.charge(f"error {n}", QUICK_S), Retry)
    assert own.charge("one more", HEALTHY_S) == GiveUp(reason)
    assert own.used == max_restarts


def test_a_hang_without_a_culprit_is_the_same_whenever_a_device_failed_before_it() -> None:
    own = budget()

    def judge(evidence: Evidence) -> Verdict:
        return evidence.verdict("HF241", "; ".join(["all ranks wait in all_reduce", *evidence.devices]), None)

    ends = []
    for seconds in range(8):
        world, incident = ended(reason=StopReason.HUNG)
        world.devices = around([DeviceFault("XID 79 on GPU 3 of node b", world.stop_began_s - seconds)], 11.0)
        ends.append(after_stop(world, incident, own, judge))
    assert all(isinstance(end, Again) for end in ends[:7])
    assert isinstance(ends[7], Outcome)
    assert ends[7].verdict is not None
    assert ends[7].verdict.gave_up.startswith("the same error 8 times in a row")


@pytest.mark.parametrize(
    ("code", "exit_code", "stepped", "ends_with"),
    [
        ("HF204", -9, True, 0),
        ("HF204", -9, False, 8),
        ("HF204", -15, True, 8),
        ("HF203", -9, True, 8),
    ],
)
def test_workers_that_are_killed_from_outside_between_steps_are_no_loop(
    code: str, exit_code: int, stepped: bool, ends_with: int
) -> None:
    """Which end of ten is that of the job; 0: none. HF203: by the kernel, since the memory is too small."""
    own, ends = budget(), list[Again | Outcome]()
    killed = structs.replace(failure(exit_code), stepped=stepped)
    while len(ends) < 10 and not any(isinstance(end, Outcome) for end in ends):
        world, incident = ended(killed)
        ends.append(after_stop(world, incident, own, lambda evidence: evidence.verdict(code, "x", killed)))
    assert (len(ends) if isinstance(ends[-1], Outcome) else 0) == ends_with


def test_hangs_of_two_kinds_are_two_errors() -> None:
    assert Verdict(code="HF241", cause="x").signature != Verdict(code="HF246", cause="x").signature


def test_what_is_nobodys_fault_is_free_but_not_without_pause() -> None:
    own = budget(0)
    assert [own.pause(f"store {n}", QUICK_S) for n in range(4)] == [Retry(s) for s in (0.0, 0.25, 0.5, 1.0)]
    assert own.used == 0


def test_what_is_free_gives_up_as_well_if_it_never_changes() -> None:
    own = budget(0)
    decisions = [own.pause("the store host died", QUICK_S) for _ in range(8)]
    assert isinstance(decisions[-1], GiveUp)


def test_a_restart_is_counted_in_words_only_against_a_number_that_means_something() -> None:
    own = Budget(3, Limits())
    own.charge("x", 0.0)
    assert own.newest == "restart 1 of 3"
    torchruns = Budget(UNBOUNDED, Limits())
    torchruns.charge("x", 0.0)
    assert torchruns.newest == "restart 1"
