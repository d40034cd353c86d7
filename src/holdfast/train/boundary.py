"""The state of one rank after its last step, as far as the next step changes it before its optimizer does.

With it a rank that was interrupted in a step goes back to the step's begin (see survival.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import types
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_compiling
from torch.optim.lr_scheduler import LRScheduler

from holdfast.protocol.errors import DataStateError
from holdfast.train import copying, torch_private
from holdfast.train.kept import WatchedTensors
from holdfast.train.own_objects import OwnObjects
from holdfast.train.random_numbers import RandomNumbers, RandomRecord, States
from holdfast.train.state import Tracker, TrainState, position_of


class Boundary:
    """The state after this rank's last step, as far as the next step changes it before its optimizer does.

    `mark` and `forward_done` are called in each step, when its work has emptied the caches: what they cost is what they
    touch for the first time. So they copy plain memory, by few functions.
    """

    def __init__(self, tracker: Tracker, place: str) -> None:
        """`place`: a folder in memory that outlives this process; empty: there is none."""
        self.step = self.epoch = 0
        self.after_forward: Callable[[], object] | None = None
        """Called at the end of each forward pass."""
        self._tracker = tracker
        self._followers = tracker.followers()
        self._positions: list[dict[str, Any]] | None = []
        self._random = RandomNumbers()
        self._interrupted: tuple[States, list[torch.Tensor]] | None = None
        """Random numbers and buffers when the rank was interrupted."""
        self._record = RandomRecord.at(place, self._random.states)
        self._schedulers = [each for each in tracker.others.values() if isinstance(each, LRScheduler)]
        self._schedules_now = [_schedule_of(each) for each in self._schedulers]
        self._schedules: list[dict[str, Any]] = []
        self._optimizers = tracker.optimizers
        self._options: list[dict[str, Any]] = []
        self._buffers = Buffers(tracker.models)
        self._parameters = WatchedTensors(each for model in tracker.models for each in model.parameters())
        self.objects = OwnObjects(tracker.others, place, tracker.loaded)
        self._scalers = [each for each in tracker.others.values() if isinstance(each, GradScaler) and each.is_enabled()]
        self._scales: list[list[torch.Tensor | None]] = []
        self._has_more = bool(self._followers or self._scalers)

    def mark(self, state: TrainState, *, begins: bool = False) -> None:
        """The step that the state counts is complete. `begins`: the training function was not called since this state
        was made or taken."""
        step = self.step = state.step
        self.epoch = state.epoch
        self._random.read()
        if self._record is not None:
            self._record.write(step, self._random.states, complete=True)
        if self._schedulers:
            self._schedules = [now() for now in self._schedules_now]
        # Without a schedule, too: one of the program's own may multiply a learning rate at an epoch's end.
        self._options = [
            group.copy() if type(group.get("lr")) is float else _options_of(group)
            for each in self._optimizers
            for group in each.param_groups
        ]
        if self._buffers.any:
            self._buffers.keep()
        self._parameters.note()
        if self._has_more:
            self._mark_more()
        if self.objects.any:
            self.objects.mark(step, begins=begins)

    def _mark_more(self) -> None:
        try:
            self._positions = [position_of(each) for each in self._followers.values()]
        except DataStateError:  # a sampler whose trained indices nobody has reported: `positions` raises it again
            self._positions = None
        self._scales = [
            [None if each is None else each.clone() for each in torch_private.scale_of(scaler)]
            for scaler in self._scalers
        ]

    def untouched(self) -> bool:
        """Whether nothing has changed since that moment that is not kept here: no parameter, as the momentum encoder's
        forward pass or an adversarial step changes, and no large tensor of a tracked object."""
        return self._parameters.intact() and self.objects.intact()

    def moved(self) -> None:
        """Parameters are not as they were at that moment, and it was found that their values are: from now on their
        memory may be elsewhere (kept.py)."""
        if not self._parameters.intact():
            self._parameters.watch_values()

    def positions(self) -> dict[str, dict[str, Any]]:
        """Of the loaders and samplers at that moment, by name. Raises DataStateError where a sampler cannot tell."""
        if self._positions is None:
            return self._tracker.positions()
        return dict(zip(self._followers, self._positions, strict=True))

    def forward_done(self) -> None:
        """A model's forward pass is done. What a step draws it has drawn by now: should this rank be lost before its
        step is complete, and others complete theirs with its gradients, its replacement needs this."""
        if self._record is not None:
            # Micro-batches are counted, too; of an optimizer step the last one counts.
            self._record.write(self._tracker.state.step + 1, self._random.now(), complete=False)
        if self.objects.any:
            self.objects.forward_done(self._tracker.state.step + 1)
        if self.after_forward is not None:
            self.after_forward()

    def rewind(self, state: TrainState) -> None:
        """Go back to that moment."""
        self._interrupted = self._random.now(look=True), self._buffers.copies()
        state.step, state.epoch = self.step, self.epoch
        self._random.restore()
        if self._schedulers:
            for scheduler, schedule in zip(self._schedulers, self._schedules, strict=True):
                scheduler.load_state_dict({name: each for name, each in schedule.items() if name != "optimizer"})
        self.objects.rewind()
        # After the objects: a schedule of the program's own may set options when it takes its state.
        groups = [group for each in self._optimizers for group in each.param_groups]
        for group, options in zip(groups, self._options, strict=True):
            _set_options(group, options)
        self._buffers.restore()
        for scaler, scales in zip(self._scalers, self._scales, strict=True):
            torch_private.set_scale(scaler, *(None if each is None else each.clone() for each in scales))

    def complete(self, step: int) -> None:
        """All go on from this step. The buffers are this rank's own: each rank has others.

        If it is the step that this rank was interrupted in, the others had its gradients, so its forward pass was done,
        and what that has changed is right. What changes later in a step (averages of the weights) is the others'."""
        if step == self.step:
            self._buffers.restore()
        elif step > self.step and self._interrupted is not None:
            self._buffers.restore_changed(self._interrupted[1])

    def restore_random(self, step: int, *, survived: bool) -> bool:
        """Set the random numbers that this rank had, or the lost one in its place, after this step. False: they are
        not known, and nothing is set."""
        if survived and step == self.step:
            self._random.restore()
        elif survived and step > self.step and self._interrupted is not None:
            self._random.restore(self._interrupted[0])  # its forward pass was done, and nothing draws after that
        elif not survived and self._record is not None and (found := self._record.read(step)) is not None:
            self._random.restore(found)
        else:
            return False
        return True

    def random_digests(self) -> dict[str, str]:
        """Of the generators' states at that moment, by name."""
        return self._random.by_generator()

    @property
    def seed(self) -> str:
        """A digest of torch's random numbers, from which the ranks of another world get theirs."""
        return hashlib.sha256(self._random.of_torch.official(self._random.states[0])).hexdigest()


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    options = group.copy()
    if isinstance(options.get("lr"), torch.Tensor):  # schedulers change it in place then
        options["lr"] = options["lr"].clone()
    return options


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    rate = group.get("lr")
    group.update(options)
    if isinstance(rate, torch.Tensor):  # a captured graph reads this very tensor
        group["lr"] = rate.copy_(options["lr"])


def _schedule_of(scheduler: LRScheduler) -> Callable[[], dict[str, Any]]:
    """What gives its state. Most schedulers keep torch's `state_dict`: all attributes but the optimizer, in a loop."""
    keeps_it = type(scheduler).state_dict is LRScheduler.state_dict
    now: Callable[[], dict[str, Any]] = vars(scheduler).copy if keeps_it else scheduler.state_dict
    return now


_after_forward: dict[int, Callable[[], object]] = {}
"""By the identity of a model: what is called when its forward pass is done."""


@contextlib.contextmanager
def noted_forward(model: nn.Module, note: Callable[[], object]) -> Iterator[None]:
    """Call `note` at the end of each forward pass in this block, except in one that is being compiled.

    Not by torch's hook: with one, a call of a module takes 8 µs more. A copy of the model, or one that is pickled, has
    its own forward pass, and notes nothing."""
    if "forward" in model.__dict__:  # somebody has replaced it already
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
    # Bound to the model: a copy's is bound to the copy.
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


class Buffers:
    """The buffers of some models, and their values at the last `keep`."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._places = [
            (torch_private.buffers_of(module), name)
            for model in models
            for module in model.modules()
            for name, each in torch_private.buffers_of(module).items()
            if each is not None
        ]
        self.any = bool(self._places)
        self._met: list[torch.Tensor | None] = []
        """The tensors that were there at the last `keep`."""
        self._theirs: list[torch.Tensor] = []
        """The same, for copies."""
        self._values: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._copy: Callable[[], object] = list

    def keep(self) -> None:
        self._find()
        self._copy()

    def copies(self) -> list[torch.Tensor]:
        self._find()
        return [each.clone() for each in self._theirs]

    def restore(self, values: Sequence[torch.Tensor] = ()) -> None:
        """Of the last `keep`, or these."""
        if values or self._values:
            self._find()
            copying.copy_alike(self._theirs, values or self._values)

    def restore_changed(self, values: Sequence[torch.Tensor]) -> None:
        """Those of these that are not as they were at the last `keep`."""
        self._find()
        there = zip(self._theirs, values, self._values, strict=True)
        changed = [(theirs, value) for theirs, value, kept in there if not torch.equal(value, kept)]
        copying.copy_alike([theirs for theirs, _ in changed], [value for _, value in changed])

    def _find(self) -> None:
        """A model may put another tensor in the place of one, or give it other memory."""
        there = [places[name] for places, name in self._places]
        addresses = list(map(torch.Tensor.data_ptr, self._theirs))
        if len(there) == len(self._met) and all(map(is_, there, self._met)) and addresses == self._addresses:
            return
        self._met = there
        self._theirs = [each.detach() for each in there if each is not None]
        if [each.shape for each in self._values] != [each.shape for each in self._theirs]:
            self._values = [each.clone() for each in self._theirs]
        self._addresses = [each.data_ptr() for each in self._theirs]
        self._copy = copying.prepared(self._values, self._theirs)
