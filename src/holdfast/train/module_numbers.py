"""Notices Python numbers in tracked modules that begin again after a resume, as `self.temperature *= 0.95` in forward,
and those in optimizers of the program's own.

No state_dict() has them. But a script may also set such a number from the step, which is right, or let it follow the
batch. So only these are looked at: attributes that training has moved in one direction in each of the first steps of a
life, and never back. One that is among its first values in the first step after a resume has begun again. A number that
is set from the step goes on; one that follows the batch, or is drawn, goes back and forth.

A number of the batch within its epoch goes back at each epoch's end. So a resume that begins an epoch tells nothing,
unless the number was seen to pass such an end.

Modules and optimizers of libraries count for themselves, and are left out. A number that is only for a log cannot be
told from one that decides something, and a number may belong to a cache that the module has lost. So nothing is
restored.

Knows modules and optimizers. Knows neither snapshots nor ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from holdfast.train import state_codec as codec
from holdfast.train.switches import named_modules
from holdfast.train.tracked import TrackedModel, TrackedOptimizer

Owner: TypeAlias = nn.Module | Optimizer
"""What has numbers as attributes."""

FIRST_STEPS = 8
"""The number of steps in which a number has to move in one direction: one that is drawn in each does so in one of
20,000 lives."""
EXACT_MAX = 2.0**53
"""Limit of the numbers: a larger integer is not exact in every JSON."""
VALUES, EPOCHS, PASSED = "values", "epochs", "passed"
"""Keys of the entry in a snapshot: the values before the first step, after the first steps, and now, by name; the
epochs at the last step; whether the numbers were seen to pass an epoch's end."""


class _Number:
    """An attribute that moves."""

    def __init__(self, name: str, owner: Owner, began: float, now: float) -> None:
        self.name = name
        self._owner = owner
        self.began, self.now = began, now
        """The value before the first step, and after the last one."""
        self.first = now
        """The value after the first steps."""
        self._grows = now > began

    def moves_on(self, *, strictly: bool) -> bool:
        """Look at it after a step. Returns whether it has moved on in its direction, or, if not `strictly`, stays."""
        before, now = self.now, _number(vars(self._owner).get(self.name.rpartition(".")[2]))
        if now is None:
            return False
        self.now = now
        return not strictly if now == before else (now > before) == self._grows


class ModuleNumbers:
    """The numbers in the tracked models and optimizers that training moves."""

    def __init__(self, models: Sequence[TrackedModel], optimizers: Sequence[TrackedOptimizer]) -> None:
        """Both are lists to which further ones may be added until `begin`."""
        self._models = models
        self._optimizers = optimizers
        self._began: dict[str, float] | None = None
        """All numbers before the first step, by name, until it is complete."""
        self._steps = 0
        self._numbers: list[_Number] = []
        """Those that move."""
        self._epochs: list[int] = []
        """The epochs at the last step."""
        self._passed = False
        """Whether the numbers were seen to pass an epoch's end."""
        self._saved: dict[str, Any] = {}
        """The entry of the state that was restored: it is the one of this life, too, until that has its own."""
        self._compares = False
        """Whether the next step is compared with it."""

    def begin(self) -> None:
        """Look at all numbers, before a state is restored. Only the first call does something."""
        if self._began is None and not self._steps:
            self._began = {name: value for name, _, value in self._all()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Compare with this entry, from `moved`, after the next step."""
        self.begin()
        self._saved, self._compares = saved, bool(saved)

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do."""
        return not (self._numbers or self._began or self._compares)

    def step(self, epochs: list[int]) -> str:
        """A step is complete, in these epochs of the script and its loaders. Returns a text about a number that has
        begun again; empty: none has."""
        self._steps += 1
        if self._began is not None:
            began, self._began = self._began, None
            self._find(began)
        else:
            self._numbers = [each for each in self._numbers if each.moves_on(strictly=self._steps <= FIRST_STEPS)]
            self._passed |= epochs != self._epochs
        if self._steps == FIRST_STEPS:
            for each in self._numbers:
                each.first = each.now
        self._epochs = epochs
        tells = self._compares and (self._saved.get(PASSED) or self._saved.get(EPOCHS) == epochs)
        self._compares = False
        return self._begun_again(codec.section(self._saved, VALUES)) if tells else ""

    def moved(self) -> dict[str, Any]:
        """The entry for a snapshot: the numbers that have moved on since the first steps. Empty for most programs."""
        if self._steps <= FIRST_STEPS:
            return self._saved
        values = {each.name: [each.began, each.first, each.now] for each in self._numbers if each.now != each.first}
        return {VALUES: values, EPOCHS: self._epochs, PASSED: self._passed} if values else {}

    def _find(self, began: Mapping[str, float]) -> None:
        """Find the numbers that the first step has moved."""
        found: dict[tuple[type, str], _Number] = {}  # of several modules of a class one is enough
        for name, owner, now in self._all():
            if began.get(name, now) != now:
                kind = type(owner), name.rpartition(".")[2]
                found.setdefault(kind, _Number(name, owner, began[name], now))
        self._numbers = [*found.values()]

    def _begun_again(self, values: Mapping[str, Any]) -> str:
        for name, owner, now in self._all():
            began, first, last = values.get(name, (now, now, now))
            if began != first and min(began, first) <= now <= max(began, first):
                of_module = isinstance(owner, nn.Module)
                saved = "make it a buffer (register_buffer)" if of_module else "keep it in param_groups"
                return (
                    f"{name} had come to {last:.6g}, and is {now:.6g} after the first step since the resume: this "
                    "Python number has begun again. No state_dict() has it. If it decides anything in training, "
                    f"{saved}, or set it from state.step in each step."
                )
        return ""

    def _all(self) -> Iterator[tuple[str, Owner, float]]:
        """The numbers in the program's own modules and optimizers, by the name `model.layer.attribute`, each with its
        owner."""
        origins: dict[type, tuple[bool, bool]] = {}
        for path, owner in self._owners():
            kind = type(owner)
            own, within_library = origins.get(kind) or origins.setdefault(kind, _origin(kind))
            for attribute, value in [*vars(owner).items()] if own else ():
                number = _number(value)
                # With an underscore it may be what a library's class keeps for itself (Lightning, torchmetrics).
                if number is not None and not (within_library and attribute.startswith("_")):
                    yield f"{path}.{attribute}", owner, number

    def _owners(self) -> Iterator[tuple[str, Owner]]:
        for model in self._models:
            for path, module in named_modules(model.module):
                yield ".".join(filter(None, (model.name, path))), module
        for each in self._optimizers:
            yield each.name, each.optimizer


def _number(value: Any) -> float | None:
    """The value, if it is a number that can be compared; a bool is none."""
    return value if type(value) in (int, float) and abs(value) < EXACT_MAX else None


def _origin(kind: type) -> tuple[bool, bool]:
    """Whether some class from which this one is made is the program's own, and whether one is a library's. torch's
    count as neither: FSDP2 makes a class of its own from each."""
    own = within_library = False
    for each in kind.__mro__:
        root = each.__module__.partition(".")[0]
        if root == "torch" or root in sys.stdlib_module_names:
            continue
        file = getattr(sys.modules.get(each.__module__), "__file__", None) or ""
        if {"site-packages", "dist-packages"}.isdisjoint(PurePath(file).parts):
            own = True
        else:
            within_library = True
    return own, within_library
