"""The folder in /dev/shm in which one node of one job keeps its memory slots and its saver's socket.

    /dev/shm/holdfast-<uid>-<run id>-<key>/      mode 0700, a shared lock on it for as long as somebody needs it
      saver.sock                                 where workers reach the saver
      <local rank>.<0|1>                         slots (slots.py)

A shelf is in use while anybody holds a shared lock on the folder itself: the agent under holdfast, the saver and the
workers elsewhere. The kernel drops a lock with its process, however that ends, and knows it across containers that
share a /dev/shm. So whoever can lock a shelf alone knows that it belongs to a dead run, and removes it; every agent and
every first worker does that when it starts.

Knows the folder's name, lock and end; knows nothing of slots or sockets. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from pathlib import Path

ROOT = Path("/dev/shm")
"""Memory, and the only place that is: a slot on a disk would be a slow snapshot that nobody verifies."""
SOCKET = "saver.sock"
RUN_ID_CHARACTERS_MAX = 32
"""In the name, for people; a socket's path may have 107 bytes."""
KEY_BYTES = 8
TRIES_MAX = 100


class Shelf:
    """A shelf that this process holds."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        """Carries the lock; a process that inherits it holds the shelf as well."""

    @classmethod
    def make(cls, run_id: str, root: Path = ROOT) -> Shelf:
        """A new one. Raises OSError."""
        return cls.at(name_of(run_id, os.urandom(KEY_BYTES).hex()), root)

    @classmethod
    def at(cls, name: str, root: Path = ROOT) -> Shelf:
        """The one of this name, made if there is none. Raises OSError; PermissionError when it is not ours alone."""
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
        """Let go of it; it stays while others hold it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
        """Remove it with all there is in it, though others hold it: what they have mapped stays theirs."""
        remove_folder(self.path)
        self.close()


def name_of(run_id: str, key: str) -> str:
    """Name of a shelf: whose, which run, and `key`, which tells it from all others."""
    readable = re.sub(r"[^A-Za-z0-9_.=+-]", "_", run_id)[:RUN_ID_CHARACTERS_MAX]
    return f"holdfast-{os.getuid()}-{readable}-{key}"


def key_of(*parts: object) -> str:
    """A key that everybody makes alike from the same parts."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[: 2 * KEY_BYTES]


def clean(root: Path = ROOT) -> list[Path]:
    """Remove what dead runs of this user have left. Returns what was removed; what resists is left alone."""
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
    """Lock it shared. False when it was removed in between, or is about to be."""
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
    """With all there is in it: plain files and a socket, and no folder. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / name)
        path.rmdir()
