"""Files as the commit protocol needs them: durable when a call returns, read with bounds, and their digests.

Knows nothing of snapshots.

**Writing** goes past the page cache. Measured with 473 MB: through the page cache a write and its fsync take 0.3 to
1.6 s, depending on what else is in the cache; with O_DIRECT 0.16 to 0.21 s every time, and the cache stays the data
loader's.

**The digest** is sha256 over chunks of 4 MiB, and sha256 over theirs: so that all cores take part, that hashing goes on
while the disk writes, and that a reader who needs a part of a file (another world size) checks just what it reads. A
rank's record holds the chunks' digests, the manifest their root. Every flipped bit, zeroed page, lost end or exchanged
file changes the root. Chosen by measurement: 473 MB in /dev/shm on 2 cores
with SHA instructions, seconds of one core | end to end of a durable write, with two threads that hash meanwhile:

    zlib.crc32  0.14 | 0.21     32 bits: one damaged chunk in four billion passes
    sha1        0.29 |
    sha256      0.31 | 0.22     chosen: nothing passes, and it costs 0.01 s
    blake2b     0.61 | 0.33     faster than sha256 only on processors without SHA instructions
    md5 0.74, sha512 0.66, blake2s 1.06, sha3_256 1.14

One thread instead of two: sha256 0.34. The same through the page cache: 1.4.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from holdfast.protocol.errors import SnapshotDamagedError, SnapshotError, SnapshotFolderError, SnapshotWriteError

ALGORITHM = "sha256-4MiB"
CHUNK_BYTES = 4 << 20
HASH_THREADS_MAX = 8
"""Beyond that no disk follows."""

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def hash_threads() -> int:
    """The number of hashing threads: one for each available core."""
    return min(HASH_THREADS_MAX, len(os.sched_getaffinity(0)))


def submit(
    pool: ThreadPoolExecutor, work: Callable[_Given, _Made], *given: _Given.args, **named: _Given.kwargs
) -> Future[_Made]:
    """Have the pool do it; where no thread can be had it is done when this returns.

    An interpreter that ends takes nothing into its pools any more, while what runs at exit, and a save that still goes
    on, have to be done. `work` may be done twice then: once here, once by a thread of the pool that came late.
    """
    try:
        return pool.submit(work, *given, **named)
    except RuntimeError:
        done: Future[_Made] = Future()
        try:
            done.set_result(work(*given, **named))
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            done.set_exception(error)
        return done


def chunk_digest(chunk: bytes | bytearray | memoryview) -> str:
    """The digest of one chunk, as hex. Releases the interpreter's lock."""
    return hashlib.sha256(chunk).hexdigest()


def chunk_begins(size_bytes: int) -> range:
    """Where the chunks of a file begin, in bytes from its start."""
    return range(0, size_bytes, CHUNK_BYTES)


def root_digest(size_bytes: int, chunks: Sequence[str]) -> str:
    """The digest of a file from those of its chunks."""
    return hashlib.sha256("\n".join([ALGORITHM, str(size_bytes), *chunks]).encode()).hexdigest()


class ChunkDigests:
    """The digests of the chunks of `data`, made by threads between `start` and `results`."""

    def __init__(self, data: memoryview, pool: ThreadPoolExecutor) -> None:
        self._data, self._pool = data, pool
        self._begins = chunk_begins(len(data))
        self._shares: list[Future[list[str]]] = []
        self._stopped = False

    def start(self) -> None:
        """A share per thread: a task for each chunk would keep the interpreter's lock busy, which the writer needs,
        too."""
        count = hash_threads()
        self._shares = [submit(self._pool, self._digest, self._begins[first::count]) for first in range(count)]

    def results(self) -> tuple[str, ...]:
        """Of all chunks, in their order; they were started."""
        shares = [share.result() for share in self._shares]
        return tuple(shares[number % len(shares)][number // len(shares)] for number in range(len(self._begins)))

    def stop(self) -> None:
        """Nobody wants the rest."""
        self._stopped = True

    def _digest(self, begins: Iterable[int]) -> list[str]:
        return [chunk_digest(self._data[begin : begin + CHUNK_BYTES]) for begin in begins if not self._stopped]


@contextmanager
def chunk_digests(data: memoryview) -> Iterator[ChunkDigests]:
    """Threads for the digests of `data`; they are gone when the body is left."""
    pool = ThreadPoolExecutor(hash_threads(), "holdfast-digest")
    digests = ChunkDigests(data, pool)
    try:
        yield digests
    finally:
        digests.stop()
        pool.shutdown(cancel_futures=True)


def digest(data: bytes | bytearray | memoryview) -> str:
    """The digest of `data`: what `root_digest` makes of its chunks."""
    view = memoryview(data).cast("B")
    with chunk_digests(view) as digests:
        digests.start()
        return root_digest(len(view), digests.results())


FIRST_BYTES = 16 << 20
"""Written before anything else is begun beside it."""
WRITE_BYTES_MAX = 256 << 20
"""The disk waits between two writes: 473 MB took 0.22 s in pieces of 16 MiB, 0.19 s in these."""
BLOCK_BYTES = 4096
"""O_DIRECT needs lengths and offsets that are multiples of it, with every file system we know."""

DAMAGE = (errno.EIO, errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EILSEQ, errno.EUCLEAN)
"""What the kernel says of files that are lost. Anything else (permissions, no memory, a server away) may pass."""


def write_all(path: Path, data: memoryview, beside: Callable[[], None] | None = None) -> None:
    """Make the file, which must not exist, with these bytes; they are on the disk when this returns.

    `beside` starts what is to be done meanwhile: it is called when the disk has begun, which otherwise would wait for
    it (15 ms of 300, with two cores that hash). OSError; FileNotFoundError when somebody has removed or replaced the
    file."""
    file = _create(path)
    try:
        if beside is not None:
            _write(file, data[:FIRST_BYTES])
            beside()
        _write(file, data, 0 if beside is None else FIRST_BYTES)
        os.fsync(file)
        if not os.path.samestat(os.stat(path), os.fstat(file)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    finally:
        os.close(file)


def write_atomically(path: Path, text: str) -> None:
    """Make or replace a small file, all or nothing. Its name is durable once its folder is synced. OSError."""
    beside = path.with_name(path.name + ".part")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write(file, memoryview(text.encode()))
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(beside, path)


def make_folder(path: Path) -> None:
    """Make a folder, with those above it, unless it is there; their names are durable when this returns. OSError."""
    missing = []
    at = path
    while not at.exists():
        missing.append(at)
        at = at.parent
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_folder(path: Path) -> None:
    """Names in the folder are on the disk when this returns. OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_text(path: Path, bytes_max: int) -> str:
    """A small file. OSError; SnapshotDamagedError when it is too large or not UTF-8."""
    with path.open("rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise SnapshotDamagedError(f"{path}: longer than {bytes_max} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise SnapshotDamagedError(f"{path}: not text") from None


def read_error(error: OSError, path: Path) -> SnapshotError:
    """What to tell a person when a file of a snapshot cannot be read: damage, or a reason that lies elsewhere."""
    kind = SnapshotDamagedError if error.errno in DAMAGE else SnapshotError
    return kind(f"{path}: {error.strerror or error}")


def vanished(folder: Path) -> SnapshotFolderError:
    """What to tell a person whose running job has lost its snapshot folder."""
    return SnapshotFolderError(
        f"{folder} has vanished: it was removed, renamed or unmounted while this job used it\n"
        "nothing is made in its place; put it back, or end the job and start it with another folder"
    )


def write_error(error: OSError, path: Path, size_bytes: int = 0) -> SnapshotWriteError:
    """What to tell a person when a snapshot cannot be written."""
    need = f" (it needs {size_bytes / 1e6:.0f} MB)" if size_bytes >= 10**6 else ""
    said = f"cannot write {path}{need}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            there = path if path.is_dir() else path.parent  # its parent may be on another disk
            said += f"; {shutil.disk_usage(there).free / 1e6:.0f} MB are free there"
    if error.errno == errno.EFBIG:
        said += "; is there a limit on file sizes (ulimit -f)?"
    return SnapshotWriteError(said)


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # A file system without it. Some of them have made the file all the same.
    with suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, flags, 0o666)


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def _write(file: int, data: memoryview, begin: int = 0) -> None:
    """From `begin` on. Whole blocks go directly to the disk where that is possible, the rest through the page cache."""
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
            # The buffer does not begin at a multiple of the block, or the file system promised too much.
            direct = leave_direct(file)
            continue
        begin += written
        if direct and begin % BLOCK_BYTES:
            direct = leave_direct(file)


def go_direct(file: int) -> None:
    """Read past the page cache from here on, whole blocks into whole pages; on a file system that cannot, through
    it."""
    with suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)


def read_into(file: int, into: memoryview, begin: int) -> int:
    """As os.preadv with one buffer; a file system that promised too much with O_DIRECT is read through the page
    cache. OSError."""
    try:
        return os.preadv(file, [into], begin)
    except OSError as error:
        if error.errno != errno.EINVAL or not _is_direct(file):
            raise
    leave_direct(file)
    return os.preadv(file, [into], begin)


def leave_direct(file: int) -> bool:
    """Through the page cache from here on. False, for whoever keeps the state."""
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False
