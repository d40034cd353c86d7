"""The search for numbers that are not finite in bytes: compared with torch, in both ways in which it is made."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.train.snapshots import not_finite
from holdfast.train.snapshots.disk import CHUNK_BYTES
from holdfast.train.snapshots.layout import PIECES, Image, TensorEntry
from holdfast.train.snapshots.not_finite import FORMATS, NotFiniteSearch, Part, add_part, has_not_finite, merged

KNOWN = {name: form for name, form in FORMATS.items() if hasattr(torch, name)}
"""torch 2.6 has no float8_e8m0fnu."""
compiled = pytest.mark.skipif(
    not_finite._reaches is None, reason="the compiled part was not built: is there a compiler?"
)


@pytest.fixture(params=[pytest.param("compiled", marks=compiled), "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(not_finite, "_reaches", None)


def data_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).flatten().numpy())


def is_finite(tensor: torch.Tensor) -> list[bool]:
    wide = torch.float32 if tensor.itemsize < 4 else tensor.dtype
    return list(torch.isfinite(tensor.to(wide)).tolist())


@pytest.mark.parametrize("name", [name for name, form in KNOWN.items() if form.item_bytes == 1])
def test_each_number_of_8_bits(name: str) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    for number, finite in enumerate(is_finite(every)):
        assert has_not_finite(memoryview(bytes([number])), FORMATS[name]) is not finite, number


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_each_number_of_16_bits_alone_and_beside_others(name: str) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(getattr(torch, name))
    data, finite = data_of(every), is_finite(every)
    for number, good in enumerate(finite):
        assert has_not_finite(data[2 * number : 2 * number + 2], FORMATS[name]) is not good, number
    assert not has_not_finite(data_of(every[torch.tensor(finite)]), FORMATS[name])


def numbers_of(name: str) -> Iterator[torch.Tensor]:
    """The borders of the format, and numbers of random bits."""
    dtype = getattr(torch, name)
    real = dtype.to_real()
    size, info = torch.empty(0, dtype=real).itemsize, torch.finfo(real)
    edges = [0.0, -0.0, 1.0, info.max, info.min, info.tiny, info.smallest_normal / 2]
    edges += [float("inf"), -float("inf"), float("nan")]
    yield torch.tensor(edges, dtype=real)
    bits = random.Random(name).randbytes(size * 20_000)
    yield torch.frombuffer(bytearray(bits), dtype=real)
    top = {2: 0x7C00, 4: 0x7F800001, 8: 0x7FF0000000000001}[size]  # a signalling nan, which a computer may silence
    yield torch.tensor([top, top - 2], dtype=getattr(torch, f"int{8 * size}")).view(real)


@pytest.mark.parametrize("name", ["float32", "float64", "complex32", "complex64", "complex128"])
def test_numbers_at_the_borders_and_of_random_bits(name: str) -> None:
    for numbers in numbers_of(name):
        data, finite = data_of(numbers), is_finite(numbers)
        size = numbers.itemsize
        for at, good in enumerate(finite):
            assert has_not_finite(data[at * size : (at + 1) * size], FORMATS[name]) is not good, numbers[at]
        assert not has_not_finite(data_of(numbers[torch.tensor(finite)]), FORMATS[name])


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in ("complex32", "complex64", "complex128")])
@pytest.mark.parametrize("items", [1, 3, 33, 70_001])
def test_one_of_many_at_any_place(name: str, items: int) -> None:
    numbers = torch.ones(items).to(getattr(torch, name))
    assert not has_not_finite(data_of(numbers), FORMATS[name])
    for at in {0, items // 2, items - 1}:
        bad = numbers.clone()
        bad.view(torch.uint8).view(items, -1)[at] = torch.tensor([float("nan")]).to(bad.dtype).view(torch.uint8)
        assert has_not_finite(data_of(bad), FORMATS[name]), at


class File:
    """A rank's file with these tensors, in the order in which they were tracked."""

    def __init__(self, tensors: dict[str, tuple[str, str, int]], metadata: dict[str, str] | None = None) -> None:
        """`tensors`: name of the format, code and number of items of the entry, by name."""
        self.image = Image.plan([TensorEntry(name, code, (n,)) for name, (_, code, n) in tensors.items()], metadata)
        self.data = bytearray(self.image.header.ljust(self.image.size_bytes, b"\0"))
        self.parts: list[Part] = []
        for name, (kind, *_) in tensors.items():
            if kind in FORMATS:
                add_part(self.parts, self.image.spans[name], kind)

    def put(self, name: str, at: int, value: bytes) -> None:
        begin = self.image.spans[name].start + at
        self.data[begin : begin + len(value)] = value

    def first(self, chunk_bytes: int = CHUNK_BYTES) -> str:
        parts: Any = json.loads(json.dumps(self.parts))  # as they come in a request
        search = NotFiniteSearch(memoryview(self.data), parts)
        for begin in reversed(range(0, len(self.data), chunk_bytes)):
            search.look(begin, min(begin + chunk_bytes, len(self.data)))
        return search.first()


NAN_SINGLE, NAN_BRAIN, INF_DOUBLE = b"\0\0\xc0\x7f", b"\xc0\x7f", b"\0\0\0\0\0\0\xf0\xff"


@pytest.mark.parametrize("chunk_bytes", [64, 4096, CHUNK_BYTES])
def test_the_first_tensor_in_the_order_of_tracking_is_named(chunk_bytes: int) -> None:
    file = File({"w": ("bfloat16", "BF16", 640), "b": ("bfloat16", "BF16", 3), "w.avg": ("float32", "F32", 640)})
    assert len(file.parts) == 2
    assert file.first(chunk_bytes) == ""
    file.put("w.avg", 4 * 639, NAN_SINGLE)
    assert file.first(chunk_bytes) == "w.avg"
    file.put("b", 4, NAN_BRAIN)
    assert file.first(chunk_bytes) == "b"
    file.put("w", 1278, NAN_BRAIN)
    assert file.first(chunk_bytes) == "w"


def test_what_is_not_trained_and_what_has_no_such_numbers_is_left_out() -> None:
    file = File({"mask": ("", "F32", 64), "w": ("float32", "F32", 64), "n": ("int32", "I32", 64)})
    file.put("mask", 0, NAN_SINGLE)
    file.put("n", 8, NAN_SINGLE)
    assert file.first() == ""


def test_neighbours_are_one_part() -> None:
    file = File({f"w{number}": ("float32", "F32", 64) for number in range(100)})
    assert len(file.parts) == 1
    file.put("w42", 12, NAN_SINGLE)
    file.put("w70", 0, NAN_SINGLE)
    assert file.first(256) == "w42"


def test_parts_in_the_order_of_the_file_are_few_and_find_the_same() -> None:
    """Adam has a step of one number beside each moment, and these stand at the end of the file."""
    sizes = {f"{name}{number}": size for number in range(100) for name, size in (("step", 1), ("moment", 64))}
    file = File({name: ("float32", "F32", size) for name, size in sizes.items()})
    assert len(file.parts) == 200
    file.parts = merged(file.parts)
    assert len(file.parts) == 1
    assert file.first() == ""
    file.put("step99", 0, NAN_SINGLE)
    assert file.first() == "step99"


def test_a_number_may_lie_in_two_chunks_and_an_entry_is_a_piece() -> None:
    """safetensors has no such type, so its bytes may begin anywhere."""
    described = json.dumps({"z@5": ["z", [5], [9], [20], "complex128"]})
    file = File({"u": ("", "U8", 61), "z@5": ("complex128", "U8", 9 * 16 - 3)}, {PIECES: described})
    file.parts[0] = (file.parts[0][0], int(file.parts[0][0]) + 128, "complex128")
    for at in range(0, 128, 8):
        for chunk_bytes in (20, 36, 100):
            file.put("z@5", at, INF_DOUBLE)
            assert file.first(chunk_bytes) == "z", (at, chunk_bytes)
            file.put("z@5", at, bytes(8))
            assert file.first(chunk_bytes) == "", (at, chunk_bytes)
