"""The folder with compiled kernels of this user on this node (--cache-dir): the libraries that keep theirs in it, its
lock, its size.

What is in it is executed by workers: the folder must belong to this user, and nobody else may write into it. Knows
files and names of variables; must not know who starts workers. All packages except the pure ones may import this:
standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from holdfast import own_folders

NAME = "holdfast-caches-"
LOCK = ".in-use"
BYTES_MAX = 10 * 2**30
"""Size of all entries above which the oldest are removed at the end of a job."""
COPY_BYTES_MAX = 2 * 2**30
"""Limit of what is copied from a folder that nodes share (--cache-from), and of what is copied to it."""
COPY_S_MAX = 15.0
"""Limit of the time for each of the two (s): a node has to be prepared within Limits.prepare_s."""
SHARE_MAX = 0.2
"""The same as a share of the file system: it may be a small one in memory."""
OTHERS_WRITE = 0o022
DEPTH_MAX = 32
"""Depth of folders that are looked at: each level keeps a descriptor open."""

VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "TORCH_EXTENSIONS_DIR": "extensions",
}
"""The variables by which libraries take the folder of their cache, and the names of those folders in ours."""
BOUNDED_BY_ITSELF = frozenset({"cuda"})
"""The driver keeps an index of this one, and bounds its size (CUDA_CACHE_MAXSIZE): nothing is removed there."""


def folder_of(value: str, environ: Mapping[str, str]) -> str | None:
    """The absolute path that a value of --cache-dir means; None: `off`. Raises OSError if the current folder was
    deleted."""
    match value:
        case "" | "off":
            return None
        case "auto":
            return _temporary_folder(environ)
        case _:
            return os.path.abspath(os.path.expanduser(value))


def _temporary_folder(environ: Mapping[str, str]) -> str:
    """A folder of this user in the temporary folder. A home folder would often be on another machine: its files are
    slow to reach, and what was compiled for one node's processor may not run on another's."""
    return os.path.join(own_folders.temporary(environ), f"{NAME}{os.geteuid()}")


def variables(folder: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for workers, without those that the user has set."""
    return {name: os.path.join(folder, kind) for name, kind in VARIABLES.items() if name not in environ}


class CacheSize(NamedTuple):
    """The size of a folder of caches."""

    bytes: int
    removed_bytes: int
    whole: bool
    """False: the time was over before all of it was seen; `bytes` is too small then."""


class CacheFolder:
    """A folder of caches that is in use: as long as it is open, no other job removes an entry."""

    def __init__(self, path: str) -> None:
        """Make the folder if it is missing. Raises OSError; PermissionError if others own it, or may write into it."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        self.path = path
        with own_folders.private(path, OTHERS_WRITE) as folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(LOCK, flags, 0o600, dir_fd=folder)
            try:
                self.had_entries = any(name in VARIABLES.values() and _any(name, folder) for name in os.listdir(folder))
                self._locked(fcntl.LOCK_SH)
            except BaseException:
                os.close(self._lock)
                raise

    def bound(self, bytes_max: int, over: Callable[[], bool]) -> CacheSize | None:
        """Remove the entries that were not used for the longest time until the rest is small enough. Stops when `over`
        says so. None: another job uses the folder, so nothing was looked at. Raises OSError."""
        with self.alone() as alone, own_folders.private(self.path, OTHERS_WRITE) as folder:
            if not alone:
                return None
            room = os.fstatvfs(folder)
            # Some file systems do not say how large they are.
            share = int(SHARE_MAX * room.f_blocks * room.f_frsize) or bytes_max
            return bound_entries(folder, min(bytes_max, share), over)

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether no other job uses the folder. If so, none begins to use it in this context."""
        if not self._locked(fcntl.LOCK_EX):
            yield False
            return
        try:
            yield True
        finally:
            self._locked(fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self._lock)

    def _locked(self, how: int) -> bool:
        """Whether the lock is held in this way now. Without locks (some network file systems) nothing is removed."""
        try:
            fcntl.flock(self._lock, how | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def size_of(path: str, over: Callable[[], bool]) -> int | None:
    """The size of all that is in it (bytes); None: there is no such folder of this user, or the time was over."""
    try:
        with own_folders.private(path, OTHERS_WRITE) as folder:
            total = sum(entry.bytes for entry in entries(folder, (), over))
    except OSError:
        return None
    return None if over() else total


class CacheEntry(NamedTuple):
    """The files of one folder, without those of the folders in it. A library writes what belongs together into one
    folder, and reads it together: it is removed together."""

    used_s: float
    """The newest time at which one of the files was written or read, as far as the file system records that."""
    bytes: int
    folders: tuple[str, ...]
    """The way to it, from the folder of caches."""
    names: tuple[str, ...]


def bound_entries(folder: int, limit: int, over: Callable[[], bool]) -> CacheSize:
    found = list(entries(folder, (), over))
    whole = not over()
    total = sum(entry.bytes for entry in found)
    removed = 0
    for entry in sorted(entry for entry in found if entry.folders and entry.folders[0] not in BOUNDED_BY_ITSELF):
        if total - removed <= limit or over():
            break
        if _remove(folder, entry):
            removed += entry.bytes
    return CacheSize(total - removed, removed, whole)


def entries(folder: int, way: tuple[str, ...], over: Callable[[], bool]) -> Iterator[CacheEntry]:
    """The entries below this open folder."""
    used_s, size, names = 0.0, 0, []
    for name in os.listdir(folder):
        if over():
            return
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                if len(way) < DEPTH_MAX:
                    yield from _entries_in(name, folder, way, over)
                continue
        except FileNotFoundError:
            continue
        used_s = max(used_s, found.st_mtime, found.st_atime)
        # Some file systems give a new file its blocks later.
        size += max(found.st_size, found.st_blocks * 512)
        names.append(name)
    if names and way:
        yield CacheEntry(used_s, size, way, tuple(names))


def _entries_in(name: str, folder: int, way: tuple[str, ...], over: Callable[[], bool]) -> Iterator[CacheEntry]:
    fd = own_folders.open_folder(name, folder)
    try:
        yield from entries(fd, (*way, name), over)
    finally:
        os.close(fd)


def _remove(folder: int, entry: CacheEntry) -> bool:
    """Remove the files of this entry, and its folder if nothing else is in it. A link is removed and never followed."""
    fds: list[int] = []
    try:
        for name in entry.folders:
            fds.append(own_folders.open_folder(name, fds[-1] if fds else folder))
        for name in entry.names:
            os.unlink(name, dir_fd=fds[-1])
        if len(fds) > 1:  # the folder of a library itself stays
            _remove_empty(entry.folders[-1], fds[-2])
    except OSError:
        return False
    finally:
        for fd in fds:
            os.close(fd)
    return True


def _remove_empty(name: str, folder: int) -> None:
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _any(name: str, folder: int) -> bool:
    """Whether there is something in this folder."""
    try:
        fd = own_folders.open_folder(name, folder)
    except OSError:
        return False
    try:
        return bool(os.listdir(fd))
    finally:
        os.close(fd)
