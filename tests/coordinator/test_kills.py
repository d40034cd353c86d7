"""A worker in `ht.survive` that is killed from outside again and again: what ends the job, and what does not."""

from __future__ import annotations

import pytest

from holdfast.coordinator.coordinator_state import Phase
from holdfast.protocol.messages import Held, ReplacementReady, WorkersFailed
from holdfast.protocol.outcome import Failure
from tests.coordinator.coordinator_desk import Desk
from tests.coordinator.test_regrouping import able, refusal, went_on


def killed(desk: Desk, step: int) -> None:
    """Rank 2 is lost in this step. Its agent says so before the workers' progress is reported."""
    failure = Failure(rank=2, local_rank=0, host="n2", pid=102, exit_code=-9, step=step)
    desk.say(2, WorkersFailed(desk.machine.generation, (failure,), evidence_follows=True))


def replaced(desk: Desk) -> None:
    went_on(desk)
    desk.wait(desk.machine.limits.backoff_max_s)
    desk.say(2, ReplacementReady(desk.machine.generation, (0,)))
    for link in (1, 2):
        desk.say(link, Held(desk.machine.generation, 7))
    went_on(desk)


def test_steps_between_two_kills_that_no_report_of_progress_has_shown() -> None:
    desk = able(max_restarts=100)
    for step in range(10, 200, 10):
        killed(desk, step)
        assert desk.machine.phase is Phase.REGROUPING
        replaced(desk)


@pytest.mark.parametrize("step", [0, 10], ids=["not known", "the same"])
def test_without_a_step_in_between_the_same_kill_ends_the_job(step: int) -> None:
    desk = able(max_restarts=100)
    for _ in range(desk.machine.limits.identical_failures_max - 1):
        killed(desk, step)
        replaced(desk)
    killed(desk, step)
    assert refusal(desk).startswith("the same error 8 times in a row")
