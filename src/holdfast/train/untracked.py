"""Notices what a training uses and does not track, in its first steps: loaders, optimizers and schedules.

The position of a loader that is not tracked is in no snapshot. A resume in the middle of an epoch, and a loss in
`ht.survive`, begin the epoch again: the first samples are trained twice. torch has no hook for passes, so its
`DataLoader.__iter__` is replaced by one that counts the batches that it hands out, from `track()` until the loader of
the training loop is known. A pass that had begun before is counted by the method that hands out its batches.

An `ht.DataLoader` that is not tracked begins with its first epoch again, also after a resume at an epoch's end.

Worker processes of torch's loader read ahead. A tracked sampler with a state of its own is then ahead of the training,
unless it counts in a method `trained()`; and a tracked IterableDataset stays where it is, since each worker reads a
copy.

A loop over a loader takes the same number of batches between two calls of `snaps.step()`. An evaluation takes many at
once, and none for a long time.

An optimizer that is not tracked and steps a tracked model begins with an empty state after a resume. torch's public
hook of all optimizers shows it. An optimizer inside a tracked one, which steps it itself, as SAM does, counts as
tracked. A schedule that is not tracked begins again after a resume; torch marks the optimizer whose rate it sets.

A random generator of the script's own begins again, too. It is looked for among the variables of the training loop, and
counts if each of the first steps has drawn from it. One that is seeded again in each step is right. If states are
saved between epochs only, so is one that is seeded in each epoch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from holdfast.protocol.errors import TrackingError
from holdfast.train import torch_private
from holdfast.train.data.datasets import (
    EVERYWHERE,
    Generator,
    GeneratorState,
    Seeded,
    attributes_of,
    is_generator,
    state_of,
)
from holdfast.train.guards import replaced
from holdfast.train.reentry import variables_in

STEPS = 3
"""An iterator belongs to the training loop if the same number of batches was taken between two steps this often in a
row."""
NOT_TRACKED = (
    "holdfast: the training loop is over a torch DataLoader that is not tracked: a resume within an epoch begins the "
    "epoch again, and trains its first samples twice.\n"
    "Take ht.DataLoader, or track ht.DistributedSampler; or save between epochs only: every=None, memory_every=None "
    "and state.epochs(…, save=True)."
)
OURS_NOT_TRACKED = (
    "holdfast: the training loop is over an ht.DataLoader that is not tracked: after a resume it begins with its first "
    "epoch again.\n"
    "Give it to track(), too."
)
SAMPLER_AHEAD = (
    "holdfast: the tracked {} is drawn ahead of the training, by num_workers= of its loader: a resume leaves out the "
    "samples that were read ahead.\n"
    "Take num_workers=0, ht.DataLoader, or ht.DistributedSampler; or count in a method trained() of it, which each "
    "snaps.step() calls."
)
DATASET_COPIED = (
    "holdfast: the tracked {} is read in copies, by num_workers= of its loader: its state here does not move, and a "
    "resume trains the samples since then twice.\n"
    "Take num_workers=0, ht.DataLoader with an ht.ShardedDataset, or torchdata's StatefulDataLoader."
)
"""Warnings about a loader of the training loop."""
OWN_ORDER = (
    "holdfast: the loader of the training loop draws its order from a random generator of its own, which no snapshot "
    "has: after a resume the order of the first epoch comes again.\n"
    "Seed it in each epoch: generator.manual_seed(seed + epoch). Or leave generator= out."
)
OWN_GENERATOR = (
    "holdfast: each step draws from {!r}, a random generator of the script's own, which no snapshot has: after a "
    "resume it begins again.\n"
    "Draw from the global generators of torch, numpy or Python, or track an object with its state."
)
SEARCH_STEPS_MAX = 200
"""Limit of the steps in which the loader of the training loop is searched for: the loop may be over something else."""


class _Count:
    """The batches of one pass."""

    def __init__(self) -> None:
        self.taken = 0
        """The number of batches so far."""
        self.seen = 0
        """The number of batches at the last step."""
        self.gap = 0
        """The number of batches between the last two steps."""
        self.equal_gaps = 0
        """The number of steps in a row with this gap."""

    def is_in_step(self) -> bool:
        """Count a complete step. Returns whether the training loop is over this iterator."""
        gap, self.seen = self.taken - self.seen, self.taken
        self.equal_gaps = self.equal_gaps + 1 if gap and gap == self.gap else int(gap > 0)
        self.gap = gap
        return self.equal_gaps >= STEPS


class _Counted(_Count):
    """An iterator of torch's loader that counts its batches."""

    def __init__(self, loader: Any, batches: Any, tracked: Collection[Any]) -> None:
        super().__init__()
        self.loader = loader
        self._batches = batches
        samplers = [*_samplers(loader.sampler), *_samplers(loader.batch_sampler)]
        parts = [*samplers, *([loader.dataset] if isinstance(loader.dataset, IterableDataset) else [])]
        among = {id(each) for each in tracked} if loader.num_workers and id(loader) not in map(id, tracked) else set()
        self._own = [each for each in parts if id(each) in among and not callable(getattr(each, "trained", None))]
        """Tracked objects of the script from which worker processes read."""
        self._states = self._read()
        self._moved: set[str] = set()
        """The classes of those whose states a request for a batch has moved."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        looks = self._own and self.taken < STEPS
        before = self._read() if looks else []
        batch = next(self._batches)
        self.taken += 1
        if looks:
            now = zip(self._own, before, self._read(), strict=True)
            self._moved |= {type(each).__name__ for each, was, new in now if was != new}
        return batch

    def _read(self) -> list[str]:
        return [repr(each.state_dict()) for each in self._own]

    def wrong_position(self) -> str:
        """A warning that the state of a tracked object is not the position of the training; empty: it may be."""
        for each, began, now in zip(self._own, self._states, self._read(), strict=True):
            if (name := type(each).__name__) in self._moved:
                return SAMPLER_AHEAD.format(name)
            if isinstance(each, IterableDataset) and began == now:
                return DATASET_COPIED.format(name)
        return ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)


def _kinds_of_loaders() -> list[Any]:
    """torch's class, and that of torchdata if the program has imported it, which has its own way to begin a pass."""
    torchdatas = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    return [DataLoader] if torchdatas is None else [DataLoader, torchdatas]


class UntrackedData:
    """Searches for the loader of the training loop, in the first steps."""

    def __init__(self, tracked: Callable[[], Collection[Any]]) -> None:
        """`tracked`: the objects that are tracked."""
        self._tracked = tracked
        self._live: weakref.WeakSet[_Counted] = weakref.WeakSet()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        """torch's iterators of the passes that have begun since this object was made."""
        self._early: weakref.WeakKeyDictionary[Any, _Count] = weakref.WeakKeyDictionary()
        """The passes that had begun before, by torch's iterator."""
        self._steps = 0
        self.order: OwnOrder | None = None
        """The order of the training loop's loader, if that is not tracked and has a random generator of its own."""
        self._hooks = contextlib.ExitStack()
        for kind in _kinds_of_loaders():
            self._replace(kind)
        for kind in torch_private.kinds_of_passes():
            self._replace_next(kind)

    def _replace(self, kind: Any) -> None:
        """Count the batches of passes that this class begins."""
        begin = kind.__iter__
        note = weakref.WeakMethod(self._note)

        @functools.wraps(begin)
        def counted(loader: Any) -> Iterator[Any]:
            batches = begin(loader)
            noted = note()
            return batches if noted is None else noted(loader, batches)

        self._hooks.enter_context(replaced(kind, __iter__=counted))

    def _replace_next(self, kind: Any) -> None:
        """Count the batches that this class of iterators hands out."""
        following = kind.__next__
        note = weakref.WeakMethod(self._note_batch)

        @functools.wraps(following)
        def counted(batches: Any) -> Any:
            batch = following(batches)
            noted = note()
            if noted is not None:
                noted(batches)
            return batch

        self._hooks.enter_context(replaced(kind, __next__=counted))

    def _note(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        self._known.add(batches)
        if self._is_inside_tracked(loader):
            return batches
        counted = _Counted(loader, batches, self._tracked())
        self._live.add(counted)
        return counted

    def _note_batch(self, batches: Any) -> None:
        """Count a batch of a pass that had begun before."""
        if batches not in self._known and not isinstance(torch_private.parts_of_pass(batches)[0], Seeded):
            self._early.setdefault(batches, _Count()).taken += 1

    def at_step(self) -> str:
        """Count a complete step. Returns a warning, once, if the training loop is over a loader whose position is not
        in the snapshots; empty: nothing is wrong."""
        if self._steps >= SEARCH_STEPS_MAX:
            return ""
        self._steps += 1
        passes = [each for each in list(self._live) if each.is_in_step()]
        # There are several if the loop is over a zip() of them.
        found = [_parts_of_loader(each.loader) for each in passes]
        found += [_parts_of_pass(batches) for batches, count in list(self._early.items()) if count.is_in_step()]
        if found or self._steps == SEARCH_STEPS_MAX:
            self.stop()
        lacking = [parts for parts in found if not self._is_tracked(parts)]
        if lacking:
            self.order = OwnOrder.of(lacking, _saved_with(self._tracked()))
            return OURS_NOT_TRACKED if any(isinstance(each, Seeded) for one in lacking for each in one) else NOT_TRACKED
        return next(filter(None, (each.wrong_position() for each in passes)), "")

    def _is_inside_tracked(self, loader: Any) -> bool:
        """Whether it is torch's loader inside an ht.DataLoader that is tracked, or kept by a tracked object."""
        if not isinstance(loader.dataset, Seeded):
            return False
        within = (one for each in self._tracked() for one in (each, *_attributes(each)))
        return any(getattr(each, "_torch", None) is loader for each in within)

    def _is_tracked(self, parts: Sequence[Any]) -> bool:
        """Whether a loader is tracked, or one of the objects from which it draws its samples."""
        if isinstance(parts[0], DataLoader) and self._is_inside_tracked(parts[0]):
            return True
        tracked = {id(each) for each in self._tracked()}
        within = {id(torch_private.pass_of(each)) for each in self._tracked()}
        return any(id(each) in tracked | within for each in parts if each is not None)

    def stop(self) -> None:
        """Put torch's own function back."""
        self._steps = SEARCH_STEPS_MAX
        self._hooks.close()


def _parts_of_loader(loader: Any) -> list[Any]:
    return [loader, loader.dataset, *_samplers(loader.sampler), *_samplers(loader.batch_sampler)]


def _parts_of_pass(batches: Any) -> list[Any]:
    dataset, sampler = torch_private.parts_of_pass(batches)
    return [batches, dataset, *_samplers(sampler)]


def _samplers(sampler: Any) -> list[Any]:
    """A sampler, and the one inside it if it makes batches."""
    return [sampler, getattr(sampler, "sampler", None)]


class OwnOrder:
    """The random generators from which loaders or their samplers draw the order of each epoch."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self._before: list[GeneratorState] = []
        """The state of each at the end of the last epoch; empty: none has ended."""

    @classmethod
    def of(cls, loaders: Iterable[Sequence[Any]], saved: Collection[int]) -> OwnOrder | None:
        """Those of these loaders, each given by its parts; None: they draw from torch's own generator, or from one that
        is among those `saved`."""
        # The second part is the dataset: what it draws is for samples, and not for their order.
        given = (getattr(each, "generator", None) for parts in loaders for each in (parts[0], *parts[2:]))
        known = {id(torch.default_generator), *saved}
        own = [each for each in given if isinstance(each, torch.Generator) and id(each) not in known]
        return cls(own) if own else None

    def epoch_ends(self) -> bool:
        """Returns whether a generator has gone on since the epoch before: the script has seeded it for neither."""
        before, self._before = self._before, [state_of(each) for each in self._generators]
        return any(was.leads_to(now) for was, now in zip(before, self._before, strict=False))  # the first time: none


class UntrackedOptimizers:
    """Optimizers that step parameters of some models and are not among those that are tracked."""

    def __init__(self, models: Iterable[nn.Module], tracked: Iterable[Optimizer], others: Iterable[Any]) -> None:
        """`others`: further tracked objects. An optimizer inside one of them counts as tracked."""
        self._parameters = {id(each) for model in models for each in model.parameters()}
        # The wrapper of accelerate steps torch's optimizer inside, and has its state.
        self.tracked = {id(each) for one in tracked for each in _with_inner(one)}
        """The identities of the tracked optimizers."""
        self.tracked |= {id(each) for one in others for each in _optimizers_in(one)}
        self.found = ""
        """The class of an optimizer that has stepped and is not tracked; empty: there is none."""

    def check(self) -> None:
        """Raise TrackingError if such an optimizer has stepped: in `ht.survive` it would lose its state."""
        if self.found:
            raise TrackingError(
                f"ht.survive: an optimizer of the class {self.found} steps a tracked model, and is not "
                "tracked: a replacement would begin with an empty state\n"
                "give it to track(), too; one that another optimizer wraps by a name of its own: "
                "track(…, base=optimizer.base_optimizer)"
            )

    def note(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer steps. Returns whether it steps parameters of the models."""
        if id(optimizer) in self.tracked:
            return True
        steps = any(id(each) in self._parameters for group in optimizer.param_groups for each in group["params"])
        if steps and not self.found:
            self.found = type(optimizer).__name__
        return steps


class UntrackedGenerators:
    """Random generators of the script's own from which the training draws."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[Generator, GeneratorState]] = {}
        """Each generator and its state after the last step, by the variable's name."""
        self._steps = 0
        self._epoch: int | None = None
        self._drawn: set[str] = set()
        """Names of those from which each step has drawn."""

    @property
    def done(self) -> bool:
        """Whether no further step is looked at."""
        return self._steps > STEPS

    def at_step(self, frame: FrameType, tracked: Collection[Any], epoch: int | None = None) -> str:
        """Look at the variables of the training loop, in the script's `frame`, after a step. Returns the name of one
        with such a generator, once; empty: there is none. One that a `tracked` object saves counts as tracked. `epoch`:
        that of the step, if states are saved between epochs only; then the last look is in the next epoch."""
        if self.done or (self._steps == STEPS and epoch is not None and epoch == self._epoch):
            return ""
        self._steps += 1
        self._epoch = epoch
        before, self._states = self._states, _generators_in(frame, tracked)
        drawn = {
            name
            for name, (each, state) in self._states.items()
            if name in before and before[name][0] is each and before[name][1].leads_to(state)
        }
        # The first look has nothing to compare with, so the second one has the first step that is known.
        self._drawn = self._drawn & drawn if self._steps > 2 else drawn
        if not self.done:
            return ""
        self._states = {}
        return min(self._drawn, default="")


def _generators_in(frame: FrameType, tracked: Collection[Any]) -> dict[str, tuple[Generator, GeneratorState]]:
    known = _saved_with(tracked) | {id(each) for each in EVERYWHERE}
    return {
        name: (each, state_of(each))
        for name, each in variables_in(frame).items()
        if is_generator(each) and id(each) not in known
    }


def _saved_with(tracked: Iterable[Any]) -> set[int]:
    """The identities of what tracked objects have as attributes, and of what their `state_dict` uses besides."""
    found: set[int] = set()
    for each in tracked:
        found |= {id(one) for one in _attributes(each)}
        with contextlib.suppress(TypeError, ValueError, AttributeError):  # it is no function of Python
            used = inspect.getclosurevars(each.state_dict)
            found |= {id(one) for one in (*used.nonlocals.values(), *used.globals.values())}
    return found


def without_its_schedule(optimizers: Iterable[Optimizer], others: Iterable[Any]) -> str:
    """The class of a tracked optimizer whose learning rate a schedule sets that is not tracked; empty: there is none.
    After a resume that schedule would begin again, from the rate that the optimizer has then. `others`: the further
    tracked objects."""
    scheduled = {
        id(one)
        for each in others
        for schedule in (each, *_attributes(each))
        if isinstance(schedule, LRScheduler)
        for one in _with_inner(schedule.optimizer)
    }
    for each in optimizers:
        both = _with_inner(each)
        if any(map(torch_private.has_schedule, both)) and not any(id(one) in scheduled for one in both):
            return type(each).__name__
    return ""


def _with_inner(optimizer: Any) -> list[Any]:
    """An optimizer, and torch's inside it if it is a wrapper of accelerate."""
    inner = getattr(optimizer, "optimizer", None)
    return [optimizer] if inner is None else [optimizer, inner]


def _optimizers_in(each: Any) -> list[Any]:
    """The optimizers that this object has as attributes, or in lists of them. A schedule only changes its optimizer."""
    if isinstance(each, LRScheduler):
        return []
    return [value for value in _attributes(each) if isinstance(value, Optimizer)]


def _attributes(each: Any) -> list[Any]:
    """The values of its attributes, and of those that are lists their items."""
    values = [*attributes_of(each).values()]
    return values + [item for value in values if isinstance(value, (list, tuple)) for item in value]
