"""Files in shared memory, mapped by the processes that write and read them.

Files are mapped in huge pages where the kernel has them. tmpfs uses small pages: to take and map them costs nine
times as much as a copy of the same bytes, and a write that bypasses the page cache spends processor time on pinning
each of them. The kernel collapses small pages into huge ones on request (Linux 6.1), in any mapping whose addresses and
offsets agree within a huge page, while others read and write them. If only one small page of a huge one exists, the
request takes and maps the huge page at the cost of one copy. If free memory is in small pieces, the kernel has to move
pages first: then it takes one to four seconds for each gigabyte. So memory is taken in small pages as soon as a huge
one takes long. These are collapsed during the training, a page now and then, once for each slot; not by a process of
low priority, because others that touch a page in work would wait while that process has lost its core.

Knows sizes, mappings and memory. Must not know what the bytes are. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from holdfast.linux import check_memory
from holdfast.train.snapshots.saver_connection import open_for_writing

_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_POPULATE_READ = 22
"""MADV_POPULATE_READ, Linux 5.14: writable pages of a shared mapping come writable, at half the cost of _WRITE."""
_COLLAPSE = 25
"""MADV_COLLAPSE, Linux 6.1."""
_MAP_FIXED = 0x10
_PUNCH_HOLE = 0x03
"""FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE."""
_HUGE_S_MAX = 0.002
"""Limit of the processor time for one huge page: small pages for the same bytes take as much. One that takes longer had
to be made free."""
_SPARE = 32
"""A writable mapping has spare addresses beyond its file: the file's size divided by this."""
_SMALL_MIN, _SMALL_MAX = 8, 256
"""Number of units that are taken in small pages after a huge page that took too long: the first of these; twice as many
each time, up to the second."""
_POPULATE_BYTES = 2 << 20
"""Bytes that are populated in one call: other threads of the worker run in between."""

_ZEROS = memoryview(bytes(256 << 10))
"""Zeros to write; of this size they stay in the processor's cache."""

_libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter's lock
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def huge_page_bytes() -> int:
    """The size of a huge page; 0: this kernel has none."""
    with contextlib.suppress(OSError, ValueError):
        return int(_HUGE_PAGE.read_text())
    return 0


class MappedFile:
    """The first bytes of a file, shared with all processes that map it. Unmapped when the last view of them is gone."""

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        """The descriptor stays the caller's. If `writable`, the file may become a little larger without a new mapping
        (`reaches`). Raises OSError."""
        mapped_bytes = size_bytes + (size_bytes // _SPARE + mmap.PAGESIZE if writable else 0)
        self._unit_bytes = huge_page_bytes() or mmap.PAGESIZE

        # Python cannot choose an address: the file is mapped over a piece of memory that is large enough to hold it at
        # an address where a huge page may begin.
        around = mmap.mmap(-1, mapped_bytes + self._unit_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(around))
        self._address = -(-begin // self._unit_bytes) * self._unit_bytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        got = _libc.mmap(self._address, mapped_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        if got != self._address:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

        at = self._address - begin
        view = memoryview(around)[at : at + mapped_bytes]
        self._room = view if writable else view.toreadonly()
        """All mapped addresses, spare ones included."""
        self.memory = self._room[:size_bytes]
        """The file's bytes."""
        self._present_bytes = 0
        """The number of bytes from the beginning whose pages are present."""

    def reaches(self, size_bytes: int) -> bool:
        """Whether a file of this size needs no new mapping."""
        return size_bytes <= len(self._room)

    def populate(self, end: int) -> Iterator[int]:
        """Make all pages present up to `end`, piece by piece; the file's memory is taken already. On a kernel that
        cannot do this, the first access to each page waits for it. Yields the number of bytes that are present."""
        for at in range(self._present_bytes, end, _POPULATE_BYTES):
            self._advise(at, min(_POPULATE_BYTES, end - at), _POPULATE_READ)
            self._present_bytes = min(at + _POPULATE_BYTES, end)
            yield self._present_bytes

    def take(self, fd: int, begin: int, size_bytes: int) -> Iterator[int]:
        """Take memory for the file from `begin` to this size, and make all its pages present, piece by piece. The file
        grows with it. Yields the number of bytes that are present. OSError."""
        unit_bytes = max(self._unit_bytes, _POPULATE_BYTES)
        at, small, next_small = begin, 0, _SMALL_MIN  # `small`: this many units are still taken in small pages
        self.memory = self._room[:size_bytes]
        while at < size_bytes:
            end = min((at // unit_bytes + 1) * unit_bytes, size_bytes)
            whole, huge = end - at == self._unit_bytes, False
            os.ftruncate(fd, end)
            if whole and not small:
                # One small page, which the kernel then collapses into a huge one.
                began_s = time.thread_time()
                os.posix_fallocate(fd, at, mmap.PAGESIZE)
                huge = self._advise(at, unit_bytes, _COLLAPSE) == 0
                if not huge or time.thread_time() - began_s > _HUGE_S_MAX:
                    small, next_small = next_small, min(2 * next_small, _SMALL_MAX)
                else:
                    next_small = _SMALL_MIN
            elif whole:
                small -= 1
            if not huge:
                _write_zeros(fd, at, end - at)
                self._advise(at, end - at, _POPULATE_READ)
            at = self._present_bytes = end
            yield end

    def make_huge(self) -> Iterator[float]:
        """Turn the file's pages into huge ones, one by one, as far as the kernel can. Yields the seconds that each
        took.

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
        """Call madvise for this part of the mapping. Returns the error's number; 0: none."""
        failed = _libc.madvise(self._address + at, size_bytes, advice)
        return ctypes.get_errno() if failed else 0


def _write_zeros(fd: int, at: int, size_bytes: int) -> None:
    """Write zeros, which takes memory for these bytes. Pages that were written are mapped sixteen at a time, those that
    were only allocated one by one: to write and map them takes two thirds of the processor time. OSError."""
    for begin in range(0, size_bytes, len(_ZEROS)):
        write_at(fd, _ZEROS[: size_bytes - begin], at + begin)


def write_at(fd: int, data: memoryview, at: int) -> None:
    """Write all of it to a file in memory, however many bytes the kernel takes at a time; disk.py is for disks.
    OSError."""
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


class GrowingFile:
    """A file that grows when more is to be written into it, mapped by its only writer: a header, and room for a body.
    The file is made by `growing` or `filling`, not before."""

    def __init__(self, path: Path, header_bytes: int) -> None:
        self.path = path
        self.room_bytes = 0
        """Bytes that are mapped for a body; 0: the file is not mapped."""
        self.mapped: MappedFile | None = None
        self._growing: MappedFile | None = None
        """The mapping for which memory is still being taken; None: none is."""
        self.memory = memoryview(b"")
        """The mapped bytes, header included; empty: the file is not mapped."""
        self._header_bytes = header_bytes

    def whole_bytes(self, size_bytes: int) -> int:
        """The file's size with a body of this size."""
        return -(-(self._header_bytes + max(1, size_bytes)) // mmap.PAGESIZE) * mmap.PAGESIZE

    def missing_bytes(self, size_bytes: int) -> int:
        """The number of bytes by which the file has to grow; negative: it is larger than needed. OSError."""
        return self.whole_bytes(size_bytes) - (os.stat(self.path).st_size if self.path.exists() else 0)

    def body(self, size_bytes: int) -> memoryview:
        """The first bytes of the body. There must be room for this number."""
        return self.memory[self._header_bytes :][:size_bytes]

    def growing(self, size_bytes: int) -> Iterator[None]:
        """Make room for a body, with every page present, piece by piece. A caller that stops halfway keeps what was
        taken. Raises OSError; the file is unchanged then."""
        if self.room_bytes >= size_bytes and self.room_bytes:
            return
        fd = open_for_writing(self.path)
        try:
            before_bytes = os.fstat(fd).st_size
            whole_bytes = max(self.whole_bytes(size_bytes), before_bytes)
            try:
                check_memory(whole_bytes - before_bytes)
                mapped = self._growing or self.mapped
                if mapped is None or not mapped.reaches(whole_bytes):
                    if before_bytes:
                        # A process that died while the file grew has left holes: an access would be a SIGBUS when
                        # memory is short.
                        os.posix_fallocate(fd, 0, before_bytes)
                    mapped = MappedFile(fd, whole_bytes, writable=True)
                self._growing = mapped
                for _ in chain(mapped.populate(before_bytes), mapped.take(fd, before_bytes, whole_bytes)):
                    yield
            except OSError:
                self._growing = None
                os.ftruncate(fd, before_bytes)
                raise
        finally:
            os.close(fd)
        self.close()
        self.mapped = mapped
        self.memory = mapped.memory
        self.room_bytes = whole_bytes - self._header_bytes

    @contextlib.contextmanager
    def filling(self, size_bytes: int) -> Iterator[Callable[[int, memoryview], None]]:
        """Make room for a body that is written before it is mapped: no page is made present, or filled with zeros,
        first.

        Yields a function that writes bytes at their position in the body, which any thread may call; all of the body
        has to be written. After the block it is mapped, and the next `growing` makes its pages present. OSError; after
        any error the file has the size that it had before."""
        fd = open_for_writing(self.path)
        before_bytes = os.fstat(fd).st_size
        whole_bytes = max(self.whole_bytes(size_bytes), before_bytes)
        try:
            check_memory(whole_bytes - before_bytes)
            if before_bytes:
                os.posix_fallocate(fd, 0, before_bytes)  # fills holes, as in `growing`
            write_at(fd, memoryview(bytes(max(0, self._header_bytes - before_bytes))), before_bytes)
            yield lambda at, data: write_at(fd, data, self._header_bytes + at)
            os.ftruncate(fd, whole_bytes)
            if not 0 < size_bytes <= self.room_bytes:
                self.close()
                self.mapped = MappedFile(fd, whole_bytes, writable=True)
                self.memory = self.mapped.memory
        except BaseException:
            os.ftruncate(fd, before_bytes)
            raise
        finally:
            os.close(fd)

    def shrink(self, whole_bytes: int) -> None:
        """Make the file smaller; this size must cover its committed bytes."""
        self.close()
        with contextlib.suppress(OSError):
            os.truncate(self.path, whole_bytes)

    def remove(self) -> None:
        """Remove the file, and give its memory back although other processes may still map it: they read zeros then,
        where a file that is made smaller would be a SIGBUS. OSError."""
        fd = open_for_writing(self.path)
        try:
            size_bytes = os.fstat(fd).st_size
            if size_bytes and _libc.fallocate(fd, _PUNCH_HOLE, 0, size_bytes):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            os.close(fd)
        self.path.unlink()
        self.close()

    def close(self) -> None:
        """Drop the mapping. It ends with its last view: the caller may still have one."""
        self.mapped = self._growing = None
        self.memory = memoryview(b"")
        self.room_bytes = 0


class Mappings:
    """The files that one process has mapped to read: a new mapping for each save costs 50 ms of processor time (473
    MB). Any thread may use it. A mapping keeps its file open, so no other file can be mistaken for it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], MappedFile] = {}

    def of(self, fd: int) -> MappedFile:
        """The mapping of the whole file. OSError."""
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        kept = self._kept.get(key)
        if kept is None or len(kept.memory) != status.st_size:
            kept = self._kept[key] = MappedFile(fd, status.st_size, writable=False)
        return kept
