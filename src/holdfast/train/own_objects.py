"""Tracked objects that are neither models nor optimizers, and that holdfast knows nothing about but `state_dict()`.

A schedule of one's own, early stopping, a counter, torchdata's loader, a stream. Their state is taken at the end of
each step and given back when the step after it is given up. It may be equal on all ranks, as that of early stopping,
or each rank's own, as the position in a stream; the program does not say which. So each rank also writes its states to
memory that outlives the process (`_StateRecord`). A replacement on this node goes on with the states of the rank that
it replaces, whichever kind they are.

A rank may have no state for the step from which all go on: it was interrupted, or lost, before it came to the end of
that step, and others completed it. Then

- data were handed out before the forward pass: their position when the rank was interrupted, or as it was written down
  after its forward pass, is right
- an object that was equal on all ranks before is taken from a rank that has completed the step
- the state of any other object is lost: all ranks are started again

Objects that can be iterated are data. Where they have no `regroup(rank, world)` they have a position for one rank of a
world of one size, so they cannot go on in another one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import msgspec
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast import own_folders
from holdfast.protocol.errors import ProcessGroupError
from holdfast.train import state_codec as codec
from holdfast.train.kept import KeptState
from holdfast.train.replicas import total

RECORDS = 3
"""Steps of which the states are kept for a replacement: see random_numbers.RECORDS."""
RECORD_BYTES_MAX = 256 << 10
"""Of one state. Larger ones are averages of weights and the like: whether these are equal on all ranks is compared in
the first steps, and one that is not equal is lost with its rank."""
Digests = dict[str, list[str]]
"""By object: of its state after the newest step, and after the step before; empty: not known."""


def is_data(each: Any) -> bool:
    """Whether the object hands out data: it can be iterated, and is no collection, no optimizer and no schedule, nor
    several of these in one object."""
    kind = type(each)
    if issubclass(kind, (Mapping, Sequence, Set)) or hasattr(kind, "step"):
        return False
    return hasattr(kind, "__iter__") or hasattr(kind, "__next__")


def unknown_objects(others: Mapping[str, Any]) -> dict[str, Any]:
    """Those of which only `state_dict()` is known, by name. Wrapped optimizers are none of them: they change in their
    steps alone, as all optimizers do."""
    return {
        name: each
        for name, each in others.items()
        if not isinstance(each, (LRScheduler, GradScaler, Optimizer)) and not callable(getattr(each, "regroup", None))
    }


class OwnObjects:
    """The objects of one rank, and their states after its newest step."""

    def __init__(self, others: Mapping[str, Any], place: str, loaded: Mapping[str, Any] | None = None) -> None:
        """`place`: a folder in memory that outlives this process; empty: there is none. `loaded`: states that the
        objects were given by a resume, by name."""
        self._objects = unknown_objects(others)
        self.any = bool(self._objects)
        self._step = -1
        self._kept: dict[str, KeptState] = {}
        self._interrupted: dict[str, KeptState] = {}
        """States of data when the rank was interrupted."""
        self._digests: Digests = {}
        self._record = _StateRecord.at(place) if self.any else None
        self._large: set[str] = set()
        """Objects whose states are too large to be written down after each step."""
        self._data = [name for name, each in self._objects.items() if is_data(each)]
        self._given = {name: state for name, state in (loaded or {}).items() if name in self._data}
        """States that data were given, and from which nothing was read since."""

    def mark(self, step: int, *, begins: bool = False) -> None:
        """This step is complete. `begins`: the training function was not called since the objects got their states.

        Data are not asked for their position then: torchdata's loader begins to read when it is asked, and in which
        order, the function has not said yet (`sampler.set_epoch`)."""
        states = {}
        for name, each in self._objects.items():
            if not (begins and name in self._data):
                states[name] = each.state_dict()
            elif name in self._given:
                states[name] = self._given[name]
        if not begins:
            self._given.clear()
        self._kept = {name: KeptState(state) for name, state in states.items()}
        texts = self._texts(states)
        before = self._digests if step == self._step + 1 else {}
        self._digests = {
            name: [texts[name].digest if name in texts else "", before.get(name, [""])[0]] for name in states
        }
        self._step = step
        if self._record is not None:
            self._record.write(step, texts, complete=True)

    def forward_done(self, step: int) -> None:
        """A forward pass of this step is done: what it needed of the data was handed out."""
        if self._record is not None and self._data:
            states = {name: self._objects[name].state_dict() for name in self._data}
            self._record.write(step, self._texts(states), complete=False)

    def intact(self) -> bool:
        """Whether the states of that moment are known, and nothing has changed them."""
        return self._kept.keys() == self._objects.keys() and all(each.intact() for each in self._kept.values())

    def digests(self) -> Digests:
        return self._digests

    def whole_digests(self) -> dict[str, str]:
        """Of the objects' states now, large ones, too. Reads all of them."""
        found = {}
        for name in self._objects.keys() - set(self._data):
            encoder = codec.Encoder()
            tree = encoder.encode(self._objects[name].state_dict(), name)
            found[name] = _digest(codec.dumps(tree)) + (total([*encoder.tensors.values()]) if encoder.tensors else "")
        return found

    def close(self) -> None:
        """No step follows."""
        if self._record is not None:
            self._record.close()
            self._record = None

    def _texts(self, states: Mapping[str, Any]) -> dict[str, _Text]:
        """By name; those of large objects are left out."""
        texts: dict[str, _Text] = {}
        for name, state in states.items():
            text = None if name in self._large else _text(name, state)
            if text is None:
                self._large.add(name)  # it stays large: it is not encoded in each step to find that out
            else:
                texts[name] = _Text(_digest(text), text)
        return texts

    def rewind(self) -> None:
        """Go back to the newest step."""
        self._interrupted = {name: KeptState(self._objects[name].state_dict()) for name in self._data}
        for name, kept in self._kept.items():
            if kept.intact():
                self._give_back(name, kept)

    def _give_back(self, name: str, kept: KeptState) -> None:
        self._given[name] = kept.give_back(self._objects[name])

    def check_world(self, *, same_places: bool) -> None:
        """Raises ProcessGroupError where data cannot follow into the world of this size."""
        if not same_places and self._data:
            raise ProcessGroupError(
                f"{', '.join(self._data)} cannot follow into a world of another size, with a position of one rank\n"
                "give it a method regroup(rank, world), or take ht.DataLoader"
            )

    def follow(
        self,
        step: int,
        states: Mapping[str, Any],
        *,
        survived: bool,
        theirs: Digests,
        survivors: Sequence[Digests],
        alike: Collection[str],
    ) -> None:
        """Give each object its state after this step, which is its own, or the source's.

        `states`: the source's; `theirs`: their digests; `survivors`: the digests of all ranks that have completed this
        step; `alike`: objects that were equal on all ranks when these were compared. Raises ProcessGroupError where
        a state is lost."""
        recorded = {} if survived or self._record is None else self._record.read(step)
        before = {} if survived or self._record is None else self._record.read(step - 1)
        for name, each in self._objects.items():
            if survived and step == self._step and name in self._kept and self._kept[name].intact():
                self._give_back(name, self._kept[name])
                continue
            if survived and step == self._step + 1 and name in self._data:
                self._give_back(name, self._interrupted[name])
                continue
            if name in recorded:
                self._give_back(name, KeptState(recorded[name].state))
                continue
            if survived and step == self._step + 1:
                last = self._digests.get(name, [""])[0]
            else:
                last = before[name].digest if name in before else ""
            were_equal = name not in self._data and (last == theirs.get(name, ["", ""])[1] if last else name in alike)
            if not were_equal or len({digests.get(name, [""])[0] for digests in survivors}) > 1:
                raise ProcessGroupError(f"{name} has a state of its own on each rank, and nobody has that of this rank")
            each.load_state_dict(states[name])


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


# --- states as bytes --------------------------------------------------------------------------------------------------


def _text(name: str, state: Any) -> bytes | None:
    """None: it is larger than RECORD_BYTES_MAX."""
    encoder = codec.Encoder()
    tree = encoder.encode(state, name)
    if sum(each.nbytes for each in encoder.tensors.values()) > RECORD_BYTES_MAX:
        return None
    text = codec.dumps([tree, {key: _packed(each) for key, each in encoder.tensors.items()}])
    return text if len(text) <= RECORD_BYTES_MAX else None


def _packed(tensor: torch.Tensor) -> list[Any]:
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return [str(plain.dtype).removeprefix("torch."), list(plain.shape), base64.b64encode(data).decode()]


def _unpacked(packed: Sequence[Any]) -> torch.Tensor:
    kind, shape, text = packed
    dtype = getattr(torch, kind)
    data = base64.b64decode(text)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def _state_of(packed: Sequence[Any]) -> Any:
    tree, tensors = packed
    return codec.decode(tree, lambda key: _unpacked(tensors[key]))


class _Text(NamedTuple):
    """One state, as bytes."""

    digest: str
    text: bytes


class _Recorded(NamedTuple):
    """One state, as it was found."""

    digest: str
    state: Any


class _StateRecord:
    """The states after each of the last RECORDS steps, in files in memory."""

    HEAD = struct.Struct("=QQI")
    """The step plus 1, 0: none; bytes that follow; their checksum, since the process may be killed while it writes."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._files = [own_folders.open_file(path) for path in paths]
        self._newest = -1
        self._number, self._complete = 0, True
        """Where the newest one is, and whether its step is complete."""

    @classmethod
    def at(cls, place: str) -> _StateRecord | None:
        """None without a folder, or without room in it."""
        if place:
            rank = os.environ.get("LOCAL_RANK", "0")
            with contextlib.suppress(OSError):
                return cls([os.path.join(place, f"{rank}.objects.{number}") for number in range(RECORDS)])
        return None

    def close(self) -> None:
        for file in self._files:
            os.close(file)

    def write(self, step: int, texts: Mapping[str, _Text], *, complete: bool) -> None:
        """The next call replaces the states of a step that is not complete."""
        if step < self._newest or (step == self._newest and self._complete):
            # The job went back: what was done since then is no longer true.
            for file in self._files:
                if self._step_of(file) >= step:
                    os.pwrite(file, bytes(self.HEAD.size), 0)
        if self._complete:
            self._number = (self._number + 1) % RECORDS
        self._newest, self._complete = step, complete
        body = codec.dumps({name: [each.digest, msgspec.Raw(each.text)] for name, each in texts.items()})
        head = self.HEAD.pack(step + 1, len(body), zlib.crc32(body))
        with contextlib.suppress(OSError):  # no room: a replacement finds none
            os.pwrite(self._files[self._number], head + body, 0)

    def _step_of(self, file: int) -> int:
        head = os.pread(file, self.HEAD.size, 0)
        return int(self.HEAD.unpack(head)[0]) - 1 if len(head) == self.HEAD.size else -1

    def read(self, step: int) -> dict[str, _Recorded]:
        """By name; empty: the states after this step are not there."""
        for file in self._files:
            if self._step_of(file) != step:
                continue
            _, size_bytes, checksum = self.HEAD.unpack(os.pread(file, self.HEAD.size, 0))
            body = os.pread(file, size_bytes, self.HEAD.size)
            if len(body) == size_bytes and zlib.crc32(body) == checksum:
                return {
                    name: _Recorded(digest, _state_of(packed)) for name, (digest, packed) in codec.loads(body).items()
                }
        return {}
