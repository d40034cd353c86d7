"""Guards: warn once, with the fix, about common mistakes. They never change a result.

The mistakes are in mistakes.py, one class for each; this module connects these to torch while a process group is open,
and removes everything at its end. The connections, and the reasons for them:

optimizers   torch's public hook that runs after every `optimizer.step()`, for all optimizers
models       public forward hooks on the outermost module, added by `ht.ddp`, `ht.accumulate` and `Snapshots.track`, so
             that other modules are not slowed down; only find_unused_parameters has a hook on each parameter, for ten
             steps
torch.save, torch.utils.data.DistributedSampler
             replaced by functions that note the call and make it. torch offers no hook for either, and a guard that has
             to be called by hand would be called only by people who know the mistake.

`process_group(guards=False)` or HOLDFAST_GUARDS=0 switches them off.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DistributedSampler
from torch.utils.hooks import RemovableHandle

from holdfast.train import torch_private
from holdfast.train.mistakes import LoneSave, LossDiffers, NoSync, SharedFacts, StaleEpoch, Unused

VARIABLE = "HOLDFAST_GUARDS"
_NOT_OF_SCRIPT = ("holdfast.train.", "torch.", "contextlib")
"""Beginnings of the names of modules whose lines no warning shows."""


class GuardWarning(UserWarning):
    """Warns of a probable mistake; the message says how to fix it."""


def level_of_script() -> int:
    """The `stacklevel` for a warning of the caller, so that it shows the script's line, and none of ours or torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_NOT_OF_SCRIPT):
        level, frame = level + 1, frame.f_back
    return level


def enabled() -> bool:
    """Whether the environment leaves the guards on."""
    return os.environ.get(VARIABLE, "1").strip().lower() not in ("0", "false", "off", "no")


class _Watched(NamedTuple):
    """What watches one model."""

    passes: NoSync
    hooks: tuple[RemovableHandle, ...]


class Guards:
    """The guards of one process group. All calls come from the thread that trains."""

    def __init__(self, rank: int, world: int, store: Any) -> None:
        self._warned: set[str] = set()
        self._steps = 0
        self._models: weakref.WeakKeyDictionary[nn.Module, _Watched] = weakref.WeakKeyDictionary()
        """Weak: a function in ht.survive may make another model after each regroup."""
        self._unused: list[Unused] = []
        self._epochs = StaleEpoch(self._warn_for_all)
        self.renew(SharedFacts(rank, world, store))

    def _warn(self, mistake: str, text: str) -> None:
        """Warn once for each kind of mistake."""
        if mistake in self._warned:
            return
        self._warned.add(mistake)
        text += f"\n(holdfast guard '{mistake}', said once; off by {VARIABLE}=0 or process_group(guards=False))"
        warnings.warn(text, GuardWarning, stacklevel=level_of_script())

    def _warn_for_all(self, mistake: str, text: str) -> None:
        """Warn on rank 0 about a mistake that every rank sees alike."""
        if self._board.rank == 0:
            self._warn(mistake, text)

    def renew(self, board: SharedFacts) -> None:
        """Count everything that the ranks share from 0 again: the world begins, or has changed."""
        self._board = board
        self._saves = LoneSave(self._warn, board)
        self._losses = LossDiffers(self._warn, board)
        for each in self._unused:
            each.remove_hooks()
        self._unused = []

    # --- connections ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Connect the guards to torch for the block."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._unhook)
            stack.callback(register_optimizer_step_post_hook(self._after_optimizer).remove)
            stack.enter_context(self._sampler_noted())
            if self._board.world > 1:
                stack.enter_context(self._save_noted())
            yield

    def _unhook(self) -> None:
        for watched in list(self._models.values()):
            for handle in watched.hooks:
                handle.remove()
        for each in self._unused:
            each.remove_hooks()

    @contextlib.contextmanager
    def _sampler_noted(self) -> Iterator[None]:
        draw, set_epoch = DistributedSampler.__iter__, DistributedSampler.set_epoch

        @functools.wraps(draw)
        def noted_draw(sampler: Any) -> Iterator[int]:
            # `chain` passes the indices on at C's speed, and calls our notes before the first and after the last one.
            return itertools.chain(self._epochs.begins(sampler), draw(sampler), self._epochs.ended(sampler))

        @functools.wraps(set_epoch)
        def noted_set_epoch(sampler: Any, epoch: int) -> None:
            self._epochs.epoch_set(sampler)
            set_epoch(sampler, epoch)

        with replaced(DistributedSampler, __iter__=noted_draw, set_epoch=noted_set_epoch):
            yield

    @contextlib.contextmanager
    def _save_noted(self) -> Iterator[None]:
        save = torch.save

        @functools.wraps(save)
        def noted_save(obj: object, f: Any, *rest: Any, **options: Any) -> None:
            save(obj, f, *rest, **options)
            self._saves.saved(f)

        with replaced(torch, save=noted_save):
            yield

    def watch(self, model: nn.Module) -> None:
        """Watch the passes of this DDP or FSDP2 model, too. A second call does nothing."""
        if self._board.world == 1 or model in self._models:
            return
        if getattr(model, "find_unused_parameters", False) and not getattr(model, "static_graph", False):
            self._unused.append(Unused(self._warn, self._board, model))
        # Ours comes first of all hooks: FSDP2's own begins with a collective.
        before = model.register_forward_pre_hook(_before_forward, prepend=True)
        after = model.register_forward_hook(_after_forward)
        self._models[model] = _Watched(NoSync(self._warn_for_all), (before, after))

    # --- what happens --------------------------------------------------------------------------------------------

    def before_forward(self, model: nn.Module) -> None:
        watched = self._models.get(model)
        if watched is not None:
            self._saves.training_goes_on(self._steps)
            watched.passes.before_forward(model)

    def after_forward(self, model: nn.Module, output: Any) -> None:
        watched = self._models.get(model)
        if watched is not None:
            watched.passes.forward(model, output)

    def _after_optimizer(self, _optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        self._steps += 1
        for watched in self._models.values():
            watched.passes.optimizer_stepped()
        self._unused = [each for each in self._unused if not each.optimizer_stepped()]
        self._saves.optimizer_stepped()

    def loss(self, value: Any) -> None:
        """Compare a loss that should be the same on all ranks; every rank calls this once per step."""
        if self._board.world > 1:
            self._losses.step(value)


# --- one per process, as torch's default group is ---------------------------------------------------------------------

_current: Guards | None = None
_blocks = itertools.count()
"""A number for each block, by which no block reads the facts of an earlier one. All ranks open them in the same order.
"""


@contextlib.contextmanager
def guarded(group: Any = None) -> Iterator[None]:
    """Guards for a block of a program that makes its process group itself; `process_group()` has them already.

        dist.init_process_group("gloo")
        with guarded():
            snaps.track(model=model)     # so the guards see it, or by ht.ddp or ht.accumulate

    `group`: of `process_group()`; by default torch's own. Blocks do not nest: the inner one adds nothing.
    """
    global _current  # noqa: PLW0603
    if _current is not None or not enabled():
        yield
        return
    # The group's own numbers are not used: a replacement is alone until it joins the others.
    _current = guards = _of_torch() if group is None else Guards(dist.get_rank(), dist.get_world_size(), group.store)
    try:
        with guards.connected():
            yield
    finally:
        _current = None


def renew_guards(rank: int, world: int, store: Any) -> None:
    """Let active guards follow a world that has changed."""
    if _current is not None:
        _current.renew(SharedFacts(rank, world, store))


def _of_torch() -> Guards:
    if not dist.is_initialized():
        return Guards(0, 1, None)
    store = dist.PrefixStore(f"holdfast.guards.{next(_blocks)}", torch_private.default_store())
    return Guards(dist.get_rank(), dist.get_world_size(), store)


def active() -> bool:
    """Whether guards watch this process."""
    return _current is not None


def watch(model: nn.Module) -> None:
    """Let active guards see a DDP or FSDP2 model's passes. `ht.ddp`, `ht.accumulate` and `Snapshots.track` call it."""
    if _current is not None:
        _current.watch(model)


def same_loss(value: Any) -> None:
    """Report a loss that should be equal on all ranks; every rank must call it equally often. It warns if the values
    differ."""
    if _current is not None:
        _current.loss(value)


# Functions, not methods of Guards: a model with hooks may be copied or pickled.


def _before_forward(model: nn.Module, _arguments: Any) -> None:
    if _current is not None and not torch.compiler.is_compiling():
        _current.before_forward(model)


def _after_forward(model: nn.Module, _arguments: Any, output: Any) -> None:
    if _current is not None and not torch.compiler.is_compiling():
        _current.after_forward(model, output)


@contextlib.contextmanager
def replaced(owner: Any, **functions: Any) -> Iterator[None]:
    """Replace attributes for a block. They are restored at its end, unless other code has replaced them since."""
    before = {name: getattr(owner, name) for name in functions}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, function in functions.items():
            if getattr(owner, name) is function:
                setattr(owner, name, before[name])
