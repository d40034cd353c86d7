"""The mistakes that guards detect: one class each, which receives events and reports what is wrong.

They observe only: no tensor is changed, nothing is raised, no collective is used. Ranks share facts through a board
(the group's store), which rank 0 reads a step later without waiting. Between events a guard costs a few attribute
look-ups per step. guards.py connects them to torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from holdfast.train import torch_private

Warn = Callable[[str, str], None]
"""(which mistake, what is wrong and how to fix it)."""

UNUSED_STEPS = 10
"""Optimizer steps in which find_unused_parameters must turn out to be needed."""
UNSYNCED_STEPS = 3
"""Optimizer steps in a row with a needless all-reduce. Fewer may be a GradScaler's skipped steps."""
LOSS_DIFFERENCE_MAX = 1e-5
"""Relative; a larger difference is no rounding."""


class SharedFacts:
    """Small facts that ranks share through a store. When the store fails, training continues."""

    def __init__(self, rank: int, world: int, store: Any) -> None:
        self.rank, self.world = rank, world
        self._store = store

    def count(self, name: str, more: int = 0) -> int:
        """How often an event was counted on all ranks together; 0 when the store does not answer."""
        with contextlib.suppress(RuntimeError):
            return int(self._store.add(f"guard/{name}", more))
        return 0

    def post(self, name: str, value: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"guard/{name}/{self.rank}", json.dumps(value))

    def posted(self, name: str) -> list[Any] | None:
        """The values that every rank posted; None while some rank has not."""
        keys = [f"guard/{name}/{rank}" for rank in range(self.world)]
        with contextlib.suppress(RuntimeError):
            if self._store.check(keys):
                return [json.loads(text) for text in self._store.multi_get(keys)]
        return None


class StaleEpoch:
    """DistributedSampler iterated a second time without set_epoch: every epoch in the same order."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Since set_epoch: 1 for each pass that began and 1 more when it was drawn to its end."""

    def told(self, sampler: Any) -> None:
        self._passes[sampler] = 0

    def begins(self, sampler: Any) -> None:
        """One pass that was left early is a look at the data; a complete one, or two of them, is training."""
        if not sampler.shuffle:
            return
        passes = self._passes.get(sampler, 0)
        if passes >= 2:
            self._warn(
                "set_epoch",
                "A DistributedSampler is iterated again without set_epoch: every epoch has the same order.\n"
                "Call sampler.set_epoch(epoch) at the start of each epoch, or use holdfast.train.DataLoader.",
            )
        self._passes[sampler] = passes + 1

    def ended(self, sampler: Any) -> Iterator[int]:
        """Yields no index; runs when all have been drawn."""
        if sampler.shuffle and self._passes.get(sampler, 0):
            self._passes[sampler] += 1
        yield from ()


class LoneSave:
    """torch.save to a file by one rank, and then training again without anything that the other ranks wait in.

    Noticed is: one rank alone saved, and its next forward pass of a watched model began with no collective of any
    process group after the save. Not noticed: files written by other means, models that nobody watches, a meeting
    through a store or a file (which is a false alarm then; there is no way to see it).
    """

    def __init__(self, warn: Warn, board: SharedFacts) -> None:
        self._warn = warn
        self._board = board
        self._collectives_at_save: int | None = None
        self._suspect = ""

    def saved(self, file: Any) -> None:
        """After torch.save(…, file)."""
        if _is_on_disk(file):
            self._collectives_at_save = _collectives()

    def training_goes_on(self, steps: int) -> None:
        """Before a forward pass; `steps`: optimizer steps before it."""
        if self._collectives_at_save is None or not torch.is_grad_enabled():
            return
        alone = self._collectives_at_save == _collectives()
        self._collectives_at_save = None
        if alone:
            self._suspect = f"saved/{steps}"
            self._board.count(self._suspect, 1)

    def optimizer_stepped(self) -> None:
        """All ranks have met in the gradients' all-reduce, so every save before this step was reported."""
        if not self._suspect:
            return
        saved_too = self._board.count(self._suspect)
        self._suspect = ""
        if saved_too == 1:
            self._warn(
                "barrier",
                f"Rank {self._board.rank} alone called torch.save, and the others ran ahead: they may read or leave "
                "before the file is complete, or time out in a collective.\n"
                "Call torch.distributed.barrier() on all ranks after the save, or use holdfast.train.Snapshots.",
            )


class NoSync:
    """Several backward passes of one model for one optimizer step, each with an all-reduce of its own."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._backward_done = False
        self._again = False
        self._in_a_row = 0

    def forward(self, model: nn.Module, output: Any) -> None:
        """After a forward pass."""
        if not (torch.is_grad_enabled() and model.training and _syncs(model)):
            return
        if self._backward_done:
            self._again = True
            return
        first = _first_with_gradient(output)
        if first is not None:
            first.register_hook(self._backward)

    def _backward(self, _gradient: torch.Tensor) -> None:
        self._backward_done = True

    def optimizer_stepped(self) -> None:
        if not self._backward_done:
            return  # another model's optimizer
        self._in_a_row = self._in_a_row + 1 if self._again else 0
        self._backward_done = self._again = False
        if self._in_a_row == UNSYNCED_STEPS:
            self._warn(
                "no_sync",
                "Gradients are accumulated over several backward passes, and all ranks exchange them in each: only "
                "the last exchange is needed.\n"
                "Use `with holdfast.train.accumulate(model, micro_batches=N) as micro: micro.backward(loss)`, or "
                "model.no_sync() around all but the last (FSDP2: set_requires_gradient_sync).",
            )


class Unused:
    """DDP with find_unused_parameters=True, and on no rank a parameter that was not used."""

    def __init__(self, warn: Warn, board: SharedFacts, model: nn.Module) -> None:
        self._warn = warn
        self._board = board
        self._steps = 0
        self._used: set[int] = set()
        self._needed = False
        parameters = [each for each in model.parameters() if each.requires_grad]
        self._count = len(parameters)
        self._hooks = [each.register_post_accumulate_grad_hook(self._gradient) for each in parameters]

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _gradient(self, parameter: torch.Tensor) -> None:
        self._used.add(id(parameter))

    def optimizer_stepped(self) -> bool:
        """Returns True when no more checks are needed."""
        if not self._used and self._hooks:
            return False  # another model's optimizer
        if self._hooks:
            self._needed |= len(self._used) < self._count
            self._used.clear()
            self._steps += 1
            if self._steps < UNUSED_STEPS:
                return False
            self.remove_hooks()
            if self._needed:
                self._board.count("unused/needed", 1)
            self._board.count("unused/seen", 1)
            return self._board.rank > 0
        if self._board.count("unused/seen") < self._board.world:
            return False
        if not self._board.count("unused/needed"):
            self._warn(
                "find_unused_parameters",
                f"find_unused_parameters=True, and in {UNUSED_STEPS} steps every rank used every parameter: DDP "
                "searches the graph in every step for nothing.\n"
                "Leave the argument out, unless later steps skip parts of the model.",
            )
        return True


class LossDiffers:
    """A loss that should be the same on all ranks differs: it was not all-reduced, or reduced to one rank only.

    Looked at in the steps 1, 2, 4, 8 …
    """

    def __init__(self, warn: Warn, board: SharedFacts) -> None:
        self._warn = warn
        self._board = board
        self._steps = 0
        self._open = ""

    def told(self, value: Any) -> None:
        """Called once per step on every rank."""
        if self._open and self._board.rank == 0:
            self._compare()
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:
            self._open = f"loss/{self._steps}"
            self._board.post(self._open, float(value.detach() if isinstance(value, torch.Tensor) else value))

    def _compare(self) -> None:
        losses = self._board.posted(self._open)
        if losses is None:
            return  # somebody is behind: at the next step
        self._open = ""
        if not all(_alike(each, losses[0]) for each in losses):
            told = ", ".join(f"{each:.6g}" for each in losses[:8]) + (" …" if len(losses) > 8 else "")
            self._warn(
                "loss",
                f"The loss differs across ranks although one value is needed for all: {told}.\n"
                "Pass `micro.loss` of holdfast.train.accumulate after the last micro-batch, or call "
                "torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG) on every rank; "
                "reduce() is not enough.",
            )


def _alike(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=LOSS_DIFFERENCE_MAX)


def _syncs(model: nn.Module) -> bool:
    """Whether the next backward pass exchanges gradients."""
    if isinstance(model, FSDPModule):
        return torch_private.fsdp_exchanges(model)
    return bool(getattr(model, "require_backward_grad_sync", False))


def _first_with_gradient(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return next((found for each in output if (found := _first_with_gradient(each)) is not None), None)
    return None


def _collectives() -> int:
    """Number of collectives that this process has begun, in all groups. Compared only with earlier numbers of this
    process."""
    return sum(map(torch_private.collectives_begun, torch_private.all_groups()))


def _is_on_disk(file: Any) -> bool:
    if isinstance(file, (str, bytes)) or hasattr(file, "__fspath__"):
        return True
    with contextlib.suppress(OSError, AttributeError, ValueError):
        return int(file.fileno()) >= 0
    return False
