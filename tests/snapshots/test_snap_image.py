"""The bytes of a rank's file: safetensors itself reads them, and what is not safetensors is refused."""

from __future__ import annotations

import json
import random

import pytest

from holdfast.core.errors import SnapshotDamagedError
from holdfast.snapshots.image import ALIGNMENT_BYTES, ITEM_BYTES, Image, TensorEntry


def filled(image: Image) -> bytes:
    return image.header + bytes(image.size_bytes - len(image.header))


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_safetensors_reads_each_type(dtype: str) -> None:
    safetensors = pytest.importorskip("safetensors")
    entries = [TensorEntry("a", dtype, (3, 5)), TensorEntry("b/ö", dtype, ()), TensorEntry("none", dtype, (0, 4))]
    image = Image.plan(entries, {"made": "here"})
    read = {
        name: (value["dtype"], tuple(value["shape"]), len(value["data"]))
        for name, value in safetensors.deserialize(filled(image))
    }
    assert read == {entry.name: (entry.dtype, entry.shape, entry.nbytes) for entry in entries}


def test_what_was_planned_is_read() -> None:
    image = Image.plan([TensorEntry("a", "F32", (1000,)), TensorEntry("b", "U8", (7,))], {"x": "y"})
    again = Image.read(filled(image), image.size_bytes)
    assert again == image
    assert again.spans == image.spans
    assert Image.read(image.header, image.size_bytes) == image


def test_tensors_are_aligned_and_leave_no_hole() -> None:
    chance = random.Random(1)
    for _ in range(200):
        entries = [
            TensorEntry(
                str(number), chance.choice(list(ITEM_BYTES)), tuple(chance.choices(range(9), k=chance.randrange(4)))
            )
            for number in range(chance.randrange(20))
        ]
        image = Image.plan(entries)
        assert len(image.header) % ALIGNMENT_BYTES == 0
        end = len(image.header)
        for entry in image.entries:
            span = image.spans[entry.name]
            assert span == slice(end, end + entry.nbytes)
            assert span.start % ITEM_BYTES[entry.dtype] == 0
            assert span.start % ALIGNMENT_BYTES == 0 or entry.nbytes % ALIGNMENT_BYTES
            end = span.stop
        assert end == image.size_bytes
        assert sorted(entry.name for entry in image.entries) == sorted(entry.name for entry in entries)


@pytest.mark.parametrize(
    "entries",
    [
        [TensorEntry("a", "F32", (1,)), TensorEntry("a", "F32", (2,))],
        [TensorEntry("__metadata__", "F32", (1,))],
        [TensorEntry("a", "complex", (1,))],
        [TensorEntry("a", "F32", (-1, 2))],
        [TensorEntry("a", "F64", (2**40, 2**40))],
    ],
)
def test_what_the_format_cannot_hold_is_refused(entries: list[TensorEntry]) -> None:
    with pytest.raises(ValueError, match="tensor"):
        Image.plan(entries)


def test_a_changed_header_is_refused_or_means_the_same_to_safetensors() -> None:
    """Ten thousand headers with a few bytes changed: whatever we accept, safetensors accepts and reads alike."""
    safetensors = pytest.importorskip("safetensors")
    chance = random.Random(2)
    image = Image.plan(
        [TensorEntry("a", "F32", (4,)), TensorEntry("b", "I64", (2, 2)), TensorEntry("c", "U8", (3,))], {"k": "v"}
    )
    whole, accepted = filled(image), 0
    for _ in range(10_000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(image.header))] = chance.choice(b'0123456789abc"[]{},: \x00\xff')
        try:
            read = Image.read(data, len(data))
        except SnapshotDamagedError:
            continue
        accepted += 1
        theirs = {name: (value["dtype"], tuple(value["shape"])) for name, value in safetensors.deserialize(bytes(data))}
        assert theirs == {entry.name: (entry.dtype, entry.shape) for entry in read.entries}
    assert accepted > 10, "the test must reach the comparison"


def header(described: object) -> bytes:
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (2**60).to_bytes(8, "little"),
        header(b"[]"),
        header(b" {}"),
        header(b"{" * 100_000),
        header(b'{"a":1,"a":1}'),
        header({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}),
        header({"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}) + b"123",
        header({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}) + b"1",
        header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.0]}}) + b"1",
        header({"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}) + b"1",
        header({"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}) + b"1",
        header({"__metadata__": {"a": 1}}),
        header({}) + b"1",
    ],
)
def test_damage_is_told_as_damage(data: bytes) -> None:
    with pytest.raises(SnapshotDamagedError):
        Image.read(data, len(data))
