"""A job's shared-memory folder (in /dev/shm on one node), its saver's socket and the messages there.

    /dev/shm/holdfast-<uid>-<run id>-<key>/      mode 0700, locked (shared) while it is in use
      saver.sock                                 where workers reach the saver
      <local rank>.<0|1|2>                       slots (slots.py)
      copies/, fetched/                          slots of other nodes' ranks (copy_service.py)
      prefetch/                                  slots that are being fetched for this node's ranks (copy_service.py)
      key                                        derived from the job token, where there is one

A shared-memory folder is in use while any process holds a shared lock on the folder itself: the agent under holdfast,
the saver and the workers elsewhere. The kernel drops a lock with its process, however that ends, and also across
containers that share a /dev/shm. So a process that gets an exclusive lock knows that the folder belongs to a dead run,
and removes it; every agent and every first worker does that when it starts.

Under holdfast the saver is the agent's child and is started when a worker connects, or for a prefetch. Elsewhere the
first worker of the node starts it, as a separate process that ends after torchrun, or after this process where there is
no launcher.

Messages on that socket are those of seqpacket.py:

    worker → saver   {"do": "hello", "local_rank", "generation"}      the first one; again in another
                                                                      generation, after a regroup. For an object store
                                                                      with "packages" and "environ", see remote.py
                     {"do": "persist", "id", "sequence", "request", "patience_s"} with the slot's descriptor, which
                                                                      carries a shared lock on it; perhaps "stage"
                     {"do": "wait", "id"}                             for "idle": nothing of this local rank is written
                     {"do": "prefetched"}                             wait for what the agent ordered (copy_service.py)
                     {"do": "serve", "word", "host", "bytes_s", "folder", "rank", "world"}
                                                                      exchange copies with others (copy_service.py);
                                                                      no rescue in this folder waits for them any more
                     {"do": "copy", "id", "sequence", "request", "to", "keep"} with the slot's descriptor, as "persist"
                     {"do": "tell", "packet"}                         a packet for the agent: "copy", "fetched"
                     {"do": "forget", "above_step"}                   drop copies of later steps
                     {"do": "read back", "path"}                      a committed snapshot; on a connection of its own
                     {"do": "bye"}                                    a regular end: nothing is rescued
    saver → worker   {"is": "prefetched", "fetched"}
                     {"is": "written", "id"}                          this rank's file is durable, its slot is free
                     {"is": "saved", "id", "path"}                    the save is done; on rank 0 it is committed
                     {"is": "failed", "id", "code", "text", "made_good"}
                     {"is": "serving", "port", "text"}                port 0: it cannot, and why
                     {"is": "forgotten"}
                     {"is": "copied", "id", "text"}                   no text: the other node has it
                     {"is": "idle", "id"}
                     {"is": "read back", "code", "text"}              no code: every byte is what was saved
                     {"is": "news", "text"}                           the result of a previous worker's save
    agent → saver    {"do": "finish"}                                 end when nothing is in flight any more
                     {"do": "prefetch", "states"}                     fetch these before the workers ask for them
    saver → agent    {"is": "up"}                                     it listens
                     {"is": "news", "text"}                           for the user
                     {"is": "saved", "path", "step", "took_s"}        it is committed; perhaps "stall_s", "metrics"
                     {"is": "copy", "step", "rank", "to", "size_bytes", "took_s", "why", "kept"}   to another node
                     {"is": "fetched", "step", "rank", "of", "took_s"}                             from another node
                                                                      perhaps "ahead": before a worker asked for it
                     {"is": "serving", "port", "host", "word", "folder", "rank", "world"}      it exchanges copies

Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import own_folders, seqpacket
from holdfast.linux import process_stat
from holdfast.protocol.errors import SaverLostError, SnapshotError, SnapshotMemoryError

STALL = "stall_s"
"""In a request's note: seconds for which training waited for this save."""
ROOT = Path("/dev/shm")
"""The only place in memory: a slot on a disk would be a slow snapshot without verification."""
SOCKET = "saver.sock"
COPIES, FETCHED, PREFETCH, KEY = "copies", "fetched", "prefetch", "key"
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
Tell = Callable[[Packet], None]
"""Takes what a thread has to tell."""

_PROGRAM = (
    "import os, sys; sys.argv[3] == '-1' and os.fork() and os._exit(0); sys.path.insert(0, {root!r}); "
    "from holdfast.train.snapshots.saver import main; main()"
)


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
                fd = own_folders.open_folder(path)
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
    return f"{prefix()}{readable}-{key}"


def key_of(*parts: object) -> str:
    """A key that every process computes alike from the same parts."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[: 2 * KEY_BYTES]


def prefix() -> str:
    """The beginning of the names of this user's folders. Another user may have taken such a name."""
    return f"holdfast-{os.geteuid()}-"


def private_folders(root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """The folders of this user's runs, each with a descriptor that is open until the next one. Those that another user
    made under such a name, and those that cannot be opened, are left out."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in sorted(os.listdir(root)) if name.startswith(prefix())]
    for name in names:
        with contextlib.ExitStack() as opened:
            try:
                fd = opened.enter_context(own_folders.private(root / name))
            except OSError:
                continue
            yield root / name, fd


def clean(root: Path = ROOT) -> list[Path]:
    """Remove the folders of this user's dead runs. Returns the removed ones; a folder that cannot be removed is
    skipped."""
    removed: list[Path] = []
    for path, fd in private_folders(root):
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            own_folders.empty(fd)
            os.rmdir(path)
            removed.append(path)
    return removed


def _hold(path: Path, fd: int) -> bool:
    """Lock it shared. False when the folder was removed in between, or is about to be."""
    try:
        own_folders.check(fd, path)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.path.samestat(os.lstat(path), os.fstat(fd)):
            return True
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return False


def remove_folder(path: Path) -> None:
    """Remove a shared-memory folder, or one inside it, if there is one. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        own_folders.remove_private(path)


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


# --- who stages -------------------------------------------------------------------------------------------------------


def open_for_writing(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


_claimed: set[Path] = set()
"""Claims of this process: POSIX locks do not distinguish its own claims, and closing one would drop all."""


def claim(folder: Path, local_rank: int) -> int:
    """Claim this local rank until the descriptor is released. Raises OSError, SnapshotMemoryError."""
    path = folder / f"{local_rank}.owner"
    if path in _claimed:
        raise SnapshotMemoryError(f"other snapshots of this process have the memory slots of local rank {local_rank}.")
    fd = open_for_writing(path)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a POSIX lock: a forked child does not have it
    except BlockingIOError as error:
        os.close(fd)
        raise SnapshotMemoryError(f"another process has the memory slots of local rank {local_rank}.") from error
    _claimed.add(path)
    return fd


def unclaim(folder: Path, local_rank: int, fd: int) -> None:
    os.close(fd)
    _claimed.discard(folder / f"{local_rank}.owner")


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
    starting = open_for_writing(place.folder / "starting")
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

    Without an agent, `anchor` is the process after whose end the saver ends. The worker that starts it waits only until
    it is no child of its own: the imports take 0.1 s and more.
    """
    # Only our package is on its path: no site-packages, no PYTHONPATH, no folder of the user.
    root = str(Path(__file__).resolve().parents[3])
    return [
        sys.executable,
        *("-I", "-S", "-c", _PROGRAM.format(root=root)),
        *(str(folder), str(listening), str(control), str(anchor)),
    ]


def key_of_life(folder: Path, word: str) -> bytes:
    """The key of one life of the job. `word`: rank 0's; the agent has left what it derived from the job token in this
    shared-memory folder. OSError."""
    held = b"no token"
    with contextlib.suppress(FileNotFoundError):
        held = (folder / KEY).read_bytes()
    return hmac.digest(held, b"holdfast copies " + word.encode(), "sha256")


def read_back(folder: Path, path: Path, patience_s: float) -> None:
    """Have the saver read a committed snapshot and check every byte. For any thread; waits.

    Raises the SnapshotError of `folder.verify`, or one when it takes too long; SaverLostError: no saver is available.
    """
    try:
        with connect(folder) as sock:
            seqpacket.send(sock, {"do": "read back", "path": str(path)})
            if not seqpacket.is_readable(sock, patience_s):
                raise SnapshotError(f"{path} was not read back within {patience_s:.0f} s: is the saver stopped?")
            got = seqpacket.receive(sock)
    except OSError as error:
        raise SaverLostError(f"the saver cannot be reached: {error.strerror}") from error
    if got is None:
        raise SaverLostError("the saver has ended meanwhile")
    if got[0].get("code") != "":
        from holdfast.train.snapshots.disk import error_of  # here: the agent, which starts at once, does not need it

        raise error_of(str(got[0].get("code")), str(got[0].get("text")))
