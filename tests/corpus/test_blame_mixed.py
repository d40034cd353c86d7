"""Any fault of one's own among any victims, in any order of arrival: the victims are never blamed."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from holdfast.diagnosis.causes import judge
from holdfast.protocol.outcome import Evidence, Failure
from tests.corpus.telling import C10D, GLOO_CLOSED, SITE, data, fails, watchdog

MIXED = data("mixed.toml")


def victim(rank: int, choice: random.Random) -> Failure:
    kind = choice.randrange(6)
    if kind == 0:
        return watchdog(rank)
    if kind == 1:
        return fails(rank, code=-6, stderr=choice.choice(MIXED["native"]))
    says = choice.choice(MIXED["complaints"])
    if kind == 2:
        return fails(rank, "ValueError: training did not finish", after=says, frames=(C10D,))
    if kind == 3:
        told = fails(rank, says, frames=(C10D,))
        return structs.replace(told, message="", error_type="", traceback="")  # logged, and sys.exit(1)
    return fails(rank, says, frames=(f"{SITE}/torch/nn/parallel/distributed.py", C10D))


def culprits(rank: int, choice: random.Random) -> tuple[str, Failure]:
    kind = choice.randrange(8)
    if kind == 0:
        return "HF204", fails(rank, code=-9)
    if kind == 1:
        return "HF205", fails(rank, code=3)
    if kind == 2:
        return "HF223", fails(rank, code=-11, stderr="Fatal Python error: Segmentation fault\n")
    code, says = choice.choice(MIXED["own"])
    if kind == 3:
        return code, fails(rank, GLOO_CLOSED, after=says)  # and a collective while it cleans up
    if kind == 4:
        told = fails(rank, says)
        return code, structs.replace(told, message="", error_type="", traceback="")
    return code, fails(rank, says)


@pytest.mark.parametrize("seed", range(40))
def test_the_fault_is_found_wherever_it_arrives(seed: int) -> None:
    choice = random.Random(seed)
    for _ in range(25):
        rank, size = choice.randrange(8), choice.randrange(2, 9)
        code, culprit = culprits(rank, choice)
        others = [victim(other, choice) for other in range(8) if other != rank][: size - 1]
        order = [culprit, *others]
        choice.shuffle(order)
        verdict = judge(_evidence(order))
        assert verdict.culprit is culprit, (culprit, [each.message for each in order])
        assert verdict.code == code, (verdict.cause, culprit)


@pytest.mark.parametrize("seed", range(40))
def test_a_fault_that_ends_after_the_stop_is_found(seed: int) -> None:
    """Its victims were faster: their reports began the stop, which ended it by a signal while it still wrote."""
    choice = random.Random(seed)
    for _ in range(10):
        code, says = choice.choice(MIXED["own"])
        culprit = fails(7, says, code=choice.choice([1, -15]), late=True)
        others = [victim(rank, choice) for rank in range(choice.randrange(1, 7))]
        late = [structs.replace(each, after_stop=True, exit_code=-15) for each in others[1:]]
        verdict = judge(_evidence([others[0], *late, culprit]))
        assert verdict.culprit is culprit
        assert verdict.code == code


@pytest.mark.parametrize("seed", range(10))
def test_without_a_fault_nobody_is_accused_of_one(seed: int) -> None:
    choice = random.Random(seed)
    for _ in range(20):
        order = [victim(rank, choice) for rank in range(choice.randrange(1, 8))]
        verdict = judge(_evidence(order))
        assert verdict.code in {"HF208", "HF209", "HF210", "HF224", "HF225"}, (verdict.cause, order)
        lost = judge(structs.replace(_evidence(order), lost_nodes=("b (silent)",)))
        assert (lost.code, lost.culprit) == ("HF306", None)


def _evidence(order: list[Failure]) -> Evidence:
    return Evidence(generation=1, restarts=0, failures=tuple(order), lost_nodes=(), gave_up="", hosts=("a", "b"))
