"""Which agents of this user run on this host: a private folder with one small file for each.

Agents write their entry once their control socket listens and remove it at the end; commands read all of them, and clear
away those of agents that were killed. Knows files and who may own them; must not know what an agent is asked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
from collections.abc import Iterator

import msgspec

SOCKET_NAME = "control.sock"
"""In the run folder; without one, in the private folder under the entry's own name."""
ENTRY_BYTES_MAX = 64 * 1024
FOLDER_VARIABLE = "HOLDFAST_RUNTIME_DIR"
"""Names the folder, for machines on which none of the usual places outlives a login."""
SUN_PATH_BYTES_MAX = 107
"""What fits into an address of a Unix socket; longer paths are reached through their folder's descriptor."""
TEMPORARY = "/tmp"
PROBE_S = 1.0
MISSING = (errno.ECONNREFUSED, errno.ENOENT, errno.ENOTDIR)


class RunningAgent(msgspec.Struct, frozen=True, kw_only=True):
    """One agent that runs."""

    run_id: str
    endpoint: str
    """Where its nodes meet: two agents with the same run id and endpoint belong to one job."""
    host: str
    pid: int
    folder: str
    """The run folder; empty with --log-dir /dev/null."""
    socket: str
    began_epoch_s: float
    script: str = ""

    @property
    def job(self) -> tuple[str, str]:
        return (self.run_id, self.endpoint)

    @property
    def name(self) -> str:
        """What tells two runs of one run id from each other."""
        return os.path.basename(self.folder) or f"{self.run_id} (pid {self.pid})"


def folders(uid: int | None = None) -> list[str]:
    """Where agents of this user may have put their entries, the best place first.

    More than one: a batch system's shell and a login shell seldom have the same variables. Where FOLDER_VARIABLE is set
    there is no other place.
    """
    uid = os.geteuid() if uid is None else uid
    chosen = os.environ.get(FOLDER_VARIABLE, "")
    if chosen:
        return [os.path.abspath(chosen)]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [os.path.join(runtime, "holdfast")] if os.path.isabs(runtime) and _owner(runtime) == uid else []
    if not runtime and _owner(f"/run/user/{uid}") == uid:
        found.append(f"/run/user/{uid}/holdfast")
    for base in dict.fromkeys((os.environ.get("TMPDIR", ""), TEMPORARY)):
        if os.path.isabs(base):
            found += [os.path.join(base, f"holdfast-{uid}"), *_substitutes(base, uid)]
    return found


def _substitutes(base: str, uid: int) -> list[str]:
    """What agents of this user have made where somebody else had taken the usual name."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(base) if name.startswith(f"holdfast-{uid}-"))
    return [path for name in names if _owner(path := os.path.join(base, name)) == uid]


def private_folder() -> str:
    """The first place of which nobody else has a part, made if needed. Raises OSError."""
    error = OSError(errno.EACCES, "no folder for it")
    places = folders()
    if not os.environ.get(FOLDER_VARIABLE):  # in a temporary folder anybody may have made one of our name
        places.append(f"{places[-1].removesuffix('/')}-{os.urandom(4).hex()}")
    for path in places:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            os.close(_open_private(path))
        except OSError as problem:
            error = problem
            continue
        return path
    raise error


def write(entry: RunningAgent, folder: str) -> str:
    """Makes the entry in this private folder and returns its path. Raises OSError."""
    try:
        return _write(entry, folder)
    except FileNotFoundError:  # an agent that ended meanwhile has taken the empty folder with it
        return _write(entry, private_folder())


def remove(path: str) -> None:
    """Takes an entry away, with what dead agents have left beside it, and the folder when none lives."""
    folder = os.path.dirname(path)
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        fd = _open_private(folder)
        try:
            _read_folder(fd)
        finally:
            os.close(fd)
    if not os.environ.get(FOLDER_VARIABLE):  # who named a folder keeps it
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _write(entry: RunningAgent, folder: str) -> str:
    name = f"{entry.pid}-{os.urandom(4).hex()}.json"
    temporary, path = os.path.join(folder, f".{name}"), os.path.join(folder, name)
    # Names of files need not be text: json writes what stands for their bytes, msgspec does not.
    text = json.dumps(msgspec.to_builtins(entry))
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
    os.rename(temporary, path)
    return path


def entries() -> list[RunningAgent]:
    """The agents of this user that run on this host, oldest first. What dead ones have left is removed."""
    found: list[RunningAgent] = []
    for folder in folders():
        with contextlib.suppress(OSError):
            fd = _open_private(folder)
            try:
                found += _read_folder(fd)
            finally:
                os.close(fd)
    return sorted(found, key=lambda entry: entry.began_epoch_s)


def listens(path: str) -> bool:
    """Whether somebody has this socket; a process that stands still has it too."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            with reachable(path) as name:
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
    for name in os.listdir(folder):
        if not name.endswith(".json") or name.startswith("."):
            continue
        entry = _read_entry(folder, name)
        if entry is not None and listens(entry.socket):
            found.append(entry)
            continue
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        if entry is not None and _owner(entry.socket) == os.geteuid():
            with contextlib.suppress(OSError):
                os.unlink(entry.socket)
    return found


def _read_entry(folder: int, name: str) -> RunningAgent | None:
    """None: whatever it is, no agent wrote it."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    try:
        return msgspec.convert(json.loads(os.read(fd, ENTRY_BYTES_MAX)), type=RunningAgent)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None
    finally:
        os.close(fd)


def _open_private(path: str) -> int:
    """A descriptor of a folder that is ours alone. Raises OSError: a link, or somebody else's, who got there first."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    told = os.fstat(fd)
    if told.st_uid == os.geteuid() and stat.S_IMODE(told.st_mode) & 0o077 == 0:
        return fd
    os.close(fd)
    raise OSError(errno.EACCES, f"{path} is not this user's alone")


def _owner(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None
