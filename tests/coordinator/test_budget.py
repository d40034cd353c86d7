"""The restart budget: what costs, when it is patient, when it gives up."""

from __future__ import annotations

import pytest

from holdfast.coordinator.ending import UNBOUNDED, Budget, GiveUp, Retry
from holdfast.protocol.policy import Limits

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
        (1, "all 1 restarts are used"),
        (3, "all 3 restarts are used"),
    ],
)
def test_a_spent_budget_says_so(max_restarts: int, reason: str) -> None:
    own = budget(max_restarts)
    for n in range(max_restarts):
        assert isinstance(own.charge(f"error {n}", QUICK_S), Retry)
    assert own.charge("one more", HEALTHY_S) == GiveUp(reason)
    assert own.used == max_restarts


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
