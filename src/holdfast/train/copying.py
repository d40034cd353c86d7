"""Copy many tensors at once, as fast as the memory is.

torch's own copy starts and joins its threads for every tensor, which on a busy machine costs more than the bytes. Here
each thread takes one share of all bytes and they meet once. What is not plain memory (a GPU's, strided, of another type)
is left to torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from holdfast.core.errors import SnapshotMemoryError

SHARE_BYTES_MIN = 4 << 20
THREADS_MAX = 8
"""More do not make memory any faster."""

SETTLE_BYTES = 8 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)

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
    """Each source into its target, of the same shape; complete when this returns."""
    blocks: list[_Block] = []
    slow_targets, slow_sources = [], []
    for target, source in zip(targets, sources, strict=True):
        if source.numel() == 0:
            continue
        if _plain(target) and _plain(source) and target.dtype == source.dtype:
            blocks.append((target.data_ptr(), source.data_ptr(), source.nbytes))
        else:
            slow_targets.append(target)
            slow_sources.append(source)
    devices = {each.device for each in (*slow_targets, *slow_sources) if each.device.type != "cpu"}
    if slow_targets:
        with torch.no_grad():
            torch._foreach_copy_(slow_targets, slow_sources, non_blocking=bool(devices))
    _move(blocks)
    for device in devices:
        torch.accelerator.synchronize(device)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_quantized and not tensor.is_conj()


def _move(blocks: list[_Block]) -> None:
    total = sum(block[2] for block in blocks)
    count = max(1, min(torch.get_num_threads(), THREADS_MAX, total // SHARE_BYTES_MIN))
    shares = _shares(blocks, -(-total // count)) if count > 1 else [blocks]
    others = [threading.Thread(target=_move_share, args=(share,), name="holdfast-copy") for share in shares[1:]]
    for thread in others:
        thread.start()
    if shares:
        _move_share(shares[0])
    for thread in others:
        thread.join()


def _move_share(share: Iterable[_Block]) -> None:
    move = ctypes.memmove  # lets go of the interpreter's lock
    for target, source, nbytes in share:
        move(target, source, nbytes)


def _shares(blocks: Iterable[_Block], share_bytes: int) -> list[list[_Block]]:
    """Cut into shares of so many bytes each."""
    shares: list[list[_Block]] = [[]]
    room = share_bytes
    for target, source, nbytes in blocks:
        done = 0
        while done < nbytes:
            if not room:
                shares.append([])
                room = share_bytes
            part = min(room, nbytes - done)
            shares[-1].append((target + done, source + done, part))
            done += part
            room -= part
    return shares
