"""What a step changes before its optimizer does comes back, and what a replacement needs is kept."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast.train.boundary import Boundary, Buffers, RandomNumbers, TorchRecord, TorchsGenerator, noted_forward

pytestmark = pytest.mark.xdist_group("torch")


def cached_gauss() -> None:
    """The second of two numbers is only taken from the first one's rest."""
    random.gauss(0.0, 1.0)


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        cached_gauss,
        lambda: random.seed(5),
        lambda: [random.getrandbits(32) for _ in range(624)],
    ],
    ids=["a number", "gauss", "seed", "as many as the state has words"],
)
@pytest.mark.parametrize("before", [lambda: None, cached_gauss], ids=["", "after gauss"])
def test_whatever_is_drawn_of_pythons_numbers_is_noticed(
    draw: Callable[[], object], before: Callable[[], object]
) -> None:
    random.seed(4)
    before()
    numbers = RandomNumbers()
    draw()
    state = random.getstate()
    numbers.read()
    random.seed(6)
    numbers.restore()
    assert random.getstate() == state


@pytest.mark.parametrize(
    "draw",
    [np.random.rand, lambda: np.random.seed(5), lambda: np.random.bytes(624 * 4)],
    ids=["a number", "seed", "as many as the state has words"],
)
def test_whatever_is_drawn_of_numpys_numbers_is_noticed(draw: Callable[[], object]) -> None:
    np.random.seed(4)
    numbers = RandomNumbers()
    draw()
    expected = np.random.get_state()
    numbers.read()
    np.random.seed(6)
    numbers.restore()
    assert repr(np.random.get_state()) == repr(expected)


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


def test_buffers_come_back_also_when_a_step_puts_others_in_their_place() -> None:
    model = nn.BatchNorm1d(3)
    buffers = Buffers([model])
    model(torch.randn(8, 3))
    buffers.keep()
    kept = {name: each.clone() for name, each in model.named_buffers()}
    model.running_mean = torch.full((3,), 9.0)
    model(torch.randn(8, 3))
    buffers.restore()
    assert all(torch.equal(each, kept[name]) for name, each in model.named_buffers())


def test_the_schedule_and_the_numbers_of_a_step_that_was_interrupted_come_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1)),
    ]
    snaps = ht.Snapshots(tmp_path, every=None, memory_every=None)
    state = snaps.track(model=model, optimizer=optimizer, first=schedules[0], second=schedules[1])
    boundary = Boundary(snaps._tracker, "")
    optimizer.step()
    for each in schedules:
        each.step()
    boundary.mark(7)
    expected = [each.state_dict() for each in schedules], optimizer.param_groups[0]["lr"], torch.get_rng_state()
    for each in schedules:
        each.step()
    torch.rand(1)
    boundary.rewind(state)
    assert state.step == 7
    assert [each.state_dict() for each in schedules] == expected[0]
    assert optimizer.param_groups[0]["lr"] == expected[1]
    assert torch.equal(torch.get_rng_state(), expected[2])


def test_the_options_come_back_also_when_a_state_was_loaded(tmp_path: Path) -> None:
    """torch puts other dictionaries in the place of an optimizer's groups then."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    snaps = ht.Snapshots(tmp_path, every=None, memory_every=None)
    state = snaps.track(model=model, optimizer=optimizer, schedule=schedule)
    boundary = Boundary(snaps._tracker, "")
    optimizer.load_state_dict(optimizer.state_dict())
    boundary.mark(1)
    optimizer.param_groups[0]["lr"] = 7.0
    boundary.rewind(state)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert schedule.optimizer is optimizer


@pytest.mark.parametrize("replaced", [False, True], ids=["", "of a program that has replaced it"])
def test_a_forward_pass_is_noted_and_that_of_a_copy_is_not(replaced: bool) -> None:
    model, rows = nn.Linear(2, 2), torch.randn(3, 2)
    if replaced:
        model.forward = lambda _, plain=model.forward: plain(rows)  # type: ignore[method-assign]
    noted = []
    with noted_forward(model, lambda: noted.append(1)):
        expected = model(rows)
        copies = [copy.deepcopy(model)] if replaced else [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert noted == [1]
        for each in copies:
            with torch.no_grad():
                each.weight.zero_()
                each.bias.zero_()
            assert torch.equal(each(rows), torch.zeros(3, 2)) or replaced
        assert torch.equal(model(rows), expected)
        assert noted == [1, 1]
    assert torch.equal(model(rows), expected)
    assert noted == [1, 1]
    assert ("forward" in model.__dict__) == replaced


def test_a_replacement_finds_the_numbers_of_the_last_three_steps(tmp_path: Path) -> None:
    """Each of two micro-batches."""
    generator = TorchsGenerator()
    path, size_bytes = str(tmp_path / "record"), len(generator.state())
    record = TorchRecord(path, size_bytes)
    states = {}
    for step in (2, 4, 6, 8):
        for micro_batch in (step - 1, step):
            torch.rand(1)
            record.write(micro_batch, generator.state(), complete=False)
        torch.rand(1)
        states[step] = generator.state()
        record.write(step, states[step], complete=True)
    found = TorchRecord(path, size_bytes)
    assert found.read(2) is None
    assert found.read(7) is None
    for step in (4, 6, 8):
        assert found.read(step) == states[step]
    record.write(6, states[6], complete=True)
    assert found.read(8) is None, "the job went back"
