"""Questions of users to simulated jobs: each ends in one answer, and none breaks a promise of the job."""

from __future__ import annotations

import pytest

from tests.support.simulator.asking import DISTURBING, HARMLESS
from tests.support.simulator.sweep import QUESTIONS, QUESTIONS_SUCCESSION, report, run_seeds


@pytest.mark.parametrize(("family", "seeds"), [(QUESTIONS, 60), (QUESTIONS_SUCCESSION, 10)])
def test_every_promise_holds_while_users_ask(family: str, seeds: int) -> None:
    """`make soak-seeds` runs more."""
    tally = run_seeds(0, seeds, family)
    assert not tally.failures, report(tally)
    assert tally.asked.keys() >= {*HARMLESS, *(DISTURBING if family == QUESTIONS else ())}


@pytest.mark.parametrize("seed", [5406, 12730])
def test_a_drain_is_not_answered_by_what_was_held_for_the_one_before(seed: int) -> None:
    """A save was let go because a node left: an answer to it came after the next drain had begun."""
    tally = run_seeds(seed, seed + 1, QUESTIONS)
    assert not tally.failures, report(tally)
