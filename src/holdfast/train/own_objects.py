"""Tracked objects that are neither models nor optimizers, and that holdfast knows nothing about but `state_dict()`.

A schedule of one's own, early stopping, a counter, torchdata's loader, a stream. Their state is taken at the end of
each step and given back when the step after it is given up. It may be equal on all ranks, as that of early stopping,
or each rank's own, as the position in a stream. Nobody says which. So each rank also writes its states to memory that
outlives the process (`_Record`): a replacement on this node goes on with those of the rank that it replaces, whichever
kind they are.

A rank that is one step behind the others has no state of its own for their step. Where its last state was equal to
theirs of that step it takes theirs; otherwise what it had when it was interrupted, in the step that the others
completed.

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
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.protocol.errors import ProcessGroupError
from holdfast.train import state_codec as codec
from holdfast.train.kept import Kept

RECORDS = 3
"""Steps of which the states are kept for a replacement: see random_numbers.RECORDS."""
RECORD_BYTES_MAX = 4 << 20
"""All states of one step together. Larger ones are averages of weights and the like, which are equal on all ranks."""
Digests = dict[str, list[str]]
"""By object: of its state after the newest step, and after the step before; empty: not known."""


def is_data(each: Any) -> bool:
    """Whether the object hands out data."""
    return hasattr(type(each), "__iter__") or hasattr(type(each), "__next__")


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

    def __init__(self, others: Mapping[str, Any], place: str) -> None:
        """`place`: a folder in memory that outlives this process; empty: there is none."""
        self._objects = unknown_objects(others)
        self.any = bool(self._objects)
        self._step = -1
        self._kept: dict[str, Kept] = {}
        self._interrupted: dict[str, Kept] = {}
        """States when the rank was interrupted."""
        self._digests: Digests = {}
        self._record = _Record.at(place) if self.any else None

    @property
    def data(self) -> list[str]:
        """Names of those that hand out data, and cannot follow another world."""
        return [name for name, each in self._objects.items() if is_data(each)]

    def mark(self, step: int) -> None:
        """This step is complete."""
        states = {name: each.state_dict() for name, each in self._objects.items()}
        self._kept = {name: Kept(state) for name, state in states.items()}
        texts = _texts(states)
        follows = step == self._step + 1
        self._digests = {
            name: [digest, self._digests.get(name, [""])[0] if follows else ""]
            for name, digest in ((name, _digest(texts.get(name))) for name in states)
        }
        self._step = step
        if self._record is not None:
            self._record.write(step, texts if len(texts) == len(states) else None)

    def intact(self) -> bool:
        """Whether the kept states are still those of that moment."""
        return all(each.intact() for each in self._kept.values())

    def digests(self) -> Digests:
        return self._digests

    def rewind(self) -> None:
        """Go back to the newest step."""
        self._interrupted = {name: Kept(each.state_dict()) for name, each in self._objects.items()}
        for name, kept in self._kept.items():
            if kept.intact():
                self._objects[name].load_state_dict(kept.state)

    def check_world(self, *, same_places: bool) -> None:
        """Raises ProcessGroupError where data cannot follow into the world of this size."""
        if not same_places and self.data:
            raise ProcessGroupError(
                f"{', '.join(self.data)} cannot follow into a world of another size: its position is that of one rank\n"
                "give it a method regroup(rank, world), or take ht.DataLoader"
            )

    def follow(self, step: int, *, survived: bool, theirs: Digests, survivors: Sequence[Digests]) -> None:
        """This rank has taken the source's states for this step: it gets its own back where it has own ones.

        `theirs`: the source's digests; `survivors`: those of all ranks that have completed this step. Raises
        ProcessGroupError where nobody knows a state."""
        recorded = None if survived or self._record is None else self._record.read(step)
        for name, each in self._objects.items():
            if survived and step == self._step and self._kept[name].intact():
                each.load_state_dict(self._kept[name].state)
            elif survived and step == self._step + 1:
                before = theirs.get(name, ["", ""])[1]
                if is_data(each) or self._digests[name][0] != before:
                    each.load_state_dict(self._interrupted[name].state)
            elif recorded is not None and name in recorded:
                each.load_state_dict(recorded[name])
            elif is_data(each) or len({digests.get(name, [""])[0] for digests in survivors}) > 1:
                raise ProcessGroupError(
                    f"{name} has a state of its own on each rank, and that of the lost rank is lost"
                )


def _digest(text: bytes | None) -> str:
    return "" if text is None else hashlib.sha256(text).hexdigest()[:16]


# --- states as bytes --------------------------------------------------------------------------------------------------


def _texts(states: Mapping[str, Any]) -> dict[str, bytes]:
    """By name; large ones are left out."""
    texts: dict[str, bytes] = {}
    for name, state in states.items():
        encoder = codec.Encoder()
        tree = encoder.encode(state, name)
        if sum(each.nbytes for each in encoder.tensors.values()) <= RECORD_BYTES_MAX:
            tensors = {key: _packed(each) for key, each in encoder.tensors.items()}
            texts[name] = codec.dumps([tree, tensors])
    return texts


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


class _Record:
    """The states after each of the last RECORDS steps, in files in memory."""

    HEAD = struct.Struct("=QQI")
    """The step plus 1, 0: none; bytes that follow; their checksum, since the process may be killed while it writes."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in paths]
        self._newest = -1
        self._number = 0

    @classmethod
    def at(cls, place: str) -> _Record | None:
        """None without a folder, or without room in it."""
        if place:
            rank = os.environ.get("LOCAL_RANK", "0")
            with contextlib.suppress(OSError):
                return cls([os.path.join(place, f"{rank}.objects.{number}") for number in range(RECORDS)])
        return None

    def write(self, step: int, texts: Mapping[str, bytes] | None) -> None:
        """`texts`: None: they are too large."""
        if step <= self._newest:  # the job went back: what was done since then is no longer true
            for file in self._files:
                if self._step_of(file) >= step:
                    os.pwrite(file, bytes(self.HEAD.size), 0)
        self._newest = step
        self._number = (self._number + 1) % RECORDS
        file = self._files[self._number]
        body = b"" if texts is None else codec.dumps({name: msgspec.Raw(text) for name, text in texts.items()})
        head = self.HEAD.pack(0 if texts is None else step + 1, len(body), zlib.crc32(body))
        with contextlib.suppress(OSError):  # no room: a replacement finds none
            os.pwrite(file, head + body, 0)

    def _step_of(self, file: int) -> int:
        head = os.pread(file, self.HEAD.size, 0)
        return int(self.HEAD.unpack(head)[0]) - 1 if len(head) == self.HEAD.size else -1

    def read(self, step: int) -> dict[str, Any] | None:
        """None: the states after this step are not there."""
        for file in self._files:
            head = os.pread(file, self.HEAD.size, 0)
            if len(head) < self.HEAD.size:
                continue
            step_plus_1, size_bytes, checksum = self.HEAD.unpack(head)
            body = os.pread(file, size_bytes, self.HEAD.size)
            if step_plus_1 == step + 1 and zlib.crc32(body) == checksum and len(body) == size_bytes:
                return {name: _state_of(packed) for name, packed in codec.loads(body).items()}
        return None
