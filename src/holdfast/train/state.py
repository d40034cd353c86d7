"""The state that is saved and restored: models, optimizers, everything else with a state_dict, random numbers,
counters.

Tensors of models and optimizers are *shared*: sharded or replicated over the ranks, and each piece is saved once. A
buffer that differs between ranks before the first step is saved once as well, for other worlds, and by each rank. All
other state is a rank's *own*: it comes back to the same rank, or, in another world, to the ranks whose number modulo
the old world is that rank's. State that is not in tensors is saved as text (state_codec.py).

tracked.py takes models and optimizers apart.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from holdfast import worker
from holdfast.protocol.errors import ShardingError, TrackingError
from holdfast.protocol.train_contract import RUN_ID_VARIABLE
from holdfast.train import replicas, torch_private
from holdfast.train import state_codec as codec
from holdfast.train.agreement import Peers
from holdfast.train.data import Position, check_same, rank_and_world
from holdfast.train.module_numbers import ModuleNumbers
from holdfast.train.own_objects import is_data, unknown_objects
from holdfast.train.random_numbers import (
    RandomNumbers,
    RandomRecord,
    equal_parts,
    parts_equal_in_groups,
    random_state,
    set_random_state,
)
from holdfast.train.reading import Saved
from holdfast.train.reducers import Order, Reducers
from holdfast.train.reentry import (
    Options,
    Reentry,
    ResumedWeights,
    Whereabouts,
    is_cycled,
    options_of,
    warn_of_cycle,
    warn_of_weights,
)
from holdfast.train.sharding import OWN, TIED, local_tensor
from holdfast.train.switches import Switches
from holdfast.train.tracked import (
    Choice,
    Compared,
    Fit,
    Role,
    Shared,
    Targets,
    TrackedModel,
    TrackedOptimizer,
    check_tied,
    listed_names,
    trained,
)
from holdfast.train.untracked import OWN_ORDER, OwnOrder

FORMAT = 1
NUMBERS_READ = 4096
"""The number of numbers of a parameter that are read to see whether it has changed."""
OWN_BUFFERS = "own_buffers"
"""Key of the text with the names of the buffers that belong to each rank."""
ALONE, STAND_IN = "alone", "stand in"
"""Marks of a text: its rank has left the state without the others; it stands for that of another rank."""
SWITCHES, NUMBERS = "switches", "numbers"
"""The parts of a text that have `Switches.changed` and `ModuleNumbers.moved`. Most snapshots have none."""


@dataclass
class Collected:
    """The state at one moment. Tensors are the live ones, not copies."""

    shared: dict[str, torch.Tensor]
    own: dict[str, torch.Tensor]
    text: bytes
    """This rank's state that is not in tensors; it changes with every step."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    """The roles of the shared tensors, by name."""
    optimized: frozenset[str] = frozenset()
    """Names of the shared tensors that only tracked optimizers change: their parameters, and what they keep for
    these."""

    @property
    def buffers(self) -> set[str]:
        """Names of shared tensors that may differ between the ranks."""
        return {name for name, role in self.roles.items() if role is Role.BUFFER}

    def trained(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors among these shared ones that training changes."""
        return trained({name: self.shared[name] for name in names}, self.roles)

    def signature(self) -> tuple[Any, ...]:
        """A value that is equal as long as a layout is valid, if the tensors' shapes and types stay the same."""
        sharded = [(key, each.placements) for key, each in self.shared.items() if isinstance(each, DTensor)]
        return (list(self.shared), list(self.own), sharded)


@dataclass
class Restored:
    """Result of a restore on one rank."""

    world_then: int
    """The number of ranks that saved the state."""
    refused: dict[str, str] = field(default_factory=dict)
    """Optional objects that did not take their state, with the errors."""
    before: dict[str, Any] = field(default_factory=dict)
    """The initial states of optional objects."""
    orders: list[Order] = field(default_factory=list)
    """The order of the gradients of each DDP module; empty: the snapshot has none."""
    notes: list[str] = field(default_factory=list)
    """What cannot come back as it was, for a warning."""
    seed: str = ""
    """The seed of the random numbers in a world of another size; empty: the size is the same, and they are restored."""
    equal: dict[str, str] | None = None
    """The random generators that were in the same state on all ranks whose states are available, with a digest of it;
    None: only one rank's state is."""
    apart: list[str] = field(default_factory=list)
    """The random generators that were in the same state within groups of these ranks."""


@dataclass
class _Parts:
    """Models and optimizers, taken apart. It is valid as long as they consist of the same objects: training waits for
    each save, and to name hundreds of tensors again takes a millisecond.
    """

    keys: list[list[str]]
    live: list[Any]
    """All objects of which they consist."""
    tensors: dict[str, torch.Tensor]
    roles: dict[str, Role]
    tied: dict[str, str]
    models: dict[str, Any]
    optimizers: dict[str, Any]
    optimized: frozenset[str]


_UNCHANGING = (torch.Tensor, str, int, float, type(None))
"""Types whose objects need not be read again as long as they are the same; a tensor's values are read when it is
copied."""


def _same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


class TrainState:
    """The position of the training. `track` returns it."""

    def __init__(self) -> None:
        self._step = 0
        self._asked = False
        """Whether the script has asked for the step, or goes over `epochs()`."""
        self.epoch = 0
        """The number of the current epoch, from 0."""
        self.run_id = ""
        """One id of the training for loggers, known after `resume()`: HOLDFAST_RUN_ID of the first life, which is saved
        with the state. That variable has it, too."""
        self._follow: Callable[[int], None] = lambda _epoch: None
        self._batches: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._pass_by: Callable[[int], None] = lambda _count: None
        """A function that is called with the number of epochs of a loop that has none left."""
        self._finish: Callable[[], None] = lambda: None
        self._save: Callable[[], None] = lambda: None
        self._pending: Callable[[], bool] = lambda: False
        """Whether there are gradients that a script adds up by hand, and that no optimizer step has used."""
        self._reentry: Reentry | None = None
        """The rest of an epoch that is trained now; None: it is a whole one."""
        self._ranks = 0
        """The number of ranks that have trained the epoch so far; 0: not known."""
        self._in_body = False
        """Whether the body of a loop over `epochs()` runs."""
        self._only = ""
        """The objects that were restored from another run, with step and epoch (`resume(only=…)`); empty: all were."""

    @property
    def step(self) -> int:
        """The number of calls of `Snapshots.step()` in all lives of this job."""
        self._asked = True
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step

    def _name(self, run_id: str) -> None:
        """Set the id of the training. Loggers find it in the environment; child processes of this rank, too."""
        self.run_id = os.environ[RUN_ID_VARIABLE] = run_id

    def _begin_again(self) -> None:
        self._step, self.epoch, self._only = 0, 0, ""
        self._follow, self._batches = (lambda _epoch: None), (lambda: (0, 0))
        self._pass_by, self._reentry = (lambda _count: None), None

    def epochs(self, count: int, *, save: bool = False) -> Iterator[int]:
        """The epochs that are left of 0 … count-1. The first one may be half done: the loader goes on within it.

        Code before the loader's loop runs again if a resume goes on within the epoch: let it compute values from the
        epoch (`lr = base * 0.1**epoch`), not change them (`lr *= 0.1`, of which a warning tells). Code after that loop
        runs again if a resume goes on from a state that was saved before its end. With
        `save` the state is saved to the disk after each epoch's body, and a resume from there goes on with the next
        epoch. After the last epoch the state is saved, unless `every` is None: the code that follows may need the
        complete training.
        """
        if self._only and self.epoch >= count:
            warnings.warn(
                f"holdfast: resume(only={self._only}) has restored epoch {self.epoch} of {count} as well: nothing is "
                "left to train. To begin a new run with these weights: ht.load_weights(model, folder), in another "
                "folder.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._asked = True
        if self.epoch >= count:
            self._pass_by(count)
        while self.epoch < count:
            self._follow(self.epoch)
            left, whole = self._batches()
            if whole:
                worker.at_step(self._step, of=self._step + left + (count - self.epoch - 1) * whole)
            self._in_body = True
            try:
                yield self.epoch
            finally:
                self._in_body = False
            if self._reentry is not None:
                self._reentry.end(self.epoch, pending=self._pending())
            self.epoch += 1
            if save:
                self._follow(self.epoch)
                self._save()
        self._finish()


def _refuse_fsdp1(name: str, module: nn.Module) -> None:
    """Raise TrackingError for FSDP1. Its parameters are flat pieces of many, whose names and state come only by
    collectives: for each save training would wait until the whole model is gathered. FSDP2 needs neither.
    """
    if any(isinstance(each, FullyShardedDataParallel) for each in module.modules()):
        raise TrackingError(
            f"track({name}=…): FullyShardedDataParallel (FSDP1) is not supported: shard with fully_shard (FSDP2),\n"
            "or save yourself: torch.distributed.checkpoint.save(…, storage_writer=ht.SnapshotWriter(folder, step=…))"
        )


def _checked(model: TrackedModel) -> TrackedModel:
    """The model, after a try of its `state_dict()`: so the error does not come at the first save. Raises TrackingError,
    also for torchmetrics' metrics, which save nothing by default."""
    try:
        if not model.live() and any(map(_is_counting_metric, model.module.modules())):
            raise TrackingError(
                f"track({model.name}=…): the state_dict() of this {type(model.module).__name__} is empty, so what it "
                f"counts begins again after a resume: call {model.name}.persistent(True) before track(), and that of "
                "each metric in it"
            )
    except TypeError as error:
        raise TrackingError(
            f"track({model.name}=…): its state_dict() fails: {error}\n"
            "one that a module overrides has to take torch's keywords: def state_dict(self, *args, **kwargs)"
        ) from error
    return model


def _is_counting_metric(module: nn.Module) -> bool:
    """Whether it is a metric of torchmetrics that has a state."""
    names = {f"{each.__module__}.{each.__name__}" for each in type(module).__mro__}
    return "torchmetrics.metric.Metric" in names and bool(getattr(module, "metric_state", True))


def _first_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor with its first rows, of about NUMBERS_READ numbers."""
    if tensor.numel() <= NUMBERS_READ:
        return tensor
    return tensor[: max(1, NUMBERS_READ * len(tensor) // tensor.numel())]


def _check_optimizer(name: str, optimizer: Optimizer) -> None:
    """Raise TrackingError for an optimizer that cannot be saved."""
    if any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__):
        raise TrackingError(
            f"track({name}=…): ZeroRedundancyOptimizer is not supported: each rank has a part of its state.\n"
            "Shard the model with fully_shard (FSDP2), and take an ordinary optimizer: its state is sharded, too."
        )
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    _check_takes_nothing(name, optimizer.state_dict)
    try:
        optimizer.state_dict()
    except Exception as error:
        raise TrackingError(f"track({name}=…): its state_dict() fails: {type(error).__name__}: {error}") from error


def _check_takes_nothing(name: str, state_dict: Callable[..., Any]) -> None:
    try:
        inspect.signature(state_dict).bind()
    except TypeError as error:
        raise TrackingError(f"track({name}=…): its state_dict() has to work without arguments: {error}") from error
    except ValueError:
        return  # some compiled functions have no signature


@dataclass
class Tracker:
    """Everything that is tracked, by the names it was given."""

    state: TrainState = field(default_factory=TrainState)
    _models: list[TrackedModel] = field(default_factory=list)
    _optimizers: list[TrackedOptimizer] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)
    """Objects that are neither models nor torch's optimizers, by name."""
    _kept: _Parts | None = None
    random_record: RandomRecord | None = None
    """The random numbers that this rank, or the lost one that it replaces, had after its last steps; None: not known.
    """
    loaded: dict[str, Any] = field(default_factory=dict)
    """The positions that `restore` has given to data that are no loaders of ours."""
    _resumed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Positions of the loaders that were restored, until the training begins."""
    looks_for_cycles: bool = False
    """Whether loops over loaders are looked at for `itertools.cycle`. No: they were, or a trainer skips batches."""
    own_order: OwnOrder | None = None
    """The order of a loader that is not tracked, if it has a random generator of its own and states are saved between
    epochs."""
    _given: dict[str, Any] = field(default_factory=dict)
    """The batch of each loader whose pass was under way at the last step, by name."""
    _beside: bool = False
    """Whether a step had batches of several loaders or samplers."""
    _counts: dict[str, Any] = field(default_factory=dict)
    """The number of steps that each schedule had made at the last `Snapshots.step()`."""
    _trains: bool = False
    """Whether a step was made in this process."""
    _passed_by: tuple[Options, dict[str, str]] | None = None
    """The optimizers' options, and digests of the weights, when the first loop over epochs had none left, after a
    resume; None: there was none."""
    _resumed_weights: ResumedWeights | None = None
    """The weights that a resume has restored, until it is known that training begins with them; None: it is."""
    chosen: tuple[str, ...] | None = None
    """The objects with which this life was begun from a snapshot (`resume(only=…)`); None: with all. Its own snapshots
    contain all objects, and these names."""
    own_buffers: tuple[str, ...] = ()
    """Names of buffers that differed between ranks before the first step, as a rank's part of a table does; equal on
    all ranks. Each rank gets its own back in a world of the same size. Those that become different in training, as
    BatchNorm's, are not among them."""

    def add(self, objects: Mapping[str, Any]) -> None:
        """Track these objects, by name. Raises TrackingError for objects that cannot be tracked, and for a name that is
        already used."""
        for name, each in objects.items():
            if "/" in name or name in self.names():
                raise TrackingError(f"track({name}=…): the name is taken, or has a slash")
            if isinstance(each, Optimizer):
                _check_optimizer(name, each)
            if isinstance(each, nn.Module):
                _refuse_fsdp1(name, each)
                self._models.append(_checked(TrackedModel(name, each)))
            elif isinstance(each, Optimizer) and type(each).state_dict is Optimizer.state_dict:
                self._optimizers.append(TrackedOptimizer(name, each, self._models))
            elif callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None)):
                _check_takes_nothing(name, each.state_dict)
                self.others[name] = each
                if callable(keep := getattr(each, "_keep_position", None)):
                    keep()
            else:
                hint = (
                    "\ntake ht.DataLoader, or track its ht.DistributedSampler" if isinstance(each, DataLoader) else ""
                )
                raise TrackingError(
                    f"track({name}=…): a {type(each).__name__} has no state_dict() and load_state_dict(){hint}"
                )
        self.state._follow, self.state._batches = self._set_epoch, self._count_batches
        self.state._pass_by = self._note_passed_by

    @property
    def step(self) -> int:
        """`state.step`, for holdfast: that notes that the script has asked for it."""
        return self.state._step

    @step.setter
    def step(self, step: int) -> None:
        self.state._step = step

    def emptied(self) -> Tracker:
        """A tracker of nothing, with the same counters, which begin at 0."""
        self.state._begin_again()
        return Tracker(self.state)

    def names(self) -> set[str]:
        return {*(each.name for each in self._models), *(each.name for each in self._optimizers), *self.others}

    @property
    def optimizers(self) -> list[Optimizer]:
        found = [each.optimizer for each in self._optimizers]
        return found + [each for each in self.others.values() if isinstance(each, Optimizer)]

    def named_models(self) -> list[tuple[str, nn.Module]]:
        return [(each.name, each.module) for each in self._models]

    @property
    def models(self) -> list[nn.Module]:
        return [each.module for each in self._models]

    @functools.cached_property
    def switches(self) -> Switches:
        """What training switches on and off in the models."""
        return Switches(self._models)

    @functools.cached_property
    def numbers(self) -> ModuleNumbers:
        """The Python numbers in the models and optimizers that training moves."""
        return ModuleNumbers(self._models, self._optimizers)

    @functools.cached_property
    def reducers(self) -> Reducers:
        """The reducers of the models. It is called when all of them are tracked."""
        return Reducers(self.models)

    def regroup(self, rank: int, world: int) -> None:
        """Let loaders, samplers and all other followers go on as this rank of another world."""
        for each in self.followers().values():
            each.regroup(rank, world)

    def positions(self) -> dict[str, dict[str, Any]]:
        """Positions of loaders and samplers, by name; equal on all ranks that have done the same steps."""
        return {name: position_of(each) for name, each in self.followers().items()}

    def set_positions(self, positions: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the positions of loaders and samplers."""
        self._resumed = {}
        for name, each in self.followers().items():
            each.load_state_dict(positions[name])

    def followers(self) -> dict[str, Any]:
        """The objects that follow the world, by name: loaders, samplers, and data of the script's own with
        `regroup(rank, world)`."""
        return {name: each for name, each in self.others.items() if callable(getattr(each, "regroup", None))}

    def check_data(self, peers: Peers) -> None:
        """Raise DataError if the ranks divide data among themselves that are not the same on all. All ranks call
        this."""
        identities = ((name, getattr(each, "_identity", None)) for name, each in self.others.items())
        theirs = peers.all_gather({name: identity() for name, identity in identities if identity is not None})
        for name, first in theirs[0].items():
            check_same(name, [first, *(each.get(name) for each in theirs[1:])])

    def check_counted(self) -> None:
        """Raise TrackingError if the loop's body has a batch that its loader has not counted."""
        if any(getattr(each, "_in_body", False) for each in self.others.values()):
            raise TrackingError(
                "save() between the optimizer's step and snaps.step(): a resume would train this batch again\n"
                "call save() after snaps.step()"
            )

    def schedule_to_step_again(self) -> str:
        """The name of a schedule that has stepped in the body of this epoch, after the pass over its data. A resume
        from a state that is saved now runs that code again: the epoch is not counted yet. Empty: there is none."""
        is_over = any(
            getattr(each, "_resumes", False) and each.epoch > self.state.epoch for each in self.others.values()
        )
        if not self.state._in_body or not is_over:
            return ""
        # Of all that such code may change, schedules alone have a count that shows it.
        counts = self._schedule_counts()
        changed = (name for name, count in self._counts.items() if counts[name] != count)
        return next(changed, "")

    def note_trained(self) -> None:
        """Let loaders count the batch in the loop's body as trained."""
        self._resumed, self._trains, self._resumed_weights = {}, True, None
        self._counts = self._schedule_counts()
        if self.state._reentry is not None:
            self.state._reentry.step(self.state.epoch)
        self._look_for_repeats()
        # A loader whose own batches are never the ones that a step counts is an evaluation's (`DataLoader._evaluates`).
        training = [each for each in self.others.values() if _is_in_loop(each)]
        if self.looks_for_cycles and training and (len(training) > 1 or not self.state._in_body):
            self._look_for_cycles()
        if len(training) > 1 and not self._beside:
            self._beside = True
            for each in training:
                each._beside_another = True
        for each in self.others.values():
            if training and callable(note := getattr(each, "_note_another", None)) and not _is_in_loop(each):
                note()
            if callable(note := getattr(each, "_stepped", None) or getattr(each, "trained", None)):
                note()

    def _look_for_repeats(self) -> None:
        """Tell a loader if none of those that are under way has given a batch since the last step."""
        given = {name: batch for name, each in self.others.items() if (batch := getattr(each, "_given", None))}
        # In epochs of one batch all batches are equal, and each is an object of its own.
        same = given.keys() == self._given.keys() and all(each is self._given[name] for name, each in given.items())
        if given and same:
            self.others[next(iter(given))]._note_no_batch()
        self._given = given

    def _look_for_cycles(self) -> None:
        """Warn, once, of a loader in the training's loop that is in `itertools.cycle`. One alone in the body of an
        epoch is not: that would never end."""
        self.looks_for_cycles = False
        if rank_and_world(None)[0]:
            return
        cycled = (name for name, each in self.others.items() if getattr(each, "_in_body", False) and is_cycled(each))
        if name := next(cycled, ""):
            warn_of_cycle(name)

    def _schedule_counts(self) -> dict[str, Any]:
        """The number of steps that each schedule has made."""
        schedules = {name: each for name, each in self.others.items() if isinstance(each, LRScheduler)}
        return {name: torch_private.steps_of(each) for name, each in schedules.items()}

    def note_pass(self, loader: Any) -> None:
        """Note that a pass over this loader of torch begins, or over one of torchdata."""
        giving = [each for each in self.others.values() if _gives_batches(each, loader)]
        if not giving:
            return
        goes_on = any(map(_continues, giving))
        if goes_on:
            self._look_at_weights()
        if self.state._reentry is not None:
            self.state._reentry.pass_begins(goes_on=goes_on)

    def note_resumed(self) -> None:
        """Note that a resume has restored everything that is tracked."""
        self._resumed_weights = ResumedWeights(self._weights)

    def _look_at_weights(self, *, epoch_begins: bool = False) -> None:
        """Warn, once, if code after the resume has changed the weights that it has restored."""
        found = self._resumed_weights
        if found is not None and not (found.epoch_begins() if epoch_begins else found.look()):
            self._resumed_weights = None

    def _set_epoch(self, epoch: int) -> None:
        self._look_at_weights(epoch_begins=True)
        if self.own_order is not None and self.own_order.epoch_ends():
            warnings.warn(OWN_ORDER, RuntimeWarning, stacklevel=3)
            self.own_order = None
        resumed, self._resumed = self._resumed, {}
        for name, each in self.others.items():
            if name in resumed:
                each._go_back(resumed[name])
            if callable(follow := getattr(each, "set_epoch", None)):
                follow(epoch)
        continued = self._continued()
        loaders = [each for each in continued if hasattr(each, "_length_asked")]
        before, self.state._ranks = self.state._ranks, rank_and_world(None)[1]
        growth = self.state._ranks / (before or self.state._ranks)
        passed_by, self._passed_by = self._passed_by, None
        if passed_by is not None and passed_by[1] != self._weights():
            warn_of_weights(epoch)
        options = None if passed_by is None else passed_by[0]
        goes_on = bool(continued) or options is not None
        self.state._reentry = Reentry(self.optimizers, loaders, growth, options) if goes_on else None

    def _continued(self) -> list[Any]:
        """The loaders and samplers whose next pass begins within an epoch."""
        return [each for each in self.others.values() if _continues(each)]

    def _note_passed_by(self, count: int) -> None:
        """Note that a loop over `count` epochs has none left, since they were trained before a resume. If more was
        trained then, so has the code that follows run."""
        self._look_at_weights(epoch_begins=True)
        self._resumed_weights = None
        # Saved exactly at the end of that loop: the code after it has not run yet, and is right to run now.
        begins_next = self.state.epoch == count and not self._continued()
        if begins_next or self._trains:
            self._passed_by = None
        elif self._passed_by is None:
            self._passed_by = options_of(self.optimizers), self._weights()

    def _weights(self) -> dict[str, str]:
        """A digest of this rank's parameters of each model, by name. It reads the first numbers of each: who loads or
        makes weights changes all of a tensor, and a whole model would take as long as to load it."""
        parts = {name: map(local_tensor, model.parameters()) for name, model in self.named_models()}
        return {
            name: replicas.total([_first_numbers(each) for each in own if codec.is_array(each)])
            for name, own in parts.items()
        }

    def whereabouts(self, resumed: object) -> Whereabouts:
        """Looks whether the script asks where it goes on. `resumed`: what `resume()` returns."""
        self.state._asked = False
        training = self._positions()
        if unknown_objects(self.others):
            training = []  # one of them may count epochs for the script
        return Whereabouts(lambda: self.state._asked, resumed, training)

    def epochs(self) -> list[int]:
        """The epochs of the script, and of the loaders and samplers of the training."""
        return [self.state.epoch, *(each.epoch for each in self._positions())]

    def epoch_of_script(self) -> int:
        """The epoch of the loop over `epochs()`; outside of one, that of the only loader of the training."""
        positions = self._positions()
        return self.state.epoch if self.state._in_body or len(positions) != 1 else positions[0].epoch

    def _positions(self) -> list[Position]:
        """The positions of the loaders and samplers of the training."""
        goes_on = (each for each in self.others.values() if isinstance(getattr(each, "_position", None), Position))
        return [each._position for each in goes_on if not each._evaluates]

    def _count_batches(self) -> tuple[int, int]:
        """The number of batches left in this epoch, and that of a whole one; zeros unless exactly one loader is the
        training's."""
        loaders = [each for each in self.others.values() if getattr(each, "_resumes", False)]
        return (loaders[0].remaining, len(loaders[0])) if len(loaders) == 1 else (0, 0)

    def collect(self, rank: int, world: int, *, alone: bool = False) -> Collected:
        """The state to save now. `alone`: this rank leaves it without the others (`Saving.leave_alone`). Raises
        codec.StateTypeError, naming the value that cannot be saved."""
        encoder = codec.Encoder(f"{OWN}{rank}/")
        parts = self._parts(encoder)
        switches, numbers = self.switches.changed(), self.numbers.moved()
        tree = {
            "format": FORMAT,
            "rank": rank,
            "world": world,
            "step": self.step,
            "epoch": self.state.epoch,
            "run_id": self.state.run_id,
            "models": parts.models,
            "optimizers": {
                each.name: {"groups": each.groups(encoder), **parts.optimizers[each.name]} for each in self._optimizers
            },
            "others": {name: encoder.encode(each.state_dict(), name) for name, each in self.others.items()},
            "kinds": self._kinds(),
            "only": self.chosen,
            "random": encoder.encode(random_state(), "random"),
            "orders": [] if rank and not alone else self.reducers.orders,
            **({ALONE: True} if alone else {}),
            **({SWITCHES: switches} if switches else {}),
            **({NUMBERS: numbers} if numbers else {}),
            TIED: parts.tied,
            OWN_BUFFERS: self.own_buffers,
        }
        own = {_own_buffer(rank, name): parts.tensors[name] for name in self.own_buffers if name in parts.tensors}
        return Collected(parts.tensors, {**encoder.tensors, **own}, codec.dumps(tree), parts.roles, parts.optimized)

    def _parts(self, encoder: codec.Encoder) -> _Parts:
        """Models and optimizers, taken apart; the parts of the last time, if they consist of the same objects."""
        states = [each.live() for each in self._models]
        keys = [list(each) for each in states]
        live = [*chain.from_iterable(each.values() for each in states)]
        live += chain.from_iterable(each.live() for each in self._optimizers)
        kept = self._kept
        if kept is not None and kept.keys == keys and _same_objects(kept.live, live):
            return kept
        shared = Shared()
        models = {
            each.name: each.collect(state, shared, encoder) for each, state in zip(self._models, states, strict=True)
        }
        optimizers = {each.name: each.collect(shared, encoder) for each in self._optimizers}
        unchanging = not any(models.values()) and all(isinstance(each, _UNCHANGING) for each in live)
        if unchanging:
            optimizers = {
                name: {part: codec.ready(tree) for part, tree in parts.items()} for name, parts in optimizers.items()
            }
        stepped = {id(p) for o in self._optimizers for group in o.optimizer.param_groups for p in group["params"]}
        optimized = frozenset(
            name
            for name, role in shared.roles.items()
            if role is Role.OPTIMIZER or (role is Role.PARAMETER and id(shared.tensors[name]) in stepped)
        )
        parts = _Parts(keys, live, shared.tensors, shared.roles, shared.tied, models, optimizers, optimized)
        self._kept = parts if unchanging else None
        return parts

    def _kinds(self) -> dict[str, str]:
        """Class names of optimizers and other objects, which need the state of their own class. Models may be
        wrapped."""
        return {
            **{each.name: type(each.optimizer).__name__ for each in self._optimizers},
            **{name: type(each).__name__ for name, each in self.others.items()},
        }

    def compare(self, saved: Saved, rank: int, choice: Choice, world: int = 0) -> Compared:
        """The differences between the snapshot and the tracked objects: input of `tracked.together`. `world`: the
        number of ranks on which it is restored; 0: as many as saved it."""
        text = text_of(saved, rank)
        if text.get(STAND_IN) and world == text["world"] and not self._has_random(text["step"]):
            raise ShardingError(f"the random numbers of rank {rank} are not available")
        there = {name for part in ("models", "optimizers", "others") for name in text[part]}
        whole = choice.only is None or text.get("only") == sorted(choice.only)
        self.state._only = "" if whole else str(sorted(choice.only or ()))
        wanted = self.names() if whole or choice.only is None else set(choice.only)
        found = Compared(frozenset(wanted), self.names(), {name: [name] for name in sorted(wanted - there)})
        if whole:
            found.unexpected += sorted(there - found.held)
        for model in self._models:
            if model.name in wanted & there:
                model.compare(saved, text["models"], there, found)
        kinds = codec.section(text, "kinds")
        for optimizer in self._optimizers:
            if optimizer.name in wanted & there:
                optimizer.compare(_merged(saved, text, optimizer.name), text["models"], kinds, found)
        for name, each in self.others.items():
            was, kind = kinds.get(name), type(each).__name__
            if name in wanted & there and was not in (None, kind) and choice.strict:
                found.problems[name] = f"{name} is a {kind} now, and a {was} in the snapshot"
            elif name in wanted & there and world and is_data(each) and not callable(getattr(each, "regroup", None)):
                self._compare_data(name, codec.expect(text.get("world"), int, "world"), world, found)
        return found

    def _compare_data(self, name: str, world_then: int, world: int, found: Compared) -> None:
        """Note a problem with data of an unknown class, with a position of each rank: in another world it is not known
        which samples are left. That is so even if all positions are equal: each may count the samples of its rank."""
        if world != world_then:
            found.problems[name] = (
                f"{name} has a position for each of {world_then} ranks, and there are {world} now: samples would be "
                "lost and repeated. Give it a method regroup(rank, world), take ht.DataLoader, or begin its epoch "
                f"again: resume(optional=['{name}'])"
            )

    def lacks_parts(self, saved: Saved, rank: int) -> bool:
        """Whether parts of tensors that this rank has may be missing: shards of other ranks. Raises ShardingError."""
        shared, text = Shared(), text_of(saved, rank)
        for model in self._models:
            model.collect(model.live(), shared, codec.Encoder())
        parts = [(key, tensor) for key, tensor in shared.tensors.items() if key in saved.pieces]
        for each in self._optimizers:
            if each.name in text["optimizers"]:
                of_optimizer = each.saved_tensors(_merged(saved, text, each.name), text["models"])
                parts += [(key, parameter) for key, _, parameter in of_optimizer]
        return not all(saved.has_part(key, tensor) for key, tensor in parts)

    def targets(self, saved: Saved, rank: int, fit: Fit) -> Targets:
        """The shared tensors to fill before `restore`."""
        shared, encoder = Shared(), codec.Encoder()
        for model in self._models:
            if model.name in fit.restored:
                model.collect(model.live(), shared, encoder)
        for name, first in shared.tied.items():
            check_tied(saved, name, first)
        into = Targets({name: each for name, each in shared.tensors.items() if name not in fit.missing})
        into.roles = shared.roles
        text = text_of(saved, rank)
        for optimizer in self._optimizers:
            if optimizer.name in fit.restored:
                optimizer.targets(saved, _merged(saved, text, optimizer.name), text["models"], into)
        return into

    def restore(self, saved: Saved, rank: int, world: int, filled: Mapping[str, torch.Tensor], fit: Fit) -> Restored:
        """Give all objects their state. `filled`: the targets, which have their values already."""
        text = text_of(saved, rank)
        world_then: int = codec.expect(text.get("world"), int, "world")
        for model in self._models:
            if model.name in fit.restored:
                model.restore_rest(codec.section(text["models"], model.name), saved.fresh)
        for optimizer in self._optimizers:
            if optimizer.name in fit.restored:
                optimizer.restore(_merged(saved, text, optimizer.name), text["models"], filled, saved)
        done = Restored(world_then, orders=codec.expect(text.get("orders", []), list, "orders"))
        if not self.state._only:  # with `only` another training begins, which freezes other parameters
            self.switches.restore(codec.section(text, SWITCHES), fit.restored)
            self.numbers.restore(codec.section(text, NUMBERS))
        for name, each in self.others.items():
            if name in fit.restored:
                state = codec.decode(text["others"][name], saved.fresh)
                if name in fit.optional:
                    done.before[name] = copy.deepcopy(each.state_dict())
                if is_data(each):
                    self.loaded[name] = copy.deepcopy(state)
                try:
                    each.load_state_dict(state)
                except Exception as error:
                    if name not in fit.optional:
                        raise
                    done.refused[name] = str(error)

        # If a script reads from a loader before the training begins, the loader goes back to this position.
        self._resumed = {
            name: position_of(each) for name, each in self.followers().items() if hasattr(each, "_go_back")
        }
        self.step = codec.expect(text.get("step"), int, "step")
        self.state.epoch = codec.expect(text.get("epoch"), int, "epoch")
        self.state._ranks = world_then
        run_id = codec.expect(text.get("run_id", ""), str, "run_id")
        if run_id and not self.state._only:  # with `only` another training begins, which has its own curves
            self.state._name(run_id)
        self._restore_own_buffers(saved, rank, done, world=world, filled=filled)
        drawn = codec.decode(text["random"], saved.fresh)
        if world == world_then and text.get(STAND_IN):
            assert self.random_record is not None
            RandomNumbers().restore(self.random_record.read(self.step))
        elif world == world_then:
            set_random_state(drawn)
        else:
            done.seed = text["random"]["torch"]["$bytes"]
            states = [each["random"] for each in saved.texts]
            done.equal = equal_parts(states) if len(states) > 1 else None
            done.apart = sorted(parts_equal_in_groups(states))
        return done

    def find_own_buffers(self, peers: Peers) -> None:
        """Find the buffers that differ between ranks; all ranks call this before the first step."""
        buffers: dict[str, torch.Tensor] = {}
        for model in self._models:
            live = {id(each) for each in model.module.buffers() if type(each) is torch.Tensor and codec.is_array(each)}
            buffers |= {
                f"{model.name}.{model.fqn(raw)}": each for raw, each in model.live().items() if id(each) in live
            }
        if len(set(peers.all_gather(replicas.total([*buffers.values()])))) == 1:
            return
        found: dict[str, set[str]] = {}
        for theirs in peers.all_gather(dict(zip(buffers, replicas.each_digest([*buffers.values()]), strict=True))):
            for name, digest in theirs.items():
                found.setdefault(name, set()).add(digest)
        self.own_buffers = tuple(name for name, digests in found.items() if len(digests) > 1)

    def _restore_own_buffers(
        self, saved: Saved, rank: int, done: Restored, *, world: int, filled: Mapping[str, torch.Tensor]
    ) -> None:
        """Give the buffers that belong to each rank this rank's values, which `filled` has not."""
        self.own_buffers = tuple(text_of(saved, rank).get(OWN_BUFFERS, ()))
        mine = [name for name in self.own_buffers if name in filled]
        if world == done.world_then:
            for name in mine:
                with torch.no_grad():
                    filled[name].copy_(saved.fresh(_own_buffer(rank, name)))
        elif mine:
            done.notes.append(
                f"{listed_names(mine)}: each of {done.world_then} ranks had a value of its own, and all {world} get "
                "that of the first one: compute it after resume(), and register it with persistent=False"
            )

    def _has_random(self, step: int) -> bool:
        return self.random_record is not None and self.random_record.read(step) is not None

    def state_in(self, saved: Saved, name: str) -> Any:
        """The state of this object, which is neither a model nor an optimizer, in an image of one rank."""
        return codec.decode(text_of(saved, 0)["others"][name], saved.fresh)

    def put_back(self, name: str, done: Restored) -> None:
        """Give this object back the state that it had: on some rank it refused the saved one."""
        self.others[name].load_state_dict(done.before[name])
        self.loaded.pop(name, None)
        self._resumed.pop(name, None)


def _is_in_loop(each: Any) -> bool:
    """Whether the training's loop has a batch of this loader or sampler that is not counted."""
    return bool(getattr(each, "_in_body", False) or getattr(each, "_in_loop", False))


def _continues(each: Any) -> bool:
    """Whether the next pass of this loader or sampler begins within an epoch."""
    return bool(getattr(each, "_continues", bool)())


def _gives_batches(each: Any, loader: Any) -> bool:
    """Whether a loader of torch gives the training batches of this tracked loader or sampler."""
    if getattr(each, "_evaluates", False):
        return False
    sampler = getattr(loader, "sampler", None)
    within = (loader, sampler, getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    return any(each is one for one in within) or getattr(each, "_torch", None) is loader


def _own_buffer(rank: int, name: str) -> str:
    """The name under which this rank saves its own value of a buffer."""
    return f"{OWN}{rank}/buffers/{name}"


def position_of(follower: Any) -> dict[str, Any]:
    """The position at which a follower goes on: its state, without a batch in the loop's body that is not known to be
    trained. The state of a script's own object is copied: what its `state_dict` returns may change later."""
    ours: Callable[[], dict[str, Any]] | None = getattr(follower, "_trained_position", None)
    return copy.deepcopy(follower.state_dict()) if ours is None else ours()


def text_of(saved: Saved, rank: int) -> dict[str, Any]:
    """The text from which this rank continues: that of the rank with its number, modulo the number of ranks at the
    save. Raises ShardingError."""
    texts = {text.get("rank"): text for text in saved.texts}
    if not texts:
        raise ShardingError("no rank's state is available")
    world_then = codec.expect(next(iter(texts.values())).get("world"), int, "world")
    found = texts.get(rank % world_then)
    if found is not None and found.get("format") == "dcp":
        raise ShardingError(
            "torch.distributed.checkpoint.save made the snapshot: load it with its load() and ht.SnapshotReader"
        )
    if found is None and all(each.get(ALONE) for each in texts.values()):
        found = _stand_in(sorted(texts.values(), key=lambda each: codec.expect(each.get("rank"), int, "rank")))
    if found is None:
        raise ShardingError(f"the state of rank {rank % world_then} is not available")
    if found.get("format") != FORMAT:
        raise ShardingError(f"the snapshot has the format {found.get('format')}, this holdfast reads {FORMAT}")
    return found


def _stand_in(texts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The text in place of that of a lost rank, whose state others have left after its loss: theirs, if all are equal
    but for random numbers; None: they differ."""
    first = texts[0]
    same = all(each[part] == first[part] for each in texts for part in ("models", "optimizers", "others", "epoch"))
    return {**first, STAND_IN: True} if same else None


def _merged(saved: Saved, text: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An optimizer's part of the text, with the states of all parameters that any rank had: those of a pipeline
    differ."""
    mine = codec.section(text["optimizers"], name)
    if not mine:
        raise ShardingError(f"the snapshot has nothing for {name}")
    state = dict(mine["state"])
    for each in saved.texts:
        for fqn, rest in codec.section(codec.section(each["optimizers"], name), "state").items():
            state.setdefault(fqn, rest)
    wanted = {fqn for group in mine["params"] for fqn in group}
    return {**mine, "state": {fqn: rest for fqn, rest in state.items() if fqn in wanted}}
