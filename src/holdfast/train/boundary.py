"""The state of one rank after its last step, as far as the next step changes it before its optimizer does.

With it a rank that was interrupted in a step goes back to the step's begin (see survival.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.train.state import Tracker, TrainState


class Boundary:
    """The state after this rank's last step, as far as the next step changes it before its optimizer does.

    `mark` is called in each step and takes about 10 µs, and the copy of the models' buffers.
    """

    def __init__(self, tracker: Tracker, place: str) -> None:
        """`place`: a folder in memory that outlives this process; empty: there is none."""
        self.step = 0
        self._tracker = tracker
        self._random = RandomNumbers()
        self._interrupted: RandomNumbers | None = None
        self._record = TorchRecord.at(place)
        self._schedulers = [each for each in tracker.others.values() if isinstance(each, LRScheduler)]
        self._schedules: list[dict[str, Any]] = []
        self._options: list[dict[str, Any]] = []
        self._held = [
            (module._buffers, name)
            for model in tracker.models
            for module in model.modules()
            for name, each in module._buffers.items()
            if each is not None
        ]
        self._buffers = [_kept(places, name).clone() for places, name in self._held]

    def mark(self, step: int) -> None:
        """This step is complete."""
        self.step = step
        self._random.read()
        if self._record is not None:
            self._record.write(step, self._random.torch)
        if self._schedulers:
            self._schedules = [each.state_dict() for each in self._schedulers]
            self._options = [_options(group) for each in self._tracker.optimizers for group in each.param_groups]
        if self._held:
            torch._foreach_copy_(self._buffers, [_kept(places, name) for places, name in self._held])

    def forward_done(self, *_: Any) -> None:
        """A model's forward pass is done; a hook. What a step draws it has drawn by now: should this rank be lost
        before its step is complete, and others complete theirs with its gradients, its replacement needs this."""
        if self._record is not None and not torch.compiler.is_compiling():
            self._record.write(self.step + 1, torch.default_generator.get_state())

    def rewind(self, state: TrainState) -> None:
        """Go back to that moment."""
        self._interrupted = RandomNumbers()
        state.step = self.step
        self._random.restore()
        for scheduler, schedule in zip(self._schedulers, self._schedules, strict=False):
            scheduler.load_state_dict(schedule)
        groups = (group for each in self._tracker.optimizers for group in each.param_groups)
        for group, options in zip(groups, self._options, strict=False):
            group.update(options)
        if self._held:
            torch._foreach_copy_([_kept(places, name) for places, name in self._held], self._buffers)

    def restore_random(self, step: int, *, survived: bool) -> bool:
        """Set the random numbers that this rank had, or the lost one in its place, after this step. False: they are
        not known, and nothing is set."""
        if survived and step == self.step:
            self._random.restore()
        elif survived and step == self.step + 1 and self._interrupted is not None:
            self._interrupted.restore()  # its forward pass was done, and nothing draws after that
        elif not survived and self._record is not None and (found := self._record.read(step)) is not None:
            torch.set_rng_state(found)
        else:
            return False
        return True

    @property
    def seed(self) -> str:
        """A digest of torch's random numbers, from which the ranks of another world get theirs."""
        return hashlib.sha256(self._random.torch.numpy().tobytes()).hexdigest()


def _kept(places: Mapping[str, torch.Tensor | None], name: str) -> torch.Tensor:
    held = places[name]
    assert held is not None
    return held.detach()


class RandomNumbers:
    """The states of the global generators of torch, Python and numpy."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self._numpy = _NumpyState()
        self.read()

    def read(self) -> None:
        self.torch.copy_(torch.default_generator.get_state())
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._python = random.getstate()
        self._numpy.read()

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        self._numpy.restore()


class TorchRecord:
    """torch's random numbers after each of the last two steps, in memory that outlives this process: a replacement on
    this node goes on with those of the rank that it replaces."""

    def __init__(self, path: str) -> None:
        """Raises OSError when there is no memory."""
        state = torch.get_rng_state()
        size_bytes = 2 * (WORD_BYTES + len(state))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            memory = memoryview(mmap.mmap(fd, size_bytes))
        finally:
            os.close(fd)
        self._steps = memory[: 2 * WORD_BYTES].cast("Q")
        bodies = memory[2 * WORD_BYTES :]
        self._states = [
            torch.frombuffer(bodies, dtype=torch.uint8, count=len(state), offset=number * len(state))
            for number in range(2)
        ]

    @classmethod
    def at(cls, place: str) -> TorchRecord | None:
        """None without a folder, or without room in it."""
        if place:
            with contextlib.suppress(OSError):
                return cls(os.path.join(place, f"{os.environ.get('LOCAL_RANK', '0')}.random"))
        return None

    def write(self, step: int, state: torch.Tensor) -> None:
        """May be called again for a step that is not complete."""
        number = step & 1
        self._steps[number] = 0
        self._states[number].copy_(state)
        self._steps[number] = step + 1

    def read(self, step: int) -> torch.Tensor | None:
        """None: the states after this step were not recorded."""
        number = step & 1
        return self._states[number].clone() if self._steps[number] == step + 1 else None


WORD_BYTES = 8


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


class _NumpyState:
    """numpy's global random numbers. Few training loops use them, and to read them takes 30 µs: as long as none was
    drawn, only the generator's memory is compared."""

    def __init__(self) -> None:
        self._state: Any = None
        self._in_use = False
        self._begun = b""
        self._address = 0
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._state = numpy.random.get_state()
            generator = numpy.random.mtrand._rand._bit_generator
            if type(generator) is numpy.random.MT19937:
                self._address = generator.ctypes.state_address
                self._begun = ctypes.string_at(self._address, MT19937_BYTES)
            self._in_use = not self._address

    def read(self) -> None:
        if not self._in_use:
            if self._address and ctypes.string_at(self._address, MT19937_BYTES) == self._begun:
                return
            self._in_use = True
        if "numpy" in sys.modules:
            self._state = sys.modules["numpy"].random.get_state()

    def restore(self) -> None:
        if self._state is not None:
            sys.modules["numpy"].random.set_state(self._state)


MT19937_BYTES = 625 * 4
"""The words of the generator's state, and its position among them."""
