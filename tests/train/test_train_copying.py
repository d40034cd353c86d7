"""Copies of many tensors: by the compiled part and by torch, the same bytes."""

from __future__ import annotations

import random
import threading
import time
from array import array

import pytest
import torch

from holdfast.train import copying

SIZES = [(0,), (1,), (3, 5), (257,), (64, 1024), (5 << 20,)]
PIECE_BYTES = 1 << 20
compiled = pytest.mark.skipif(copying._stream is None, reason="the compiled part was not built: is there a compiler?")


def pairs() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Targets and sources of many kinds; the largest has more than one piece."""
    torch.manual_seed(1)
    sources = [torch.randn(size) for size in SIZES]
    sources += [torch.randn(70, 30).T, torch.randn(4, 4, dtype=torch.complex64).conj(), torch.tensor(7)]
    sources += [torch.randn(100).bfloat16(), torch.rand(33) > 0.5, torch.nn.Parameter(torch.randn(9, 9))]
    sources += [torch.randn(1, dtype=torch.complex64).conj().imag]  # contiguous, and its sign is only noted down
    return [torch.zeros(source.shape, dtype=source.dtype) for source in sources], sources


@pytest.fixture(params=[pytest.param(True, marks=compiled), False], ids=["compiled", "torch"])
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(copying, "_stream", None)


@pytest.mark.usefixtures("mover")
def test_copies_are_equal() -> None:
    targets, sources = pairs()
    copying.copy_all(targets, sources)
    assert all(map(torch.equal, targets, sources))
    assert not any(target.requires_grad for target in targets)


@compiled
def test_the_compiled_part_takes_what_is_plain_and_leaves_the_rest() -> None:
    targets, sources = pairs()
    left_targets, left_sources = copying._copy_plain(targets, sources)
    assert [tuple(source.shape) for source in left_sources] == [(30, 70), (4, 4), (1,)]
    left = {id(target) for target in left_targets}
    moved = [(target, source) for target, source in zip(targets, sources, strict=True) if id(target) not in left]
    assert len(moved) == len(sources) - 3
    assert all(torch.equal(target, source) for target, source in moved)


@pytest.mark.usefixtures("mover")
def test_as_many_items_in_another_shape() -> None:
    target, source = torch.zeros(2, 6), torch.arange(12.0)
    copying.copy_all([target], [source])
    assert torch.equal(target.flatten(), source)
    with pytest.raises(RuntimeError):
        copying.copy_all([torch.zeros(5)], [torch.zeros(1, 1, 7)])


def _addresses(memory: torch.Tensor, begins: list[int]) -> array[int]:
    return array("Q", [memory.data_ptr() + begin for begin in begins])


@compiled
@pytest.mark.parametrize("threads", [-1, 1, 2, 5, 1000])
def test_blocks_of_any_size_at_any_address_and_not_a_byte_beside_them(threads: int) -> None:
    random.seed(threads)
    edges = [0, 1, 15, 63, 64, 65, 4095, 4096, 4097, 4160, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1]
    sizes = edges + [random.randrange(3 * PIECE_BYTES) for _ in range(12)] + [0]
    begins_from, begins_to, end = [], [], 0
    for size in sizes:
        begins_from.append(end + random.randrange(64))
        begins_to.append(end + random.randrange(1, 64))
        end += size + 128
    source = torch.randint(1, 256, (end,), dtype=torch.uint8)
    target, expected = torch.zeros(end, dtype=torch.uint8), torch.zeros(end, dtype=torch.uint8)
    for begin_from, begin_to, size in zip(begins_from, begins_to, sizes, strict=True):
        expected[begin_to : begin_to + size] = source[begin_from : begin_from + size]
    assert copying._stream is not None
    blocks = _addresses(target, begins_to), _addresses(source, begins_from), array("Q", sizes)
    copying._stream.copy(*blocks, threads)
    assert torch.equal(target, expected)


@compiled
def test_it_refuses_lists_that_do_not_match() -> None:
    assert copying._stream is not None
    with pytest.raises(ValueError, match="as many"):
        copying._stream.copy(array("Q", [1]), array("Q"), array("Q", [0]), 1)
    with pytest.raises(ValueError, match="as many"):
        copying._stream.copy(array("B", [1]), array("B", [1]), array("B", [0]), 1)
    with pytest.raises(TypeError):
        copying._stream.copy([1], [2], [3], 1)  # type: ignore[arg-type]


@compiled
def test_other_threads_of_the_program_run_meanwhile() -> None:
    source = torch.ones(16 << 20)
    target, stop, seen = torch.zeros(16 << 20), threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            seen.append(bool(target[0] == 1) and not bool(target[-1] == 1))
            time.sleep(0)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(50):
            target.zero_()
            copying.copy_alike([target], [source])
            if any(seen):
                break
    finally:
        stop.set()
        looking.join()
    assert any(seen), "nobody saw a half copied tensor: the interpreter was held"
    assert torch.equal(target, source)
