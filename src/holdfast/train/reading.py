"""Rebuilds a saved state from the ranks' images with torch's planner, for any world and any sharding.

An image lies in a memory slot or in a file of a committed snapshot; both are read alike.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor

from holdfast.protocol.errors import ShardingError, SnapshotDamagedError, StateMismatchError
from holdfast.train import state_codec as codec
from holdfast.train.copying import PrivateMapping, can_copy_pages, copy_all
from holdfast.train.sharding import DTYPES, TEXT, TIED, Piece, local_pieces, local_tensor
from holdfast.train.snapshots.folder import RankFile, Snapshot
from holdfast.train.snapshots.layout import ALIGNMENT_BYTES, LENGTH_BYTES, PIECES, Image, head_bytes
from holdfast.train.snapshots.not_finite import FORMATS, has_not_finite
from holdfast.train.snapshots.slots import HEADER_BYTES


class Part(Protocol):
    """One rank's image: in memory, or a `RankFile`, which checks every byte against its digest."""

    @property
    def image(self) -> Image: ...

    def load(self, names: Sequence[str]) -> memoryview:
        """Memory that contains at least these entries, at `image.spans`. Raises SnapshotDamagedError."""
        ...


class MemoryPart:
    """An image in memory."""

    def __init__(self, data: memoryview, image: Image, path: Path | None = None, offset: int = 0) -> None:
        """`path`: the file from which these bytes are mapped, starting at `offset`; empty if they are not from a
        file."""
        self.image = image
        self.path = path
        self.offset = offset
        self._data = data

    def load(self, names: Sequence[str]) -> memoryview:  # noqa: ARG002 - all are there
        return self._data


def parts_of_slot(data: memoryview, path: Path | None = None) -> list[MemoryPart]:
    """The one or two images of a memory slot. Raises SnapshotDamagedError."""
    parts: list[MemoryPart] = []
    begin = 0
    while begin < len(data):
        rest = data[begin:]
        # The second image is found where the first one ends; only the last one's end is the slot's.
        head = head_bytes(rest[:LENGTH_BYTES], len(rest))
        size_bytes = head + _body_bytes(rest[LENGTH_BYTES:head])
        parts.append(MemoryPart(rest[:size_bytes], Image.read(rest, size_bytes), path, HEADER_BYTES + begin))
        begin += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return parts


def _body_bytes(header: memoryview) -> int:
    try:
        described = json.loads(bytes(header))
        return max((each["data_offsets"][1] for name, each in described.items() if name != "__metadata__"), default=0)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SnapshotDamagedError(f"the slot's header is not readable: {error}") from None


_Found = tuple[Part, str, Piece]
"""A saved piece: the image that contains it, and the name of its entry there."""


@dataclass(frozen=True)
class ReadPlan:
    """Tensors, and the plan to fill them."""

    saved: Saved
    matching: Sequence[tuple[torch.Tensor, _Found]]
    """Tensors that this process held in the same form when they were saved."""
    planner: LoadPlanner
    plan: LoadPlan
    """The plan for all other tensors."""

    def load(self) -> None:
        """Fill the tensors. Raises SnapshotDamagedError."""
        self.saved.copy_whole(self.matching)
        self.saved.fill(self.plan, self.planner)


class Saved:
    """A saved state, read from the available images of all ranks."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._mapped: dict[Path, PrivateMapping] = {}

    @cached_property
    def pieces(self) -> dict[str, dict[tuple[int, ...], _Found]]:
        """All pieces, by key and then by offsets. Copies are left out; a tied tensor is listed under all its names."""
        found: dict[str, dict[tuple[int, ...], _Found]] = {}
        for part in self._parts:
            described = _described(part.image)
            for entry in part.image.entries:
                if entry.name != TEXT:
                    piece = Piece.of_entry(entry, described.get(entry.name))
                    found.setdefault(piece.key, {}).setdefault(piece.offsets, (part, entry.name, piece))
        for text in self.texts:
            for name, key in codec.section(text, TIED).items():
                if name not in found and key in found:
                    found[name] = found[key]
        return found

    @cached_property
    def texts(self) -> list[dict[str, Any]]:
        """The state of each rank that is not in tensors, in the order of the parts."""
        texts = []
        for part in self._parts:
            span = part.image.spans.get(TEXT)
            if span is not None:
                texts.append(codec.expect(codec.loads(part.load([TEXT])[span]), dict, "text"))
        return texts

    def whole_shape(self, key: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of a saved tensor; None if there is none of this name."""
        pieces = self.pieces.get(key)
        if not pieces:
            return None
        piece = next(iter(pieces.values()))[2]
        return piece.whole, piece.dtype

    def prepare(self, targets: Mapping[str, torch.Tensor]) -> ReadPlan:
        """The plan to fill these tensors, or this rank's shards of them. Raises ShardingError if a part is not
        available; StateMismatchError."""
        matching: list[tuple[torch.Tensor, _Found]] = []
        others: dict[str, torch.Tensor] = {}
        for key, tensor in targets.items():
            self._check_shape(key, tensor)
            found = self.match(key, tensor)
            if found is None:
                others[key] = tensor
            else:
                matching.append((local_tensor(tensor), found))
        planner, plan = self._plan(others)
        return ReadPlan(self, matching, planner, plan)

    def match(self, key: str, tensor: torch.Tensor) -> _Found | None:
        """The saved piece with exactly the part of this tensor that this process has; None: there is none."""
        sizes = tuple(tensor.shape)
        offsets = (0,) * len(sizes)
        if isinstance(tensor, DTensor):
            held = local_pieces({key: tensor})
            if len(held) != 1:
                return None
            offsets, sizes = held[0].offsets, held[0].sizes
        found = self.pieces.get(key, {}).get(offsets)
        return found if found is not None and found[2].sizes == sizes else None

    def has_part(self, key: str, tensor: torch.Tensor) -> bool:
        """Whether the part of this tensor that this process has is surely available: as one piece, or since the whole
        tensor is."""
        pieces = [piece for _, _, piece in self.pieces.get(key, {}).values()]
        held = sum(math.prod(each.sizes) for each in pieces)
        return self.match(key, tensor) is not None or (bool(pieces) and held == math.prod(pieces[0].whole))

    def adopt(self, found: _Found) -> torch.Tensor | None:
        """A piece in a memory slot as a tensor in the same pages, which are copied when they are written to; None: that
        is not possible.

        All `copies_to_make` have to be made before any process writes to that slot.
        """
        part, name, piece = found
        if not isinstance(part, MemoryPart) or part.path is None or math.prod(piece.sizes) == 0 or not can_copy_pages():
            return None
        if part.path not in self._mapped:
            self._mapped[part.path] = PrivateMapping(part.path)
        span = part.image.spans[name]
        if (part.offset + span.start) % piece.dtype.itemsize:
            return None
        mapping = self._mapped[part.path]
        view = mapping.take(slice(part.offset + span.start, part.offset + span.stop))
        return torch.frombuffer(view, dtype=piece.dtype).view(piece.sizes)

    def copies_to_make(self) -> list[Callable[[], None]]:
        """Functions that copy the adopted pages, piece by piece, in any order, while they are in use. They raise
        SnapshotMemoryError."""
        return [partial(mapping.copy_pages, *piece) for mapping in self._mapped.values() for piece in mapping.pieces()]

    def copy_whole(self, matching: Sequence[tuple[torch.Tensor, _Found]]) -> None:
        """Copy pieces as they are. Raises SnapshotDamagedError."""
        for number, items in self._by_part((tensor, *found) for tensor, found in matching).items():
            part = self._parts[number]
            data = part.load([name for _, name, _ in items])
            copy_all(
                [tensor for tensor, _, _ in items],
                [piece_view(data, part.image.spans[name], piece) for _, name, piece in items],
            )

    def first_not_finite(self, keys: Collection[str]) -> str:
        """The first of these tensors with a value that is not finite; empty: there is none. It looks at all pieces that
        are available. Raises SnapshotDamagedError."""
        for part in self._parts:
            described = _described(part.image)
            pieces = {each.name: Piece.of_entry(each, described.get(each.name)) for each in part.image.entries}
            forms = {
                name: form
                for name, piece in pieces.items()
                if piece.key in keys and (form := FORMATS.get(str(piece.dtype).removeprefix("torch."))) is not None
            }
            data = part.load(list(forms))
            for name, form in forms.items():
                if has_not_finite(data[part.image.spans[name]], form):
                    return pieces[name].key
        return ""

    def _by_part(self, items: Iterable[tuple[Any, Part, str, Piece]]) -> dict[int, list[tuple[Any, str, Piece]]]:
        numbers = {id(part): number for number, part in enumerate(self._parts)}
        by_part: dict[int, list[tuple[Any, str, Piece]]] = {}
        for what, part, name, piece in items:
            by_part.setdefault(numbers[id(part)], []).append((what, name, piece))
        return by_part

    def _check_shape(self, key: str, tensor: torch.Tensor) -> None:
        found = self.whole_shape(key)
        if found is None:
            raise StateMismatchError(f"{key} is tracked now and was not when the snapshot was made")
        if found[0] != tuple(tensor.shape):
            raise StateMismatchError(f"{key} has the shape {list(tensor.shape)}, and {list(found[0])} in the snapshot")

    def fresh(self, key: str) -> torch.Tensor:
        """A saved tensor as a new, whole tensor in main memory."""
        found = self.whole_shape(key)
        if found is None:
            raise SnapshotDamagedError(f"the saved state refers to {key!r}, which is not there")
        tensor = torch.empty(found[0], dtype=found[1])
        self.prepare({key: tensor}).load()
        return tensor

    def _plan(self, targets: Mapping[str, torch.Tensor]) -> tuple[LoadPlanner, LoadPlan]:
        """torch's plan to fill these tensors from several pieces each. Raises ShardingError."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self.metadata(targets), is_coordinator=False)
        plan = planner.create_local_plan()
        needed = sum(math.prod(item.lengths) for item in plan.items)
        held = sum(local_tensor(tensor).numel() for tensor in targets.values())
        if needed < held:
            raise ShardingError("parts of the saved tensors are not available")
        return planner, plan

    def metadata(self, keys: Iterable[str]) -> Metadata:
        """torch's Metadata of the saved tensors of these keys."""
        return Metadata({key: _storage_metadata(self.pieces[key]) for key in keys if key in self.pieces})

    def fill(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Copy the pieces of the plan into the planner's tensors. Raises SnapshotDamagedError."""
        by_part = self._by_part(
            (item, *self.pieces[item.storage_index.fqn][tuple(item.storage_index.offset or ())]) for item in plan.items
        )
        for number, items in by_part.items():
            part = self._parts[number]
            data = part.load([name for _, name, _ in items])
            targets, sources = [], []
            for item, name, piece in items:
                source = piece_view(data, part.image.spans[name], piece)
                targets.append(planner.resolve_tensor(item).detach())
                sources.append(_narrow(source, item.storage_offsets, item.lengths))
            copy_all(targets, sources)


@contextlib.contextmanager
def opened(snapshot: Snapshot) -> Iterator[Saved]:
    """The saved state of a snapshot, with all ranks' files open inside the block. Raises SnapshotError."""
    with contextlib.ExitStack() as files:
        yield Saved([files.enter_context(RankFile(snapshot, rank)) for rank in range(snapshot.manifest.world)])


def piece_view(data: memoryview, span: slice, piece: Piece) -> torch.Tensor:
    """A piece in memory, as a tensor of its shape; it shares that memory if possible."""
    count = math.prod(piece.sizes)
    if count == 0:
        return torch.empty(piece.sizes, dtype=piece.dtype)
    # A tensor whose type safetensors does not know is stored as bytes, at any offset; torch crashes if items are not
    # aligned.
    aligned = span.start % piece.dtype.itemsize == 0
    dtype, items = (piece.dtype, count) if aligned else (torch.uint8, count * piece.dtype.itemsize)
    if data.readonly:
        flat = _quiet_frombuffer(data, dtype, items, span.start)
    else:
        flat = torch.frombuffer(data, dtype=dtype, count=items, offset=span.start)
    return (flat if aligned else flat.clone().view(piece.dtype)).view(piece.sizes)


def _quiet_frombuffer(data: memoryview, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
    """The same as torch.frombuffer, without its warning that the tensor must not be written to: it never is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=offset)


def _described(image: Image) -> dict[str, Any]:
    """The descriptions of pieces in this image, by the names of the entries."""
    described: dict[str, Any] = codec.expect(codec.loads(image.metadata.get(PIECES, "{}").encode()), dict, PIECES)
    for entry in image.entries:
        if entry.dtype not in DTYPES and entry.name not in described:
            raise SnapshotDamagedError(f"tensor {entry.name!r} has a type that torch does not know")
    return described


def _storage_metadata(pieces: Mapping[tuple[int, ...], _Found]) -> TensorStorageMetadata:
    first = next(iter(pieces.values()))[2]
    return TensorStorageMetadata(
        TensorProperties(dtype=first.dtype),
        torch.Size(first.whole),
        [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for _, _, piece in pieces.values()],
    )


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (begin, length) in enumerate(zip(offsets, lengths, strict=True)):
        if begin or length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor
