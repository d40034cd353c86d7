"""What a step changes before its optimizer does comes back, and what a replacement needs is kept."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast.train.boundary import Boundary, Buffers, noted_forward

pytestmark = pytest.mark.xdist_group("torch")


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
    state.step, state.epoch = 7, 2
    boundary.mark(state)
    state.step, state.epoch = 8, 3
    expected = [each.state_dict() for each in schedules], optimizer.param_groups[0]["lr"], torch.get_rng_state()
    for each in schedules:
        each.step()
    torch.rand(1)
    boundary.rewind(state)
    assert (state.step, state.epoch) == (7, 2)
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
    boundary.mark(state)
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
