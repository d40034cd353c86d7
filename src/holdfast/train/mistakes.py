"""The mistakes that guards detect: one class each, which receives events and reports what is wrong.

They observe only: no tensor is changed, nothing is raised, no collective is used. Ranks share facts through the group's
store, which rank 0 reads a step later without waiting. Between events a guard costs a few attribute look-ups per step.
guards.py connects them to torch.
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
"""Warns of a mistake: its name, and a text that says what is wrong and how to fix it."""

UNUSED_STEPS = 10
"""The number of optimizer steps in which find_unused_parameters must turn out to be needed."""
UNSYNCED_STEPS = 3
"""The guard warns after this number of optimizer steps in a row with a needless all-reduce. Fewer may be steps that a
GradScaler has skipped."""
AHEAD_STEPS = 3
"""The guard warns after this number of steps that took the same number of batches, and fewer than the first one."""
STEPS_AGAIN = 2
"""The guard warns after this number of steps without a batch of their own."""
LOSS_DIFFERENCE_MAX = 1e-5
"""Largest relative difference of losses that may come from rounding."""


class SharedFacts:
    """Small facts that ranks share through a store. When the store fails, training continues."""

    def __init__(self, rank: int, world: int, store: Any) -> None:
        self.rank, self.world = rank, world
        self._store = store

    def count(self, name: str, more: int = 0) -> int:
        """The count of this event on all ranks together, after `more` was added; 0: the store does not answer."""
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
    """The mistake of a second pass over a DistributedSampler without set_epoch: every epoch has the same order."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """A count since set_epoch: 1 for each pass that began, and 1 more if it was drawn to its end."""

    def epoch_set(self, sampler: Any) -> None:
        self._passes[sampler] = 0

    def begins(self, sampler: Any) -> Iterator[int]:
        """Note that a pass begins: this iterator gives no index, and runs before the first one. torchdata makes
        iterators from which it draws nothing. One pass that was left early may only show the data; a complete one, or
        two of them, are training."""
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
        yield from ()

    def ended(self, sampler: Any) -> Iterator[int]:
        """Note that a pass was drawn to its end: this iterator gives no index, and runs after the last one."""
        if sampler.shuffle and self._passes.get(sampler, 0):
            self._passes[sampler] += 1
        yield from ()


class LoneSave:
    """The mistake of torch.save to a file by one rank, after which training goes on without a wait of the other ranks.

    It is noticed if only one rank saved, and its next forward pass of a watched model began without any collective, of
    any process group, after the save. Files that are written by other means and models that are not watched are not
    noticed. A wait through a store or a file cannot be seen, and is a false alarm.
    """

    def __init__(self, warn: Warn, board: SharedFacts) -> None:
        self._warn = warn
        self._board = board
        self._collectives_at_save: int | None = None
        self._suspect = ""

    def saved(self, file: Any) -> None:
        """Note a torch.save(…, file), after it was made."""
        if _is_on_disk(file):
            self._collectives_at_save = _collectives()

    def training_goes_on(self, steps: int) -> None:
        """Note that a forward pass begins, after this number of optimizer steps."""
        if self._collectives_at_save is None or not torch.is_grad_enabled():
            return
        alone = self._collectives_at_save == _collectives()
        self._collectives_at_save = None
        if alone:
            self._suspect = f"saved/{steps}"
            self._board.count(self._suspect, 1)

    def optimizer_stepped(self) -> None:
        """Warn if this rank alone has saved. All ranks have been in the gradients' all-reduce by now, so every save
        before this step was reported."""
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
    """The mistake of several backward passes of one model for one optimizer step, each with an all-reduce.

    Passes between which the gradients were let go of add nothing up: a closure of LBFGS, or the two passes of SAM."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._backward_done = False
        self._again = self._adds_up = False
        self._in_a_row = 0

    def before_forward(self, model: nn.Module) -> None:
        """Note that a forward pass begins. Only now FSDP2's parameters have their gradients."""
        self._adds_up = self._backward_done and any(each.grad is not None for each in model.parameters())

    def forward(self, model: nn.Module, output: Any) -> None:
        """Note a forward pass, after it was made."""
        if not (torch.is_grad_enabled() and model.training and _syncs(model)):
            return
        if self._backward_done:
            self._again |= self._adds_up
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


class ReadAhead:
    """The mistake of a loop that asks a loader for the next batch before it trains the last one, as a prefetcher does:
    the first step of a pass takes more batches than those after it. The reverse has the same effect: several steps with
    one batch, as in a loop that packs sequences, or repeats each batch."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._warned = False
        self._again = 0
        """The number of steps without a batch of their own."""
        self.begin()

    def begin(self) -> None:
        """A pass begins."""
        self._batches = self._first = self._later = self._in_a_row = 0

    def batch(self) -> None:
        self._batches += 1

    def stepped_again(self) -> None:
        """Note a step after which the loop's body has the same batch as before: another use of it, or of what the loop
        has put aside from it. One may be an accident."""
        self._again += 1
        if self._again == STEPS_AGAIN:
            self._warn(
                "read_ahead",
                "snaps.step() was called again before the loop took another batch. The first of these calls counts the "
                "batch as trained, so a resume after it leaves out the rest of what the loop does with that batch.\n"
                "Call snaps.step() once per batch, after all of it.",
            )

    def stepped(self) -> None:
        batches, self._batches = self._batches, 0
        if not self._first:
            self._first = batches
            return
        self._in_a_row = self._in_a_row + 1 if batches == self._later else 1
        self._later = batches
        if self._in_a_row == AHEAD_STEPS and 0 < batches < self._first and not self._warned:
            self._warned = True
            self._warn(
                "read_ahead",
                f"The loop took {self._first} batches before its first step, and {batches} before each of the next: it "
                "seems to read ahead. A step counts the newest batch as trained, so a resume would leave it out.\n"
                "Ask for each batch in the pass of the loop that trains it. What num_workers= and pin_memory=True read "
                "ahead is counted right.",
            )


class Unused:
    """The mistake of find_unused_parameters=True, if every rank uses every parameter."""

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
        """Note an optimizer's step. Returns True when no more checks are needed."""
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
    """The mistake of a loss that should be the same on all ranks and differs: it was not all-reduced, or reduced to one
    rank only. It is compared in the steps 1, 2, 4, 8 …
    """

    def __init__(self, warn: Warn, board: SharedFacts) -> None:
        self._warn = warn
        self._board = board
        self._steps = 0
        self._open = ""

    def step(self, value: Any) -> None:
        """Compare the loss of a step; every rank calls this once per step."""
        if self._open and self._board.rank == 0:
            self._compare()
        self._steps += 1
        if self._steps & (self._steps - 1) == 0 and (number := number_of(value)) is not None:
            self._open = f"loss/{self._steps}"
            self._board.post(self._open, number)

    def _compare(self) -> None:
        losses = self._board.posted(self._open)
        if losses is None:
            return  # a rank has not reached this step: compare at the next call
        self._open = ""
        if not all(_alike(each, losses[0]) for each in losses):
            values = ", ".join(f"{each:.6g}" for each in losses[:8]) + (" …" if len(losses) > 8 else "")
            self._warn(
                "loss",
                f"The loss differs across ranks although one value is needed for all: {values}.\n"
                "Pass `micro.loss` of holdfast.train.accumulate after the last micro-batch, or call "
                "torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG) on every rank; "
                "reduce() is not enough.",
            )


def number_of(value: Any) -> float | None:
    """A loss or metric as a number; None: it is none, as before the first evaluation."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


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
    """The number of collectives that this process has begun, in all groups. It is compared only with earlier numbers of
    this process."""
    return sum(map(torch_private.collectives_begun, torch_private.all_groups()))


def _is_on_disk(file: Any) -> bool:
    if isinstance(file, (str, bytes)) or hasattr(file, "__fspath__"):
        return True
    with contextlib.suppress(OSError, AttributeError, ValueError):
        return int(file.fileno()) >= 0
    return False
