"""Copy many tensors at once, as fast as the memory is.

torch's own threads do it, unless the machine is crowded: they meet after every tensor, and when one of them has to wait
for a core that costs a time slice for each tensor (measured with four busy processes on two cores: 35 times as long). Then
threads of ours take pieces of all bytes until none is left, and meet once, which is a fifth slower on a quiet machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from holdfast.core.errors import SnapshotMemoryError

PIECE_BYTES = 8 << 20
SMALL_BYTES_MAX = 128 << 10
"""Up to here taking the interpreter's lock back costs more than the copy."""
CROWDED = 1.5
THREADS_MAX = 8
"""More do not make memory any faster."""

SETTLE_BYTES = 8 << 20
NICENESS = 19
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)

_move_small = ctypes.PyDLL(None).memmove  # keeps the interpreter's lock
_move_small.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move_small.restype = ctypes.c_void_p

_Block = tuple[int, int, int]
"""To, from, how many bytes."""


class PrivateMapping:
    """A file's pages as memory of this process, each copied when it is first written to: a copy that costs nothing yet.

    A page that was not copied yet shows what others write to the file, hence `settle`.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._memory = memoryview(self._map)
        self._taken: list[slice] = []

    def take(self, span: slice) -> memoryview:
        """These bytes, for the taker alone."""
        self._taken.append(span)
        return self._memory[span]

    def settle(self) -> None:
        """Copy all pages that were taken and are not copied yet. Others may write to them meanwhile."""
        begin_address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for begin, end in _page_runs(self._taken):
            for at in range(begin, end, SETTLE_BYTES):
                size = min(SETTLE_BYTES, end - at)
                # By ctypes, which lets go of the interpreter's lock.
                if _libc.madvise(ctypes.c_void_p(begin_address + at), ctypes.c_size_t(size), _POPULATE_WRITE) != 0:
                    number = ctypes.get_errno()
                    raise SnapshotMemoryError(f"no memory to take over the state: {os.strerror(number)}")


def step_back() -> None:
    """This thread runs when training leaves a core free. torch's threads wait for each other at every operation: one that
    loses its core to us holds up all of them.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def can_settle() -> bool:
    """Whether this kernel can copy pages on request (Linux 5.14)."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        page.madvise(_POPULATE_WRITE)
    except OSError:
        return False
    return True


def _page_runs(spans: Sequence[slice]) -> list[tuple[int, int]]:
    """Whole pages that cover the spans, merged."""
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
    """Each source into its target, which has as many items; complete when this returns."""
    copy_alike(
        targets,
        [
            source if source.shape == target.shape else source.reshape(target.shape)
            for target, source in zip(targets, sources, strict=True)
        ],
    )


def copy_alike(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Each source into its target, which has the same shape; complete when this returns."""
    # Whatever is done here for each tensor is done hundreds of times while training waits.
    with torch.no_grad():
        if _is_crowded():
            targets, sources = _move_plain(targets, sources)
        devices = {each.device for each in (*targets, *sources) if not each.is_cpu}
        if sources:
            torch._foreach_copy_(list(targets), list(sources), non_blocking=bool(devices))
    for device in devices:
        torch.accelerator.synchronize(device)


def _move_plain(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copy what is nothing but bytes with threads of ours; returns the others."""
    blocks: list[_Block] = []
    others: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        if _plain(target) and _plain(source) and target.dtype == source.dtype and target.nbytes == source.nbytes:
            blocks.append((target.data_ptr(), source.data_ptr(), source.nbytes))
        else:
            others[0].append(target)
            others[1].append(source)
    _move(blocks)
    return others


def _is_crowded() -> bool:
    """More threads want to run just now than there are cores. The load average would still tell of the last minute."""
    if torch.get_num_threads() == 1:
        return False  # nobody to wait for
    try:
        with open("/proc/loadavg", "rb") as file:
            running = int(file.read().split()[3].partition(b"/")[0])
    except (OSError, ValueError, IndexError):
        return False
    return running > CROWDED * len(os.sched_getaffinity(0))


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.dtype.is_complex and tensor.is_conj())


def _move(blocks: Sequence[_Block]) -> None:
    pieces: deque[_Block] = deque()
    for target, source, nbytes in blocks:
        if nbytes <= SMALL_BYTES_MAX:
            _move_small(target, source, nbytes)
        else:
            steps = range(0, nbytes, PIECE_BYTES)
            pieces.extend((target + at, source + at, min(PIECE_BYTES, nbytes - at)) for at in steps)
    count = min(torch.get_num_threads(), THREADS_MAX, len(pieces))
    others = [threading.Thread(target=_move_pieces, args=(pieces,), name="holdfast-copy") for _ in range(count - 1)]
    for thread in others:
        thread.start()
    _move_pieces(pieces)
    for thread in others:
        thread.join()


def _move_pieces(pieces: deque[_Block]) -> None:
    """Take pieces until none is left: a thread that loses its core takes fewer."""
    with contextlib.suppress(IndexError):
        while True:
            ctypes.memmove(*pieces.popleft())  # lets go of the interpreter's lock
