"""The state of one rank after its last step, as far as the next step changes it before its optimizer does.

With it a rank that was interrupted in a step goes back to the beginning of that step (see survival.py).
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
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from holdfast.protocol.errors import DataStateError
from holdfast.train import copying, torch_private
from holdfast.train.kept import WatchedTensors
from holdfast.train.own_objects import OwnObjects
from holdfast.train.random_numbers import RandomNumbers, RandomRecord, States
from holdfast.train.state import Tracker, TrainState, position_of


class Boundary:
    """The state after this rank's last step, as far as the next step changes it before its optimizer does.

    `mark` and `forward_done` are called in each step, when its work has emptied the processor's caches: their cost is
    the memory that they touch for the first time. So they copy plain memory, by few functions.
    """

    def __init__(self, tracker: Tracker, place: str) -> None:
        """`place`: a folder in memory that outlives this process; empty: there is none."""
        self.step = self.epoch = 0
        """The step and the epoch of the last `mark`."""
        self.after_forward: Callable[[], object] | None = None
        """A function that is called at the end of each forward pass; None: there is none."""
        self._tracker = tracker
        self._followers = tracker.followers()
        self._positions: list[dict[str, Any]] | None = []
        """Positions of the followers; None: a sampler did not know its own."""
        self._random = RandomNumbers()
        self._interrupted: tuple[States, list[torch.Tensor]] | None = None
        """Random numbers and buffers when the rank was interrupted; None: it never was."""
        self._record = RandomRecord.at(place, self._random.states)
        self._schedulers = [each for each in tracker.others.values() if isinstance(each, LRScheduler)]
        self._schedules_now = [_schedule_of(each) for each in self._schedulers]
        self._schedules: list[dict[str, Any]] = []
        self._optimizers = tracker.optimizers
        self._options: list[dict[str, Any]] = []
        self._buffers = Buffers(tracker.models)
        self._parameters = WatchedTensors(map(_watchable, (p for model in tracker.models for p in model.parameters())))
        self.objects = OwnObjects(tracker.others, place, tracker.loaded)
        self._scalers = [each for each in tracker.others.values() if isinstance(each, GradScaler) and each.is_enabled()]
        self._scales: list[list[torch.Tensor | None]] = []
        self._has_more = bool(self._followers or self._scalers)

    def mark(self, state: TrainState, *, begins: bool = False, enters: bool = False) -> None:
        """Keep the state: the step that it counts is complete. `begins`: the training function was not called since
        this state was made or taken. `enters`: it was agreed on for a world in which no step was done yet. Another rank
        may not have come so far, so the random numbers are not written down: those of the step's own world stay."""
        step = self.step = state.step
        self.epoch = state.epoch
        self._random.read()
        if self._record is not None:
            if enters:
                self._record.go_back(step)
            else:
                self._record.write(step, self._random.states, complete=True)
        if begins:
            self._interrupted = None  # its step is done, or given up
        if self._schedulers:
            self._schedules = [now() for now in self._schedules_now]
        # Also without a schedule: the program's own code may change a learning rate at an epoch's end.
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
        momentum encoder changes some, and so does an adversarial step), and no large tensor of a tracked object."""
        return self._parameters.intact() and self.objects.intact()

    def moved(self) -> None:
        """Accept that parameters are in other memory than at the last `mark`: the caller has found that their values
        are the same. From now on these are watched by their values (kept.py)."""
        if not self._parameters.intact():
            self._parameters.watch_values()

    def positions(self) -> dict[str, dict[str, Any]]:
        """The positions of the loaders and samplers at the last `mark`, by name. Raises DataStateError if a sampler
        does not know its position."""
        if self._positions is None:
            return self._tracker.positions()
        return dict(zip(self._followers, self._positions, strict=True))

    def forward_done(self) -> None:
        """Write the random numbers down for a replacement: a model's forward pass is done, and a step draws nothing
        after it. The replacement needs them if this rank is lost before its step is complete, and others complete
        theirs with its gradients."""
        if self._record is not None:
            # Each micro-batch calls this; that of the step's last one stays.
            self._record.write(self._tracker.state.step + 1, self._random.now(), complete=False)
        if self.objects.any:
            self.objects.forward_done(self._tracker.state.step + 1)
        if self.after_forward is not None:
            self.after_forward()

    def rewind(self, state: TrainState) -> None:
        """Go back to the last `mark`."""
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
        """Give the buffers this rank's own values, since all ranks go on from this step, and each has its own.

        If the rank was interrupted in this step, the others had its gradients, so its forward pass was done: the
        buffers that the pass has changed are right. Those that change later in a step (averages of the weights) are
        the source's."""
        if step == self.step:
            self._buffers.restore()
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
    """The function that gives a scheduler's state. Most schedulers keep torch's `state_dict`, which returns all
    attributes but the optimizer, by a loop: a copy of all attributes is faster."""
    keeps_it = type(scheduler).state_dict is LRScheduler.state_dict
    now: Callable[[], dict[str, Any]] = vars(scheduler).copy if keeps_it else scheduler.state_dict
    return now


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


class Buffers:
    """The buffers of some models, and their values at the last `keep`."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._names = [
            (torch_private.buffers_of(module), name)
            for model in models
            for module in model.modules()
            for name, each in torch_private.buffers_of(module).items()
            if each is not None
        ]
        self.any = bool(self._names)
        """Whether there are any."""
        self._found: list[torch.Tensor | None] = []
        """The tensors that were found last; None in place of one that the model has set to None."""
        self._theirs: list[torch.Tensor] = []
        """The same tensors, detached."""
        self._values: list[torch.Tensor] = []
        """Copies of their values at the last `keep`."""
        self._addresses: list[int] = []
        """The addresses of their memory."""
        self._copy: Callable[[], object] = list
        """Copies all buffers into `_values`."""

    def keep(self) -> None:
        """Keep the values."""
        self._find()
        self._copy()

    def copies(self) -> list[torch.Tensor]:
        """Copies of the values now."""
        self._find()
        return [each.clone() for each in self._theirs]

    def restore(self, values: Sequence[torch.Tensor] = ()) -> None:
        """Give the buffers the values of the last `keep`, or these."""
        if values or self._values:
            self._find()
            copying.copy_alike(self._theirs, values or self._values)

    def restore_changed(self, values: Sequence[torch.Tensor]) -> None:
        """Give those buffers these values whose value differs from that of the last `keep`."""
        self._find()
        there = zip(self._theirs, values, self._values, strict=True)
        changed = [(theirs, value) for theirs, value, kept in there if not torch.equal(value, kept)]
        copying.copy_alike([theirs for theirs, _ in changed], [value for _, value in changed])

    def _find(self) -> None:
        """Find the tensors again: a model may replace one, or give it other memory."""
        there = [buffers[name] for buffers, name in self._names]
        addresses = list(map(torch.Tensor.data_ptr, self._theirs))
        if len(there) == len(self._found) and all(map(is_, there, self._found)) and addresses == self._addresses:
            return

        self._found = there
        self._theirs = [each.detach() for each in there if each is not None]
        if [each.shape for each in self._values] != [each.shape for each in self._theirs]:
            self._values = [each.clone() for each in self._theirs]
        self._addresses = [each.data_ptr() for each in self._theirs]
        self._copy = copying.prepared(self._values, self._theirs)
