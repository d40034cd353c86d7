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
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from holdfast.train.state import Tracker, TrainState


class Boundary:
    """The state after this rank's last step, as far as the next step changes it before its optimizer does.

    `mark` and `forward_done` are called in each step. Together they take about 10 µs, and the copy of the models'
    buffers: what was not drawn from, or not replaced, is not copied again.
    """

    def __init__(self, tracker: Tracker, place: str) -> None:
        """`place`: a folder in memory that outlives this process; empty: there is none."""
        self.step = 0
        self._tracker = tracker
        self._random = RandomNumbers()
        self._interrupted: tuple[RandomNumbers, list[torch.Tensor]] | None = None
        """Random numbers and buffers when the rank was interrupted."""
        self._record = TorchRecord.at(place)
        self._schedulers = [each for each in tracker.others.values() if isinstance(each, LRScheduler)]
        self._schedules: list[dict[str, Any]] = []
        self._groups = [group for each in tracker.optimizers for group in each.param_groups] if self._schedulers else []
        self._options: list[dict[str, Any]] = []
        self._buffers = Buffers(tracker.models)

    def mark(self, step: int) -> None:
        """This step is complete."""
        self.step = step
        self._random.read()
        if self._record is not None:
            self._record.write(step, self._random.torch, complete=True)
        if self._schedulers:
            self._schedules = [_schedule(each) for each in self._schedulers]
            self._options = [group.copy() for group in self._groups]
        self._buffers.keep()

    def forward_done(self, *_: Any) -> None:
        """A model's forward pass is done; a hook. What a step draws it has drawn by now: should this rank be lost
        before its step is complete, and others complete theirs with its gradients, its replacement needs this."""
        if self._record is not None and not torch.compiler.is_compiling():
            # Micro-batches are counted, too; of an optimizer step the last one counts.
            self._record.write(self._tracker.state.step + 1, self._random.of_torch.state(), complete=False)

    def rewind(self, state: TrainState) -> None:
        """Go back to that moment."""
        self._interrupted = RandomNumbers(), self._buffers.copies()
        state.step = self.step
        self._random.restore()
        for scheduler, schedule in zip(self._schedulers, self._schedules, strict=True):
            scheduler.load_state_dict(schedule)
        for group, options in zip(self._groups, self._options, strict=True):
            group.update(options)
        self._buffers.restore()

    def complete(self, step: int) -> None:
        """Others have completed this step: if it is the one that this rank was interrupted in, they had its gradients,
        so its forward pass was done. Its buffers are what that has left: each rank has others."""
        if step > self.step and self._interrupted is not None:
            self._buffers.restore(self._interrupted[1])

    def restore_random(self, step: int, *, survived: bool) -> bool:
        """Set the random numbers that this rank had, or the lost one in its place, after this step. False: they are
        not known, and nothing is set."""
        if survived and step == self.step:
            self._random.restore()
        elif survived and step > self.step and self._interrupted is not None:
            self._interrupted[0].restore()  # its forward pass was done, and nothing draws after that
        elif not survived and self._record is not None and (found := self._record.read(step)) is not None:
            torch.set_rng_state(found)
        else:
            return False
        return True

    @property
    def seed(self) -> str:
        """A digest of torch's random numbers, from which the ranks of another world get theirs."""
        return hashlib.sha256(self._random.torch.numpy().tobytes()).hexdigest()


def _schedule(scheduler: LRScheduler) -> dict[str, Any]:
    """What its `load_state_dict` takes. Most keep torch's `state_dict`, which leaves out one attribute in a loop."""
    if type(scheduler).state_dict is not LRScheduler.state_dict:
        return dict(scheduler.state_dict())
    schedule: dict[str, Any] = scheduler.__dict__.copy()
    del schedule["optimizer"]
    return schedule


class Buffers:
    """The buffers of some models, and their values at the last `keep`."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._places = [
            (module._buffers, name)
            for model in models
            for module in model.modules()
            for name, each in module._buffers.items()
            if each is not None
        ]
        self._met: list[torch.Tensor | None] = []
        """The tensors that were there at the last `keep`."""
        self._theirs: list[torch.Tensor] = []
        """The same, for copies."""
        self._values: list[torch.Tensor] = []

    def keep(self) -> None:
        if not self._places:
            return
        self._find()
        torch._foreach_copy_(self._values, self._theirs)

    def copies(self) -> list[torch.Tensor]:
        self._find()
        return [each.clone() for each in self._theirs]

    def restore(self, values: Sequence[torch.Tensor] = ()) -> None:
        """Of the last `keep`, or these."""
        if values or self._values:
            self._find()
            torch._foreach_copy_(self._theirs, values or self._values)

    def _find(self) -> None:
        """A model may put another tensor in the place of one."""
        there = [places[name] for places, name in self._places]
        if len(there) == len(self._met) and all(map(is_, there, self._met)):
            return
        self._met = there
        self._theirs = [each.detach() for each in there if each is not None]
        if len(self._values) != len(self._theirs):
            self._values = [each.clone() for each in self._theirs]


class RandomNumbers:
    """The states of the global generators of torch, Python and numpy."""

    def __init__(self) -> None:
        self._may_use_cuda = torch.backends.cuda.is_built()
        self._cuda: torch.Tensor | None = None
        self.of_torch = TorchsGenerator()
        self._of_python = PythonsGenerator()
        self._of_numpy = NumpysGenerator()
        self.read()

    def read(self) -> None:
        self.torch = self.of_torch.state()
        if self._may_use_cuda and torch.cuda.is_initialized():
            self._cuda = torch.cuda.get_rng_state()
        self._of_python.read()
        self._of_numpy.read()

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        self._of_python.restore()
        self._of_numpy.restore()


class TorchsGenerator:
    """torch's global generator of the CPU. Its state is copied only when somebody has drawn from it, where torch keeps
    it in the memory in the order that we know."""

    BEFORE, WORDS, AFTER = 20, 4 * 624, 28
    """Bytes: seed, place and more; the numbers; the second one of two that are drawn from a normal distribution."""
    SEARCHED = 256

    def __init__(self) -> None:
        self._state = torch.default_generator.get_state()
        self._seen: object = None
        at = getattr(torch.default_generator, "_cdata", 0)
        words = bytes(self._state[24:56].tolist())  # as the state has them: eight bytes for each
        first = b"".join(words[number : number + 4] for number in range(0, len(words), 8))
        found = ctypes.string_at(at, self.SEARCHED).find(first) if at else -1
        parts = [(at + found - self.BEFORE, self.BEFORE + 8), (at + found + self.WORDS, self.AFTER)]
        self._memory = [(ctypes.c_char * size).from_address(part) for part, size in parts if found >= self.BEFORE]

    def state(self) -> torch.Tensor:
        """Nobody may change it. The same object as before, if nobody has drawn."""
        if self._memory:
            seen = [each.raw for each in self._memory]
            if seen == self._seen:
                return self._state
            self._seen = seen
        self._state = torch.default_generator.get_state()
        return self._state


class MersenneTwister:
    """The memory of a generator of this kind. To read its whole state takes 10 to 30 µs, and few training loops draw
    from the generators of Python and numpy: two words show whether the state is another one."""

    WORDS = 624

    def __init__(self, words_at: int, position_at: int) -> None:
        # The first word is the same in all generators that were seeded and not drawn from.
        self._word = ctypes.c_uint32.from_address(words_at + ctypes.sizeof(ctypes.c_uint32))
        self._position = ctypes.c_int32.from_address(position_at)

    def mark(self) -> tuple[int, int]:
        return self._position.value, self._word.value


class PythonsGenerator:
    """`random`'s global generator."""

    def __init__(self) -> None:
        self._state = random.getstate()
        self._generator: random.Random = random._inst
        # CPython's layout: the object's head, the position, the words.
        at = id(self._generator) + object.__basicsize__
        memory = MersenneTwister(at + ctypes.sizeof(ctypes.c_int32), at)
        words = self._state[1]
        self._memory = memory if memory.mark() == (words[MersenneTwister.WORDS], words[1]) else None
        self._seen: object = None

    def read(self) -> None:
        if self._memory is not None:
            seen = (self._memory.mark(), self._generator.gauss_next)  # type: ignore[attr-defined]
            if seen == self._seen:
                return
            self._seen = seen
        self._state = random.getstate()

    def restore(self) -> None:
        random.setstate(self._state)


class NumpysGenerator:
    """numpy's global generator, where numpy is loaded."""

    def __init__(self) -> None:
        self._random: Any = None
        self._state: Any = None
        self._memory: MersenneTwister | None = None
        self._seen: object = None
        if "numpy" in sys.modules:
            self._random = sys.modules["numpy"].random
            generator = self._random.mtrand._rand._bit_generator
            if type(generator) is self._random.MT19937:
                at = generator.ctypes.state_address
                self._memory = MersenneTwister(at, at + MersenneTwister.WORDS * ctypes.sizeof(ctypes.c_uint32))

    def read(self) -> None:
        if self._random is None:
            return
        if self._memory is not None:
            seen = self._memory.mark()
            if seen == self._seen:
                return
            self._seen = seen
        self._state = self._random.get_state()

    def restore(self) -> None:
        if self._random is not None:
            self._random.set_state(self._state)


class TorchRecord:
    """torch's random numbers after each of the last RECORDS steps, in memory that outlives this process: a replacement
    on this node goes on with those of the rank that it replaces."""

    def __init__(self, path: str) -> None:
        """Raises OSError when there is no memory."""
        state = torch.get_rng_state()
        size_bytes = RECORDS * (WORD_BYTES + len(state))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            memory = memoryview(mmap.mmap(fd, size_bytes))
        finally:
            os.close(fd)
        self._steps = memory[: RECORDS * WORD_BYTES].cast("Q")
        bodies = memory[RECORDS * WORD_BYTES :]
        self._states = [
            torch.frombuffer(bodies, dtype=torch.uint8, count=len(state), offset=number * len(state))
            for number in range(RECORDS)
        ]
        self._state_bytes = len(state)
        self._addresses = [each.data_ptr() for each in self._states]
        self._newest = -1, state
        self._number, self._complete = 0, True
        """Where the newest one is, and whether its step is complete."""

    @classmethod
    def at(cls, place: str) -> TorchRecord | None:
        """None without a folder, or without room in it."""
        if place:
            with contextlib.suppress(OSError):
                return cls(os.path.join(place, f"{os.environ.get('LOCAL_RANK', '0')}.random"))
        return None

    def write(self, step: int, state: torch.Tensor, *, complete: bool) -> None:
        """What is written for a step that is not complete the next call replaces. Nobody may change `state`
        afterwards."""
        newest, kept = self._newest
        if self._complete and newest != step:
            self._number = (self._number + 1) % RECORDS
        self._complete = complete
        if newest == step and kept is state:
            return
        for number in range(RECORDS):
            if number == self._number or self._steps[number] == step + 1:
                self._steps[number] = 0
        # copy_ takes four times that.
        ctypes.memmove(self._addresses[self._number], state.data_ptr(), self._state_bytes)
        self._steps[self._number] = step + 1
        self._newest = step, state

    def read(self, step: int) -> torch.Tensor | None:
        """None: the states after this step were not recorded."""
        for number in range(RECORDS):
            if self._steps[number] == step + 1:
                return self._states[number].clone()
        return None


WORD_BYTES = 8
RECORDS = 3
"""A lost rank may have completed a step that no other one has, and have done the forward pass of the next: the others
go on from the step before."""
