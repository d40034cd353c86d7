"""Questions of users to simulated jobs: each ends in one answer, and none breaks a promise of the job."""

from __future__ import annotations

import pytest

from tests.support.simulator.asking import DISTURBING, HARMLESS
from tests.support.simulator.sweep import QUESTIONS, QUESTIONS_SUCCESSION, report, run_seeds


@pytest.mark.parametrize(("family", "first"), [(QUESTIONS, 0), (QUESTIONS, 60), (QUESTIONS_SUCCESSION, 0)])
def test_every_promise_holds_while_users_ask(family: str, first: int) -> None:
    tally = run_seeds(first, first + (60 if family == QUESTIONS else 25), family)
    assert not tally.failures, report(tally)
    assert tally.asked.keys() >= {*HARMLESS, *(DISTURBING if family == QUESTIONS else ())}
