"""The soak of sharded models: a seed is a case, and what a job has at its end is judged."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from soak.kills import Case, FaultError, drawn, judge

REFERENCE = {
    "step": 8,
    "rates": [0.01],
    "parameters": ["a"],
    "weights": [1.0, 2.0],
    "losses": [0.5],
    "calls": [[1, 1, 4, 0, "", 0]],
}
WAITS = Case("hsdp", 1, 4, "wait", 0, 3, 0.0, True, 1, "1")
SHRINKS = Case("hsdp", 1, 4, "shrink", 0, 3, 0.0, True, 1, "1")


def test_a_seed_is_a_case() -> None:
    def cases(seed: int) -> list[Case]:
        return [drawn(Random(f"{seed} {number}"), seed, number) for number in range(30)]

    assert cases(1) == cases(1)
    assert {each.how for each in cases(1)} == {"shrink", "wait"}
    assert {each.nodes for each in cases(1)} == {1, 2, 3}


def test_a_job_that_ends_as_an_undisturbed_one_is_good() -> None:
    other_sums = {**REFERENCE, "parameters": ["b"], "weights": [1.0, 2.0 + 1e-9], "calls": [[1, 1, 2, 0, "", 0]]}
    for case, found in ((WAITS, [REFERENCE, REFERENCE]), (SHRINKS, [other_sums])):
        problem = None
        try:
            judge(case, found, REFERENCE)
        except FaultError as error:
            problem = str(error)
        assert problem is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a step is missing": ({"step": 7}, "step: 7, undisturbed 8"),
    "another weight": ({"weights": [1.0, 2.1]}, "weights differ"),
    "a loss is missing": ({"losses": []}, "losses differ: 0 and 1"),
    "another loss": ({"losses": [0.6]}, "losses differ"),
    "other bits": ({"parameters": ["b"]}, "not the bits"),
}


@pytest.mark.parametrize(("changed", "problem"), WRONG.values(), ids=WRONG)
def test_another_end_is_a_fault(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(FaultError, match=problem):
        judge(WAITS, [{**REFERENCE, **changed}], REFERENCE)


def test_ranks_with_different_weights_are_a_fault() -> None:
    with pytest.raises(FaultError, match="the ranks have different weights"):
        judge(SHRINKS, [REFERENCE, {**REFERENCE, "parameters": ["b"]}], REFERENCE)


def test_a_job_without_an_end_is_a_fault() -> None:
    with pytest.raises(FaultError, match="no rank came to the end"):
        judge(SHRINKS, [], REFERENCE)
