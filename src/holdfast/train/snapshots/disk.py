"""Files for snapshots, and their digests: what a call writes is durable when it returns, and what it reads is bounded.
Knows nothing of snapshots. Reading and writing in an object store is passed on to remote.py.

**Writing** bypasses the page cache: it takes the same time whatever else is in the cache, and leaves the cache to the
data loader.

**The digest** is sha256 over chunks of 4 MiB, and sha256 over their digests. So all cores take part, hashing continues
while the disk writes, and a reader that needs a part of a file (another world size) checks only what it reads. A rank's
record holds the digests of the chunks, the manifest their root. Every flipped bit, zeroed page, lost end or exchanged
file changes the root. docs/internals/decisions.md has the measurements behind both choices.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import ParamSpec, TypeVar

from holdfast import own_folders
from holdfast.protocol import errors
from holdfast.protocol.errors import SnapshotDamagedError, SnapshotError, SnapshotFolderError, SnapshotWriteError
from holdfast.train.snapshots.remote import Location, RemotePath

try:
    from zlib_ng import zlib_ng as fast
except ImportError:  # zlib-ng is in the extra `train`; both make the same checksum
    import zlib as fast  # type: ignore[no-redef]

ALGORITHM = "sha256-4MiB"
CHUNK_BYTES = 4 << 20
HASH_THREADS_MAX = 8
"""More threads would be faster than any disk."""
PART = ".part"
"""End of the name of a file that is not complete."""
REFUSAL_TRY_S, REFUSED_S = 1.0, 3.0
"""A disk that may refuse everything is tried at this interval, and counts as refusing everything after this time (s). A
disk that was full for a moment, before something was deleted, does not count."""
TRY_BYTES = 4096

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def hash_threads() -> int:
    """The number of hashing threads: one for each available core."""
    return min(HASH_THREADS_MAX, len(os.sched_getaffinity(0)))


def submit(
    pool: ThreadPoolExecutor, work: Callable[_Given, _Made], *given: _Given.args, **named: _Given.kwargs
) -> Future[_Made]:
    """Let the pool do the work. Where there is no thread for it, it is done when this returns.

    An interpreter that is ending accepts no work for its pools, but exit functions and a running save still need it.
    `work` may then be done twice: here, and by a thread of the pool that started late; so it must be repeatable.
    """
    try:
        return pool.submit(work, *given, **named)
    except RuntimeError:
        done: Future[_Made] = Future()
        try:
            done.set_result(work(*given, **named))
        except Exception as error:  # noqa: BLE001 - raised when the result is read
            done.set_exception(error)
        return done


def chunk_digest(chunk: bytes | bytearray | memoryview) -> str:
    """The digest of one chunk, as hex. Releases the interpreter's lock."""
    return hashlib.sha256(chunk).hexdigest()


def chunk_crc(chunk: memoryview) -> str:
    """A cheap digest of one chunk, as hex, against accidents but not against forgery. Releases the interpreter's lock.

    zlib-ng makes 10 GB/s or more, zlib 2 to 6, sha256 with SHA instructions 2."""
    return f"{fast.crc32(chunk):08x}"


def chunk_begins(size_bytes: int) -> range:
    """The beginnings of a file's chunks, in bytes from its start."""
    return range(0, size_bytes, CHUNK_BYTES)


def root_digest(size_bytes: int, chunks: Sequence[str]) -> str:
    """The digest of a file from those of its chunks."""
    return hashlib.sha256("\n".join([ALGORITHM, str(size_bytes), *chunks]).encode()).hexdigest()


class ChunkDigests:
    """The digests of the chunks of `data`, made by threads between `start` and `results`. Use it as a context manager:
    the threads have ended when the body is left."""

    def __init__(self, data: memoryview, look: Callable[[int, int], object] | None = None) -> None:
        """`look`: called by the threads with begin and end of each chunk, while it is in a cache."""
        self._look = look
        self._data, self._pool = data, ThreadPoolExecutor(hash_threads(), "holdfast-digest")
        self._begins = chunk_begins(len(data))
        self._shares: list[Future[list[str]]] = []
        self._stopped = False

    def start(self) -> None:
        """Start the threads. Each gets one share: a task for each chunk would keep the interpreter's lock busy, which
        the writer also needs."""
        count = hash_threads()
        self._shares = [submit(self._pool, self._digest, self._begins[first::count]) for first in range(count)]

    def results(self) -> tuple[str, ...]:
        """The digests of all chunks, in their order. Call it after `start`."""
        shares = [share.result() for share in self._shares]
        return tuple(shares[number % len(shares)][number // len(shares)] for number in range(len(self._begins)))

    def __enter__(self) -> ChunkDigests:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)

    def _digest(self, begins: Iterable[int]) -> list[str]:
        return [self._of_chunk(begin) for begin in begins if not self._stopped]

    def _of_chunk(self, begin: int) -> str:
        digest = chunk_digest(self._data[begin : begin + CHUNK_BYTES])
        if self._look is not None:
            self._look(begin, min(begin + CHUNK_BYTES, len(self._data)))
        return digest


FIRST_BYTES = 16 << 20
"""Size of the first piece, which is written before parallel work starts."""
WRITE_BYTES_MAX = 256 << 20
"""Largest size of one write. The disk is idle between two of them: larger pieces are faster."""
BLOCK_BYTES = 4096
"""Lengths and offsets with O_DIRECT are multiples of this, on every known file system."""

DAMAGE = (errno.EIO, errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EILSEQ, errno.EUCLEAN)
"""The kernel's errors for files that are lost. Other errors (permissions, no memory, no server) may be temporary."""


def write_all(path: Location, data: memoryview, beside: Callable[[], None]) -> None:
    """Make the file, which must not exist, with these bytes; they are on the disk when this returns.

    `beside` starts parallel work. It is called when the disk has begun, so that the disk does not wait for it. Raises
    OSError; FileNotFoundError when the file was removed or replaced meanwhile."""
    if isinstance(path, RemotePath):
        beside()
        return path.upload(data)
    file = _create(path)
    try:
        _write(file, data[:FIRST_BYTES])
        beside()
        _write(file, data, FIRST_BYTES)
        os.fsync(file)
        if not os.path.samestat(os.stat(path), os.fstat(file)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    finally:
        os.close(file)
    return None


def write_atomically(path: Location, text: str) -> None:
    """Make or replace a small file, all or nothing. Its name is durable once its folder is synced. OSError."""
    if isinstance(path, RemotePath):
        return path.put(text.encode())
    beside = path.with_name(path.name + PART)
    # What a killed writer has left is removed, not opened: in a folder that others share it may be a link of theirs.
    beside.unlink(missing_ok=True)
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write(file, memoryview(text.encode()))
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(beside, path)
    return None


def make_folder(path: Location) -> None:
    """Make a folder, with those above it, unless it is there; their names are durable when this returns. OSError."""
    if isinstance(path, RemotePath):
        return  # an object store has no folders
    missing = []
    above = path
    while not above.exists():
        missing.append(above)
        above = above.parent
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_folder(path: Location) -> None:
    """Write the folder's names to the disk. OSError."""
    if isinstance(path, RemotePath):
        return  # an object and its name are durable when the store answers
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def names(folder: Location) -> list[str]:
    """The names in a folder. OSError; FileNotFoundError when there is no folder, or nothing under a URL."""
    found = listed(folder)
    if not found and isinstance(folder, RemotePath):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    return found


def is_read_only(folder: Path) -> bool:
    """Whether its disk is mounted read-only. OSError."""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


class RefusalWatch:
    """Finds out whether a disk refuses even a small file, for a process that waits for what others write there.

    A rank that cannot write leaves a refusal or renames the folder, so that no rank waits for it. Under a quota of
    btrfs, and on a dead disk, neither is possible.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_try_s = time.monotonic() + REFUSAL_TRY_S
        """The time of the next try (monotonic s)."""
        self._refused_since_s = inf
        """The time from which on every try has failed (monotonic s); inf: the last one has not."""

    def check(self) -> None:
        """Raise OSError if the disk is read-only, or has refused everything for REFUSED_S."""
        if is_read_only(self._folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        now_s = time.monotonic()
        if now_s < self._next_try_s:
            return

        self._next_try_s = now_s + REFUSAL_TRY_S
        try:
            self._write()
        except FileNotFoundError:
            return  # the folder is gone: the caller finds that by itself, and it is another error
        except OSError:
            self._refused_since_s = min(self._refused_since_s, now_s)
            if now_s >= self._refused_since_s + REFUSED_S:
                raise
        else:
            self._refused_since_s = inf

    def _write(self) -> None:
        path = self._folder / f"look.{os.urandom(4).hex()}{PART}"
        try:
            with path.open("xb", buffering=0) as file:
                file.write(bytes(TRY_BYTES))
                os.fsync(file.fileno())
        finally:
            path.unlink(missing_ok=True)


def listed(folder: Location) -> list[str]:
    """The names in a folder, as by `names`; none, and no error, when there is nothing under a URL."""
    return list(folder.sizes()) if isinstance(folder, RemotePath) else os.listdir(folder)


def size(path: Location) -> int:
    """The size of a file in bytes. OSError."""
    return path.size() if isinstance(path, RemotePath) else path.stat().st_size


def delete(path: Location) -> None:
    """Delete a file, if there is one. OSError."""
    if isinstance(path, RemotePath):
        path.delete()
    else:
        path.unlink(missing_ok=True)


def remove(path: Location, *, keep: str = "") -> None:
    """Delete a folder with its files, as far as the disk allows; but not, in an object store, the object `keep`."""
    if not isinstance(path, RemotePath):
        with suppress(OSError):
            own_folders.remove(path)
        return
    with suppress(OSError):
        path.abort_uploads()
        # In this order MANIFEST.json comes after the ranks' files: until the end it says what is being deleted.
        for name in sorted(path.sizes(), reverse=True):
            if name != keep:
                (path / name).delete()


def read_text(path: Location, bytes_max: int) -> str:
    """The text of a small file. OSError; SnapshotDamagedError when it is too large or not UTF-8."""
    if isinstance(path, RemotePath):
        data = path.read(0, bytes_max + 1)
    else:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise SnapshotDamagedError(f"{path}: longer than {bytes_max} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise SnapshotDamagedError(f"{path}: not text") from None


def vanished(folder: Location) -> SnapshotFolderError:
    """The error for a running job that has lost its snapshot folder."""
    return SnapshotFolderError(
        f"{folder} has vanished: it was removed, renamed or unmounted while this job used it\n"
        "no new folder is made in its place; put it back, or end the job and start it with another folder"
    )


def write_error(error: OSError, path: Location, size_bytes: int = 0) -> SnapshotWriteError:
    """The error for a snapshot that cannot be written."""
    need = f" (it needs {size_bytes / 1e6:.0f} MB)" if size_bytes >= 10**6 else ""
    text = f"cannot write {path}{need}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and isinstance(path, Path):
        with suppress(OSError):
            folder = path if path.is_dir() else path.parent  # the parent of a folder may be on another disk
            text += f"; {shutil.disk_usage(folder).free / 1e6:.0f} MB are free there"
    if error.errno == errno.EFBIG:
        text += "; is there a limit on file sizes (ulimit -f)?"
    return SnapshotWriteError(text)


def _create(path: Path) -> int:
    """Make the file, open for direct writing where the file system can. Returns the descriptor. OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The file system does not know O_DIRECT. Some of these have made the file nevertheless.
    with suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, flags, 0o666)


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def _write(file: int, data: memoryview, begin: int = 0) -> None:
    """Write the bytes from `begin` on, to the same position of the file. Whole blocks go directly to the disk where
    that is possible, the rest through the page cache. OSError."""
    direct = _is_direct(file)
    whole = len(data) - len(data) % BLOCK_BYTES
    while begin < len(data):
        if direct and begin >= whole:
            direct = leave_direct(file)
        end = min(begin + WRITE_BYTES_MAX, whole if direct else len(data))
        try:
            written = os.pwrite(file, data[begin:end], begin)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            # The buffer does not begin at a multiple of the block, or the file system does not keep its promise.
            direct = leave_direct(file)
            continue
        begin += written
        if direct and begin % BLOCK_BYTES:  # only a part was written, as on a full disk: the rest is not aligned
            direct = leave_direct(file)


class OpenFile:
    """A file, or an object, to read from. Methods raise OSError."""

    def __init__(self, path: Location) -> None:
        self._object = path if isinstance(path, RemotePath) else None
        self._fd = -1
        if not isinstance(path, RemotePath):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read_into(self, into: memoryview, begin: int) -> int:
        """Read bytes from the position `begin`, as os.preadv with one buffer. Returns their number. If the file system
        refuses to bypass the page cache, it is used."""
        if self._object is not None:
            data = self._object.read(begin, begin + len(into))
            into[: len(data)] = data
            return len(data)
        try:
            return os.preadv(self._fd, [into], begin)
        except OSError as error:
            if error.errno != errno.EINVAL or not _is_direct(self._fd):
                raise
        leave_direct(self._fd)
        return os.preadv(self._fd, [into], begin)

    def go_direct(self) -> None:
        """Bypass the page cache from now on, if the file system can: reads must be whole blocks into whole pages."""
        with suppress(OSError, ValueError):
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_DIRECT)

    def leave_direct(self) -> None:
        """Use the page cache from now on."""
        if self._fd >= 0:
            leave_direct(self._fd)

    def close(self) -> None:
        """Close the file. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def leave_direct(file: int) -> bool:
    """Use the page cache from now on. Returns False, the new value of "direct"."""
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False


def error_of(code: str, text: str) -> SnapshotError:
    """The error with this code, as it was raised in the saver or by another rank. An unknown code becomes a
    SnapshotWriteError."""
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SnapshotError))
    return next((kind(text) for kind in kinds if kind.code == code), SnapshotWriteError(text))
