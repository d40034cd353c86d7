"""Notices a script that takes the rest of an epoch for a whole one, after a resume within the epoch.

`for epoch in state.epochs(…)` begins the body of that epoch again, and the loader gives the rest of its batches. Three
habits are then wrong, in silence:

- Code before the loop over the loader runs a second time. `lr *= 0.1` there is in the restored state already. So does
  code between two loops over epochs, when the first one has no epoch left.
- `enumerate(loader)` counts from 0 again, so that `i + 1 == len(loader)` never comes true, and the gradients of the
  last batches wait for an optimizer step that nobody makes.
- A sum over the epoch's batches begins again, too, and `running / len(loader)` after the loop divides the sum over the
  rest by the number of all.
- `itertools.cycle(loader)` keeps the batches of one pass and repeats them: the rest of a pass has few, or none.

Code before the loop that draws or seeds random numbers is right to run again, but the next step draws those of the
restored state: they are put back when the loop begins.

`ResumedWeights` notices code that changes the weights that a resume has restored.

`Whereabouts` notices a loop that goes over `range(n)` instead of `state.epochs(n)`, `OwnCounts` a variable in which the
script counts steps.

It looks at options and gradients only, in the first step and at the end of such an epoch. Code that computes a rate
from the epoch or from the step changes nothing when it runs again, or sets the rate in each step: that is no mistake.
With another number of ranks a rate may follow that number, or its square root.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.train.data import Position
from holdfast.train.data.datasets import attributes_of
from holdfast.train.data.loader import ENDLESS
from holdfast.train.guards import level_of_script
from holdfast.train.random_numbers import random_state, set_random_state

Options = list[dict[str, float]]
"""The numbers among the options of all parameter groups."""
STEPS_UNTIL_ASKED = 2
"""The number of steps after which a script has asked where it is, or never does."""
LOOKS_AT_COUNTS = 3
"""The number of steps in which a variable has to follow the steps since the resume."""
UNSHARED_REFERENCES = 3
"""The count of references to a frame's dict that nobody else has: the frame's, ours, and that of the call which
counts."""
STEPS_MIN = 8
"""Fewest steps since the resume after which variables are looked at."""


class Reentry:
    """The rest of an epoch."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        loaders: Sequence[Any],
        growth: float,
        before: Options | None = None,
    ) -> None:
        """`loaders`: those of ours that go on within the epoch. `growth`: the number of ranks, divided by that of the
        epoch so far. `before`: the options at the end of an earlier loop over epochs, which had no epoch left; None:
        they are looked at now."""
        self._optimizers = optimizers
        self._loaders = loaders
        for each in loaders:
            each._length_asked = each._has_given_rest = each._length_asked_after = False
        self._random: Mapping[str, Any] | None = random_state()
        """The random numbers that the next step draws, until a pass begins; None: one has."""
        self._before = options_of(optimizers) if before is None else before
        self._at_pass: Options | None = None
        """The options when the first pass over tracked data began; None: none has."""
        self._growth = growth
        self._stepped = False

    def pass_begins(self, *, goes_on: bool) -> None:
        """Note that a pass over tracked data of the training begins. `goes_on`: within its epoch. Then what code before
        the loop has drawn or seeded was drawn in this epoch before."""
        if self._at_pass is None:
            self._at_pass = options_of(self._optimizers)
        if self._random is not None and goes_on:
            set_random_state(self._random)
        self._random = None

    def step(self, epoch: int) -> None:
        """Warn at the first step if code before the loop has changed an option, and the loop did not set it."""
        stepped, self._stepped = self._stepped, True
        if stepped or self._at_pass is None:
            return
        now = options_of(self._optimizers)
        for before, at_pass, after in zip(self._before, self._at_pass, now, strict=False):
            for option in sorted(before.keys() & at_pass.keys() & after.keys()):
                if before[option] != at_pass[option] == after[option] and not self._follows_ranks(
                    before[option], after[option]
                ):
                    warnings.warn(
                        f"holdfast: epoch {epoch} goes on after a resume, and code before its loop has changed "
                        f"{option!r} of an optimizer from {before[option]:.6g} to {after[option]:.6g}: it had run "
                        f"before, and its effect is in the restored state. Compute {option!r} from the epoch, or "
                        "change it after the loop over the loader.",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                    return

    def _follows_ranks(self, before: float, after: float) -> bool:
        return any(math.isclose(after, before * each, rel_tol=1e-6) for each in (self._growth, self._growth**0.5))

    def end(self, epoch: int, *, pending: bool) -> None:
        """Warn if the epoch ends with gradients that no optimizer step has used, in a loop that asks for the length of
        its loader, and if code after the loop has asked for it. `pending`: whether there are such gradients."""
        if pending and any(each._length_asked for each in self._loaders):
            warnings.warn(
                f"holdfast: epoch {epoch} went on after a resume, and has ended with gradients that no optimizer step "
                "has used. enumerate(loader) begins at 0 again: for the last batch ask loader.batch_number + 1 == "
                "len(loader), or use ht.accumulate.",
                RuntimeWarning,
                stacklevel=3,
            )
        if any(each._length_asked_after for each in self._loaders):
            warnings.warn(
                f"holdfast: epoch {epoch} went on after a resume, and code after its loop has asked for len(loader), "
                "the batches of the whole epoch: if it divides a sum over the loop by them, that mean is too small. "
                "Divide by the number of batches that the loop had.",
                RuntimeWarning,
                stacklevel=3,
            )


class ResumedWeights:
    """The parameters that a resume has given to models: code between it and the first step must not change them, as one
    that loads a pretrained checkpoint does.

    It is looked at when the first loop over epochs begins, and when data go on within an epoch. Code before the loop
    over the data of a whole epoch may change weights."""

    def __init__(self, digests: Callable[[], dict[str, str]]) -> None:
        """`digests`: a digest of the parameters of each model, by name."""
        self._digests = digests
        self._restored = digests()
        self._epochs = 0

    def epoch_begins(self) -> bool:
        """Look, if this is the first epoch since the resume. Returns whether to look again when its loop begins."""
        self._epochs += 1
        return self._epochs == 1 and self.look()

    def look(self) -> bool:
        """Warn if the parameters of a model have changed. Returns whether they have not."""
        changed = [name for name, digest in self._digests().items() if self._restored[name] != digest]
        if changed:
            warnings.warn(
                f"holdfast: code after resume() has changed the weights of {', '.join(changed)} before the first step: "
                "what was trained before the resume is lost. Load a checkpoint, or set first values, before resume().",
                RuntimeWarning,
                stacklevel=level_of_script(),
            )
        return not changed


class Whereabouts:
    """A training that goes on after a resume, in a later epoch than the first one, whose script may not know it.

    `for epoch in range(n)` then trains n more epochs. A script whose number of steps is right has asked for something:
    `state.epochs(…)`, `state.step`, the loader's position, or what `resume()` has returned."""

    def __init__(self, asked: Callable[[], bool], resumed: object, positions: Sequence[Position]) -> None:
        """`asked`: whether the script has asked for its place in other ways. `resumed`: what `resume()` returns.
        `positions`: those of the loaders over which the training goes."""
        self._asked = asked
        self._resumed = weakref.ref(resumed)
        self._positions = positions
        self._epoch = max((each.epoch for each in positions), default=0)
        self._steps = 0

    def at_step(self) -> bool:
        """Note that a step is complete. Returns whether more are looked at."""
        self._steps += 1
        if self._steps < STEPS_UNTIL_ASKED:  # a loop may ask at its end
            return True
        known = self._asked() or self._resumed() is not None or any(each.known for each in self._positions)
        if self._epoch and not known:
            warnings.warn(
                f"holdfast: training goes on in epoch {self._epoch} after a resume, and the loop has not asked where "
                "it is: `for epoch in range(n)` trains n more epochs. Write `for epoch in state.epochs(n)`, or "
                "`while state.step < n`.",
                RuntimeWarning,
                stacklevel=4,
            )
        return False


class OwnCounts:
    """Variables of a script that count the steps since the resume, instead of those of the training.

    The number of a batch in its epoch does so, too, until the epoch ends. So they are looked at in the first steps of
    the next epoch."""

    def __init__(self, step: int, epoch: int) -> None:
        """`step`, `epoch`: those of the resume."""
        self._from = step
        self._epoch = epoch
        self._complete = 0
        """The number of optimizer steps since the resume."""
        self._first: dict[str, int] = {}
        """The variables with such a number in each step that was looked at, with the number in the first of these."""
        self._left = LOOKS_AT_COUNTS
        """The number of steps in which variables are still to be looked at."""

    def at_step(self, frame: FrameType, step: int, epoch: int) -> bool:
        """Look at the variables of the training loop, in the script's `frame`, after a step. Returns whether to look
        after more steps."""
        self._complete += 1
        since = step - self._from
        if self._from < LOOKS_AT_COUNTS:  # both numbers are too near to each other
            return False
        if self._left == LOOKS_AT_COUNTS and (epoch == self._epoch or self._complete < STEPS_MIN):
            self._epoch = epoch  # after few steps the number of a batch would be too near: the next epoch tells more
            return True
        counts = [*range(since - 1, since + 2), *range(self._complete - 1, self._complete + 2)]
        found = {name: each for name, each in variables_in(frame).items() if type(each) is int and each in counts}
        if self._left < LOOKS_AT_COUNTS:
            found = {name: self._first[name] for name, each in found.items() if each > self._first.get(name, each)}
        self._first = found
        self._left -= 1
        if self._left == 0 and self._first:
            warnings.warn(
                f"holdfast: {min(self._first)!r} counts the steps since the resume, and not those of the training, of "
                f"which there are {step}: it has begun again. If it decides anything in training, or is the step of a "
                "log, set it from state.step.",
                RuntimeWarning,
                stacklevel=5,
            )
        return self._left > 0


def variables_in(frame: FrameType) -> dict[str, Any]:
    """The variables that code in this frame of a script sees, and the attributes of its `self`; empty: the frame is of
    an integration into another library."""
    if frame.f_globals.get("__name__", "").startswith("holdfast."):
        return {}
    own = _locals_of(frame)
    attributes = attributes_of(own.get("self"))
    return {**frame.f_globals, **own, **{f"self.{name}": each for name, each in attributes.items()}}


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of this frame alone. Up to Python 3.12 the frame of a function keeps a dict of them when it was
    asked, and so a batch and its outputs, as long as the function runs. It is emptied, unless someone else has it; the
    function has it if it calls `locals()`, and must not find more in it."""
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    if "locals" in frame.f_code.co_names:
        return {}
    kept = frame.f_locals
    found = dict(kept)
    if sys.getrefcount(kept) <= UNSHARED_REFERENCES:
        kept.clear()
    return found


def is_cycled(loader: Any) -> bool:
    """Whether an `itertools.cycle` goes over this loader of ours. It looks through the memory, once: 40 ms."""
    cycles = (each for each in gc.get_objects() if type(each) is itertools.cycle)
    passes = (one for each in cycles for one in gc.get_referents(each) if isinstance(one, GeneratorType))
    return any(one.gi_frame is not None and _locals_of(one.gi_frame).get("self") is loader for one in passes)


def warn_of_cycle(name: str) -> None:
    """Warn of a tracked loader in `itertools.cycle`."""
    warnings.warn(
        f"holdfast: {name} is in itertools.cycle(), which repeats the batches of one pass: after a resume these are "
        f"its last ones, or none, and a zip() with it ends.\n{ENDLESS}",
        RuntimeWarning,
        stacklevel=5,
    )


def warn_of_weights(epoch: int) -> None:
    """Warn of code between two loops over epochs that has changed the restored weights."""
    warnings.warn(
        f"holdfast: epoch {epoch} goes on after a resume, and code between two loops over epochs has changed the "
        "weights: it had run before, and what was trained since is lost. Write it under `if state.epoch == n and "
        "loader.cursor == 0:`, with the n of the loop before.",
        RuntimeWarning,
        stacklevel=4,
    )


def options_of(optimizers: Sequence[Optimizer]) -> Options:
    """The numbers among the options of all parameter groups."""
    return [
        {key: number for key, value in group.items() if (number := _number(value)) is not None}
        for each in optimizers
        for group in each.param_groups
    ]


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
