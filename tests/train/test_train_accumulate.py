"""Accumulation: the gradient of an optimizer step is the mean over its samples, however it is cut up."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast.train as ht
from holdfast.protocol.errors import ProcessGroupError
from holdfast.train.data.position import GlobalBatch, Share
from tests.warm import Warm

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.timeout(180)]


@dataclass
class Dealt:
    """A loader as accumulate sees one."""

    share: Share | None = None
    every: int = 1


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters()])


@pytest.fixture
def whole() -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model, 10 rows, their mean loss and its gradients."""
    torch.manual_seed(0)
    model, rows = nn.Linear(4, 3), torch.randn(10, 4)
    reference = copy.deepcopy(model)
    loss = loss_of(reference, rows)
    loss.backward()
    return model, rows, loss.detach(), gradients(reference)


def test_equal_micro_batches(whole) -> None:
    model, rows, loss, expected = whole
    lasts = []
    for part in rows.split(2):
        with ht.accumulate(model, every=5) as micro:
            micro.backward(loss_of(model, part))
        lasts.append(micro.last)
        assert ht.mid_accumulation(model) is not micro.last
    assert lasts == [False] * 4 + [True]
    torch.testing.assert_close(gradients(model), expected)
    torch.testing.assert_close(micro.loss, loss)
    assert not micro.loss.requires_grad


def test_a_loader_tells_how_much_each_batch_weighs(whole) -> None:
    model, rows, loss, expected = whole
    loader = Dealt()
    sizes = []
    for share in GlobalBatch.kept(10, 1, 3).deal(0, 0, 10):
        loader.share = share
        part = rows[share.start : share.stop]
        sizes.append(len(part))
        with ht.accumulate(model, loader) as micro:
            micro.backward(loss_of(model, part))
    assert sorted(sizes) == [2, 2, 3, 3]
    assert micro.last
    torch.testing.assert_close(gradients(model), expected)
    torch.testing.assert_close(micro.loss, loss)


def test_the_loss_before_the_last_is_the_mean_so_far() -> None:
    model = nn.Linear(1, 1)
    seen = []
    for value in (1.0, 3.0, 8.0):
        with ht.accumulate(model, every=3) as micro:
            micro.backward(model.weight.sum() * 0 + value)
        seen.append(micro.loss.item())
    assert seen == pytest.approx([1.0, 2.0, 4.0])
    with ht.accumulate(model, every=3) as micro:
        assert micro.loss.isnan()


def test_the_next_step_begins_anew() -> None:
    model = nn.Linear(1, 1)
    for value in (1.0, 5.0, 7.0, 9.0):
        with ht.accumulate(model, every=2) as micro:
            micro.backward(model.weight.sum() * 0 + value)
    assert micro.loss.item() == pytest.approx(8.0)


def test_a_failed_micro_batch_does_not_count() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ZeroDivisionError), ht.accumulate(model, every=2):
        raise ZeroDivisionError
    assert not ht.mid_accumulation(model)


def test_a_gradient_scaler(whole) -> None:
    model, rows, loss, expected = whole
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for part in rows.split(5):
        with ht.accumulate(model, every=2) as micro:
            micro.backward(loss_of(model, part), scaler=scaler)
    torch.testing.assert_close(gradients(model), expected * 8)
    torch.testing.assert_close(micro.loss, loss)


def test_what_cannot_be_accumulated() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ProcessGroupError, match="at least one"), ht.accumulate(model, every=0):
        pass
    with pytest.raises(ProcessGroupError, match="no batch yet"), ht.accumulate(model, Dealt()):
        pass


def test_a_model_is_not_kept_alive() -> None:
    model = nn.Linear(1, 1)
    with ht.accumulate(model) as micro:
        micro.backward(model.weight.sum())
    gone = weakref.ref(model)
    del model, micro
    gc.collect()
    assert gone() is None


def test_resizes_leave_the_loss_curve_as_it_is(warm: Warm) -> None:
    """DDP on 2, 3, 4, 1 ranks and FSDP2 on 4, 2, 3, as one process undisturbed; epochs with uneven tails."""
    curves = warm.found(SCRIPTS / "curve.py", timeout=170)
    assert len(curves["undisturbed"]) == 16
    assert curves["ddp"] == pytest.approx(curves["undisturbed"], rel=1e-5)
    assert curves["fsdp"] == pytest.approx(curves["undisturbed"], rel=1e-5)
