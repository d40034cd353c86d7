"""Reads a snapshot folder: which snapshots are committed, which one to resume from, and the content of one.

`survey` checks cheap properties: manifests, names, sizes. `RankFile` returns only bytes that were checked against their
digest. A file is read chunk by chunk by a few threads, each of which hashes the chunk that it has just read; a rank
that needs only some of the tensors (another world size) reads and checks only their chunks.

A process that reads while retention deletes gets the whole snapshot or a SnapshotGoneError, never a part: retention
renames a folder before it deletes anything in it, and files that are open stay readable. No function uses a time stamp,
and none writes except `quarantine` and `clear_debris`. Knows bytes and names, no tensors.

In an object store nothing is renamed (remote_commit.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from holdfast.protocol.errors import NoValidSnapshotError, SnapshotDamagedError, SnapshotError, SnapshotGoneError
from holdfast.train.snapshots import disk, remote_commit
from holdfast.train.snapshots.disk import CHUNK_BYTES, chunk_begins, chunk_digest, hash_threads, submit
from holdfast.train.snapshots.layout import (
    LENGTH_BYTES,
    MANIFEST,
    MANIFEST_BYTES_MAX,
    RECORD_BYTES_MAX,
    FolderKind,
    Image,
    Key,
    Manifest,
    Named,
    RankRecord,
    head_bytes,
    parse_name,
    record_file,
)
from holdfast.train.snapshots.remote import Location, RemotePath, location_of


class RankFile:
    """One rank's file of a committed snapshot, open for reading. Use it as a context manager.

    What `load` has returned stays valid after `close`. All methods may raise SnapshotDamagedError, SnapshotGoneError,
    SnapshotError."""

    def __init__(self, snapshot: Snapshot, rank: int) -> None:
        entry = snapshot.manifest.ranks[rank]
        self.path = snapshot.path / entry.file
        self.size_bytes = entry.size_bytes
        try:
            # Open the file first: once it is open, retention may delete its name.
            self._file = disk.OpenFile(self.path)
            self.record = self._read_record(snapshot, rank)
        except OSError as error:
            raise unreadable(snapshot.path, error) from error

    @cached_property
    def image(self) -> Image:
        """Names, types, shapes and positions of the tensors."""
        head = self._read_new(1)
        try:
            length = head_bytes(head[:LENGTH_BYTES], self.size_bytes)
            if length > len(head):
                head = self._read_new(-(-length // CHUNK_BYTES))
            return Image.read(head, self.size_bytes)
        except SnapshotDamagedError as error:
            raise self._damaged(str(error)) from None

    def load(self, names: Iterable[str] | None = None) -> memoryview:
        """The file's bytes in new, writable memory, from which `image.spans` are cut.

        With `names` only these tensors' bytes are read; the rest is undefined and takes no memory. Raises KeyError for
        a name that is not in the image.
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

    def check(self, beside: Callable[[], object] | None = None) -> None:
        """Read and check everything, keep nothing.

        `beside`: for a check during training. It is called before each chunk, and returns when no more urgent work is
        in progress. One thread then reads and bypasses the page cache: that takes twice as long, uses a quarter of the
        processor time when all cores are busy, and leaves the cache to the data loader.
        """

        def pass_over(part: Sequence[int]) -> None:
            chunk = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # begins at a page
            for number in part:
                if beside is not None:
                    beside()
                self._read_chunk(number, chunk[: self.size_bytes - number * CHUNK_BYTES])

        numbers = range(len(self.record.chunks))
        if beside is not None:
            self._file.go_direct()
            pass_over(numbers[:-1])
            self._file.leave_direct()
            pass_over(numbers[-1:])  # the last chunk may end within a block, which a direct read cannot
        else:
            _in_threads(pass_over, numbers)
        # A header that does not fit its tensors is damage too, even with the right digest.
        _ = self.image

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> RankFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_record(self, snapshot: Snapshot, rank: int) -> RankRecord:
        """The rank's record, which must be the one in the manifest. On an error the file is closed."""
        entry = snapshot.manifest.ranks[rank]
        with ExitStack() as failing:
            failing.callback(self.close)
            try:
                record = RankRecord.load(disk.read_text(snapshot.path / record_file(rank), RECORD_BYTES_MAX))
            except SnapshotDamagedError as error:
                raise self._damaged(str(error)) from None
            if (record.digest, record.size_bytes) != (entry.digest, entry.size_bytes):
                raise self._damaged("its record is not the one that was committed")
            failing.pop_all()
        return record

    def _read_new(self, count: int) -> memoryview:
        """The first chunks in order, as far as `count` bytes exist."""
        data = memoryview(bytearray(min(count * CHUNK_BYTES, self.size_bytes)))
        for number in range(len(chunk_begins(len(data)))):
            self._read_chunk(number, data[number * CHUNK_BYTES :][:CHUNK_BYTES])
        return data

    def _read_chunk(self, number: int, into: memoryview) -> None:
        """Read the chunk with this number and check it."""
        begin, filled = number * CHUNK_BYTES, 0
        try:
            while filled < len(into) and (count := self._file.read_into(into[filled:], begin + filled)):
                filled += count
        except OSError as error:
            raise unreadable(self.path.parent, error) from error
        if filled < len(into):
            raise self._damaged(f"it ends after {begin + filled} of {self.size_bytes} bytes")
        if not self._is_saved(number, into):
            raise self._damaged(f"bytes {begin} to {begin + filled} are not what was saved")

    def _is_saved(self, number: int, data: memoryview) -> bool:
        """Whether these are the saved bytes of this chunk. A subclass may have a cheaper way (read_back.py)."""
        return chunk_digest(data) == self.record.chunks[number]

    def _damaged(self, why: str) -> SnapshotDamagedError:
        return SnapshotDamagedError(f"{self.path}: {why}")


def verify(snapshot: Snapshot, beside: Callable[[], object] | None = None) -> None:
    """Read every byte of a snapshot and check it. Raises SnapshotDamagedError, which names the file; SnapshotGoneError;
    SnapshotError.

    `beside`: see RankFile.check.
    """
    for rank in range(snapshot.manifest.world):
        with RankFile(snapshot, rank) as file:
            file.check(beside)


def confirm(snapshot: Snapshot) -> None:
    """Ask an object store for the manifest, all records and all sizes, without reading all bytes again: the store has
    checked them when they were uploaded, and every load checks them. Raises SnapshotDamagedError, SnapshotGoneError,
    SnapshotError."""
    for rank in range(inspect(snapshot.path).manifest.world):
        RankFile(snapshot, rank).close()


def _chunks(span: slice) -> range:
    """The chunks that hold these bytes."""
    return range(span.start // CHUNK_BYTES, -(-span.stop // CHUNK_BYTES) if span.stop > span.start else 0)


def _memory(size_bytes: int) -> memoryview:
    """Memory that begins at a page and is allocated only where it is written."""
    # No huge pages: 473 MB take 0.3 s to touch without them, and 0.1 to 1.5 s with them when memory is fragmented.
    mapped = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(mapped)[:size_bytes]


def _in_threads(work: Callable[[Sequence[int]], None], numbers: Sequence[int]) -> None:
    """Do the work on all numbers, split between the threads."""
    # While half of the threads wait for the disk, the other half hash.
    count = min(2 * hash_threads(), len(numbers))
    if count < 2:
        return work(numbers)
    with ThreadPoolExecutor(count, "holdfast-digest") as pool:
        for share in [submit(pool, work, numbers[first::count]) for first in range(count)]:
            share.result()
    return None


WHY = "WHY.txt"
"""Name of the file in a quarantined snapshot that says what is wrong with it."""
SUFFIX_MAX = 1000
"""Limit of the numbers that are tried for a free name."""
MARK = "suspect."
"""Beginning of the name of a mark."""


def mark_file(key: Key) -> str:
    """Name of the file that marks this snapshot as suspect."""
    return MARK + key.name


def marked_key(name: str) -> Key | None:
    """The snapshot that a file of this name marks; None: it is no mark."""
    named = parse_name(name.removeprefix(MARK)) if name.startswith(MARK) else None
    return named.key if named is not None and named.kind is FolderKind.COMMITTED else None


@dataclass(frozen=True)
class Snapshot:
    """A committed snapshot whose manifest and sizes are valid."""

    path: Location
    manifest: Manifest

    @property
    def key(self) -> Key:
        """The key by which snapshots are ordered: (step, attempt)."""
        return self.manifest.key

    @property
    def step(self) -> int:
        """The step at which it was saved."""
        return self.manifest.step


@dataclass(frozen=True)
class Problem:
    """A folder that is named like a committed snapshot, but is none, or cannot be read now."""

    path: Location
    key: Key
    error: SnapshotError

    @property
    def damaged(self) -> bool:
        """Whether it can never be read as a snapshot. If False (permissions, a newer version), it may well be valid."""
        return isinstance(self.error, SnapshotDamagedError)


@dataclass(frozen=True)
class Survey:
    """The content of a snapshot folder. Everything is in ascending order of (step, attempt)."""

    path: Location
    committed: tuple[Snapshot, ...] = ()
    """Committed snapshots that are not marked as suspect."""
    problems: tuple[Problem, ...] = ()
    debris: tuple[Location, ...] = ()
    """Unfinished attempts (they may be in progress now), and folders that retention did not finish deleting."""
    quarantined: tuple[Location, ...] = ()
    """Snapshots that were found damaged, and renamed."""
    suspects: tuple[Snapshot, ...] = ()
    """Committed snapshots with a mark: training that went on from them failed (lives.py)."""
    marks: frozenset[Key] = frozenset()
    """All marks, also those of states that are, or were, in memory."""

    @property
    def newest_valid(self) -> Snapshot | None:
        """The newest snapshot whose manifest and sizes are valid; its digests are checked when it is read."""
        return self.committed[-1] if self.committed else None

    @property
    def preferred(self) -> Snapshot | None:
        """The newest snapshot that is not known to hold values that are not finite; the newest one if all are."""
        good = [each for each in self.committed if each.manifest.finite is not False]
        return good[-1] if good else self.newest_valid

    @property
    def fresh(self) -> bool:
        """Whether the folder has never held a save."""
        return not (self.committed or self.problems or self.debris or self.quarantined or self.suspects)

    @property
    def keys(self) -> list[Key]:
        """The keys of all that is saved here, or was begun."""
        rest = [named.key for path in (*self.debris, *self.quarantined) if (named := parse_name(path.name))]
        return [*(each.key for each in (*self.committed, *self.suspects)), *(each.key for each in self.problems), *rest]


def entries(path: Location) -> tuple[list[tuple[str, Named]], frozenset[Key]]:
    """The folders of snapshots in a snapshot folder, with what their names say (in an object store their manifests);
    and all marks. OSError."""
    names = disk.names(path)
    found = [(name, named) for name in names if (named := parse_name(name))]
    if isinstance(path, RemotePath):
        found = remote_commit.with_kinds(path, found)
    return found, frozenset(key for name in names if (key := marked_key(name)))


def attempt_location(folder: str, key: Key) -> Location:
    """The folder in which an attempt is written. In an object store it has its committed name from the beginning."""
    location = location_of(folder)
    return location / (key.name if isinstance(location, RemotePath) else key.named(FolderKind.ATTEMPT))


def survey(folder: str | os.PathLike[str] | RemotePath) -> Survey:
    """List a snapshot folder; a missing one is empty. Files that are not ours are ignored. Raises SnapshotError."""
    path = location_of(folder)
    try:
        listed, marks = entries(path)
    except FileNotFoundError:
        return Survey(path)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from error
    ours = sorted((named.key, name, named.kind) for name, named in listed)
    committed, problems = [], []
    for key, name, kind in ours:
        if kind is not FolderKind.COMMITTED:
            continue
        try:
            committed.append(inspect(path / name))
        except SnapshotGoneError:
            continue  # retention has deleted it since the listing
        except SnapshotError as error:
            problems.append(Problem(path / name, key, error))
    return Survey(
        path,
        committed=tuple(each for each in committed if each.key not in marks),
        problems=tuple(problems),
        debris=tuple(path / name for _, name, kind in ours if kind in (FolderKind.ATTEMPT, FolderKind.GONE)),
        quarantined=tuple(path / name for _, name, kind in ours if kind is FolderKind.BAD),
        suspects=tuple(each for each in committed if each.key in marks),
        marks=marks,
    )


def inspect(path: Location) -> Snapshot:
    """The snapshot in this committed folder. Raises SnapshotDamagedError; SnapshotGoneError; SnapshotVersionError."""
    try:
        text = disk.read_text(path / MANIFEST, MANIFEST_BYTES_MAX)
        if isinstance(path, RemotePath) and remote_commit.tombstone_kind(text):
            raise SnapshotGoneError("it was set aside meanwhile; look for a newer one")
        manifest = Manifest.load(text)
        if manifest.key.name != path.name:
            raise SnapshotDamagedError(f"its manifest is that of {manifest.key.name}")
        # One listing of an object store serves a thousand ranks. A listing may be old: a file that it does not show
        # with the right size is asked for by name.
        listed = path.sizes() if isinstance(path, RemotePath) else {}
        for entry in manifest.ranks:
            size_bytes = listed.get(entry.file, -1)
            if size_bytes != entry.size_bytes:
                size_bytes = disk.size(path / entry.file)
            if size_bytes != entry.size_bytes:
                raise SnapshotDamagedError(f"{entry.file} has {size_bytes} bytes, not {entry.size_bytes}")
    except SnapshotError as error:
        raise type(error)(f"{path}: {error}") from None
    except OSError as error:
        raise unreadable(path, error) from error
    return Snapshot(path, manifest)


def unreadable(snapshot: Location, error: OSError) -> SnapshotError:
    """The error for an unreadable file of a committed snapshot: SnapshotDamagedError; SnapshotGoneError, when the whole
    snapshot is gone; SnapshotError for what may be temporary."""
    if error.errno in (errno.ENOENT, errno.ESTALE) and not _exists(snapshot):
        return SnapshotGoneError(f"{snapshot} was removed meanwhile; look for a newer one")
    if error.errno == errno.ENOENT:
        return SnapshotDamagedError(f"{snapshot}: {Path(error.filename or '').name} is missing")
    kind = SnapshotDamagedError if error.errno in disk.DAMAGE else SnapshotError
    return kind(f"{location_of(error.filename or snapshot)}: {error.strerror or error}")


def is_lasting(error: SnapshotError) -> bool:
    """Whether the snapshot itself is damaged: then it is renamed. That it is gone, or an input/output error, may be the
    view of one node, or an outage: then it is passed over."""
    cause = error.__cause__
    passes = isinstance(cause, OSError) and cause.errno == errno.EIO
    return isinstance(error, SnapshotDamagedError) and not passes


def _exists(snapshot: Location) -> bool:
    if not isinstance(snapshot, RemotePath):
        return snapshot.exists()
    with contextlib.suppress(OSError):
        return remote_commit.kind_of(snapshot) is FolderKind.COMMITTED
    return True  # the store does not answer now


def choose(found: Survey, *, fresh_ok: bool = False) -> Snapshot | None:
    """The snapshot to resume from: the newest with finite values; if all are suspect, the newest of these; None: start
    from the beginning.

    Raises NoValidSnapshotError when there are saves and none of them is valid, unless `fresh_ok`. A snapshot that is
    unreadable now, but may be valid, and is newer than the newest valid one, is an error: it is not skipped silently.
    """
    newest = found.preferred or (found.suspects[-1] if found.suspects else None)
    for problem in reversed(found.problems):
        if not problem.damaged and (newest is None or problem.key > newest.key) and not fresh_ok:
            raise problem.error
    if newest is not None or fresh_ok or found.fresh:
        return newest
    remains = [*(problem.path for problem in found.problems), *found.debris, *found.quarantined]
    raise NoValidSnapshotError(
        f"{found.path} holds no valid snapshot, only {first_of([path.name for path in remains], 4)}.\n"
        "To start from zero on purpose, pass SnapshotOptions(fresh_ok=True) or choose another folder."
    )


def first_of(names: Sequence[object], most: int) -> str:
    """The first `most` of these names, for a message; an ellipsis stands for the others."""
    return ", ".join(map(str, names[:most])) + (" …" if len(names) > most else "")


def quarantine(path: Location, why: str) -> Location | None:
    """Rename a damaged snapshot, so that it is not used again. Returns its new path; None: that failed (the disk is
    read-only, or another process was faster), so the caller has to skip the snapshot.
    """
    named = parse_name(path.name)
    if named is None or named.kind is not FolderKind.COMMITTED:
        raise ValueError(f"{path} is no committed snapshot")
    aside = rename_aside(path, named.key, FolderKind.BAD)
    if aside is not None:
        with contextlib.suppress(OSError):
            disk.write_atomically(aside / WHY, f"{path.name} was set aside: {why}\n")
            disk.sync_folder(path.parent)
    return aside


def rename_aside(path: Location, key: Key, kind: FolderKind) -> Location | None:
    """Give a folder a free name of this kind; None when the disk does not allow it. In an object store, a committed
    snapshot gets a tombstone of this kind."""
    if isinstance(path, RemotePath):
        return path if remote_commit.set_aside(path, kind) else None
    for number in range(1, SUFFIX_MAX):
        target = path.with_name(key.named(kind) + (f".{number}" if number > 1 else ""))
        # The kernel refuses to rename a folder onto one that is not empty: no folder is replaced, even by a concurrent
        # process.
        try:
            path.rename(target)
        except FileNotFoundError:
            return None
        except OSError:
            if not target.exists():
                return None
        else:
            return target
    return None


@contextlib.contextmanager
def being_written(path: Location) -> Iterator[int]:
    """Mark this attempt as being written, by a lock that ends with the process and is visible on this machine. Yields
    the folder's descriptor; -1: an object store has none, or there is no folder, which the writer reports."""
    with contextlib.ExitStack() as held:
        fd = -1
        with contextlib.suppress(OSError):
            if isinstance(path, Path):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                held.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a file system may have no locks
        yield fd


def is_being_written(path: Location) -> bool:
    """Whether a process of this machine is writing this attempt. A process of another machine, and one that writes to
    an object store, are not seen."""
    if isinstance(path, RemotePath):
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def clear_debris(found: Survey) -> list[Location]:
    """Delete the remains of unfinished saves. Returns the deleted paths. Only the job that has the folder's lease may
    call it, and only while it saves nothing."""
    cleared: list[Location] = []
    for path in found.debris:
        if isinstance(path, RemotePath):
            cleared += [path] if remote_commit.clear(path) else []
            continue
        named = parse_name(path.name)
        renamed = (
            path if named is None or named.kind is FolderKind.GONE else rename_aside(path, named.key, FolderKind.GONE)
        )
        if isinstance(renamed, Path):
            disk.remove(renamed)
            with contextlib.suppress(OSError):
                renamed.unlink()  # succeeds for what is not a folder: a file, or a link, whose target is not ours
            if not os.path.lexists(renamed):
                cleared.append(path)
    if isinstance(found.path, RemotePath):
        with contextlib.suppress(OSError):
            found.path.abort_uploads()
    return cleared
