"""The states of all random generators: they are read after each step, written down for a replacement, and saved.

To read the whole state of a generator takes 2 to 30 µs, and few training loops draw from all of them. A few words of
the state show whether it has changed: the position, and a word that no two states have in common. To read these is one
call of compiled code (`Look`)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import mmap
import os
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import call
from typing import Any, TypeAlias

import torch

from holdfast import own_folders
from holdfast.train import torch_private

WORDS = 624
WORDS_BYTES = 4 * WORDS
"""Size of the words of a Mersenne twister: the generators of torch, Python and numpy are of this kind."""
WORD_BYTES = 8
NO_CUDA = b"\xff" * 16
"""A value of the size of a state of torch's generator on a GPU (seed and offset), which means that there is none."""
States: TypeAlias = tuple[bytes, ...]
"""The states of all generators: torch's on the CPU, Python's and numpy's, torch's on this GPU. Each has a constant
size."""
RECORDS = 3
"""The number of steps whose states are kept. A lost rank may have completed a step that no other rank has completed,
and have done the forward pass of the next one; the others go on from the step before."""


class RandomNumbers:
    """The states of the global generators of torch, Python and numpy, and of torch's on this GPU."""

    def __init__(self) -> None:
        self._may_use_cuda = torch.backends.cuda.is_built()
        self.of_torch = TorchsGenerator()
        self._of_python = PythonsGenerator()
        self._of_numpy = NumpysGenerator()
        self._looks = [*self._of_python.looks, *self._of_numpy.looks]
        self._seen: list[object] = []
        """What the `Look`s of Python and numpy have returned last."""
        self._rest = b""
        """The states of Python's and numpy's generators."""
        self._cuda = NO_CUDA
        self._drawn = False
        """Whether the program has ever drawn from Python's or numpy's generators."""
        self.states: States = ()
        """The states at the last `read`."""
        self.read()

    def read(self) -> None:
        """Read the states."""
        self.states = self.now(look=True)

    def now(self, *, look: bool = False) -> States:
        """The states now. Each part is the same object as long as nothing is drawn from its generators. Without `look`,
        those of Python and numpy are read only if the program has drawn from them before."""
        if (look or self._drawn) and (seen := [*map(call, self._looks)]) != self._seen:
            self._changed(seen)
        if self._may_use_cuda:
            self._read_cuda()
        return (self.of_torch.state(), self._rest, self._cuda)

    def by_generator(self) -> dict[str, str]:
        """A digest of the state of each generator at the last `read`, with the names that snapshots use."""
        of_torch, rest, cuda = self.states
        parts = {
            "torch": of_torch,
            "python": rest[: PythonsGenerator.STATE.size],
            "numpy": rest[PythonsGenerator.STATE.size :],
            "cuda": cuda,
        }
        return {name: hashlib.sha256(part).hexdigest()[:16] for name, part in parts.items()}

    def _changed(self, seen: list[object]) -> None:
        self._drawn |= bool(self._seen)
        self._seen = seen
        self._rest = self._of_python.state() + self._of_numpy.state()

    def _read_cuda(self) -> None:
        # While a graph is captured torch refuses to give the state, and a capture draws nothing.
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            self._cuda = torch.cuda.get_rng_state().numpy().tobytes()

    def restore(self, states: States | None = None) -> None:
        """Set the states of the last `read`, or these."""
        of_torch, rest, cuda = self.states if states is None else states
        self.of_torch.restore(of_torch)
        self._of_python.restore(rest[: PythonsGenerator.STATE.size])
        self._of_numpy.restore(rest[PythonsGenerator.STATE.size :])
        if cuda != NO_CUDA and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(cuda), dtype=torch.uint8))


Look = Callable[[], object]
"""Returns a value that changes whenever something is drawn from a generator."""


def _look_at(address: int, size_bytes: int) -> Callable[[], bytes]:
    """A function that returns the bytes at this address."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B").tobytes


class TorchsGenerator:
    """torch's global generator of the CPU. If torch has its state in memory in the known order, that memory is copied:
    torch's own copy takes several times as long."""

    MEMORY = struct.Struct(f"=Qi?3xI{WORDS_BYTES}s4xf?3xd?7x")
    """The order in memory: seed, count of the numbers that are left, whether it was seeded, index of the next one; the
    numbers; then the second one of two that were drawn from a normal distribution, and whether there is one: in single
    and in double precision."""
    STATE = struct.Struct(f"=QiiQ{2 * WORDS_BYTES}s8xd8xi4xf?3x")
    """The order in `get_state`: eight bytes for each of the numbers, and double precision first."""
    WORDS_AT = 20
    """Offset of the numbers in memory."""
    FIRST_BYTES = WORDS_AT + 3 * 4
    """The bytes at the beginning that show whether something was drawn."""
    LAST_AT = WORDS_AT + WORDS_BYTES
    """Offset of what follows the numbers."""
    SEARCHED = 256
    """The bytes of the object in which the state is searched for."""

    def __init__(self) -> None:
        self._memory: Callable[[], bytes] | None = None
        self._first: Look = object
        self._last: Look = object
        self._seen: object = None
        self._state = b""

        # Whether the order in memory is the known one is tried on a generator of our own.
        model = torch.Generator()
        fields = list(self.STATE.unpack(_state(model)))
        fields[5:] = 0.5, 1, 0.25, True
        _set_state(model, self.STATE.pack(*fields))
        at = self._begin(model)
        if at is not None and self._translated(ctypes.string_at(at, self.MEMORY.size)) == _state(model):
            begin = (
                torch_private.generator_address(torch.default_generator) + at - torch_private.generator_address(model)
            )
            self._memory = _look_at(begin, self.MEMORY.size)
            self._first = _look_at(begin, self.FIRST_BYTES)
            self._last = _look_at(begin + self.LAST_AT, self.MEMORY.size - self.LAST_AT)

    def _begin(self, generator: torch.Generator) -> int | None:
        """The address of its state; None: it was not found."""
        at = torch_private.generator_address(generator)
        first = struct.pack("=4I", *struct.unpack_from("=4Q", _state(generator), 24))
        found = ctypes.string_at(at, self.SEARCHED).find(first) if at else -1
        return at + found - self.WORDS_AT if found >= self.WORDS_AT else None

    def state(self) -> bytes:
        """The state, for `restore` and `official`. It is the same object as long as nothing is drawn."""
        seen = self._first(), self._last()
        if seen != self._seen:
            self._seen = seen
            self._state = _state(torch.default_generator) if self._memory is None else self._memory()
        return self._state

    def restore(self, state: bytes) -> None:
        _set_state(torch.default_generator, self.official(state))

    def official(self, state: bytes) -> bytes:
        """The same state in the order of `get_state`."""
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

    GAUSS = struct.Struct("=?d")
    """Whether there is the second one of two numbers that were drawn from a normal distribution; that number."""
    MEMORY = struct.Struct(f"={1 + WORDS}I")
    """The order in memory: the position, the words."""
    STATE = struct.Struct(f"=?d{1 + WORDS}I")

    def __init__(self) -> None:
        words = random.getstate()[1]
        self._generator: Any = random._inst
        # CPython's layout: the object's head, the position, the words. The first word is the same whatever the seed.
        begin = id(self._generator) + object.__basicsize__
        look = _look_at(begin, 12)
        known = look() == struct.pack("=3I", words[WORDS], *words[:2])
        self._memory = _look_at(begin, self.MEMORY.size) if known else None
        gauss = functools.partial(getattr, self._generator, "gauss_next")
        self.looks: list[Look] = [look, gauss] if known else [object]

    def state(self) -> bytes:
        gauss = self._generator.gauss_next
        head = self.GAUSS.pack(gauss is not None, gauss or 0.0)
        if self._memory is not None:
            return head + self._memory()
        words = random.getstate()[1]
        return head + self.MEMORY.pack(words[WORDS], *words[:WORDS])

    def restore(self, state: bytes) -> None:
        has_gauss, gauss, position, *words = self.STATE.unpack(state)
        random.setstate((self._generator.VERSION, (*words, position), gauss if has_gauss else None))


class NumpysGenerator:
    """numpy's global generator, if numpy is loaded and the program has not replaced it by one of another kind."""

    STATE = struct.Struct(f"=??di{WORDS_BYTES}s")
    """Whether there is one; then the same fields as in PythonsGenerator, with the words after the position."""
    KIND = "MT19937"

    def __init__(self) -> None:
        self._random: Any = None
        self.looks: list[Look] = []
        if "numpy" in sys.modules:
            self._random = sys.modules["numpy"].random
            generator = self._random.mtrand._rand._bit_generator
            # In memory the position comes after the last word: these eight bytes show whether something was drawn.
            at = generator.ctypes.state_address + WORDS_BYTES - 4 if type(generator).__name__ == self.KIND else 0
            gauss = self._gauss_begin()
            known = at and gauss is not None
            self.looks = [_look_at(at, 8), _look_at(gauss, 16)] if known and gauss is not None else [object]

    def _gauss_begin(self) -> int | None:
        """The address at which the global generator has the flag whether there is the second one of two normal numbers,
        and then that number; None: it was not found. It is searched for in a generator of our own."""
        model = self._random.RandomState(0)
        kind, words, position, *_ = model.get_state()
        model.set_state((kind, words, position, 1, 0.123456789))
        found = ctypes.string_at(id(model), type(model).__basicsize__).find(struct.pack("=d", 0.123456789))
        begin = found - 8
        if begin < 0 or ctypes.c_int.from_address(id(model) + begin).value != 1:
            return None
        return id(self._random.mtrand._rand) + begin

    def state(self) -> bytes:
        if self._random is not None:
            now = self._random.get_state(legacy=False)
            if now["bit_generator"] == self.KIND:
                words, position = now["state"]["key"].tobytes(), now["state"]["pos"]
                return self.STATE.pack(True, bool(now["has_gauss"]), now["gauss"], position, words)
        return bytes(self.STATE.size)

    def restore(self, state: bytes) -> None:
        there, has_gauss, gauss, position, words = self.STATE.unpack(state)
        if there and self._random is not None:
            words = sys.modules["numpy"].frombuffer(words, dtype="uint32")
            self._random.set_state((self.KIND, words, position, int(has_gauss), gauss))


class RandomRecord:
    """The random numbers after each of the last RECORDS steps, in memory that outlives this process: a replacement on
    this node goes on with those of the rank that it replaces."""

    def __init__(self, path: str, states: States) -> None:
        """`states`: of the same sizes as those that are written later. Raises OSError when there is no memory."""
        head_bytes = RECORDS * WORD_BYTES
        state_bytes = sum(map(len, states))
        size_bytes = head_bytes + RECORDS * state_bytes
        fd = own_folders.open_file(path)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            memory = memoryview(mmap.mmap(fd, size_bytes))
        finally:
            os.close(fd)
        self._steps = memory[:head_bytes].cast("Q")
        """The step of each state, plus 1; 0: there is none."""
        ends = [*itertools.accumulate(map(len, states), initial=0)]
        self._states = [
            [memory[at + begin : at + end] for begin, end in itertools.pairwise(ends)]
            for at in range(head_bytes, size_bytes, state_bytes)
        ]
        self._held: list[States] = [(b"", b"", b"")] * RECORDS
        """The states that this process has written: the same objects show that nothing was drawn."""
        self._newest = -1
        """The newest step that was written."""
        self._number, self._complete = 0, True
        """The index of that step's states, and whether the step is complete."""

    @classmethod
    def at(cls, place: str, states: States) -> RandomRecord | None:
        """The record in this folder; None: there is no folder, or no room in it."""
        if place:
            with contextlib.suppress(OSError):
                return cls(cls.path(place), states)
        return None

    @staticmethod
    def path(place: str) -> str:
        """The file of this local rank in this folder."""
        return os.path.join(place, f"{os.environ.get('LOCAL_RANK', '0')}.random")

    def write(self, step: int, states: States, *, complete: bool) -> None:
        """Write the states of this step down. If it is not complete, the next call replaces them."""
        newest = self._newest
        if self._complete and newest != step:
            self._number = (self._number + 1) % RECORDS
        self._complete = complete
        number, steps = self._number, self._steps
        held = self._held[number]
        # Without a loop and without a function: after a step's work the processor's caches have none of this, and a
        # call costs more than the comparisons.
        is_there = held[0] is states[0] and held[1] is states[1] and held[2] is states[2]
        if newest == step and is_there:
            return
        if step < newest:  # the job went back: the steps that it had done since are given up
            for each in range(RECORDS):
                if steps[each] > step:
                    steps[each] = 0
        if not is_there:
            steps[number] = 0  # the process may be killed while it writes
            of_torch, rest, cuda = self._states[number]
            if held[0] is not states[0]:
                of_torch[:] = states[0]
            if held[1] is not states[1]:
                rest[:] = states[1]
            if held[2] is not states[2]:
                cuda[:] = states[2]
            self._held[number] = states
        steps[number] = step + 1
        self._newest = step

    def go_back(self, step: int) -> None:
        """The job goes on from this step in another world: those after it are given up. What is recorded of this one
        stays: the numbers that this rank had after it in the world in which it was done."""
        for number in range(RECORDS):
            if self._steps[number] > step + 1:
                self._steps[number] = 0
            elif self._steps[number] == step + 1:
                self._number = number
        self._newest, self._complete = step, True

    def read(self, step: int) -> States | None:
        """The states after this step; None: they were not recorded."""
        for number in range(RECORDS):
            if self._steps[number] == step + 1:
                return tuple(map(bytes, self._states[number]))
        return None


# --- in snapshots -----------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The states of the random generators that are in use: Python, numpy if imported, torch on CPU and this GPU."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, struct.pack(f"<{len(words)}I", *words), gauss],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if "numpy" in sys.modules:
        now = sys.modules["numpy"].random.get_state(legacy=False)
        state["numpy"] = now
        if now["bit_generator"] == NumpysGenerator.KIND:
            words, position = now["state"]["key"].tobytes(), now["state"]["pos"]
            state["numpy"] = [NumpysGenerator.KIND, words, position, now["has_gauss"], now["gauss"]]
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Set the random generators back after the block, as if nothing had been drawn in it."""
    state = random_state()
    yield
    set_random_state(state)


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the random generators to the states that `random_state` returned."""
    version, packed, gauss = state["python"]
    random.setstate((version, struct.unpack(f"<{len(packed) // 4}I", packed), gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if "numpy" in state:
        import numpy as np

        numbers = state["numpy"]
        if not isinstance(numbers, Mapping):
            name, keys, *rest = numbers
            inner = {"key": np.frombuffer(keys, dtype=np.uint32), "pos": rest[0]}
            numbers = {"bit_generator": name, "state": inner, "has_gauss": rest[1], "gauss": rest[2]}
        kind = numbers["bit_generator"]
        if np.random.get_state(legacy=False)["bit_generator"] != kind:
            np.random.set_bit_generator(getattr(np.random, kind)())  # type: ignore[attr-defined]
        np.random.set_state(numbers)
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))


def equal_parts(states: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Names of the generators that are in the same state in all of these, which are of several ranks, with a digest of
    it: the program draws the same numbers from them on each of these ranks. Empty for one rank alone."""
    if len(states) < 2:
        return {}
    first, *others = states
    return {
        name: hashlib.sha256(repr(state).encode()).hexdigest()[:16]
        for name, state in first.items()
        if all(each.get(name) == state for each in others)
    }


def parts_equal_in_groups(states: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the generators whose states are equal within groups of ranks, all of one size, and differ between these:
    the program has seeded the groups. The states may be those of some ranks only."""
    found = set()
    for name in states[0]:
        sizes = set(Counter(repr(each.get(name)) for each in states).values())
        if len(sizes) == 1 and 1 < min(sizes) < len(states):
            found.add(name)
    return frozenset(found)


def seed_random(common: bytes, rank: int, world: int, equal: Collection[str] = ()) -> None:
    """Seed the random generators in another world, from bytes that all ranks have: each rank gets a seed of its own,
    and the same one for the generators that are `equal` on all ranks."""

    def seed(name: str) -> bytes:
        own = "" if name in equal else f"/{rank}"
        return hashlib.sha256(common + f"{own}/{world}".encode()).digest()

    random.seed(seed("python"))
    # One call seeds the generators of the CPU and of the GPUs.
    torch.manual_seed(int.from_bytes(seed("torch")[:7], "little"))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(int.from_bytes(seed("cuda")[:7], "little"))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(list(seed("numpy")))
