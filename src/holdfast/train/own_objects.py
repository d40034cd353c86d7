"""Tracked objects that are neither models nor optimizers, and of which holdfast knows nothing but `state_dict()`.

Examples are a schedule of the program's own, early stopping, a counter, torchdata's loader, a stream. Their state is
taken at the end of each step, and given back when the step after it is given up. It may be equal on all ranks, like
that of early stopping, or each rank's own, like the position in a stream; the program does not say which. So each rank
also writes its states to memory that outlives the process (`_StateRecord`). A replacement on this node goes on with the
states of the rank that it replaces, of either kind.

A rank may have no state for the step from which all go on: it was interrupted, or lost, before it came to the end of
that step, and others completed it. Then

- data were handed out before the forward pass: their position when the rank was interrupted, or the one that was
  written down after its forward pass, is right
- an object that was equal on all ranks before is taken from a rank that has completed the step
- the state of any other object is lost: all ranks are started again

Objects that can be iterated are data. Without a method `regroup(rank, world)` their position is that of one rank in a
world of one size, so they cannot go on in another one.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import msgspec
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast import own_folders
from holdfast.protocol.errors import ProcessGroupError, TrackingError
from holdfast.train import state_codec as codec
from holdfast.train.kept import KeptState
from holdfast.train.replicas import total

RECORDS = 3
"""The number of steps whose states are kept for a replacement: see random_numbers.RECORDS."""
RECORD_BYTES_MAX = 256 << 10
"""Limit of the size of a state that is written down. Larger ones are averages of weights and the like: whether these
are equal on all ranks is compared in the first steps, and one that is not equal is lost with its rank."""
Digests = dict[str, list[str]]
"""Two digests for each object: of its state after the newest step, and after the step before; empty: not known."""


def is_data(each: Any) -> bool:
    """Whether the object hands out data: it can be iterated, and is no collection, no optimizer and no schedule, nor
    several of these in one object."""
    kind = type(each)
    if issubclass(kind, (Mapping, Sequence, Set)) or hasattr(kind, "step"):
        return False
    return hasattr(kind, "__iter__") or hasattr(kind, "__next__")


def unknown_objects(others: Mapping[str, Any]) -> dict[str, Any]:
    """The objects of which only `state_dict()` is known, by name. Wrapped optimizers do not belong to them: like all
    optimizers they change only in their steps."""
    return {
        name: each
        for name, each in others.items()
        if not isinstance(each, (LRScheduler, GradScaler, Optimizer)) and not callable(getattr(each, "regroup", None))
    }


def unknown_data(others: Mapping[str, Any]) -> dict[str, Any]:
    """Those of them that hand out data."""
    return {name: each for name, each in unknown_objects(others).items() if is_data(each)}


class FirstStates:
    """The states of tracked objects before anything was trained, for those that a second start at step 0 finds again.

    An object that is made again is not held: a schedule or a wrapped optimizer would keep the model before it alive."""

    def __init__(self, others: Mapping[str, Any]) -> None:
        # Data of other libraries are not asked, as in `OwnObjects.mark`: torchdata's loader begins to read then.
        data = unknown_data(others)
        self._data = {name: _reference(each) for name, each in data.items()}
        self._kept = {
            name: (_reference(each), copy.deepcopy(each.state_dict()))
            for name, each in others.items()
            if name not in data
        }

    def give_back(self, others: Mapping[str, Any]) -> None:
        """Give those objects that are still there the states that they had. Raises TrackingError for data of other
        libraries: they go on where they are, and would leave out what the steps that are given up have read."""
        for name, reference in self._data.items():
            if (present := others.get(name)) is not None and present is reference():
                raise TrackingError(
                    f"no state is complete, and {name} ({type(present).__name__}) was made before the training "
                    "function: it cannot begin again in this process"
                )
        for name, (reference, state) in self._kept.items():
            present = others.get(name)
            if present is not None and present is reference():
                present.load_state_dict(copy.deepcopy(state))


def _reference(each: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(each)
    except TypeError:  # its class has slots: no schedule or optimizer of torch
        return lambda: each


class OwnObjects:
    """The objects of one rank, and their states after its newest step."""

    def __init__(self, others: Mapping[str, Any], place: str, loaded: Mapping[str, Any] | None = None) -> None:
        """`place`: a folder in memory that outlives this process; empty: there is none. `loaded`: states that the
        objects were given by a resume, by name."""
        self._objects = unknown_objects(others)
        self.any = bool(self._objects)
        """Whether there are any."""
        self._step = -1
        """The newest step; -1: none was completed."""
        self._kept: dict[str, KeptState] = {}
        """States after that step, by name."""
        self._interrupted: dict[str, KeptState] = {}
        """States of data when the rank was interrupted, by name."""
        self._digests: Digests = {}
        self._record = _StateRecord.at(place) if self.any else None
        self._large: set[str] = set()
        """Objects whose states are too large to be written down after each step."""
        self._data = list(unknown_data(others))
        self._given = {name: state for name, state in (loaded or {}).items() if name in self._data}
        """States that data were given, if nothing was read since, by name."""

    def mark(self, step: int, *, begins: bool = False) -> None:
        """Keep the states after this step. `begins`: the training function was not called since the objects got them.

        In that case data are not asked for their position: torchdata's loader begins to read when it is asked, and the
        function has not set the order yet (`sampler.set_epoch`)."""
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
        """Write the positions of data down for a replacement: a forward pass of this step is done, so its data were
        handed out."""
        if self._record is not None and self._data:
            states = {name: self._objects[name].state_dict() for name in self._data}
            self._record.write(step, self._texts(states), complete=False)

    def intact(self) -> bool:
        """Whether the states after the newest step are known, and nothing has changed them."""
        return self._kept.keys() == self._objects.keys() and all(each.intact() for each in self._kept.values())

    def digests(self) -> Digests:
        """The digests of the states after the newest two steps."""
        return self._digests

    def whole_digests(self) -> dict[str, str]:
        """The digests of the objects' states now, by name, except those of data. It reads large ones, too."""
        found = {}
        for name in self._objects.keys() - set(self._data):
            encoder = codec.Encoder()
            tree = encoder.encode(self._objects[name].state_dict(), name)
            found[name] = _digest(codec.dumps(tree)) + (total([*encoder.tensors.values()]) if encoder.tensors else "")
        return found

    def close(self) -> None:
        """Close the record's files: no step follows."""
        if self._record is not None:
            self._record.close()
            self._record = None

    def _texts(self, states: Mapping[str, Any]) -> dict[str, _Text]:
        """These states as bytes, by name; those of large objects are left out."""
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
        self._given[name] = kept.give_back(self._objects[name].load_state_dict)

    def check_world(self, *, same_ranks: bool) -> None:
        """Raise ProcessGroupError if data cannot follow into the new world. `same_ranks`: it has the size of the old
        one, and all survivors have their ranks."""
        if not same_ranks and self._data:
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
        equal_objects: Collection[str],
    ) -> None:
        """Give each object its state after this step: its own if that is known, otherwise the source's.

        `states`: those of the source. `theirs`: their digests. `survivors`: the digests of all ranks that have
        completed this step. `equal_objects`: objects that were equal on all ranks when these were compared. Raises
        ProcessGroupError if a state is lost."""
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

            # Only the source's state is left. It is right if the object was equal on all ranks after the step before,
            # and is equal on all that have completed this one.
            if survived and step == self._step + 1:
                last = self._digests.get(name, [""])[0]
            else:
                last = before[name].digest if name in before else ""
            were_equal = name not in self._data and (
                last == theirs.get(name, ["", ""])[1] if last else name in equal_objects
            )
            if not were_equal or len({digests.get(name, [""])[0] for digests in survivors}) > 1:
                raise ProcessGroupError(f"{name} has a state of its own on each rank, and nobody has that of this rank")
            each.load_state_dict(states[name])


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


# --- states as bytes --------------------------------------------------------------------------------------------------


def _text(name: str, state: Any) -> bytes | None:
    """The state as bytes; None: it is larger than RECORD_BYTES_MAX."""
    encoder = codec.Encoder()
    tree = encoder.encode(state, name)
    if sum(each.nbytes for each in encoder.tensors.values()) > RECORD_BYTES_MAX:
        return None
    text = codec.dumps([tree, {key: _packed(each) for key, each in encoder.tensors.items()}])
    return text if len(text) <= RECORD_BYTES_MAX else None


def _packed(tensor: torch.Tensor) -> list[Any]:
    """The tensor as JSON: type, shape, and its bytes in base64."""
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
    """The state in the bytes that `_text` made, after they were parsed."""
    tree, tensors = packed
    return codec.decode(tree, lambda key: _unpacked(tensors[key]))


class _Text(NamedTuple):
    """One state, as bytes."""

    digest: str
    text: bytes


class _Recorded(NamedTuple):
    """One state that was read from a record."""

    digest: str
    state: Any


class _StateRecord:
    """The states after each of the last RECORDS steps, in files in memory."""

    HEAD = struct.Struct("=QQI")
    """A file's first bytes: the step plus 1 (0: none), the number of bytes that follow, and their checksum, since the
    process may be killed while it writes."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._files = [own_folders.open_file(path) for path in paths]
        self._newest = -1
        """The newest step that was written."""
        self._number, self._complete = 0, True
        """The index of the file with that step, and whether the step is complete."""

    @classmethod
    def at(cls, place: str) -> _StateRecord | None:
        """The record in this folder; None: there is no folder, or no room in it."""
        if place:
            rank = os.environ.get("LOCAL_RANK", "0")
            with contextlib.suppress(OSError):
                return cls([os.path.join(place, f"{rank}.objects.{number}") for number in range(RECORDS)])
        return None

    def close(self) -> None:
        for file in self._files:
            os.close(file)

    def write(self, step: int, texts: Mapping[str, _Text], *, complete: bool) -> None:
        """Write the states of this step down. If it is not complete, the next call replaces them."""
        if step < self._newest or (step == self._newest and self._complete):
            # The job went back: the steps that it had done since are given up.
            for file in self._files:
                if self._step_of(file) >= step:
                    os.pwrite(file, bytes(self.HEAD.size), 0)
        if self._complete:
            self._number = (self._number + 1) % RECORDS
        self._newest, self._complete = step, complete
        body = codec.dumps({name: [each.digest, msgspec.Raw(each.text)] for name, each in texts.items()})
        head = self.HEAD.pack(step + 1, len(body), zlib.crc32(body))
        with contextlib.suppress(OSError):  # no room is left: a replacement finds no states
            os.pwrite(self._files[self._number], head + body, 0)

    def _step_of(self, file: int) -> int:
        """The step whose states are in this file; -1: none."""
        head = os.pread(file, self.HEAD.size, 0)
        return int(self.HEAD.unpack(head)[0]) - 1 if len(head) == self.HEAD.size else -1

    def read(self, step: int) -> dict[str, _Recorded]:
        """The states after this step, by name; empty: they are not in the record."""
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
