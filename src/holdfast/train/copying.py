"""Copies many tensors at once, as fast as the memory allows.

Tensors of plain bytes are copied by the compiled part (_stream.c): its threads take pieces of all tensors until none is
left, and synchronize once; their writes bypass the caches. torch's own threads synchronize after every tensor, which
takes 3 ms for 588 tensors, or seconds when one of the threads has to wait for a core; and an ordinary store reads the
memory that it overwrites. Measured with 473 MB on 2 cores: 23 ms; by torch 39 ms; a single tensor of the same size by
torch 37 ms.

torch copies the rest, and everything if the compiled part was not built because the installation found no compiler.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch

from holdfast.protocol.errors import SnapshotMemoryError, StateMismatchError
from holdfast.train import torch_private

try:
    from holdfast.train import _stream
except ImportError:
    _stream = None  # type: ignore[assignment]

THREADS_MAX = 16
"""Limit of the threads: more do not make memory any faster."""

PAGES_BYTES = 512 << 10
"""Size of the pages that are copied at once: an access to the last of them waits for all."""
_SHARED = "a tensor whose items share memory (expanded?) cannot hold what was saved: give the model a copy, .clone()"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)


class PrivateMapping:
    """A file's pages as memory of this process. Each is copied when it is first written to: the mapping itself costs
    nothing.

    A page that was not copied yet shows writes of other processes to the file, hence `copy_pages`.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._memory = memoryview(self._map)
        self._taken: list[slice] = []

    def take(self, span: slice) -> memoryview:
        """These bytes, for the caller alone."""
        self._taken.append(span)
        return self._memory[span]

    def pieces(self) -> list[tuple[int, int]]:
        """The pages that hold the taken bytes: begin and size in bytes, at most PAGES_BYTES each."""
        return [
            (at, min(PAGES_BYTES, end - at))
            for begin, end in _page_runs(self._taken)
            for at in range(begin, end, PAGES_BYTES)
        ]

    def copy_pages(self, begin: int, size_bytes: int) -> None:
        """Copy those of these pages that are not copied yet; other threads may write to them meanwhile. Raises
        SnapshotMemoryError."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + begin
        # ctypes releases the interpreter's lock; mmap's own madvise does not.
        if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _POPULATE_WRITE) != 0:
            number = ctypes.get_errno()
            raise SnapshotMemoryError(f"no memory to take over the state: {os.strerror(number)}")


@cache
def can_copy_pages() -> bool:
    """Whether this kernel can copy pages on request (Linux 5.14)."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        page.madvise(_POPULATE_WRITE)
    except OSError:
        return False
    return True


def _page_runs(spans: Sequence[slice]) -> list[tuple[int, int]]:
    """The whole pages that cover the spans; neighbouring runs are merged."""
    runs: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda each: each.start):
        begin = span.start // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-span.stop // mmap.PAGESIZE) * mmap.PAGESIZE
        if runs and begin <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        else:
            runs.append((begin, end))
    return runs


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, which has the same number of items. The copies are complete when this
    returns."""
    copy_alike(
        targets,
        [
            source if source.shape == target.shape else source.reshape(target.shape)
            for target, source in zip(targets, sources, strict=True)
        ],
    )


def copy_alike(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, which has the same shape and shares no memory with it. The copies are complete
    when this returns. Raises StateMismatchError."""
    # Work for each tensor is done hundreds of times while training waits.
    with torch.no_grad():
        if _stream is not None:
            targets, sources = _copy_plain(targets, sources)
        targets, sources = _copy_odd(targets, sources)
        devices = {each.device for each in (*targets, *sources) if not each.is_cpu}
        if sources:
            torch_private.foreach_copy(list(targets), list(sources), non_blocking=bool(devices))
    for device in devices:
        torch.accelerator.synchronize(device)


def prepared(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Callable[[], object]:
    """A function that copies each source into its target, which has the same type and shape; for many small tensors
    that are copied often. It may be called as long as all of them keep their memory."""
    pairs = list(zip(targets, sources, strict=True))
    if _stream is None or not all(_is_plain(each) for pair in pairs for each in pair):
        return partial(torch_private.foreach_copy, list(targets), list(sources))
    to, of = (array("Q", [each.data_ptr() for each in tensors]) for tensors in (targets, sources))
    return partial(_stream.copy, to, of, array("Q", [each.nbytes for each in sources]), 1)


def _copy_plain(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copy tensors of plain bytes. Returns the other targets and their sources."""
    blocks = array("Q"), array("Q"), array("Q")
    others: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        if _is_plain(target) and _is_plain(source) and target.dtype == source.dtype and target.nbytes == source.nbytes:
            blocks[0].append(target.data_ptr())
            blocks[1].append(source.data_ptr())
            blocks[2].append(source.nbytes)
        else:
            others[0].append(target)
            others[1].append(source)
    _stream.copy(*blocks, min(torch.get_num_threads(), THREADS_MAX))
    return others


def _copy_odd(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Copy into targets that torch cannot copy in a batch. Returns the other targets and their sources."""
    odd = {number for number, each in enumerate(targets) if _is_odd(each)}
    for number in odd:
        with torch.inference_mode(targets[number].is_inference()):
            _copy_into_odd(targets[number], sources[number])
    if not odd:
        return targets, sources
    left = [number for number in range(len(targets)) if number not in odd]
    return [targets[number] for number in left], [sources[number] for number in left]


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view that conjugates or negates, was made in inference mode, or has items that share
    memory, or perhaps do."""
    return (
        tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_inference()
        or torch_private.overlap(tensor) != torch_private.NO_OVERLAP
    )


def _copy_into_odd(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into such a target. Raises StateMismatchError if items that share memory get different values."""
    if torch_private.overlap(target) != torch_private.OVERLAP:
        target.copy_(source)
    else:
        # The tensor is expanded: of the items that share memory, one is written.
        for dim, stride in enumerate(target.stride()):
            if stride == 0:
                target, source = target.narrow(dim, 0, 1), _the_same_along(source, dim)
        target.copy_(source)
        return
    if torch_private.overlap(target) != torch_private.NO_OVERLAP and not _is_equal(target, source):
        raise StateMismatchError(_SHARED)


def _the_same_along(source: torch.Tensor, dim: int) -> torch.Tensor:
    """The first slice in this dimension. Raises StateMismatchError unless all others are equal to it."""
    first = source.narrow(dim, 0, 1)
    if not _is_equal(first.expand_as(source), source):
        raise StateMismatchError(_SHARED)
    return first


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    other = other.to(one.device)
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - nan


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
