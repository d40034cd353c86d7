"""A pass of torch's loader that begins within an epoch draws no random number.

torch's `DataLoader` draws a seed for its worker processes whenever a pass begins, from the global generator if it has
none of its own. An undisturbed run draws one in each epoch. After a resume within an epoch, and after a loss in
`ht.survive`, the rest of the epoch is a pass of its own, and everything that is drawn later would be another number.

This concerns tracked objects only: a pass over an `ht.DistributedSampler`, and torchdata's loader. Worker processes
that draw (random augmentations) begin with another seed all the same: what they had drawn is not saved anywhere.

A tracked `ht.DistributedSampler` also gets to know here which batches the loop was given: by its indices alone, which
are drawn ahead, the sampler of an evaluation looks like one of the training.

Knows loaders and torch's generator. Knows nothing of snapshots.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from holdfast.train import torch_private
from holdfast.train.data.sampler import DistributedSampler, SamplerPass
from holdfast.train.guards import replaced


class _Noted:
    """An iterator of torch's loader over tracked samplers, which notes what it hands out."""

    def __init__(self, samplers: dict[int, tuple[DistributedSampler, SamplerPass]]) -> None:
        self._samplers = samplers
        self.batches: Any = None
        """torch's iterator."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self.batches)
        except StopIteration:
            for sampler, noted in self._samplers.values():
                sampler._end_pass(noted)
            raise
        for _, noted in self._samplers.values():
            noted.given += 1
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return len(self.batches)


def _batch_size(loader: Any) -> int:
    """The number of samples in each batch but the last; 0: a batch sampler of another kind decides."""
    if loader.batch_sampler is None:
        return 1
    return int(loader.batch_sampler.batch_size) if type(loader.batch_sampler) is BatchSampler else 0


class ContinuedPasses:
    """Replaces torch's functions that begin a pass, from its construction until `stop`."""

    def __init__(self, tracked: Callable[[], Collection[Any]], begins: Callable[[Any], None] = lambda _: None) -> None:
        """`tracked`: the objects that are tracked. `begins` is called with each loader over which a pass
        begins."""
        self._tracked = tracked
        self._begins = begins
        self._hooks = contextlib.ExitStack()
        self._replace(DataLoader, "__iter__", self._over_samplers)
        torchdatas = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
        if torchdatas is not None and hasattr(torchdatas, torch_private.MAKER_OF_PASSES):
            self._replace(torchdatas, torch_private.MAKER_OF_PASSES, self._of_torchdata)

    def _replace(self, kind: Any, name: str, ours: Callable[[Any, Callable[[Any], Any]], Any]) -> None:
        """Let `ours` begin the passes of this class."""
        begin = getattr(kind, name)
        weak = weakref.WeakMethod(ours)  # an object that was never stopped must not be kept alive by torch's class

        @functools.wraps(begin)
        def begun(loader: Any) -> Any:
            own = weak()
            return begin(loader) if own is None else own(loader, begin)

        self._hooks.enter_context(replaced(kind, **{name: begun}))

    def _over_samplers(self, loader: Any, begin: Callable[[Any], Any]) -> Any:
        self._begins(loader)
        tracked = {id(each) for each in self._tracked()}
        samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        ours = {id(each): each for each in samplers if isinstance(each, DistributedSampler) and id(each) in tracked}
        if not ours:
            return begin(loader)
        # A loader with a generator of its own draws nothing from the global one.
        draws = loader.generator is None and any(each._continues() for each in ours.values())
        size = _batch_size(loader)
        length = len(loader) if size else 0
        noted = _Noted({key: (each, each._begin_pass(size, length)) for key, each in ours.items()})
        before = torch.get_rng_state() if draws else None
        noted.batches = begin(loader)  # after `_begin_pass`: with workers it draws indices
        if before is not None:
            torch.set_rng_state(before)
        return noted

    def _of_torchdata(self, loader: Any, begin: Callable[[Any], Any]) -> Any:
        self._begins(loader)
        if loader.generator is not None:
            return begin(loader)
        before = torch.get_rng_state()
        batches = begin(loader)
        if torch_private.batches_taken(batches) and any(each is loader for each in self._tracked()):
            torch.set_rng_state(before)
        return batches

    def stop(self) -> None:
        """Put torch's own functions back."""
        self._hooks.close()
