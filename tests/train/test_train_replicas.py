"""Replicas are compared at each save to the disk, and before the first one to memory; what is not equal is not saved."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.train import replicas
from holdfast.train.replica_state import ReplicaState
from holdfast.train.replicas import difference, first_difference, first_not_finite, total
from holdfast.train.state import Tracker
from tests.warm import Warm

SCRIPT = Path(__file__).parent / "scripts" / "replica_ranks.py"
pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.timeout(180)]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)


def some(chance: random.Random) -> torch.Tensor:
    """A tensor of any type, size and layout."""
    shape = chance.choice([(), (0,), (1,), (3, 5), (7, 64), (129, 65), (300_001,)])
    tensor = (torch.randn(shape) * 50).to(chance.choice(DTYPES))
    match chance.randrange(4):
        case 0 if tensor.dim() == 2:
            return tensor.t()
        case 1 if tensor.dim() == 1 and len(tensor) > 2:
            return tensor[1:]
        case 2 if tensor.dim() == 1 and len(tensor) == 1:
            return tensor.expand(9)
        case _:
            return tensor


@pytest.mark.parametrize("seed", range(30))
def test_equal_tensors_have_equal_digests_whatever_their_memory(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    tensors = [some(chance) for _ in range(chance.randint(1, 9))]
    copies = [each.clone(memory_format=torch.contiguous_format) for each in tensors]
    assert total(tensors) == total(copies)
    changed = chance.randrange(len(copies))
    flat = copies[changed].reshape(-1)
    if len(flat):
        raw = flat.view(torch.uint8)
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        copies[changed] = flat.view(copies[changed].shape)
        assert total(tensors) != total(copies)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(1000), torch.ones(1000)),
        (torch.zeros(100_000), torch.zeros(100_001)),
        (torch.arange(100_000), torch.arange(100_000).flip(0)),
        (torch.zeros(4, 2), torch.zeros(2, 4)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
    ],
)
def test_other_values_places_and_shapes_have_other_digests(one: torch.Tensor, other: torch.Tensor) -> None:
    assert total([one]) != total([other])


def test_blocks_of_equal_words_do_not_cancel() -> None:
    block = torch.randn(replicas.BLOCK_WORDS * 2)
    assert total([torch.cat([block, block * 2])]) != total([torch.cat([block * 2, block])])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("items", [1, 70_000])
def test_what_is_not_finite_is_named(value: float, dtype: torch.dtype, items: int) -> None:
    tensors = {"a": torch.ones(items, dtype=dtype), "whole": torch.ones(3, dtype=torch.int64), "b": torch.ones(items)}
    assert first_not_finite(tensors) == ""
    tensors["b"][items // 2] = value
    assert first_not_finite(tensors) == "b"
    tensors["a"] = tensors["b"].to(dtype)
    assert first_not_finite(tensors) == "a"


def test_large_finite_values_are_finite() -> None:
    large = {str(dtype): torch.full((5000,), torch.finfo(dtype).max, dtype=dtype) for dtype in DTYPES[:4]}
    assert first_not_finite(large) == ""


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({0: 1, 1: 2}, "rank 0 and rank 1 differ"),
        ({0: 1, 1: 2, 2: 1}, "rank 1 differs from ranks 0 and 2"),
        ({0: 2, 1: 1, 2: 1, 3: 3, 4: 1}, "ranks 0 and 3 differ from ranks 1, 2 and 4"),
        ({0: 1, 1: 2, 2: 1, 3: 2}, "ranks 0, 1, 2 and 3 differ from one another"),
        ({2: 5, 6: 5}, "None"),
    ],
)
def test_which_ranks_differ(said: dict[int, int], text: str) -> None:
    assert str(difference(said)) == text


def test_the_first_tensor_that_differs_is_named() -> None:
    found = first_difference({0: ["a", "b", "c"], 1: ["a", "x", "y"]}, ["one", "two", "three"])
    assert found is not None
    assert found[0] == "two"


# --- real ranks -------------------------------------------------------------------------------------------------------


def test_replicas_that_are_equal_are_saved_with_the_buffers_of_one_rank(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "healthy", tmp_path)
    said = found["said"]
    assert said[0] != said[1] != said[2], "the ranks were to have buffers of their own"
    assert found["saved"] == said[0]


WHAT = {
    "one_bit": "rank 1 differs from ranks 0 and 2 in model.last.weight",
    "moment": "rank 0 and rank 1 differ in optimizer.state.first.weight.exp_avg",
    "counter": "rank 0 differs from ranks 1 and 2 in optimizer.state.scale.step",
    "frozen": "rank 3 differs from ranks 0, 1 and 2 in model.frozen",
    "swapped": "rank 0 and rank 1 differ in model.first.weight",
}


def assert_refused(found: dict[str, Any], text: str) -> None:
    for error in found["said"]:
        assert error.startswith("HF414 ReplicasDifferError")
        assert "after step 2" in error
        assert text in error
    assert found["steps"] == [1]


def test_a_replica_that_differs_is_named_on_all_ranks_and_not_saved(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "diverged", tmp_path)
    for change, text in WHAT.items():
        assert_refused(found[change], text)
    assert found["statistics"] == {"said": ["", ""], "steps": [1, 2, 3]}


def test_by_the_clock_as_well(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "clock", tmp_path)
    assert_refused({**found, "steps": [1]}, "rank 0 and rank 1 differ in model.last.weight")
    assert 2 not in found["steps"]


def test_replicas_that_may_differ_are_saved_as_the_first_rank_has_them(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "allowed", tmp_path)
    assert found["said"] == ["", ""]
    assert found["saved"] == [0.5] * 5


def test_a_module_that_each_rank_has_for_itself_is_no_replica(warm: Warm, tmp_path: Path) -> None:
    for error in warm.found(SCRIPT, "private", tmp_path):
        assert "ranks 0, 1, 2 and 3 differ from one another in model.own.weight" in error


def test_ranks_that_differ_leave_no_state_in_memory_for_each_other(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "in_memory", tmp_path)
    for name, step, held in (("own saved", 2, []), ("common saved", 2, []), ("own remade", 1, [])):
        for each in found[name]:
            assert "rank 0 and rank 1 differ in model.own.weight" in each["error"]
            assert (each["step"], each["began_with"], each["held"]) == (step, [], held)
    assert [each["equal"] for each in found["own saved"]] == [False, False], "one cannot take the state of the other"
    # They are equal before the first step: that state is good, and the difference is found after it.
    for each in found["common remade"]:
        assert "after step 1: rank 0 and rank 1 differ" in each["error"]
        assert set(each["held"]) == {0}


def test_what_belongs_to_each_rank_comes_back_to_it_or_is_named(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "grouped", tmp_path)
    assert found["4"] == [{"part": [rank] * 3, "seen": [1.0, 1.0], "notes": []} for rank in range(4)]
    for each in found["2"]:
        assert (each["part"], each["seen"]) == ([0.0] * 3, [1.0, 1.0])
        about_buffers, about_numbers = sorted(each["notes"], reverse=True)
        assert about_buffers.startswith("model.part: each of 4 ranks had a value of its own, and all 2 get that of")
        assert about_numbers.startswith("groups of ranks drew the same random numbers (torch), ")


@pytest.mark.parametrize("uncompared", [False, True])
def test_what_was_not_compared_is_not_left_for_a_lost_rank(*, uncompared: bool) -> None:
    model = torch.nn.Linear(2, 2)
    tracker = Tracker()
    tracker.add({"model": model})
    said = []
    saving: Any = SimpleNamespace(uncompared=uncompared, leave_alone=lambda *, tensors: said.append(tensors))
    state = ReplicaState(tracker, "")
    state.leave(saving)
    state.close()
    assert said == [not uncompared]


def test_it_is_the_same_whether_ddp_or_the_module_in_it_is_tracked(warm: Warm, tmp_path: Path) -> None:
    (_, weights), (resumed, weights_again) = warm.found(SCRIPT, "inner", tmp_path)
    assert resumed
    assert weights_again == weights


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_shards_are_compared_with_their_replicas(warm: Warm, tmp_path: Path) -> None:
    found = warm.found(SCRIPT, "hsdp", tmp_path)
    for error in found["said"]:
        assert "rank 1 and rank 3 differ in model.first.weight" in error
    assert found["steps"] == [1, 2]
    for error in found["refused"]:
        assert "a DTensor cannot be stored here" in error
