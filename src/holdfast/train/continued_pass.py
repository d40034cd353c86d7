"""A pass of torch's loader that begins within an epoch draws no random number.

torch's `DataLoader` draws a seed for its worker processes whenever a pass begins, from the global generator if it has
none of its own. An undisturbed run draws one in each epoch. After a resume within an epoch, and after a loss in
`ht.survive`, the rest of the epoch is a pass of its own, and everything that is drawn later would be another number.

This concerns tracked objects only: a pass over an `ht.DistributedSampler`, and torchdata's loader. Worker processes
that draw (random augmentations) begin with another seed all the same: what they had drawn is not saved anywhere.

Knows loaders and torch's generator. Knows nothing of snapshots.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast.train import torch_private
from holdfast.train.data.sampler import DistributedSampler
from holdfast.train.guards import replaced


class ContinuedPasses:
    """Replaces torch's functions that begin a pass, from its construction until `stop`."""

    def __init__(self, tracked: Callable[[], Collection[Any]]) -> None:
        """`tracked`: the objects that are tracked."""
        self._tracked = tracked
        self._hooks = contextlib.ExitStack()
        self._replace(DataLoader, "__iter__", self._over_samplers)
        torchdatas = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
        if torchdatas is not None and hasattr(torchdatas, torch_private.MAKER_OF_PASSES):
            self._replace(torchdatas, torch_private.MAKER_OF_PASSES, self._of_torchdata)

    def _replace(self, kind: Any, name: str, ours: Callable[[Any, Callable[[Any], Any]], Any]) -> None:
        """Let `ours` begin the passes of this class. A loader with a generator of its own draws nothing from the global
        one, and is left alone."""
        begin = getattr(kind, name)
        weak = weakref.WeakMethod(ours)  # an object that was never stopped must not be kept alive by torch's class

        @functools.wraps(begin)
        def begun(loader: Any) -> Any:
            own = weak()
            return begin(loader) if own is None or loader.generator is not None else own(loader, begin)

        self._hooks.enter_context(replaced(kind, **{name: begun}))

    def _over_samplers(self, loader: Any, begin: Callable[[Any], Any]) -> Any:
        tracked = {id(each) for each in self._tracked()}
        samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        ours = [each for each in samplers if isinstance(each, DistributedSampler) and id(each) in tracked]
        if not any(each._continues() for each in ours):
            return begin(loader)
        before = torch.get_rng_state()
        batches = begin(loader)
        torch.set_rng_state(before)
        return batches

    def _of_torchdata(self, loader: Any, begin: Callable[[Any], Any]) -> Any:
        before = torch.get_rng_state()
        batches = begin(loader)
        if torch_private.batches_taken(batches) and any(each is loader for each in self._tracked()):
            torch.set_rng_state(before)
        return batches

    def stop(self) -> None:
        """Put torch's own functions back."""
        self._hooks.close()
