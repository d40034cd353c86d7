"""The connection of a worker to the saver: the saver's address, how it is reached and started, and the messages on its
socket.

Under holdfast the saver is the agent's child and is started when a worker connects, or for a prefetch. Elsewhere the
first worker of the node starts it, as a separate process that ends after torchrun, or after this process where there is
no launcher.

Messages on that socket are those of seqpacket.py:

    worker → saver   {"do": "hello", "local_rank", "generation"}      the first one; again in another
                                                                      generation, after a regroup: no rescue waits for
                                                                      other nodes any more. For an object store with
                                                                      "packages" and "environ", see remote.py
                     {"do": "persist", "id", "sequence", "request", "patience_s"} with the slot's descriptor, which
                                                                      carries a shared lock on it; perhaps "stage"
                     {"do": "wait", "id"}                             ask for "idle" as soon as no save of this local
                                                                      rank is being written
                     {"do": "prefetched"}                             ask for what the agent had fetched
                                                                      (copy_service.py); the answer may take time
                     {"do": "serve", "word", "host", "bytes_s", "folder", "rank", "world"}
                                                                      exchange copies with others (copy_service.py);
                                                                      no rescue in this folder waits for them any more
                     {"do": "copy", "id", "sequence", "request", "to", "keep", "beside"} with the slot's descriptor, as
                                                                      "persist"; "beside": the folder of a slot that is
                                                                      itself a copy
                     {"do": "tell", "packet"}                         a packet for the agent: "copy", "fetched"
                     {"do": "forget", "above_step"}                   drop copies of later steps
                     {"do": "read back", "path"}                      a committed snapshot; on a connection of its own
                     {"do": "bye"}                                    this worker ends regularly: nothing is rescued
    saver → worker   {"is": "prefetched", "fetched"}
                     {"is": "written", "id"}                          this rank's file is durable, its slot is free
                     {"is": "saved", "id", "path", "warning"}         the save is done; on rank 0 it is committed
                     {"is": "failed", "id", "code", "text", "made_good"}
                     {"is": "serving", "port", "text"}                port 0: it cannot, and why
                     {"is": "forgotten"}
                     {"is": "copied", "id", "text"}                   no text: the other node has it
                     {"is": "idle", "id"}
                     {"is": "read back", "code", "text"}              no code: every byte is what was saved
                     {"is": "news", "text"}                           the result of a previous worker's save

The messages between saver and agent are in protocol/train_contract.py. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import seqpacket
from holdfast.linux import process_stat
from holdfast.memory_folder import KEY, ROOT, SOCKET, MemoryFolder, clean, key_of, listen, name_of
from holdfast.protocol.errors import SaverLostError, SnapshotError, SnapshotMemoryError
from holdfast.protocol.train_contract import SAVER_VARIABLE, saver_argv

STALL = "stall_s"
"""Name in a request's note: the seconds for which training waited for this save."""
START_LIMIT_S = 10.0
"""Limit for the start of a detached saver, also by another worker of this node."""
POLL_S = 0.01
"""Pause between two tries to lock the start of a saver (s)."""
Packet = dict[str, Any]
Tell = Callable[[Packet], None]
"""Takes a packet: a thread's report to the thread that started it."""


@dataclass(frozen=True)
class SaverAddress:
    """The address of one worker's slots and saver."""

    folder: Path
    """The shared-memory folder."""
    local_rank: int
    generation: int
    anchor: int
    """Pid of the process after whose end the saver ends; 0: an agent controls the saver."""
    held: MemoryFolder | None = None
    """The lock that keeps the folder from being removed while this process lives; None: the agent has it."""

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> SaverAddress:
        """The address in the environment; without an agent the folder is made. Raises SnapshotMemoryError when that is
        not possible."""
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


# --- the right to stage -----------------------------------------------------------------------------------------------


def open_for_writing(path: Path) -> int:
    """Open or make a file in shared memory, for this user alone. Returns the descriptor. OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


_claimed: set[Path] = set()
"""Files that this process has claimed. POSIX locks do not distinguish two claims of one process, and closing one of its
descriptors would drop both."""


def claim(folder: Path, local_rank: int) -> int:
    """Claim this local rank's slots for this process. Returns the descriptor for `unclaim`. Raises OSError,
    SnapshotMemoryError."""
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
    """Give up the claim; `fd`: what `claim` returned."""
    os.close(fd)
    _claimed.discard(folder / f"{local_rank}.owner")


# --- the saver: how it is reached and started -------------------------------------------------------------------------


def connect(folder: Path) -> socket.socket:
    """Connect to the saver of this folder. It never waits: a full backlog is an error. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(str(folder / SOCKET))
    except OSError:
        sock.close()
        raise
    return sock


def start_saver(address: SaverAddress) -> socket.socket:
    """Start a saver that outlives this process, unless another worker of this node just did. Returns a connection to
    it. Raises OSError, SubprocessError."""
    path = address.folder / SOCKET
    starting = open_for_writing(address.folder / "starting")
    try:
        _lock_within(starting, START_LIMIT_S)
        with contextlib.suppress(OSError):  # another worker has started it
            return connect(address.folder)

        path.unlink(missing_ok=True)
        with listen(path) as listening:
            # Connected before the saver starts: one that finds no worker might end at once.
            sock = connect(address.folder)
            passed = [listening.fileno(), *([address.held.fd] if address.held is not None else [])]
            argv = saver_argv(address.folder, listening=listening.fileno(), anchor=address.anchor)
            try:
                _run_apart(argv, passed)
            except BaseException:
                sock.close()
                raise
            return sock
    finally:
        fcntl.flock(starting, fcntl.LOCK_UN)  # a child that another thread has forked meanwhile may have it open, too
        os.close(starting)


def _run_apart(argv: list[str], passed: list[int]) -> None:
    """Run a program in its own session, detached from this process. Raises OSError, SubprocessError."""
    import subprocess  # imported here: the saver and the agent import this module as well, and do not need it

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
            time.sleep(POLL_S)
        else:
            return


def _start_time(pid: int) -> str:
    """The start time; empty when the process is gone."""
    stat = process_stat(pid)
    return stat.started if stat is not None else ""


# --- messages ---------------------------------------------------------------------------------------------------------


def field_of(packet: Packet, name: str, kind: type[Any]) -> Any:
    """The packet's field of this name, which must have exactly this type. Raises ValueError."""
    value = packet.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}, {kind.__name__} expected"[:200])
    return value


def key_of_life(folder: Path, word: str) -> bytes:
    """The key of one life of the job, by which savers prove to each other that they belong to it. OSError.

    `folder`: the shared-memory folder, in which the agent has left what it derived from the job token, if there is one.
    `word`: the random word that rank 0 has drawn for this life."""
    from_token = b"no token"
    with contextlib.suppress(FileNotFoundError):
        from_token = (folder / KEY).read_bytes()
    return hmac.digest(from_token, b"holdfast copies " + word.encode(), "sha256")


def read_back(folder: Path, path: Path, patience_s: float) -> None:
    """Let the saver read a committed snapshot and check every byte, and wait for that. Any thread may call it.

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
        from holdfast.train.snapshots.disk import error_of  # imported here: the agent does not need it at its start

        raise error_of(str(got[0].get("code")), str(got[0].get("text")))
