"""Gradient accumulation: one optimizer step made of several micro-batches, with one exchange of gradients.

Knows DDP, FSDP2 and plain modules, and a loader's share of its batch (batch.Share). Knows no loader and no snapshot.

The gradient of an optimizer step is the mean over all its samples, on all ranks, whatever the number of ranks and
micro-batches. In a loop over a loader of ours each micro-batch weighs what it holds, and a step ends with the epoch.
With a number and any other loader each weighs the same, and the count goes on over the epoch's end.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from holdfast.protocol.errors import ProcessGroupError
from holdfast.train.data import Ahead, HasShare, Share, in_hand
from holdfast.train.guards import watch


class MicroBatch:
    """One micro-batch of an optimizer step, yielded by `accumulate`."""

    def __init__(self, accumulation: _Accumulation, number: int, every: int, scale: float) -> None:
        self._accumulation = accumulation
        self.number = number
        """Its number within its optimizer step, from 0."""
        self.every = every
        """Micro-batches in this optimizer step."""
        self.scale = scale
        """The factor of the loss in `backward`: the batch's part of the step's samples, times the number of ranks."""
        self.last = number == every - 1
        """Whether the optimizer steps after this one."""

    def backward(self, loss: torch.Tensor, *, scaler: Any = None, **arguments: Any) -> None:
        """`loss.backward()` with the loss scaled; `loss` is the mean over the batch's samples.

        `scaler`: a torch.amp.GradScaler. Several losses of one micro-batch may be given one after the other."""
        scaled = loss * self.scale
        (scaled if scaler is None else scaler.scale(scaled)).backward(**arguments)
        self._accumulation.add(scaled.detach())

    @property
    def loss(self) -> torch.Tensor:
        """The mean loss over the samples of the optimizer step, detached.

        After the last micro-batch over all ranks, the same value on each; before, over what this rank has had so far.
        NaN when there was no `backward`.
        """
        return self._accumulation.loss()


class _Accumulation:
    """The unfinished optimizer step of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.done = 0
        """Micro-batches of this optimizer step that are done."""
        plain = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        # Weakly: this object must not keep alive the model whose life it shares.
        self._ddp = [weakref.ref(each) for each in _outermost(plain, DistributedDataParallel)]
        self._fsdp = [weakref.ref(each) for each in _outermost(plain, FSDPModule)]
        # A plain module on each rank has a loss of its own.
        self._world = dist.get_world_size(self._group()) if self._ddp or self._fsdp else 1
        self._sum: torch.Tensor | None = None
        self._weight = 0.0
        self._exchange: Any = None
        self._every = 1
        """Micro-batches in this optimizer step."""
        self._samples = 0
        """Samples of all ranks in it."""
        self._last_share: Share | None = None
        self._cut = False
        """The loop's body splits a batch into several micro-batches, so the loader's batches are not micro-batches."""

    def next_of(self, loader: Ahead, every: int) -> tuple[int, int, float] | None:
        """Number, count and scale of the next micro-batch, when `every` batches of the loader make a step or, at the
        epoch's end, fewer. None: batches are not micro-batches."""
        share = loader.share
        if share is None or self._cut:
            return None
        if share is self._last_share:
            self._cut = True
            return None
        self._last_share = share
        number = self.done
        if number == 0:
            ahead = loader.samples_ahead(every)
            self._every, self._samples = len(ahead), sum(ahead)
        scale = share.scale * loader.samples_ahead(1)[0] / self._samples
        return min(number, self._every - 1), self._every, scale

    def _group(self) -> Any:
        """The group over which the gradients' mean is computed."""
        module = self._ddp[0]() if self._ddp else None
        return dist.group.WORLD if module is None else module.process_group

    def add(self, scaled: torch.Tensor) -> None:
        value = scaled.to(torch.promote_types(scaled.dtype, torch.float32))
        self._sum = value if self._sum is None else self._sum + value

    def loss(self) -> torch.Tensor:
        if self._sum is None:
            return torch.tensor(float("nan"))
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
            self._sum = self._sum / self._world
            self._weight = 1.0
        return self._sum / self._weight if self._weight > 0 else self._sum

    @contextlib.contextmanager
    def micro_batch(self, number: int, every: int, scale: float) -> Iterator[MicroBatch]:
        if number == 0:
            self._sum, self._weight, self._exchange = None, 0.0, None
        self._weight += scale
        micro = MicroBatch(self, number, every, scale)
        with self._synced(exchange=micro.last):
            yield micro
        self.done = 0 if micro.last else number + 1
        if micro.last and self._world > 1 and self._sum is not None:
            # Every rank comes here once per step, so this meets no other collective; it runs beside the optimizer.
            self._exchange = dist.all_reduce(self._sum, group=self._group(), async_op=True)

    @contextlib.contextmanager
    def _synced(self, *, exchange: bool) -> Iterator[None]:
        """Gradients are exchanged in the backward pass, or only added up on this rank."""
        with contextlib.ExitStack() as stack:
            if not exchange:
                for module in _alive(self._ddp):
                    stack.enter_context(module.no_sync())
            for module in _alive(self._fsdp):
                _set_fsdp(module, exchange=exchange)
                stack.callback(_set_fsdp, module, exchange=True)
            yield


def _alive(references: list[weakref.ref[Any]]) -> Iterator[Any]:
    return (module for each in references if (module := each()) is not None)


def _set_fsdp(module: Any, *, exchange: bool) -> None:
    module.set_requires_gradient_sync(exchange)
    module.set_is_last_backward(exchange)


def _outermost(module: nn.Module, kind: type) -> list[Any]:
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]


_accumulations: weakref.WeakKeyDictionary[nn.Module, _Accumulation] = weakref.WeakKeyDictionary()
"""The unfinished step of each model, for the model's life: a loop needs no object of ours, and the model gets no
attribute."""


@contextlib.contextmanager
def accumulate(model: nn.Module, every: int | HasShare | None = None) -> Iterator[MicroBatch]:
    """One micro-batch: scales its loss, and lets gradients be exchanged only in the last one of an optimizer step.

        for batch in loader:
            with ht.accumulate(model, loader) as micro:      # forward pass and backward pass both inside
                micro.backward(loss_fn(model(batch)))        # instead of loss.backward()
            if micro.last:
                optimizer.step()
                optimizer.zero_grad()

    `every`: the loader that the loop is over (holdfast.train's), which decides what makes an optimizer step; or a
    number of batches; without it the loader's own, or 1. In a loop over a loader of holdfast.train every sample
    counts the same, however uneven batches are, and the epoch's last optimizer step may have fewer batches. With any
    other loader batches weigh the same, and the count goes on over the end of an epoch. `model`: DDP, FSDP2, or
    neither. Raises ProcessGroupError for a number below 1, one that contradicts the loader, or a loader that has
    handed out nothing.
    """
    accumulation = _accumulations.get(model)
    if accumulation is None:
        accumulation = _accumulations[model] = _Accumulation(model)
    watch(model)
    number, every, scale = _place(accumulation, every)
    with accumulation.micro_batch(number, every, scale) as micro:
        yield micro


def _place(accumulation: _Accumulation, every: int | HasShare | None) -> tuple[int, int, float]:
    """Number, count and loss factor of the next micro-batch."""
    loader = in_hand()
    if every is None:
        every = 1 if loader is None or loader.share is None else loader
    if isinstance(every, int):
        if every < 1:
            raise ProcessGroupError(f"accumulate(every={every}): at least one micro-batch makes an optimizer step.")
        if loader is not None and (loader.every > 1 or loader.is_kept):
            if loader.every != every:
                raise ProcessGroupError(
                    f"accumulate(model, every={every}): the loader makes optimizer steps of {loader.every} batches\n"
                    "write accumulate(model, loader), or leave global_batch_size= and every= of the loader out"
                )
            every = loader
    if isinstance(every, int):
        found = None if loader is None else accumulation.next_of(loader, every)
        # min: `every` may have become smaller in the middle of a step.
        return found or (min(accumulation.done, every - 1), every, 1 / every)
    share = every.share
    if share is None:
        raise ProcessGroupError(
            "accumulate(model, loader) belongs into the loop over that loader: it has no batch yet."
        )
    return share.micro, share.every, share.scale


def forget_pending() -> None:
    """Give up the unfinished optimizer steps of all models; their micro-batches are repeated."""
    _accumulations.clear()


def mid_accumulation(model: nn.Module) -> bool:
    """Whether gradients of an unfinished optimizer step are pending: a snapshot taken now would lose them."""
    accumulation = _accumulations.get(model)
    return accumulation is not None and accumulation.done > 0
