"""A file in shared memory that grows when more is to be written into it, mapped by its only writer.

Knows sizes, mappings and memory. Must not know what the bytes are. Standard library only."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from holdfast.linux import check_memory
from holdfast.snapshots.mapping import MappedFile, write_at
from holdfast.snapshots.memory_folder import open_for_writing


class GrowingFile:
    """A header, and room for a body. Nothing is made before `growing`."""

    def __init__(self, path: Path, header_bytes: int) -> None:
        self.path = path
        self.room_bytes = 0
        """Mapped, for a body; 0: not mapped."""
        self.mapped: MappedFile | None = None
        self._growing: MappedFile | None = None
        """Memory for it is still being taken."""
        self.memory = memoryview(b"")
        self._header_bytes = header_bytes

    def whole_bytes(self, size_bytes: int) -> int:
        """The file's size with a body of this size."""
        return -(-(self._header_bytes + max(1, size_bytes)) // mmap.PAGESIZE) * mmap.PAGESIZE

    def missing_bytes(self, size_bytes: int) -> int:
        """How much the file has to grow."""
        return self.whole_bytes(size_bytes) - (os.stat(self.path).st_size if self.path.exists() else 0)

    def body(self, size_bytes: int) -> memoryview:
        """The first bytes of the body, of which there is room for so many."""
        return self.memory[self._header_bytes :][:size_bytes]

    def growing(self, size_bytes: int) -> Iterator[None]:
        """Make room, with every page present, piece by piece; stopped, it keeps what was taken. Raises OSError; the
        file is unchanged then."""
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
                        os.posix_fallocate(fd, 0, before_bytes)  # a process that died while it grew has left holes
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
        """Room for a body that is written before it is mapped: no page is made present, or filled with zeros, first.
        Gives what writes bytes at their place in the body, for any threads; all of it has to be written. After the
        block it is mapped, and the next `growing` makes its pages present. OSError; after any error the file has its
        size of before."""
        fd = open_for_writing(self.path)
        before_bytes = os.fstat(fd).st_size
        whole_bytes = max(self.whole_bytes(size_bytes), before_bytes)
        try:
            check_memory(whole_bytes - before_bytes)
            if before_bytes:
                os.posix_fallocate(fd, 0, before_bytes)  # as above
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
        """To a size above its committed bytes."""
        self.close()
        with contextlib.suppress(OSError):
            os.truncate(self.path, whole_bytes)

    def close(self) -> None:
        """The mapping ends with its last view: the caller may still have one."""
        self.mapped = self._growing = None
        self.memory = memoryview(b"")
        self.room_bytes = 0
