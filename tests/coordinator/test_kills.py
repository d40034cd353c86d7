"""A worker in `ht.survive` that is killed from outside again and again: what ends the job, and what does not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from holdfast.coordinator.world import Phase
from holdfast.protocol.messages import Held, ReplacementReady, WorkersFailed
from holdfast.protocol.outcome import Failure
from tests.coordinator.coordinator_harness import CoordinatorHarness
from tests.coordinator.test_regrouping import all_can_go_on, refusal, went_on


def killed(harness: CoordinatorHarness, step: int, *, stepped: bool) -> None:
    """Rank 2 is lost in this step. Its agent says so before the workers' progress is reported."""
    failure = Failure(rank=2, local_rank=0, host="n2", pid=102, exit_code=-9, step=step, stepped=stepped)
    harness.say(2, WorkersFailed(harness.machine.generation, (failure,), evidence_follows=True))


def replaced(harness: CoordinatorHarness) -> None:
    went_on(harness)
    harness.wait(harness.machine.limits.backoff_max_s)
    harness.say(2, ReplacementReady(harness.machine.generation, (0,)))
    for link in (1, 2):
        harness.say(link, Held(harness.machine.generation, 7))
    went_on(harness)


@pytest.mark.parametrize("steps", [range(10, 200, 10), [23, 22] * 10], ids=["on and on", "back to a state in memory"])
def test_steps_between_two_kills_that_no_report_of_progress_has_shown(steps: Iterable[int]) -> None:
    harness = all_can_go_on(max_restarts=100)
    for step in steps:
        killed(harness, step, stepped=True)
        assert harness.machine.phase is Phase.REGROUPING
        replaced(harness)


@pytest.mark.parametrize("step", [0, 10], ids=["not known", "the same"])
def test_without_a_step_in_between_the_same_kill_ends_the_job(step: int) -> None:
    harness = all_can_go_on(max_restarts=100)
    for _ in range(harness.machine.limits.identical_failures_max - 1):
        killed(harness, step, stepped=False)
        replaced(harness)
    killed(harness, step, stepped=False)
    assert refusal(harness).startswith("the same error 8 times in a row")
