"""The bytes of one rank's file: a safetensors file, planned before any tensor is copied, and validated when it is read.

    8 bytes, little endian: length of the header | header: JSON, padded with spaces | the tensors, without a gap

The same bytes are the content of a memory slot: the saver copies bytes and knows nothing of tensors. No torch here.

The format allows no holes, so tensors are laid out such that each begins at a multiple of its item's size, and each
whose size is a multiple of 64 bytes (all large ones are) at a multiple of 64 bytes from the file's start."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.protocol.errors import SnapshotDamagedError

ALIGNMENT_BYTES = 64
LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""safetensors' own limit."""
DIMENSIONS_MAX = 64
SIZE_BYTES_MAX = 2**62
METADATA = "__metadata__"

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of one item, by safetensors' name of the type."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its name, safetensors' code of its type ("F32", "BF16" …), its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Image:
    """The layout of one rank's file."""

    header: bytes
    """All bytes before the first tensor."""
    entries: tuple[TensorEntry, ...]
    """In the order of the file."""
    metadata: Mapping[str, str]

    @classmethod
    def plan(cls, entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None = None) -> Image:
        """The image of these tensors. ValueError for a bad name, type or shape."""
        placed = sorted(entries, key=_place)
        names = {entry.name for entry in placed}
        if len(names) < len(placed) or METADATA in names:
            raise ValueError(f"names of tensors must be unique, and none may be {METADATA}")
        described: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
        begin = 0
        for entry in placed:
            _check(entry)
            end = begin + entry.nbytes
            described[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
            begin = end
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
        if len(text) > HEADER_BYTES_MAX:
            raise ValueError(f"names and metadata take {len(text)} bytes; the format allows {HEADER_BYTES_MAX}")
        return cls(len(text).to_bytes(LENGTH_BYTES, "little") + text, tuple(placed), dict(metadata or {}))

    @classmethod
    def read(cls, head: bytes | bytearray | memoryview, size_bytes: int) -> Image:
        """The image whose file begins with `head` (the header at least, see `head_bytes`) and has `size_bytes`.

        SnapshotDamagedError unless it is whole and consistent.
        """
        view = memoryview(head).cast("B")
        header_bytes = head_bytes(view[:LENGTH_BYTES], size_bytes)
        header = bytes(view[:header_bytes])
        if len(header) < header_bytes:
            raise SnapshotDamagedError(f"the header has {len(header)} of {header_bytes} bytes")
        described = _parse(header[LENGTH_BYTES:])
        metadata = described.pop(METADATA, {})
        if not _is_text_map(metadata):
            raise SnapshotDamagedError(f"{METADATA} is not a map of text to text")
        begins = {name: _entry(name, value) for name, value in described.items()}
        placed = sorted(begins.values(), key=lambda each: each[1])
        expected = 0
        for entry, begin, end in placed:
            if begin != expected or end != begin + entry.nbytes:
                raise SnapshotDamagedError(f"tensor {entry.name!r} claims bytes {begin} to {end}, not from {expected}")
            expected = end
        if header_bytes + expected != size_bytes:
            raise SnapshotDamagedError(f"the file has {size_bytes} bytes, its header {header_bytes + expected}")
        return cls(header, tuple(entry for entry, _, _ in placed), metadata)

    @cached_property
    def spans(self) -> dict[str, slice]:
        """The place of each tensor, in bytes from the file's start."""
        spans, begin = {}, len(self.header)
        for entry in self.entries:
            spans[entry.name] = slice(begin, begin + entry.nbytes)
            begin += entry.nbytes
        return spans

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def head_bytes(length: bytes | memoryview, size_bytes: int) -> int:
    """Bytes before the first tensor, from the file's first eight and its size. SnapshotDamagedError."""
    if len(length) < LENGTH_BYTES:
        raise SnapshotDamagedError(f"the file has {size_bytes} bytes, too few for any header")
    header_bytes = LENGTH_BYTES + int.from_bytes(length, "little")
    if header_bytes > min(size_bytes, LENGTH_BYTES + HEADER_BYTES_MAX):
        raise SnapshotDamagedError(f"the header claims {header_bytes} bytes; the file has {size_bytes}")
    return header_bytes


def _place(entry: TensorEntry) -> tuple[bool, int]:
    """Multiples of the alignment first, then by size of the item: each keeps the next one aligned."""
    if entry.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {entry.name!r}: {entry.dtype!r} is no type of safetensors")
    return (entry.nbytes % ALIGNMENT_BYTES != 0, -ITEM_BYTES[entry.dtype])


def _check(entry: TensorEntry) -> None:
    shape = entry.shape
    sound = len(shape) <= DIMENSIONS_MAX and all(type(each) is int and each >= 0 for each in shape)
    if not sound or entry.nbytes > SIZE_BYTES_MAX:
        raise ValueError(f"tensor {entry.name!r} has the shape {shape}")


def _parse(text: bytes) -> dict[str, Any]:
    try:
        # As safetensors has it: an object from the first byte on, each name once.
        described = json.loads(text, object_pairs_hook=_unique) if text.startswith(b"{") else None
    except (ValueError, RecursionError) as error:
        raise SnapshotDamagedError(f"the header is not readable: {error}") from None
    if not isinstance(described, dict):
        raise SnapshotDamagedError("the header is not a JSON object")
    return described


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    described = dict(pairs)
    if len(described) < len(pairs):
        raise ValueError("a name comes twice")
    return described


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _entry(name: str, value: Any) -> tuple[TensorEntry, int, int]:
    """One described tensor and its claimed bytes, or SnapshotDamagedError."""
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        entry = TensorEntry(name, dtype, tuple(shape))
        _place(entry)
        _check(entry)
        numbers = type(begin) is int and type(end) is int
    except (TypeError, ValueError, KeyError):
        numbers = False
    if not numbers:
        raise SnapshotDamagedError(f"tensor {name!r} is not described as safetensors would")
    return entry, begin, end
