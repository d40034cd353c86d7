"""A job's shared-memory folder (in /dev/shm on one node): who has it, when it is removed, and which files are in it.

    /dev/shm/holdfast-<uid>-<run id>-<key>/      mode 0700, locked (shared) while it is in use
      saver.sock                                 where workers reach the saver
      <local rank>.<0|1|2>                       slots (train/snapshots/slots.py)
      copies/, fetched/                          slots of other nodes' ranks (train/snapshots/copy_service.py)
      prefetch/                                  slots that are being fetched for this node's ranks
      key                                        derived from the job token, where there is one

A shared-memory folder is in use while any process holds a shared lock on the folder itself: the agent under holdfast,
the saver and the workers elsewhere. The kernel drops a lock with its process, however that ends, and also across
containers that share a /dev/shm. So a process that gets an exclusive lock knows that the folder belongs to a dead run,
and removes it; every agent and every first worker does that when it starts.

The agent makes the folder, and reads of a slot only whether it holds a state; the rest is known to
`holdfast.train.snapshots` alone. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from holdfast import own_folders

ROOT = Path("/dev/shm")
"""The only file system that is surely in memory. A slot on a disk would be a slow snapshot without verification."""
SOCKET = "saver.sock"
COPIES, FETCHED, PREFETCH, KEY = "copies", "fetched", "prefetch", "key"
"""Names in the folder; the module's docstring describes them."""
RUN_ID_CHARACTERS_MAX = 32
"""Characters of the run id in the name, for people; a socket's path may have 107 bytes."""
KEY_BYTES = 8
TRIES_MAX = 100
"""Attempts to make and lock a folder that another process removes at the same time as a dead run's."""
BACKLOG = 256
"""Connections that may wait for the saver's start; all local ranks connect at once."""

SLOT_COUNT_MAX = 3
"""Slots of one local rank."""
SLOT_MAGIC = 0x0002_544F_4C53_4648
""""HFSLOT", version 2."""
SLOT_WORD_BYTES = 8
"""Size of the numbers at the beginning of a slot's file, in the machine's own byte order."""
SLOT_MAGIC_WORD, SLOT_COMMIT_WORD = 0, 1
"""Indices of the first numbers: the magic number, and the sequence number of the state in the slot, which is 0 while
the state is replaced."""
_SLOT_NAME = re.compile(r"(\d{1,6})\.([012])")


class MemoryFolder:
    """A shared-memory folder that this process keeps locked."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        """Descriptor that carries the lock: a process that inherits it keeps the folder locked as well; -1: closed."""

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
            if _lock(path, fd):
                return cls(path, fd)
        raise FileExistsError(17, "removed as soon as it is made", str(path))

    def close(self) -> None:
        """Release the folder. It stays in use while other processes have it locked."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
        """Remove the folder with its content, even if others have it locked: their mappings stay valid."""
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
    """The beginning of the names of this user's folders. Another user may have made a folder with such a name."""
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


def _lock(path: Path, fd: int) -> bool:
    """Take a shared lock on the folder, or close its descriptor and return False when the folder was removed since it
    was opened, or is about to be."""
    try:
        own_folders.check(fd, path)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Another process may have removed the folder before the lock, and made a new one under its name.
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


# --- slots ------------------------------------------------------------------------------------------------------------


def slot_path(folder: Path, local_rank: int, index: int) -> Path:
    return folder / f"{local_rank}.{index}"


def local_ranks(folder: Path) -> list[int]:
    """The local ranks that have slots in this folder."""
    try:
        found = [_SLOT_NAME.fullmatch(name) for name in os.listdir(folder)]
    except OSError:
        return []
    return sorted({int(name[1]) for name in found if name is not None})


def ranks_with_states(folder: Path) -> set[int]:
    """The local ranks, or for copies the ranks, that have a valid slot in this folder, by their commit words alone."""
    each = range(SLOT_COUNT_MAX)
    return {rank for rank in local_ranks(folder) if any(commit_word(folder, rank, index) for index in each)}


def commit_word(folder: Path, local_rank: int, index: int) -> int | None:
    """The sequence number of the state in this slot; 0: it is being replaced; None: no slot."""
    with contextlib.suppress(OSError), slot_path(folder, local_rank, index).open("rb", buffering=0) as file:
        words = memoryview(file.read((SLOT_COMMIT_WORD + 1) * SLOT_WORD_BYTES)).cast("Q")
        if len(words) > SLOT_COMMIT_WORD and words[SLOT_MAGIC_WORD] == SLOT_MAGIC:
            return words[SLOT_COMMIT_WORD]
    return None
