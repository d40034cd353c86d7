"""What training switches on and off, once, is as it was after a resume: gradients of parameters, modes of modules."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast.train as ht
from holdfast.train.agreement import Peers
from holdfast.train.reducers import Reducers, not_exchanged
from holdfast.train.switches import named_modules

pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.usefixtures("own_staging")]


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    made[0].requires_grad_(False)
    return made


def life(
    folder: Path,
    model: nn.Module,
    change: Callable[[nn.Module], object] | None = None,
    *,
    steps: int = 2,
    **choice: Any,
) -> nn.Module:
    """One life of a training: `change` comes once, after its first step."""
    with ht.Snapshots(folder, every="1 step", memory_every=None) as snaps:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = snaps.track(model=model, optimizer=optimizer)
        snaps.resume(**choice)
        for _ in range(steps):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval() if change is None else None
            snaps.step()
            if state.step == 1 and change is not None:
                change(model)
    return model


def gradients(model: nn.Module) -> list[bool]:
    return [each.requires_grad for each in model.parameters()]


def modes(model: nn.Module) -> list[bool]:
    return [each.training for each in model.modules()]


def unfreeze(model: nn.Module) -> None:
    model[0].requires_grad_(True)  # type: ignore[index]
    model[1].eval()  # type: ignore[index]


def test_what_was_switched_once_is_so_after_every_resume(tmp_path: Path) -> None:
    expected = [True] * 6, [True, True, False, True]
    for steps in (2, 0, 1, 0):
        model = life(tmp_path, net(), unfreeze, steps=steps)
        assert (gradients(model), modes(model)) == expected


def test_what_was_frozen_for_another_optimizers_step_alone_is_trained_after_a_resume(tmp_path: Path) -> None:
    """As a GAN's discriminator, while the generator learns from it."""
    for steps in (1, 0):
        model = net()
        layer = model[2]
        with ht.Snapshots(tmp_path, every="1 step", memory_every=None) as snaps:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            snaps.track(model=model, optimizer=optimizer)
            snaps.resume()
            for _ in range(steps):
                layer.requires_grad_(False)
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                layer.requires_grad_(True)
                snaps.step()
        assert gradients(model) == gradients(net())


def test_what_the_script_sets_before_a_resume_stays_where_training_changed_nothing(tmp_path: Path) -> None:
    life(tmp_path, net(), unfreeze)
    edited = net()
    edited[2].requires_grad_(False)
    life(tmp_path, edited, steps=0)
    assert gradients(edited) == [True] * 4 + [False] * 2


@pytest.mark.parametrize("evaluates", [True, False])
def test_the_modes_are_those_of_training_and_not_of_an_evaluation(tmp_path: Path, evaluates: bool) -> None:
    """A save may come in an evaluation, and a resume may be for one."""
    life(tmp_path, net(), None if evaluates else unfreeze, steps=1)
    model = net() if evaluates else net().eval()
    life(tmp_path, model, steps=0)
    assert modes(model) == [evaluates] * 4


def test_another_training_freezes_what_it_wants(tmp_path: Path) -> None:
    life(tmp_path, net(), unfreeze)
    model = life(tmp_path, net(), steps=0, only=["model"])
    assert gradients(model) == gradients(net())


def test_a_snapshot_without_changes_has_no_entry(tmp_path: Path) -> None:
    model = net()
    snaps = ht.Snapshots(tmp_path, every=None, memory_every=None)
    snaps.track(model=model)
    tracker = snaps._tracker
    tracker.switches.begin()
    tracker.switches.note()
    assert b"switches" not in tracker.collect(0, 1).text
    model[1].eval()
    assert b"switches" not in tracker.collect(0, 1).text, "no optimizer has stepped"
    tracker.switches.note()
    assert b"switches" in tracker.collect(0, 1).text
    model[1].train()
    tracker.switches.note()
    assert b"switches" not in tracker.collect(0, 1).text
    model[0].requires_grad_(True)
    assert b"switches" in tracker.collect(0, 1).text


def test_modules_have_the_same_names_in_wrappers() -> None:
    class Within(nn.Module):
        def __init__(self, wrapped: bool) -> None:
            super().__init__()
            module = nn.Sequential(nn.Linear(1, 1))
            self.module = torch.compile(module, backend="eager") if wrapped else module

    plain, wrapped = Within(False), torch.compile(Within(True), backend="eager")
    assert {name for name, _ in named_modules(plain)} == {name for name, _ in named_modules(wrapped)}
    assert dict(named_modules(plain)).keys() == {"", "module", "module.0"}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # a DDP module holds the group
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_gradients_that_a_resume_needs_again_are_exchanged() -> None:
    """DDP was made while the layer was frozen, as at the beginning of each life."""
    wrapper = nn.parallel.DistributedDataParallel(model := net())
    unfreeze(model)
    unfrozen = [*model[0].parameters()]
    assert not_exchanged(unfrozen) == "0.weight"
    reducers = Reducers([wrapper])
    reducers.take_in(unfrozen, Peers(0, 1))
    assert not_exchanged(unfrozen) == ""
    for _ in range(2):
        wrapper(torch.randn(4, 3)).square().mean().backward()
    assert all(each.grad is not None for each in model.parameters())
