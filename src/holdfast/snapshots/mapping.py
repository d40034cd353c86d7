"""Files of /dev/shm in memory, in huge pages where the kernel has them.

tmpfs uses small pages. With 473 MB of them a write past the page cache spends 41 ms of processor time on
pinning pages, with huge ones 7, and takes half as long beside a training; a copy into them is a few per cent quicker.
The kernel collapses small pages into huge ones on request (Linux 6.1), in any mapping whose addresses and offsets
agree within a huge page, while others read and write them. That takes one to four seconds for each gigabyte, so it is
done beside the training, a page now and then, once for each slot; and not by a process of low priority, for which
others would wait with it when it loses its core (measured: saves of three times the length on a crowded machine).

Knows nothing of what is in the files. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_POPULATE_READ = 22
"""MADV_POPULATE_READ, Linux 5.14: writable pages of a shared mapping come writable, at half the cost of _WRITE."""
_COLLAPSE = 25
"""MADV_COLLAPSE, Linux 6.1."""
_MAP_FIXED = 0x10
_POPULATE_BYTES = 2 << 20
"""Populated in one call: other threads of the worker run in between."""

_libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter's lock
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def huge_page_bytes() -> int:
    """The size of a huge page; 0: this kernel has none."""
    with contextlib.suppress(OSError, ValueError):
        return int(_HUGE_PAGE.read_text())
    return 0


class MappedFile:
    """The first bytes of a file, shared with all processes that map it. Unmapped when the last view of them is gone."""

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        """Raises OSError. The descriptor stays the caller's."""
        self._unit_bytes = huge_page_bytes() or mmap.PAGESIZE
        # Python cannot choose an address: the file is mapped over a piece of memory that is large enough to hold it at
        # an address where a huge page may begin.
        around = mmap.mmap(-1, size_bytes + self._unit_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(around))
        self._address = -(-begin // self._unit_bytes) * self._unit_bytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        got = _libc.mmap(self._address, size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        if got != self._address:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        at = self._address - begin
        view = memoryview(around)[at : at + size_bytes]
        self.memory = view if writable else view.toreadonly()

    def populate(self) -> None:
        """Make all pages present. On a kernel without this, the first access to each page waits for it."""
        size_bytes = len(self.memory)
        for at in range(0, size_bytes, _POPULATE_BYTES):
            self._advise(at, min(_POPULATE_BYTES, size_bytes - at), _POPULATE_READ)

    def make_huge(self) -> Iterator[float]:
        """Turn its pages into huge ones, one by one, as far as the kernel can: yields the seconds each took.

        Other threads may read and write meanwhile; only an access to the page in work waits.
        """
        if self._unit_bytes == mmap.PAGESIZE:
            return
        for at in range(0, len(self.memory) - self._unit_bytes + 1, self._unit_bytes):
            began_s = time.monotonic()
            if self._advise(at, self._unit_bytes, _COLLAPSE) == errno.EINVAL:
                return  # this kernel lacks it; other errors concern this page alone
            yield time.monotonic() - began_s

    def _advise(self, at: int, size_bytes: int, advice: int) -> int:
        """The error's number; 0: done."""
        failed = _libc.madvise(self._address + at, size_bytes, advice)
        return ctypes.get_errno() if failed else 0


class Mappings:
    """The files that one process has mapped to read: a new mapping for each save costs 50 ms of processor time (473
    MB).

    For any thread. A mapping keeps its file open, so no other file can be mistaken for it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], MappedFile] = {}

    def of(self, fd: int) -> MappedFile:
        """The whole file. OSError."""
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        kept = self._kept.get(key)
        if kept is None or len(kept.memory) != status.st_size:
            kept = self._kept[key] = MappedFile(fd, status.st_size, writable=False)
        return kept
