"""A job's shared-memory folder (in /dev/shm on one node), its mapped files, its saver's socket and the messages there.

    /dev/shm/holdfast-<uid>-<run id>-<key>/      mode 0700, locked (shared) while it is in use
      saver.sock                                 where workers reach the saver
      <local rank>.<0|1>                         slots (slots.py)

A shared-memory folder is in use while any process holds a shared lock on the folder itself: the agent under holdfast,
the saver and the workers elsewhere. The kernel drops a lock with its process, however that ends, and also across
containers that share a /dev/shm. So a process that gets an exclusive lock knows that the folder belongs to a dead run,
and removes it; every agent and every first worker does that when it starts.

Under holdfast the saver is the agent's child and is started when a worker connects. Elsewhere the first worker of the
node starts it, as a separate process that ends after torchrun, or after this process where there is no launcher.

Messages on that socket are those of seqpacket.py:

    worker → saver   {"do": "hello", "local_rank", "generation"}      the first one; again in another
                                                                      generation, after a regroup. For an object store
                                                                      with "packages" and "environ", see remote.py
                     {"do": "persist", "id", "sequence", "request", "patience_s"} with the slot's descriptor, which
                                                                      carries a shared lock on it; perhaps "stage"
                     {"do": "wait", "id"}                             for "idle": nothing of this local rank is written
                     {"do": "bye"}                                    a regular end: nothing is rescued
    saver → worker   {"is": "written", "id"}                          this rank's file is durable, its slot is free
                     {"is": "saved", "id", "path"}                    the save is done; on rank 0 it is committed
                     {"is": "failed", "id", "code", "text", "made_good"}
                     {"is": "idle", "id"}
                     {"is": "news", "text"}                           the result of a previous worker's save
    agent → saver    {"do": "finish"}                                 end when nothing is in flight any more
    saver → agent    {"is": "up"}                                     it listens
                     {"is": "news", "text"}                           for the user
                     {"is": "saved", "path", "step", "took_s"}        a snapshot is committed

Files are mapped in huge pages where the kernel has them. tmpfs uses small pages: to take and map them costs nine
times as much as a copy of the same bytes, and a write past the page cache spends processor time on pinning each of
them. The kernel collapses small pages into huge ones on request (Linux 6.1), in any mapping whose addresses and offsets
agree within a huge page, while others read and write them. Where one small page is all that is there yet, this takes
and maps a huge page for the price of one copy. Where free memory is in small pieces, the kernel has to move pages
first: then it takes one to four seconds for each gigabyte. So memory is taken in small pages as soon as a huge one
takes long, and they are collapsed beside the training, a page now and then, once for each slot; and not by a process of
low priority, for which others would wait with it when it loses its core.

Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.linux import process_stat
from holdfast.protocol.errors import SnapshotMemoryError

ROOT = Path("/dev/shm")
"""The only place in memory: a slot on a disk would be a slow snapshot without verification."""
SOCKET = "saver.sock"
RUN_ID_CHARACTERS_MAX = 32
"""Characters of the run id in the name, for people; a socket's path may have 107 bytes."""
KEY_BYTES = 8
TRIES_MAX = 100


START_LIMIT_S = 10.0
"""Limit for the start of a detached saver, also by another worker of this node."""
LOOK_AGAIN_S = 0.01
SAVER_VARIABLE = "HOLDFAST_SAVER"
"""In a worker's environment: `MEMORY_FOLDER@GENERATION@LOCAL_RANK`, the place of its slots and its saver."""
BACKLOG = 256
"""Connections that may wait for the saver's start; all local ranks connect at once."""
FINISH_LIMIT_S = 120.0
"""At the agent's end: how long to wait for saves in flight. A save that is not done then is an uncommitted attempt."""
Packet = dict[str, Any]

_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from holdfast.snapshots.saver import main; main()"


class MemoryFolder:
    """A shared-memory folder that this process keeps locked."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        """Carries the lock; a process that inherits it holds the folder as well."""

    @classmethod
    def make(cls, run_id: str, root: Path = ROOT) -> MemoryFolder:
        """Make a new folder. Raises OSError."""
        return cls.at(name_of(run_id, os.urandom(KEY_BYTES).hex()), root)

    @classmethod
    def at(cls, name: str, root: Path = ROOT) -> MemoryFolder:
        """The folder of this name, made if there is none. Raises OSError; PermissionError when it is not ours alone."""
        path = root / name
        for _ in range(TRIES_MAX):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            if _hold(path, fd):
                return cls(path, fd)
        raise FileExistsError(17, "removed as soon as it is made", str(path))

    def close(self) -> None:
        """Release the folder; it stays while others hold it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
        """Remove the folder with its content, even if others hold it: their mappings stay valid."""
        remove_folder(self.path)
        self.close()


def name_of(run_id: str, key: str) -> str:
    """Name of a shared-memory folder: its user, its run, and the unique `key`."""
    readable = re.sub(r"[^A-Za-z0-9_.=+-]", "_", run_id)[:RUN_ID_CHARACTERS_MAX]
    return f"holdfast-{os.getuid()}-{readable}-{key}"


def key_of(*parts: object) -> str:
    """A key that every process computes alike from the same parts."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[: 2 * KEY_BYTES]


def clean(root: Path = ROOT) -> list[Path]:
    """Remove the folders of this user's dead runs. Returns the removed ones; a folder that cannot be removed is
    skipped."""
    removed: list[Path] = []
    prefix = f"holdfast-{os.getuid()}-"
    try:
        names = [name for name in os.listdir(root) if name.startswith(prefix)]
    except OSError:
        return removed
    for name in names:
        with contextlib.suppress(OSError):
            fd = os.open(root / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(root / name)
                removed.append(root / name)
            finally:
                os.close(fd)
    return removed


def _hold(path: Path, fd: int) -> bool:
    """Lock it shared. False when the folder was removed in between, or is about to be."""
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(1, "is not this user's alone", str(path))
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), found):
            return True
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return False


def remove_folder(path: Path) -> None:
    """Remove a folder that holds plain files and a socket, but no folders. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / name)
        path.rmdir()


@dataclass(frozen=True)
class SaverAddress:
    """The place of one worker's slots and saver."""

    folder: Path
    local_rank: int
    generation: int
    anchor: int
    """The process after whose end the saver ends; 0: an agent controls the saver."""
    held: MemoryFolder | None = None
    """Keeps the folder from being cleaned away while this process lives; None: the agent does."""

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> SaverAddress:
        """Read it from the environment. Raises SnapshotMemoryError when there is no memory for a folder."""
        address = environ.get(SAVER_VARIABLE, "")
        if address:
            folder, generation, local_rank = address.rsplit("@", 2)
            return cls(Path(folder), int(local_rank), int(generation), 0)
        # torchrun's workers find the same folder after a restart, because torchrun itself has not changed.
        launched = "TORCHELASTIC_RUN_ID" in environ
        anchor = os.getppid() if launched else os.getpid()
        run_id = environ.get("TORCHELASTIC_RUN_ID", "plain")
        name = name_of(run_id, key_of(run_id, anchor, _start_time(anchor)))
        clean(root)
        try:
            held = MemoryFolder.at(name, root)
        except OSError as error:
            raise SnapshotMemoryError(f"{root} cannot be used: {error.strerror}.") from error
        local_rank = environ.get("LOCAL_RANK", "0") if launched else "0"
        return cls(held.path, int(local_rank), int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")), anchor, held)

    def close(self) -> None:
        """Release the folder."""
        if self.held is not None:
            self.held.close()


# --- the saver: how it is reached and started -------------------------------------------------------------------------


def connect(folder: Path) -> socket.socket:
    """Connect to the saver of this folder. Raises OSError; never waits, because a full backlog is an error."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(str(folder / SOCKET))
    except OSError:
        sock.close()
        raise
    return sock


def start_saver(place: SaverAddress) -> socket.socket:
    """Start a saver that outlives this process, unless another worker of this node just has. Raises OSError."""
    path = place.folder / SOCKET
    starting = os.open(place.folder / "starting", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock_within(starting, START_LIMIT_S)
        with contextlib.suppress(OSError):
            return connect(place.folder)
        path.unlink(missing_ok=True)
        with listen(path) as listening:
            # The connection waits in the socket until the saver listens; a saver without workers might end at once.
            sock = connect(place.folder)
            passed = [listening.fileno(), *([place.held.fd] if place.held is not None else [])]
            argv = saver_argv(place.folder, listening=listening.fileno(), anchor=place.anchor)
            try:
                _run_apart(argv, passed)
            except BaseException:
                sock.close()
                raise
            return sock
    finally:
        os.close(starting)


def _run_apart(argv: list[str], passed: list[int]) -> None:
    """Run a program in its own session, detached from this process. Raises OSError, SubprocessError."""
    import subprocess  # lazily: the saver and the agent import this module as well, and do not need it

    null = subprocess.DEVNULL
    subprocess.run(
        argv,
        stdin=null,
        stdout=null,
        stderr=null,
        cwd="/",
        pass_fds=passed,
        start_new_session=True,
        check=True,
        timeout=START_LIMIT_S,
    )


def _lock_within(fd: int, limit_s: float) -> None:
    """Take an exclusive lock. Raises TimeoutError, which is an OSError."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(110, "another worker has been starting it for too long") from None
            time.sleep(LOOK_AGAIN_S)
        else:
            return


def _start_time(pid: int) -> str:
    """The start time; empty when the process is gone."""
    stat = process_stat(pid)
    return stat.started if stat is not None else ""


# --- messages ---------------------------------------------------------------------------------------------------------


def field(packet: Packet, name: str, kind: type[Any]) -> Any:
    """A field of this type. Raises ValueError."""
    value = packet.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}, {kind.__name__} expected"[:200])
    return value


def listen(path: Path) -> socket.socket:
    """The socket to which workers connect; the folder's mode excludes other users. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def saver_argv(folder: Path, *, listening: int, control: int = -1, anchor: int = 0) -> list[str]:
    """The saver's command line: `listening` is a descriptor's number in it, and so is `control`, the agent's socket.

    Without an agent, `anchor` is the process after whose end the saver ends.
    """
    # Only our package is on its path: no site-packages, no PYTHONPATH, no folder of the user.
    root = str(Path(__file__).resolve().parents[2])
    return [
        sys.executable,
        *("-I", "-S", "-c", _PROGRAM.format(root=root)),
        *(str(folder), str(listening), str(control), str(anchor)),
    ]


# --- mapped files -----------------------------------------------------------------------------------------------------

_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_POPULATE_READ = 22
"""MADV_POPULATE_READ, Linux 5.14: writable pages of a shared mapping come writable, at half the cost of _WRITE."""
_COLLAPSE = 25
"""MADV_COLLAPSE, Linux 6.1."""
_MAP_FIXED = 0x10
_HUGE_S_MAX = 0.002
"""Processor time: as much as small pages for the same bytes take. A huge page that takes longer had to be made free."""
_SPARE = 32
"""Addresses of a mapping beyond its file: one part in so many."""
_SMALL_MIN, _SMALL_MAX = 8, 256
"""After that so many units are taken in small pages; twice as many each time."""
_POPULATE_BYTES = 2 << 20
"""Populated in one call: other threads of the worker run in between."""

_ZEROS = memoryview(bytes(256 << 10))
"""They stay in the processor's cache."""

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
        """Raises OSError. The descriptor stays the caller's. Writable, it can become a little larger: `reaches`."""
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
        self.memory = self._room[:size_bytes]
        self._present_bytes = 0

    def reaches(self, size_bytes: int) -> bool:
        """Whether a file of this size needs no new mapping."""
        return size_bytes <= len(self._room)

    def populate(self, end: int | None = None) -> Iterator[None]:
        """Make all pages present, piece by piece. On a kernel without this, the first access to each page waits for it.

        The file's memory is taken already, up to `end`."""
        size_bytes = len(self.memory) if end is None else end
        for at in range(self._present_bytes, size_bytes, _POPULATE_BYTES):
            self._advise(at, min(_POPULATE_BYTES, size_bytes - at), _POPULATE_READ)
            self._present_bytes = min(at + _POPULATE_BYTES, size_bytes)
            yield

    def take(self, fd: int, begin: int, size_bytes: int) -> Iterator[None]:
        """Take memory for the file from `begin` to this size, and make all its pages present, piece by piece. The file
        grows with it. OSError."""
        unit_bytes = max(self._unit_bytes, _POPULATE_BYTES)
        at, small, pause = begin, 0, _SMALL_MIN
        self.memory = self._room[:size_bytes]
        while at < size_bytes:
            end = min((at // unit_bytes + 1) * unit_bytes, size_bytes)
            whole, huge = end - at == self._unit_bytes, False
            os.ftruncate(fd, end)
            if whole and not small:
                began_s = time.thread_time()
                os.posix_fallocate(fd, at, mmap.PAGESIZE)
                huge = self._advise(at, unit_bytes, _COLLAPSE) == 0
                if not huge or time.thread_time() - began_s > _HUGE_S_MAX:
                    small, pause = pause, min(2 * pause, _SMALL_MAX)
                else:
                    pause = _SMALL_MIN
            elif whole:
                small -= 1
            if not huge:
                _write_zeros(fd, at, end - at)
                self._advise(at, end - at, _POPULATE_READ)
            at = self._present_bytes = end
            yield

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


def _write_zeros(fd: int, at: int, size_bytes: int) -> None:
    """Pages that were written are mapped sixteen at a time, those that were only allocated one by one: both steps take
    two thirds of the processor time. OSError."""
    done = 0
    while done < size_bytes:
        done += os.pwrite(fd, _ZEROS[: size_bytes - done], at + done)


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
