"""Losses and digests on a GPU: nothing waits for the device, and the numbers are those of the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this machine has no GPU that torch can use", allow_module_level=True)

from holdfast.protocol.errors import NotFiniteError  # noqa: E402 - they import torch
from holdfast.train.loss_watch import LossWatch  # noqa: E402
from holdfast.train.replicas import first_not_finite, total  # noqa: E402


def test_losses_that_are_not_finite_are_noticed_some_steps_later() -> None:
    watch = LossWatch()
    for step in range(3):
        watch.step(step, {"loss": torch.tensor(float("nan"), device="cuda")}, stepped=True)
    with pytest.raises(NotFiniteError):
        watch.read_all()


def test_no_step_waits_for_the_device() -> None:
    watch, done = LossWatch(), torch.cuda.Event()
    torch.cuda._sleep(10_000_000_000)
    for step in range(8):
        watch.step(step, {"loss": torch.ones((), device="cuda")}, stepped=True)
    done.record()
    assert not done.query(), "the device was waited for"
    watch.read_all()


def test_a_digest_is_the_same_on_every_device() -> None:
    tensors = [torch.randn(300_001), torch.randn(7, 64).to(torch.bfloat16), torch.arange(5), torch.zeros(0)]
    assert total([each.cuda() for each in tensors]) == total(tensors)
    tensors[1][3, 3] = float("inf")
    assert first_not_finite({str(number): each.cuda() for number, each in enumerate(tensors)}) == "1"
