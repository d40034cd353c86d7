"""The state of one rank after its last step, as far as the next step changes it before its optimizer does.

With it a rank that was interrupted in a step goes back to the beginning of that step (see survival.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, call, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from holdfast.protocol.errors import DataStateError
from holdfast.train import copying, torch_private
from holdfast.train.kept import ExtraStates, WatchedTensors
from holdfast.train.module_parts import ModuleParts
from holdfast.train.own_objects import OwnObjects
from holdfast.train.random_numbers import RandomNumbers, RandomRecord, States
from holdfast.train.state import Tracker, TrainState, position_of

_needs_gradient = attrgetter("requires_grad")
CONTAINERS = (list, dict, set, deque)
"""What a program's schedule may change in place."""


class Rates(NamedTuple):
    """What decides the learning rates: it may be changed before the training, and in each step."""

    schedules: list[dict[str, Any]]
    """The states of torch's schedules."""
    options: list[list[dict[str, Any]]]
    """The options of the parameter groups of each optimizer."""


class Boundary:
    """The state after this rank's last step, as far as the next step changes it before its optimizer does.

    `mark` and `forward_done` are called in each step, when its work has emptied the processor's caches: their cost is
    the memory that they touch for the first time. So they copy plain memory, by few functions.
    """

    def __init__(self, tracker: Tracker, place: str) -> None:
        """`place`: a folder in memory that outlives this process; empty: there is none."""
        self.step = self.epoch = 0
        """The step and the epoch of the last `mark`."""
        self.passes = 0
        """The number of forward passes with gradients since the last `mark`."""
        self.after_forward: Callable[[], object] | None = None
        """A function that is called at the end of each forward pass; None: there is none."""
        self._tracker = tracker
        self._followers = tracker.followers()
        self._positions: list[dict[str, Any]] | None = []
        """Positions of the followers; None: a sampler did not know its own."""
        self._random = RandomNumbers()
        self._interrupted: tuple[States, list[KeptBuffer]] | None = None
        """Random numbers and buffers when the rank was interrupted; None: it never was."""
        self._record = RandomRecord.at(place, self._random.states)
        self._schedulers = [each for each in tracker.others.values() if isinstance(each, LRScheduler)]
        self._schedules_now = [_schedule_of(each) for each in self._schedulers]
        self._schedules: list[dict[str, Any]] = []
        self._optimizers = tracker.optimizers
        self._options: list[list[dict[str, Any]]] = []
        """Those of the parameter groups of each optimizer."""
        self._parts = ModuleParts(tracker.models)
        self._buffers = Buffers(tracker.models)
        self._extra = ExtraStates(self._parts.modules)
        self._parameters = WatchedTensors(map(_watchable, self._parts.parameters))
        self._needing: list[bool] = []
        """Whether each parameter needed a gradient at the last `mark`."""
        self.objects = OwnObjects(tracker.others, place, tracker.loaded)
        self._scalers = [each for each in tracker.others.values() if isinstance(each, GradScaler) and each.is_enabled()]
        self._scales: list[list[torch.Tensor | None]] = []
        self._has_more = bool(self._followers or self._scalers)

    def mark(self, state: TrainState, *, begins: bool = False, enters: bool = False) -> None:
        """Keep the state: the step that it counts is complete. `begins`: the training function was not called since
        this state was made or taken. `enters`: it was agreed on for a world in which no step was done yet. Another rank
        may not have come so far, so the random numbers are not written down: those of the step's own world stay."""
        step = self.step = state._step
        self.epoch, self.passes = state.epoch, 0
        self._random.read()
        if self._record is not None:
            if enters:
                self._record.go_back(step)
            else:
                self._record.write(step, self._random.states, complete=True)
        if begins:
            self._interrupted = None  # its step is done, or given up
        if self._schedulers:
            self._schedules = [*map(call, self._schedules_now)]
        # Also without a schedule: the program's own code may change a learning rate at an epoch's end.
        self._options = [
            [group.copy() if type(group.get("lr")) is float else _options_of(group) for group in each.param_groups]
            for each in self._optimizers
        ]
        if self._parts.renew():
            self._buffers.take(self._parts.modules)
            self._extra = ExtraStates(self._parts.modules)
            self._parameters.watch(map(_watchable, self._parts.parameters))
        self._buffers.keep()
        if self._extra.any:
            self._extra.keep()
        self._parameters.note()
        self._needing = [*map(_needs_gradient, self._parts.parameters)]
        if self._has_more:
            self._mark_more()
        if self.objects.any:
            self.objects.mark(step, begins=begins)

    def _mark_more(self) -> None:
        """Keep what only some programs have: positions in the data, scales of a GradScaler."""
        try:
            self._positions = [position_of(each) for each in self._followers.values()]
        except DataStateError:  # a sampler does not know which indices are trained: `positions` raises this again
            self._positions = None
        self._scales = [
            [None if each is None else each.clone() for each in torch_private.scale_of(scaler)]
            for scaler in self._scalers
        ]

    def untouched(self) -> bool:
        """Whether nothing that is not kept here has changed since the last `mark`: no parameter (the forward pass of a
        momentum encoder changes some, and so does an adversarial step; that of a codebook may put a new one in its
        place), and no large tensor of a tracked object."""
        if self._parts.have_changed() or not self._extra.intact():
            return False
        return self._parameters.intact() and self.objects.intact()

    def moved(self) -> None:
        """Accept that parameters are in other memory than at the last `mark`: the caller has found that their values
        are the same. From now on these are watched by their values (kept.py)."""
        if not self._parameters.intact():
            self._parameters.watch_values()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the models at the last `mark`."""
        return self._parts.parameters

    def positions(self) -> dict[str, dict[str, Any]]:
        """The positions of the loaders and samplers at the last `mark`, by name. Raises DataStateError if a sampler
        does not know its position."""
        if self._positions is None:
            return self._tracker.positions()
        return dict(zip(self._followers, self._positions, strict=True))

    def forward_done(self) -> None:
        """Write the random numbers down for a replacement: a model's forward pass is done, and most steps draw nothing
        after it. The replacement needs them if this rank is lost before its step is complete, and others complete
        theirs with its gradients."""
        self.passes += torch.is_grad_enabled()
        self.note_drawn()  # each micro-batch calls this; that of the step's last one stays
        if self.objects.any:
            self.objects.forward_done(self._tracker.step + 1)
        if self.after_forward is not None:
            self.after_forward()

    def note_drawn(self) -> None:
        """Write the random numbers down again: the loss has drawn some, or an optimizer that adds noise."""
        if self._record is not None:
            self._record.write(self._tracker.step + 1, self._random.now(), complete=False)

    def rewind(self, state: TrainState) -> None:
        """Go back to the last `mark`."""
        self._interrupted = self._random.now(look=True), self._buffers.copies()
        state.step, state.epoch = self.step, self.epoch
        self._random.restore()
        self.objects.rewind()
        # After the objects: a schedule of the program's own may set options when it takes its state.
        self.set_rates(self.rates)
        for parameter, needs in zip(self._parts.parameters, self._needing, strict=True):
            if parameter.requires_grad != needs:
                parameter.requires_grad_(needs)
        self._buffers.restore()
        self._extra.restore()
        for scaler, scales in zip(self._scalers, self._scales, strict=True):
            torch_private.set_scale(scaler, *(None if each is None else each.clone() for each in scales))

    def complete(self, step: int) -> None:
        """Give the buffers this rank's own values, since all ranks go on from this step, and each has its own.

        If the rank was interrupted in this step, the others had its gradients, so its forward pass was done: the
        buffers that the pass has changed are right. Those that change later in a step (averages of the weights) are
        the source's."""
        if step == self.step:
            self._buffers.restore()
            self._extra.restore()
        elif step > self.step and self._interrupted is not None:
            self._buffers.restore_changed(self._interrupted[1])

    def restore_random(self, step: int, *, survived: bool) -> bool:
        """Set the random numbers that this rank, or the lost one that it replaces, had after this step. Returns False,
        and sets nothing, if they are not known."""
        if survived and step == self.step:
            self._random.restore()
        elif survived and step > self.step and self._interrupted is not None:
            self._random.restore(self._interrupted[0])  # its forward pass was done, and nothing draws after that
        elif not survived and self._record is not None and (found := self._record.read(step)) is not None:
            self._random.restore(found)
        else:
            return False
        return True

    @property
    def random(self) -> States:
        """The random numbers at the last `mark`."""
        return self._random.states

    def set_random(self, states: States) -> None:
        self._random.restore(states)

    @property
    def rates(self) -> Rates:
        """The states of the schedules, and the optimizers' options, at the last `mark`."""
        return Rates(self._schedules, self._options)

    def set_rates(self, rates: Rates) -> None:
        for scheduler, schedule in zip(self._schedulers, rates.schedules, strict=True):
            kept = {name: each for name, each in schedule.items() if name != "optimizer"}
            scheduler.load_state_dict(_with_own_containers(kept))
        for optimizer, kept_options in zip(self._optimizers, rates.options, strict=True):
            # A group that was added since then goes, and the program adds it again.
            del optimizer.param_groups[len(kept_options) :]
            for group, options in zip(optimizer.param_groups, kept_options, strict=True):
                _set_options(group, options)

    def random_digests(self) -> dict[str, str]:
        """The digests of the generators' states at the last `mark`, by name."""
        return self._random.by_generator()

    @property
    def seed(self) -> str:
        """A digest of torch's random numbers, from which the ranks of another world get theirs."""
        return hashlib.sha256(self._random.of_torch.official(self._random.states[0])).hexdigest()


def _watchable(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that counts the changes of this parameter: of a sharded one the part that this process has."""
    return torch_private.local_part(parameter) if isinstance(parameter, DTensor) else parameter


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of the options of a parameter group."""
    options = group.copy()
    if isinstance(options.get("lr"), torch.Tensor):  # schedulers change such a learning rate in place
        options["lr"] = options["lr"].clone()
    return options


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    rate = group.get("lr")
    group.update(options)
    if isinstance(rate, torch.Tensor):  # a captured graph reads this very tensor
        group["lr"] = rate.copy_(options["lr"])


def _schedule_of(scheduler: LRScheduler) -> Callable[[], dict[str, Any]]:
    """The function that gives a scheduler's state. Most of torch's keep `LRScheduler.state_dict`, which returns all
    attributes but the optimizer, by a loop: a copy of all attributes is faster. torch's own change none of them in
    place; a program's may have a list of what it saw."""
    of_torch = type(scheduler).__module__ == LRScheduler.__module__
    keeps_it = type(scheduler).state_dict is LRScheduler.state_dict
    if of_torch:
        now: Callable[[], dict[str, Any]] = vars(scheduler).copy if keeps_it else scheduler.state_dict
        return now
    return lambda: _with_own_containers(scheduler.state_dict())


def _with_own_containers(state: dict[str, Any]) -> dict[str, Any]:
    """The state with copies of its containers: what is in them may be anything, as a model."""
    return {name: copy.copy(each) if isinstance(each, CONTAINERS) else each for name, each in state.items()}


_after_forward: dict[int, Callable[[], object]] = {}
"""The function that is called when a model's forward pass is done, by the model's identity."""


@contextlib.contextmanager
def noted_forward(model: nn.Module, note: Callable[[], object]) -> Iterator[None]:
    """Call `note` at the end of each forward pass in this block, except in one that is being compiled.

    It replaces `forward` instead of using torch's hook, with which a call of a module takes 8 µs more. A copy of the
    model, or one that is pickled, has its own forward pass, and notes nothing."""
    if "forward" in model.__dict__:  # the program, or a library, has replaced it already
        _after_forward[id(model)] = note
        hook = model.register_forward_hook(_note)
        try:
            yield
        finally:
            hook.remove()
            del _after_forward[id(model)]
        return
    forward = type(model).forward

    @functools.wraps(forward)
    def noted(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        output = forward(module, *arguments, **keywords)
        _note(module)
        return output

    _after_forward[id(model)] = note
    # A method bound to the model: that of a copy is bound to the copy, which `_note` does not know.
    model.__dict__["forward"] = ours = types.MethodType(noted, model)
    try:
        yield
    finally:
        if model.__dict__.get("forward") is ours:
            del model.__dict__["forward"]
        del _after_forward[id(model)]


def _note(module: nn.Module, *_: Any) -> None:
    if not is_compiling() and (note := _after_forward.get(id(module))) is not None:
        note()


class KeptBuffer(NamedTuple):
    """A buffer of a module, and its value at some time."""

    buffers: dict[str, torch.Tensor | None]
    """The module's."""
    name: str
    tensor: torch.Tensor | None
    """The buffer itself; None: the model had set it to None."""
    value: torch.Tensor | None


class Buffers:
    """The buffers of some models, and their values at the last `keep`. A model may replace a buffer, register one, or
    give it another shape or type, as caches and queues that grow."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._modules = [torch_private.buffers_of(module) for model in models for module in model.modules()]
        """The buffers of each module, by name."""
        self._names: list[tuple[dict[str, torch.Tensor | None], str]] = []
        self._found: list[torch.Tensor | None] = []
        """The tensors at the last `keep`, in the order of `_names`; None in place of one that the model has set to
        None."""
        self._theirs: list[torch.Tensor] = []
        """The same tensors, detached, but for sparse ones."""
        self._values: list[torch.Tensor] = []
        """Copies of their values at the last `keep`."""
        self._addresses: list[int] = []
        """The addresses of their memory."""
        self._copy: Callable[[], object] = list
        """Copies all of these into `_values`."""
        self._sparse: dict[int, torch.Tensor] = {}
        """The values of sparse buffers, by their position in `_names`."""
        self._keeps = False
        """Whether `keep` was called."""

    def take(self, modules: Sequence[nn.Module]) -> None:
        """Keep the buffers of these modules from the next `keep` on: the models have others than before."""
        self._modules = [torch_private.buffers_of(module) for module in modules]
        self._names = []

    def keep(self) -> None:
        """Keep the values."""
        self._keeps = True
        if sum(map(len, self._modules)) != len(self._names):
            self._names = [(buffers, name) for buffers in self._modules for name in buffers]
        if not self._names and not self._found:
            return  # there are none
        there = [buffers.get(name) for buffers, name in self._names]
        addresses = list(map(torch.Tensor.data_ptr, self._theirs))
        if len(there) != len(self._found) or not all(map(is_, there, self._found)) or addresses != self._addresses:
            self._find(there)
        self._copy()
        for index in self._sparse:
            self._sparse[index] = there[index].detach().clone()  # type: ignore[union-attr]

    def _find(self, there: list[torch.Tensor | None]) -> None:
        """Take these tensors from now on."""
        self._found = there
        self._sparse = {index: each for index, each in enumerate(there) if each is not None and not _is_dense(each)}
        self._theirs = [each.detach() for each in there if each is not None and _is_dense(each)]
        if [*map(_kind, self._values)] != [*map(_kind, self._theirs)]:
            self._values = [each.clone() for each in self._theirs]
        self._addresses = [each.data_ptr() for each in self._theirs]
        self._copy = copying.prepared(self._values, self._theirs)

    def copies(self) -> list[KeptBuffer]:
        """The buffers and copies of their values now."""
        return [
            KeptBuffer(buffers, name, each, None if each is None else each.detach().clone())
            for buffers in self._modules
            for name, each in buffers.items()
        ]

    def restore(self) -> None:
        """Give the buffers the values of the last `keep`. A buffer that was registered since then goes."""
        if not self._keeps:
            return
        known = {(id(buffers), name) for buffers, name in self._names}
        for buffers in self._modules:
            for name in [name for name in buffers if (id(buffers), name) not in known]:
                del buffers[name]
        put_back(self._kept())

    def restore_changed(self, interrupted: Sequence[KeptBuffer]) -> None:
        """Give those buffers these values whose value differs from that of the last `keep`."""
        before = {(id(each.buffers), each.name): each.value for each in self._kept()}
        put_back([each for each in interrupted if not _equal(each.value, before.get((id(each.buffers), each.name)))])

    def _kept(self) -> list[KeptBuffer]:
        values, found = iter(self._values), []
        for index, ((buffers, name), tensor) in enumerate(zip(self._names, self._found, strict=True)):
            value = None if tensor is None else self._sparse[index] if index in self._sparse else next(values)
            found.append(KeptBuffer(buffers, name, tensor, value))
        return found


def put_back(kept: Sequence[KeptBuffer]) -> None:
    """Give these buffers these values: in the tensors that are there, if they are of the same kind, since a captured
    graph or a view may use them; else in the ones that were there."""
    targets, values = [], []
    for each in kept:
        there = each.buffers.get(each.name)
        if each.tensor is None or each.value is None:
            each.buffers[each.name] = None
            continue
        if there is None or _kind(there) != _kind(each.value):
            # It was changed in place if it is of another kind now.
            there = each.tensor if _kind(each.tensor) == _kind(each.value) else each.value.clone()
            each.buffers[each.name] = there
        if there is each.value:
            continue
        if _is_dense(there):
            targets.append(there.detach())
            values.append(each.value)
        else:
            with torch.no_grad():
                there.copy_(each.value)
    copying.copy_alike(targets, values)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if _kind(one) != _kind(other):
        return False
    same: bool = torch.equal(*(each if _is_dense(each) else each.to_dense() for each in (one, other)))
    return same
