"""Decides whether `snaps.step()` ends an optimizer step, or only one of several batches whose gradients are pending.

A call of `snaps.step()` says that a step is complete and may be saved. There is one exception: while gradients wait for
the rest of their optimizer step, the state alone is not enough to go on from, because the gradients would be lost. So
nothing is saved then; a save that was due is made after the optimizer has stepped.

In the middle of `ht.accumulate` it is known that gradients are pending. A script that accumulates by hand does not say
so. For such a script torch's hooks are evidence: gradients are pending if no optimizer has stepped since the last call,
and there are gradients. The evidence may be wrong: a `step()` that is replayed from a CUDA graph, or that another
optimizer makes, runs no hook. So after CALLS_MAX calls without any hook each call counts as a complete step, and one
warning says so.

This evidence is one rank's. Another rank may see something else at the same call: a GradScaler of its own has skipped
the step there, or it adds up another number of batches between exchanges (local SGD). So no rank decides alone whether
it takes part in a save. All of them do, and in the save they exchange whether something is pending (save.py)."""

from __future__ import annotations

import warnings
from enum import Enum

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from holdfast.train import torch_private
from holdfast.train.accumulation import UnfinishedStep, unfinished_micro_batches

CALLS_MAX = 10
"""Limit of the calls of `snaps.step()` in a row with gradients and without an optimizer's step. A script that
accumulates more batches than this by hand gets the warning, too; from its first optimizer step on its batches are
recognised."""


class WherePending(Enum):
    """The ranks on which gradients are pending after a call of `snaps.step()`."""

    NONE = "none"
    HERE = "here"
    """Gradients are pending on this rank; it may be otherwise on the others."""
    EVERYWHERE = "everywhere"
    """Gradients are pending on every rank: in an accumulation at whose end all exchange gradients."""


class PendingGradients:
    """One rank's evidence of pending gradients, from the optimizers that it tracks."""

    def __init__(self) -> None:
        self.stepped = False
        """Whether a tracked optimizer has stepped since the last call of `at_step`."""
        self._optimizers: list[Optimizer] = []
        self._sharded: list[FSDPModule] = []
        self._silent_calls = 0
        """The number of calls in a row with gradients and without an optimizer's step."""
        self._silent_calls_known = 0
        """The largest such number after which an optimizer did step: the number of batches that are added up by hand.
        """
        self._newest = WherePending.NONE
        """The answer of the last call of `at_step`."""
        self._micro_batches: dict[int, UnfinishedStep] = {}
        """Unfinished steps of `ht.accumulate` at the last call of `at_step`, by the model's identity."""

    def watch(self, optimizer: Optimizer) -> None:
        """Look at this optimizer's steps and gradients."""
        self._optimizers.append(optimizer)
        optimizer.register_step_post_hook(self._note)

    def watch_model(self, model: nn.Module) -> None:
        """Look at gradients that FSDP2 keeps in this model, beside its parameters, until all ranks exchange them."""
        self._sharded += [each for each in model.modules() if isinstance(each, FSDPModule)]

    def _note(self, *_: object) -> None:
        self.stepped = True
        self._silent_calls_known = max(self._silent_calls_known, self._silent_calls)
        self._silent_calls = 0

    def begin_again(self) -> None:
        """Count from 0 again: the world has changed, and the step that was under way is given up. The counts have to be
        the same on all ranks."""
        self.stepped = False
        self._silent_calls = 0
        self._micro_batches = {}
        self._newest = WherePending.NONE

    def now(self) -> WherePending:
        """The answer between two calls of `at_step`, for a save that the script itself asks for."""
        return self._newest if not self.stepped and self._has_gradients() else WherePending.NONE

    def at_step(self) -> WherePending:
        """The answer for this call of `snaps.step()`, which begins a new step."""
        self._newest = self._at_step()
        return self._newest

    def _at_step(self) -> WherePending:
        stepped, self.stepped = self.stepped, False
        before, self._micro_batches = self._micro_batches, unfinished_micro_batches()
        # A model whose step is where it was at the last call is not trained any more: its step delays no save.
        unfinished = [each for model, each in self._micro_batches.items() if before.get(model) != each]
        if unfinished:
            return WherePending.EVERYWHERE if any(each.exchanges for each in unfinished) else WherePending.HERE
        if stepped or not self._has_gradients():
            return WherePending.NONE
        self._silent_calls += 1
        calls_max = max(CALLS_MAX, 2 * self._silent_calls_known)
        if self._silent_calls == calls_max:
            _warn(calls_max)
        return WherePending.HERE if self._silent_calls < calls_max else WherePending.NONE

    def _has_gradients(self) -> bool:
        # An optimizer that was skipped, as by a GradScaler, or one without hooks, leaves none after zero_grad().
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        there = any(parameter.grad is not None for group in groups for parameter in group["params"])
        return there or any(map(torch_private.fsdp_holds_gradients, self._sharded))


def _warn(calls: int) -> None:
    warnings.warn(
        f"holdfast: snaps.step() was called {calls} times, gradients are there, and no tracked optimizer has "
        "stepped. Each call counts as a complete step from here on, and is saved as one.\n"
        "If several calls make one optimizer step, use ht.accumulate, or call snaps.step() once for all of them.",
        RuntimeWarning,
        stacklevel=4,
    )
