"""The state of one rank after its last step, as far as the next step changes it before its optimizer does.

With it a rank that was interrupted in a step goes back to the step's begin (see survival.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import random
import struct
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim.lr_scheduler import LRScheduler

from holdfast.train import copying
from holdfast.train.state import Tracker, TrainState

WORDS = 624
WORDS_BYTES = 4 * WORDS
"""Of a Mersenne twister: the generators of torch, Python and numpy are of this kind."""
WORD_BYTES = 8
RECORDS = 3
"""A lost rank may have completed a step that no other one has, and have done the forward pass of the next: the others
go on from the step before."""


class Boundary:
    """The state after this rank's last step, as far as the next step changes it before its optimizer does.

    `mark` and `forward_done` are called in each step, when its work has emptied the caches: what they cost is what they
    touch for the first time. So they copy plain memory, by few functions.
    """

    def __init__(self, tracker: Tracker, place: str) -> None:
        """`place`: a folder in memory that outlives this process; empty: there is none."""
        self.step = 0
        self._tracker = tracker
        self._random = RandomNumbers()
        self._interrupted: tuple[RandomNumbers, list[torch.Tensor]] | None = None
        """Random numbers and buffers when the rank was interrupted."""
        self._record = TorchRecord.at(place, len(self._random.torch))
        self._schedulers = [each for each in tracker.others.values() if isinstance(each, LRScheduler)]
        self._schedules_now = [_schedule_of(each) for each in self._schedulers]
        self._schedules: list[dict[str, Any]] = []
        self._optimizers = tracker.optimizers
        self._options: list[dict[str, Any]] = []
        self._buffers = Buffers(tracker.models)

    def mark(self, step: int) -> None:
        """This step is complete."""
        self.step = step
        self._random.read()
        if self._record is not None:
            self._record.write(step, self._random.torch, complete=True)
        if self._schedulers:
            self._schedules = [now() for now in self._schedules_now]
            self._options = [group.copy() for each in self._optimizers for group in each.param_groups]
        if self._buffers.any:
            self._buffers.keep()

    def forward_done(self) -> None:
        """A model's forward pass is done. What a step draws it has drawn by now: should this rank be lost before its
        step is complete, and others complete theirs with its gradients, its replacement needs this."""
        if self._record is not None:
            # Micro-batches are counted, too; of an optimizer step the last one counts.
            self._record.write(self._tracker.state.step + 1, self._random.of_torch.state(), complete=False)

    def rewind(self, state: TrainState) -> None:
        """Go back to that moment."""
        self._interrupted = RandomNumbers(), self._buffers.copies()
        state.step = self.step
        self._random.restore()
        if self._schedulers:
            for scheduler, schedule in zip(self._schedulers, self._schedules, strict=True):
                scheduler.load_state_dict({name: each for name, each in schedule.items() if name != "optimizer"})
            groups = [group for each in self._optimizers for group in each.param_groups]
            for group, options in zip(groups, self._options, strict=True):
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
            self._random.of_torch.restore(found)
        else:
            return False
        return True

    @property
    def seed(self) -> str:
        """A digest of torch's random numbers, from which the ranks of another world get theirs."""
        return hashlib.sha256(self._random.of_torch.official(self._random.torch)).hexdigest()


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
            (module._buffers, name)
            for model in models
            for module in model.modules()
            for name, each in module._buffers.items()
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
            torch._foreach_copy_(self._theirs, values or self._values)

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


class RandomNumbers:
    """The states of the global generators of torch, Python and numpy."""

    def __init__(self) -> None:
        self._may_use_cuda = torch.backends.cuda.is_built()
        self._cuda: torch.Tensor | None = None
        self.of_torch = TorchsGenerator()
        self._of_python = PythonsGenerator()
        self._of_numpy = NumpysGenerator()
        self._looks = [*self._of_python.looks, *self._of_numpy.looks]
        self._seen: list[object] = []
        self.read()

    def read(self) -> None:
        self.torch = self.of_torch.state()
        if self._may_use_cuda and torch.cuda.is_initialized():
            self._cuda = torch.cuda.get_rng_state()
        seen = [look() for look in self._looks]
        if seen != self._seen:
            self._seen = seen
            self._of_python.read()
            self._of_numpy.read()

    def restore(self) -> None:
        self.of_torch.restore(self.torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        self._of_python.restore()
        self._of_numpy.restore()


Look = Callable[[], object]
"""Tells something of a generator that differs whenever somebody has drawn from it."""

# To read the whole state of a generator takes 2 to 30 µs, and few training loops draw from all of them. A few words of
# it show whether it is another one: the position, and a word that no two states have in common. A look at them is one
# call of compiled code.


def _look_at(address: int, size_bytes: int) -> Callable[[], bytes]:
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B").tobytes


class TorchsGenerator:
    """torch's global generator of the CPU. Where torch keeps its state in the memory in the order that we know, that
    memory is copied: torch's own copy takes several times as long."""

    MEMORY = struct.Struct(f"=Qi?3xI{WORDS_BYTES}s4xf?3xd?7x")
    """Seed, numbers left, whether it was seeded, the next one; the numbers; then the second one of two that were drawn
    from a normal distribution, and whether there is one: in single and in double precision."""
    STATE = struct.Struct(f"=QiiQ{2 * WORDS_BYTES}s8xd8xi4xf?3x")
    """The same as `get_state` has it: eight bytes for each of the numbers, and double precision first."""
    WORDS_AT = 20
    FIRST_BYTES = WORDS_AT + 3 * 4
    LAST_AT = WORDS_AT + WORDS_BYTES
    SEARCHED = 256

    def __init__(self) -> None:
        self._memory: Callable[[], bytes] | None = None
        self._first: Look = object
        self._last: Look = object
        self._seen: object = None
        self._state = b""
        model = torch.Generator()
        told = list(self.STATE.unpack(_state(model)))
        told[5:] = 0.5, 1, 0.25, True
        _set_state(model, self.STATE.pack(*told))
        at = self._begin(model)
        if at is not None and self._translated(ctypes.string_at(at, self.MEMORY.size)) == _state(model):
            begin = torch.default_generator._cdata + at - model._cdata
            self._memory = _look_at(begin, self.MEMORY.size)
            self._first = _look_at(begin, self.FIRST_BYTES)
            self._last = _look_at(begin + self.LAST_AT, self.MEMORY.size - self.LAST_AT)

    def _begin(self, generator: torch.Generator) -> int | None:
        """The address of its state; None: it is not where we look."""
        at = getattr(generator, "_cdata", 0)
        first = struct.pack("=4I", *struct.unpack_from("=4Q", _state(generator), 24))
        found = ctypes.string_at(at, self.SEARCHED).find(first) if at else -1
        return at + found - self.WORDS_AT if found >= self.WORDS_AT else None

    def state(self) -> bytes:
        """For `restore` and `official`; the same object as long as nobody draws."""
        seen = self._first(), self._last()
        if seen != self._seen:
            self._seen = seen
            self._state = _state(torch.default_generator) if self._memory is None else self._memory()
        return self._state

    def restore(self, state: bytes) -> None:
        _set_state(torch.default_generator, self.official(state))

    def official(self, state: bytes) -> bytes:
        """As `get_state` has it."""
        return state if self._memory is None else self._translated(state)

    def _translated(self, memory: bytes) -> bytes:
        seed, left, seeded, following, words, single, has_single, double, has_double = self.MEMORY.unpack(memory)
        wide = struct.pack(f"={WORDS}Q", *struct.unpack(f"={WORDS}I", words))
        pair = double if has_double else 0.0, has_double, single if has_single else 0.0, has_single
        return self.STATE.pack(seed, left, seeded, following, wide, *pair)


def _state(generator: torch.Generator) -> bytes:
    return bytes(memoryview(generator.get_state().numpy()))


def _set_state(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class PythonsGenerator:
    """`random`'s global generator."""

    def __init__(self) -> None:
        self._state = random.getstate()
        generator: random.Random = random._inst
        # CPython's layout: the object's head, the position, the words. The first word is the same whatever the seed.
        look = _look_at(id(generator) + object.__basicsize__, 12)
        words = self._state[1]
        known = look() == struct.pack("=3I", words[WORDS], *words[:2])
        self.looks: list[Look] = [look, functools.partial(getattr, generator, "gauss_next")] if known else [object]

    def read(self) -> None:
        self._state = random.getstate()

    def restore(self) -> None:
        random.setstate(self._state)


class NumpysGenerator:
    """numpy's global generator, where numpy is loaded."""

    def __init__(self) -> None:
        self._random: Any = None
        self._state: Any = None
        self.looks: list[Look] = []
        if "numpy" in sys.modules:
            self._random = sys.modules["numpy"].random
            generator = self._random.mtrand._rand._bit_generator
            # The words, and behind the last one the position.
            at = generator.ctypes.state_address + WORDS_BYTES - 4 if type(generator) is self._random.MT19937 else 0
            self.looks = [_look_at(at, 8) if at else object]

    def read(self) -> None:
        if self._random is not None:
            self._state = self._random.get_state()

    def restore(self) -> None:
        if self._random is not None:
            self._random.set_state(self._state)


class TorchRecord:
    """torch's random numbers after each of the last RECORDS steps, in memory that outlives this process: a replacement
    on this node goes on with those of the rank that it replaces."""

    def __init__(self, path: str, state_bytes: int) -> None:
        """Raises OSError when there is no memory."""
        head_bytes = RECORDS * WORD_BYTES
        size_bytes = head_bytes + RECORDS * state_bytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            memory = memoryview(mmap.mmap(fd, size_bytes))
        finally:
            os.close(fd)
        self._steps = memory[:head_bytes].cast("Q")
        """Of each state, plus 1; 0: there is none."""
        self._states = [memory[at : at + state_bytes] for at in range(head_bytes, size_bytes, state_bytes)]
        self._held = [b""] * RECORDS
        """What this process has written there: to compare objects is enough to see that nobody has drawn."""
        self._newest = -1
        self._number, self._complete = 0, True
        """Where the newest one is, and whether its step is complete."""

    @classmethod
    def at(cls, place: str, state_bytes: int) -> TorchRecord | None:
        """None without a folder, or without room in it."""
        if place:
            with contextlib.suppress(OSError):
                return cls(os.path.join(place, f"{os.environ.get('LOCAL_RANK', '0')}.random"), state_bytes)
        return None

    def write(self, step: int, state: bytes, *, complete: bool) -> None:
        """What is written for a step that is not complete the next call replaces."""
        newest = self._newest
        if self._complete and newest != step:
            self._number = (self._number + 1) % RECORDS
        self._complete = complete
        number, steps = self._number, self._steps
        is_there = self._held[number] is state
        if newest == step and is_there:
            return
        if step < newest:  # the job went back: what was done since then is no longer true
            for each in range(RECORDS):
                if steps[each] > step:
                    steps[each] = 0
        if not is_there:
            steps[number] = 0
            self._states[number][:] = state
            self._held[number] = state
        steps[number] = step + 1
        self._newest = step

    def read(self, step: int) -> bytes | None:
        """None: the states after this step were not recorded."""
        for number in range(RECORDS):
            if self._steps[number] == step + 1:
                return bytes(self._states[number])
        return None
