"""Read a committed snapshot: every byte that is handed out was checked against its digest first.

A file is read chunk by chunk by a few threads, each of which hashes what it has just read. Who needs only some of the
tensors (another world size) reads and checks only their chunks. Knows bytes and names, no tensors.

A reader beside retention gets the whole snapshot or a SnapshotGoneError, never a part: retention renames a folder
before it deletes anything in it, and files that are open stay readable.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from types import TracebackType

from holdfast.core.errors import SnapshotDamagedError
from holdfast.snapshots import digest, disk, layout
from holdfast.snapshots.digest import CHUNK_BYTES
from holdfast.snapshots.folder import Snapshot, unreadable
from holdfast.snapshots.image import LENGTH_BYTES, Image, head_bytes
from holdfast.snapshots.manifest import RECORD_BYTES_MAX, RankRecord

GiveWay = Callable[[], object]
"""Returns when nothing that is more urgent is going on."""


class RankFile:
    """One rank's file of a committed snapshot, open for reading. Use it as a context manager.

    What `load` has returned stays valid after `close`. SnapshotDamagedError, SnapshotGoneError, SnapshotError.
    """

    def __init__(self, snapshot: Snapshot, rank: int) -> None:
        entry = snapshot.manifest.ranks[rank]
        self.path = snapshot.path / entry.file
        self.size_bytes = entry.size_bytes
        try:
            # The file first: once it is open, retention may take its name.
            self._file = self.path.open("rb", buffering=0)
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self.record = self._read_record(snapshot, rank)
        except OSError as error:
            raise unreadable(snapshot.path, error) from error

    @cached_property
    def image(self) -> Image:
        """Names, types, shapes and places of the tensors."""
        head = self._read_new(1)
        try:
            length = head_bytes(head[:LENGTH_BYTES], self.size_bytes)
            if length > len(head):
                head = self._read_new(-(-length // CHUNK_BYTES))
            return Image.read(head, self.size_bytes)
        except SnapshotDamagedError as error:
            raise self._damaged(str(error)) from None

    def load(self, names: Iterable[str] | None = None) -> memoryview:
        """The file's bytes in fresh, writable memory, for `image.spans` to be cut from.

        With `names` only these tensors' bytes are there; the rest is undefined and takes no memory.
        KeyError for a name that is not in the image.
        """
        if names is None:
            numbers = list(range(len(self.record.chunks)))
        else:
            numbers = sorted({each for name in names for each in _chunks(self.image.spans[name])})
        data = _memory(self.size_bytes)

        def fill(part: Sequence[int]) -> None:
            for number in part:
                self._read_chunk(number, data[number * CHUNK_BYTES :][:CHUNK_BYTES])

        _in_threads(fill, numbers)
        return data

    def check(self, beside: GiveWay | None = None) -> None:
        """Read and check everything, keep nothing.

        `beside` a training: by one thread, past the page cache, and it is called before each chunk. That takes twice as
        long, a quarter of the processor time when all cores are busy, and the cache stays the data loader's.
        """

        def pass_over(part: Sequence[int]) -> None:
            chunk = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # begins at a page
            for number in part:
                if beside is not None:
                    beside()
                self._read_chunk(number, chunk[: self.size_bytes - number * CHUNK_BYTES])

        numbers = range(len(self.record.chunks))
        if beside is not None:
            disk.go_direct(self._file.fileno())
            pass_over(numbers[:-1])
            disk.leave_direct(self._file.fileno())
            pass_over(numbers[-1:])  # no whole blocks
        else:
            _in_threads(pass_over, numbers)
        # A header that does not fit its tensors is damage too, whatever its digest.
        _ = self.image

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> RankFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_record(self, snapshot: Snapshot, rank: int) -> RankRecord:
        entry = snapshot.manifest.ranks[rank]
        with ExitStack() as failing:
            failing.callback(self.close)
            try:
                record = RankRecord.load(disk.read_text(snapshot.path / layout.record_file(rank), RECORD_BYTES_MAX))
            except SnapshotDamagedError as error:
                raise self._damaged(str(error)) from None
            if (record.digest, record.size_bytes) != (entry.digest, entry.size_bytes):
                raise self._damaged("its record is not the one that was committed")
            failing.pop_all()
        return record

    def _read_new(self, count: int) -> memoryview:
        """The first chunks, one after the other, as far as there are so many bytes."""
        data = memoryview(bytearray(min(count * CHUNK_BYTES, self.size_bytes)))
        for number in range(len(digest.chunk_begins(len(data)))):
            self._read_chunk(number, data[number * CHUNK_BYTES :][:CHUNK_BYTES])
        return data

    def _read_chunk(self, number: int, into: memoryview) -> None:
        begin, filled = number * CHUNK_BYTES, 0
        try:
            while filled < len(into) and (count := disk.read_into(self._file.fileno(), into[filled:], begin + filled)):
                filled += count
        except OSError as error:
            raise unreadable(self.path.parent, error) from error
        if filled < len(into):
            raise self._damaged(f"it ends after {begin + filled} of {self.size_bytes} bytes")
        if digest.chunk_digest(into) != self.record.chunks[number]:
            raise self._damaged(f"bytes {begin} to {begin + filled} are not what was saved")

    def _damaged(self, why: str) -> SnapshotDamagedError:
        return SnapshotDamagedError(f"{self.path}: {why}")


def verify(snapshot: Snapshot, beside: GiveWay | None = None) -> None:
    """Read every byte of a snapshot and check it. SnapshotDamagedError names the file; SnapshotGoneError; SnapshotError.

    `beside`: see RankFile.check.
    """
    for rank in range(snapshot.manifest.world):
        with RankFile(snapshot, rank) as file:
            file.check(beside)


def _chunks(span: slice) -> range:
    """Which chunks hold these bytes."""
    return range(span.start // CHUNK_BYTES, -(-span.stop // CHUNK_BYTES) if span.stop > span.start else 0)


def _memory(size_bytes: int) -> memoryview:
    """Memory that begins at a page and is taken only where it is written."""
    # No huge pages: 473 MB take 0.3 s to touch without them, and 0.1 to 1.5 s with them when memory is fragmented.
    mapped = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(mapped)[:size_bytes]


def _in_threads(work: Callable[[Sequence[int]], None], numbers: Sequence[int]) -> None:
    """Do the work on all numbers, a share per thread."""
    # While half of them wait for the disk, the other half hash.
    count = min(2 * digest.threads(), len(numbers))
    if count < 2:
        return work(numbers)
    with ThreadPoolExecutor(count, "holdfast-digest") as pool:
        for share in [digest.submit(pool, work, numbers[first::count]) for first in range(count)]:
            share.result()
    return None
