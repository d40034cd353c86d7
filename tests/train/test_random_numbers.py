"""Whatever is drawn from a random generator is noticed, comes back, and is there for a replacement."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.train.random_numbers import (
    RandomNumbers,
    RandomRecord,
    TorchsGenerator,
    parts_equal_in_groups,
    random_state,
    set_random_state,
)

pytestmark = pytest.mark.xdist_group("torch")


def cached_gauss() -> None:
    """The second of two numbers is only taken from the first one's rest."""
    random.gauss(0.0, 1.0)


DRAWS: dict[str, tuple[Any, Callable[[], object], Callable[[], object]]] = {
    "a number": (random, random.random, random.getstate),
    "gauss": (random, cached_gauss, random.getstate),
    "seed": (random, lambda: random.seed(5), random.getstate),
    "as many as the state has words": (random, lambda: [random.getrandbits(32) for _ in range(624)], random.getstate),
    "numpy, a number": (np.random, np.random.rand, np.random.get_state),
    "numpy, normal": (np.random, np.random.randn, np.random.get_state),
    "numpy, seed": (np.random, lambda: np.random.seed(5), np.random.get_state),
    "numpy, as many as the state has words": (np.random, lambda: np.random.bytes(624 * 4), np.random.get_state),
}
"""The generator, what is drawn from it, its whole state."""


@pytest.mark.parametrize(("generator", "draw", "state"), DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("after_a_normal_one", [False, True])
def test_whatever_is_drawn_is_noticed(
    generator: Any, draw: Callable[[], object], state: Callable[[], object], after_a_normal_one: bool
) -> None:
    generator.seed(4)
    if after_a_normal_one:
        cached_gauss() if generator is random else np.random.randn()
    numbers = RandomNumbers()
    draw()
    expected = repr(state())
    numbers.read()
    generator.seed(6)
    numbers.restore()
    assert repr(state()) == expected


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1),
        lambda: torch.randn(1),  # every second time only what is left of the time before
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.manual_seed(5),
        lambda: torch.randint(2**32, (624,)),
        lambda: torch.set_rng_state(torch.Generator().manual_seed(4).get_state()),
    ],
    ids=["a number", "normal", "normal, double", "seed", "as many as the state has words", "another state"],
)
def test_whatever_is_drawn_of_torchs_numbers_is_noticed(draw: Callable[[], object]) -> None:
    torch.manual_seed(4)
    torch.rand(700)
    generator = TorchsGenerator()
    for _ in range(3):
        draw()
        state, expected = generator.state(), torch.get_rng_state()
        assert len(state) < len(expected), "the memory is not where it was"
        torch.manual_seed(6)
        generator.restore(state)
        assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(1), random.random, np.random.randn], ids=["torch", "Python", "numpy"]
)
def test_a_replacement_finds_the_numbers_of_the_last_three_steps(tmp_path: Path, draw: Callable[[], object]) -> None:
    """Each of two micro-batches."""
    numbers = RandomNumbers()
    path = str(tmp_path / "record")
    record = RandomRecord(path, numbers.states)
    draw()
    numbers.read()
    states = {}
    for step in (2, 4, 6, 8):
        for micro_batch in (step - 1, step):
            draw()
            record.write(micro_batch, numbers.now(), complete=False)
        draw()
        states[step] = numbers.now()
        record.write(step, states[step], complete=True)
    found = RandomRecord(path, numbers.states)
    assert found.read(2) is None
    assert found.read(7) is None
    for step in (4, 6, 8):
        assert found.read(step) == states[step]
    record.write(6, states[6], complete=True)
    assert found.read(8) is None, "the job went back"


def test_what_was_recorded_is_drawn_again() -> None:
    def drawn() -> list[float]:
        some = [random.random(), random.gauss(0.0, 1.0), float(np.random.rand()), float(np.random.randn())]
        return [*some, torch.rand(1).item(), torch.randn(1).item()]

    numbers = RandomNumbers()
    drawn()  # the second of each two normal numbers is left
    numbers.read()
    recorded, expected = numbers.now(), drawn()
    drawn()
    numbers.restore(recorded)
    assert drawn() == expected


@pytest.mark.parametrize(
    ("states", "in_groups"),
    [("1111", False), ("1122", True), ("1212", True), ("112233", True), ("1234", False), ("1112", False), ("1", False)],
)
def test_groups_of_ranks_with_equal_states_are_known(states: str, *, in_groups: bool) -> None:
    found = parts_equal_in_groups([{"torch": each, "python": "same"} for each in states])
    assert found == ({"torch"} if in_groups else set())


@pytest.mark.parametrize("kind", ["PCG64", "MT19937"])
def test_numpys_numbers_come_back_whatever_generator_the_program_has_set(kind: str) -> None:
    before = np.random.get_state(legacy=False)["bit_generator"]
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(7))
        state = random_state()
        drawn = np.random.random(3).tolist()
        np.random.set_bit_generator(np.random.MT19937(1))
        set_random_state(state)
        assert np.random.random(3).tolist() == drawn
        RandomNumbers()
    finally:
        np.random.set_bit_generator(getattr(np.random, before)())
