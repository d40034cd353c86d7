"""The agents of this user that run on this host, and how a command asks one of them.

Each agent writes one small file into a private folder once its control socket listens, keeps it locked, and removes it
at the end. Commands read all of them. They remove one only if its agent is proved to be gone: the kernel has dropped
the lock. That the file cannot be read, or the socket not be reached, proves nothing: the command may lack descriptors
or rights, or see other mounts, and another version of holdfast may write other fields. A question gets one answer,
within a time limit. Sockets are plain: a command that asks one agent one thing needs no event loop. Knows files, their
owners, and the socket; must not know the meaning of an answer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import msgspec

from holdfast import own_folders, seqpacket
from holdfast.linux import boot_id, process_stat
from holdfast.protocol.codec import clean
from holdfast.protocol.errors import ControlRefusedError, ControlSilentError, NoRunError

ASKED_S = 5.0
"""Time for which a command waits for an answer, unless the question needs more (s)."""
ANSWER_BYTES_MAX = 64 * 1024 * 1024
CHUNK_BYTES = 256 * 1024
Body = TypeVar("Body")
SOCKET_NAME = "control.sock"
"""Name of the control socket in the run folder. Without a run folder it is in the private folder, under a name of its
own."""
ENTRY_BYTES_MAX = 64 * 1024
FOLDER_VARIABLE = "HOLDFAST_RUNTIME_DIR"
"""The variable that names the private folder, for machines on which none of the usual places outlives a login."""
SUN_PATH_BYTES_MAX = 107
"""The maximal length of a Unix socket's address; longer paths are reached through their folder's descriptor."""
PROBE_S = 1.0
MISSING = (errno.ECONNREFUSED, errno.ENOENT, errno.ENOTDIR)
"""Errors of connect(2) that mean that no process has this socket open, as far as this process can see."""


class RunningAgent(msgspec.Struct, frozen=True, kw_only=True):
    """The entry of one running agent."""

    run_id: str
    endpoint: str
    """The rendezvous endpoint: two agents with the same run id and endpoint belong to one job."""
    host: str
    pid: int
    folder: str
    """The run folder; empty with --log-dir /dev/null."""
    socket: str
    began_epoch_s: float
    script: str = ""
    locked_on: str = ""
    """The boot of the machine whose kernel keeps this file locked while the agent lives; empty: nothing does."""
    hidden: bool = False
    """The agent lives, but its socket cannot be reached from here. The file never has this."""

    @property
    def job(self) -> tuple[str, str]:
        return (self.run_id, self.endpoint)

    @property
    def name(self) -> str:
        """The name that distinguishes two runs with the same run id."""
        return os.path.basename(self.folder) or f"{self.run_id} (pid {self.pid})"


def folders(uid: int | None = None) -> list[str]:
    """The folders in which agents of this user may have put their entries, the best first.

    There are several, because a batch system's shell and a login shell seldom have the same variables. Where
    FOLDER_VARIABLE is set, it is the only one.
    """
    uid = os.geteuid() if uid is None else uid
    chosen = os.environ.get(FOLDER_VARIABLE, "")
    if chosen:
        return [os.path.abspath(chosen)]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [os.path.join(runtime, "holdfast")] if os.path.isabs(runtime) and _owner(runtime) == uid else []
    if not runtime and _owner(f"/run/user/{uid}") == uid:
        found.append(f"/run/user/{uid}/holdfast")
    for base in dict.fromkeys((own_folders.temporary(os.environ), own_folders.TEMPORARY)):
        if os.path.isabs(base):
            found += [os.path.join(base, f"holdfast-{uid}"), *_substitutes(base, uid)]
    return found


def _substitutes(base: str, uid: int) -> list[str]:
    """Folders that agents of this user made where another user had taken the usual name."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(base) if name.startswith(f"holdfast-{uid}-"))
    return [path for name in names if _owner(path := os.path.join(base, name)) == uid]


def private_folder() -> str:
    """The first folder of which no other user owns a part; made if needed. Raises OSError."""
    error = OSError(errno.EACCES, "no folder for it")
    places = folders()
    if not os.environ.get(FOLDER_VARIABLE):  # in a temporary folder any user may have made a folder of our name
        places.append(f"{places[-1].removesuffix('/')}-{os.urandom(4).hex()}")
    for path in places:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            with own_folders.private(path):
                return path
        except OSError as problem:
            error = problem
    raise error


@dataclass(frozen=True)
class WrittenEntry:
    """This agent's own entry."""

    path: str
    fd: int
    """The open file, which carries the lock."""


def write(entry: RunningAgent, folder: str) -> WrittenEntry:
    """Write the entry into this private folder. Raises OSError."""
    try:
        return _write(entry, folder)
    except FileNotFoundError:  # an agent that ended meanwhile has removed the empty folder
        return _write(entry, private_folder())


def remove(written: WrittenEntry) -> None:
    """Remove an entry, the entries of dead agents beside it, and the folder when no agent lives."""
    folder, name = os.path.split(written.path)
    with contextlib.suppress(OSError), own_folders.private(folder) as fd:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=fd)
        _read_folder(fd)
    os.close(written.fd)
    if not os.environ.get(FOLDER_VARIABLE):  # a folder that the user named is kept
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _write(entry: RunningAgent, folder: str) -> WrittenEntry:
    name = f"{entry.pid}-{os.urandom(4).hex()}.json"
    with own_folders.private(folder) as within:
        fd = os.open(f".{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=within)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                entry = msgspec.structs.replace(entry, locked_on=boot_id())
            # File names need not be valid text: json writes surrogates for their bytes, msgspec does not.
            os.write(fd, json.dumps(msgspec.to_builtins(entry)).encode())
            os.rename(f".{name}", name, src_dir_fd=within, dst_dir_fd=within)
        except BaseException:
            os.close(fd)
            raise
    return WrittenEntry(os.path.join(folder, name), fd)


def entries() -> list[RunningAgent]:
    """The agents of this user that run on this host, oldest first. Removes the entries of dead agents."""
    found: list[RunningAgent] = []
    for folder in folders():
        with contextlib.suppress(OSError), own_folders.private(folder) as fd:
            found += _read_folder(fd)
    return sorted(found, key=lambda entry: entry.began_epoch_s)


def unread() -> list[str]:
    """Entries that this process cannot read, or that another version of holdfast may have written: the jobs may run."""
    found: list[str] = []
    for path in folders():
        with contextlib.suppress(OSError), own_folders.private(path) as folder:
            found += [os.path.join(path, name) for name in _names(folder) if _read_entry(folder, name)[0] is None]
    return found


def listens(path: str) -> bool:
    """Whether a process has this socket open; a stopped process has it too. True where it cannot be asked."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, reachable(path) as name:
            probe.settimeout(PROBE_S)
            probe.connect(name)
    except OSError as error:
        return error.errno not in MISSING
    return True


@contextlib.contextmanager
def reachable(path: str) -> Iterator[str]:
    """The path in a form short enough for a socket's address, as long as the block lasts. Raises OSError."""
    if len(os.fsencode(path)) <= SUN_PATH_BYTES_MAX:
        yield path
        return
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{os.path.basename(path)}"
    finally:
        os.close(fd)


def _read_folder(folder: int) -> list[RunningAgent]:
    found = []
    for name in _names(folder):
        entry, life = _read_entry(folder, name)
        if entry is None:
            continue
        heard = listens(entry.socket)
        if life is AgentLife.ENDED and not heard:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            with contextlib.suppress(OSError):
                if _is_own_socket(entry.socket):
                    os.unlink(entry.socket)
        elif heard or life is AgentLife.RUNS:
            found.append(msgspec.structs.replace(entry, hidden=not heard))
    return found


def _names(folder: int) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith(".")]


class AgentLife(Enum):
    """The life of the agent that wrote an entry, as far as it is known."""

    RUNS = "runs"
    ENDED = "ended"
    UNKNOWN = "unknown"


def _read_entry(folder: int, name: str) -> tuple[RunningAgent | None, AgentLife]:
    """Read an entry. Returns None if no agent of this version wrote this file, or if it cannot be read now."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None, AgentLife.UNKNOWN
    try:
        entry = msgspec.convert(json.loads(os.read(fd, ENTRY_BYTES_MAX)), type=RunningAgent)
        return entry, _life(fd, entry)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None, AgentLife.UNKNOWN
    finally:
        os.close(fd)


def _life(fd: int, entry: RunningAgent) -> AgentLife:
    """The life of an entry's agent: the kernel keeps the file locked while it lives."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two commands do not take each other for the agent
    except BlockingIOError:
        return AgentLife.RUNS
    except OSError:
        return AgentLife.UNKNOWN
    # The folder may be on a network disk, and another machine may not see its locks: only an agent of this machine is
    # known to have ended. Its containers have other host names but the same boot; after a restart of the machine the
    # boot is another one but the host name is the same.
    here = entry.locked_on == boot_id() or entry.host == socket.gethostname()
    return AgentLife.ENDED if entry.locked_on and here else AgentLife.UNKNOWN


def _is_own_socket(path: str) -> bool:
    found = os.lstat(path)
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def _owner(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """An agent's answer."""

    whole: bool = True
    """False: the coordinator could not be asked; the answer is this node's alone."""
    body: msgspec.Raw = msgspec.Raw(b"null")
    code: str = ""
    """The code of an error: the question was not answered, and `text` or `refused` gives the reason."""
    text: str = ""
    """The agent's reason why it has no answer."""
    refused: str = ""
    """The job's reason why it refused the question: nothing was done."""

    def read(self, kind: type[Body]) -> Body:
        """The body as this type. Raises ControlRefusedError."""
        try:
            return clean(msgspec.json.decode(self.body, type=kind))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ControlRefusedError(f"the answer is of another version of holdfast: {error}") from None


class NodeEnd(msgspec.Struct, frozen=True):
    """The end of this node's part of the job."""

    kind: str
    exit_code: int
    message: str
    cause: str


class Call:
    """One connection to an agent, with the question asked. A context manager."""

    def __init__(
        self,
        entry: RunningAgent,
        question: str | None,
        about: Mapping[str, object] | None = None,
        *,
        by: str = "",
        within_s: float = ASKED_S,
    ) -> None:
        """Connect and ask. `question` None asks how the agent ends; `about`, `by` and `within_s` as in ControlRequest.
        Raises NoRunError, ControlRefusedError, ControlSilentError."""
        self._entry = entry
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._received = bytearray()
        self._limit_s = within_s
        self._socket.settimeout(self._limit_s)
        try:
            with reachable(entry.socket) as name:
                self._socket.connect(name)
            self._check_owner()
            request = {"ask": question, "by": by, "about": about or {}, "within_s": within_s}
            self._socket.sendall(msgspec.json.encode(request) + b"\n")
        except OSError as error:
            self._socket.close()
            raise self._reason(error) from None

    def _check_owner(self) -> None:
        """Check that the socket belongs to our user: another one may have put his in the place of ours. Root asks the
        agents of all users. Raises PermissionError."""
        if os.geteuid() not in (0, seqpacket.peer(self._socket)[1]):
            raise PermissionError(errno.EACCES, "belongs to another user")

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Becomes readable when the answer arrives, or when the agent has gone."""
        return self._socket.fileno()

    def answer(self, limit_s: float | None = None) -> Reply | None:
        """The answer; None: the agent has ended without one.

        Raises ControlSilentError after `limit_s` (None: the default of the question), ControlRefusedError.
        """
        self._limit_s = limit_s or self._limit_s
        end = time.monotonic() + self._limit_s
        while b"\n" not in self._received:
            try:
                self._socket.settimeout(max(0.001, end - time.monotonic()))
                chunk = self._socket.recv(CHUNK_BYTES)
            except ConnectionResetError:
                return None
            except OSError as error:
                raise self._reason(error) from None
            if not chunk:
                return None
            self._received += chunk
            if len(self._received) > ANSWER_BYTES_MAX:
                raise ControlRefusedError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        try:
            reply = msgspec.json.decode(bytes(self._received), type=Reply)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ControlRefusedError(
                f"the process at {self._entry.socket} is not an agent of holdfast: {error}"
            ) from None
        if reply.refused:
            raise ControlRefusedError(f"{self._entry.name}: {reply.refused}")
        if reply.code:
            kind = ControlSilentError if reply.code == ControlSilentError.code else ControlRefusedError
            raise kind(f"the agent of {self._entry.name} (pid {self._entry.pid}): {reply.text}")
        return reply

    def _reason(self, error: OSError) -> NoRunError | ControlRefusedError | ControlSilentError:
        entry = self._entry
        if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
            who = f"the agent of {entry.name} (pid {entry.pid})"
            return ControlSilentError(f"{who} does not answer within {self._limit_s:g} s{_why_silent(entry.pid)}")
        if error.errno in MISSING and entry.hidden:
            return ControlSilentError(
                f"the agent of {entry.name} (pid {entry.pid}) runs, but its socket {entry.socket} is not visible from "
                "here: ask from its own container, or where the same folders are mounted"
            )
        if error.errno in (*MISSING, errno.EPIPE, errno.ECONNRESET):
            return NoRunError(f"{entry.name} has ended")
        if isinstance(error, PermissionError):
            return ControlRefusedError(f"{entry.socket} belongs to another user{_whose(entry.socket)}")
        return ControlSilentError(f"the agent of {entry.name} cannot be asked: {error.strerror or error}")


def ask(
    entry: RunningAgent,
    question: str,
    about: Mapping[str, object] | None = None,
    *,
    by: str = "",
    within_s: float = ASKED_S,
) -> Reply:
    """Ask one question. Raises NoRunError, ControlSilentError, and ControlRefusedError also when the job refuses it."""
    with Call(entry, question, about, by=by, within_s=within_s) as call:
        reply = call.answer()
    if reply is None:
        raise NoRunError(f"{entry.name} has just ended")
    return reply


def ask_any(
    entries: list[RunningAgent],
    question: str,
    about: Mapping[str, object] | None = None,
    *,
    by: str = "",
    within_s: float = ASKED_S,
) -> tuple[RunningAgent, Reply]:
    """The answer of the first agent of a job that answers. Raises the error of the last one when none answers."""
    *others, last = entries
    for entry in others:
        with contextlib.suppress(ControlSilentError, NoRunError):
            return entry, ask(entry, question, about, by=by, within_s=within_s)
    return last, ask(last, question, about, by=by, within_s=within_s)


def _why_silent(pid: int) -> str:
    """The reason why a process does not answer, from its state in the kernel, in words; empty: it is gone."""
    stat = process_stat(pid)
    match stat and stat.state:
        case None:
            return ""
        case "T" | "t":
            return f": it was stopped by a signal; `kill -CONT {pid}` resumes it"
        case "D":
            return ": it waits in the kernel, for a disk perhaps"
        case _:
            return f"; `kill -9 {pid}` ends this node's agent and workers"


def _whose(path: str) -> str:
    with contextlib.suppress(OSError):
        return f" (uid {os.stat(os.path.dirname(path)).st_uid})"
    return ""
