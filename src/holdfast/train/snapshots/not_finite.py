"""Finds numbers that are not finite in the bytes of a rank's file, while its writer makes their digests.

A request to save names the parts of the file that training changes, with the format of their numbers. So the process
that trains reads nothing for this, and the saver reads the bytes while they are in its caches anyway.

In every format with an infinity the exponent of such a number has all bits set. If the lowest bit of the exponent is
added to it, the sum reaches the bit of the sign, and no other number's does. So many numbers are examined at once, as
one long integer: the compiled part (_stream.c) takes 64 bits, Python without it as many as fit into a cache.

Knows bytes and the file's header. Must not know torch. Standard library only.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from holdfast.train.snapshots.layout import PIECES, Image

_reaches: Callable[[memoryview, int, int, int], bool] | None = None
"""The compiled part; None: it was not built, or by an older version. `from holdfast.train import …` would be an import
of the whole package."""
with suppress(ImportError, AttributeError):
    _reaches = import_module("holdfast.train._stream").reaches

PIECE_BYTES = 1 << 16
"""The bytes that Python examines at once."""
WORD_BYTES = 8


@dataclass(frozen=True)
class NumberFormat:
    """A format of numbers that may be nan or infinite."""

    item_bytes: int
    exponent: int
    """The bits of the exponent; of a format without infinity, those of nan without its sign. 0: see `nan`."""
    lowest: int = 0
    """The lowest of these bits."""
    nan: bytes = b""
    """The only number that is not finite; empty: `exponent` says which are."""


_HALF = NumberFormat(2, 0x7C00, 0x0400)
_SINGLE = NumberFormat(4, 0x7F80_0000, 0x0080_0000)
_DOUBLE = NumberFormat(8, 0x7FF0_0000_0000_0000, 0x0010_0000_0000_0000)
FORMATS = {
    "float16": _HALF, "bfloat16": NumberFormat(2, 0x7F80, 0x0080), "float32": _SINGLE, "float64": _DOUBLE,
    "complex32": _HALF, "complex64": _SINGLE, "complex128": _DOUBLE,
    "float8_e5m2": NumberFormat(1, 0x7C, 0x04), "float8_e4m3fn": NumberFormat(1, 0x7F, 0x01),
    "float8_e5m2fnuz": NumberFormat(1, 0, nan=b"\x80"), "float8_e4m3fnuz": NumberFormat(1, 0, nan=b"\x80"),
    "float8_e8m0fnu": NumberFormat(1, 0, nan=b"\xff"),
}  # fmt: skip
"""The formats, by torch's names of the types. All numbers of other types are finite."""

Part = Sequence[int | str]
"""First byte in the file, end, and name of the format; a part may have many tensors."""


def add_part(parts: list[Part], span: slice, kind: str) -> None:
    """Add these bytes: to the last part if they continue it, otherwise as a new one."""
    if parts and list(parts[-1][1:]) == [span.start, kind]:
        parts[-1] = (parts[-1][0], span.stop, kind)
    else:
        parts.append((span.start, span.stop, kind))


def merged(parts: Sequence[Part]) -> list[Part]:
    """The same bytes as few parts, in the order of the file: these fit into the header of a memory slot."""
    fewer: list[Part] = []
    for begin, end, kind in sorted(parts, key=lambda each: int(each[0])):
        add_part(fewer, slice(int(begin), int(end)), str(kind))
    return fewer


def has_not_finite(data: memoryview, form: NumberFormat) -> bool:
    """Whether one of the numbers in these bytes is not finite. `data` begins with a number, and ends with one."""
    if form.nan:
        return any(form.nan in bytes(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES))
    if _reaches is not None:
        return _reaches(data, *_repeated(form, WORD_BYTES))
    exponents, lowest, signs = _repeated(form, PIECE_BYTES)
    return any(
        ((int.from_bytes(data[at : at + PIECE_BYTES], "little") & exponents) + lowest) & signs
        for at in range(0, len(data), PIECE_BYTES)
    )


@cache
def _repeated(form: NumberFormat, size_bytes: int) -> tuple[int, int, int]:
    """The bits of the exponent, its lowest bit and the bit of the sign, for all numbers in so many bytes."""
    ones = int.from_bytes((1).to_bytes(form.item_bytes, "little") * (size_bytes // form.item_bytes), "little")
    return ones * form.exponent, ones * form.lowest, ones << (8 * form.item_bytes - 1)


class NotFiniteSearch:
    """The search in one file. Any threads may call `look`."""

    def __init__(self, data: memoryview, parts: Sequence[Part]) -> None:
        """`parts`: in the order in which their tensors were tracked; they do not overlap."""
        self._data = data
        numbered = [(int(begin), int(end), FORMATS[str(kind)], n) for n, (begin, end, kind) in enumerate(parts)]
        self._parts = sorted(numbered, key=lambda each: each[0])
        self._begins = [begin for begin, *_ in self._parts]
        self._found: list[tuple[int, int, int, NumberFormat]] = []
        """Number of the part, first byte and end of what was examined at once, and the format."""

    def look(self, begin: int, end: int) -> None:
        """Examine the numbers that begin in these bytes of the file."""
        for at in range(max(bisect_right(self._begins, begin) - 1, 0), len(self._parts)):
            first, last, form, number = self._parts[at]
            if first >= end:
                return
            # A number of a type that safetensors does not know may begin anywhere, and lie in two chunks.
            start = first + -(-max(begin - first, 0) // form.item_bytes) * form.item_bytes
            stop = min(first + -(-(end - first) // form.item_bytes) * form.item_bytes, last)
            if start < stop and has_not_finite(self._data[start:stop], form):
                self._found.append((number, start, stop, form))

    def first(self) -> str:
        """Name of the first tensor with a number that is not finite, in the order of the parts; empty: there is none.
        Call it when all threads have looked."""
        if not self._found:
            return ""
        image = Image.read(self._data, len(self._data))
        for _, start, stop, form in sorted(self._found, key=lambda each: each[:2]):
            for name, span in image.spans.items():
                inside = slice(max(span.start, start), min(span.stop, stop))
                if inside.start < inside.stop and has_not_finite(self._data[inside], form):
                    # The name of the tensor, of which the entry may be a piece.
                    return str(json.loads(image.metadata.get(PIECES, "{}")).get(name, [name])[0])
        return ""
