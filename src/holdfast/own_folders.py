"""Folders of this user in places where other users may write too, such as /tmp and /dev/shm.

A path means nothing there: between a check and the use of the same path another user may put a link, or a folder of
their own, in its place. So a folder is opened once, without following a link, the owner and the mode of what was opened
decide, and everything below it is reached from that descriptor.

All packages except the pure ones may import this: standard library only, and no shutil, which the agent and the
supervisor do not load. shutil.rmtree would not be right in any case: it checks no owner, and opens the folder by path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping

Path = str | os.PathLike[str]

TEMPORARY, TEMPORARY_VARIABLES = "/tmp", ("TMPDIR", "TEMP", "TMP")
"""The folder for temporary files, and the variables that name another one, in Python's own order."""

DEPTH_MAX = 32
"""Depth of folders that are removed: each level keeps a descriptor open. Ours have three levels."""
NAME_TRIES_MAX = 8
"""Number of random names that are tried for a new file."""


def temporary(environ: Mapping[str, str]) -> str:
    """The folder for temporary files: the first existing one that a variable names, else /tmp. Not
    `tempfile.gettempdir()`: it passes over a folder that is full or cannot be written, which users must be told, and
    takes the current folder in the end."""
    named = (environ.get(name, "") for name in TEMPORARY_VARIABLES)
    return next((path for path in named if os.path.isabs(path) and os.path.isdir(path)), TEMPORARY)


def open_folder(path: Path, dir_fd: int | None = None) -> int:
    """A descriptor of the folder itself. Raises OSError; NotADirectoryError for a link and for anything else."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


@contextlib.contextmanager
def private(path: Path, others: int = 0o077) -> Iterator[int]:
    """Open a folder that belongs to this user, and for which nobody else has one of the rights `others`.

    Raises OSError; PermissionError for any other folder.
    """
    fd = open_folder(path)
    try:
        check(fd, path, others)
        yield fd
    finally:
        os.close(fd)


def check(fd: int, path: Path, others: int = 0o077) -> None:
    """Raise PermissionError when this open folder or file is not this user's alone. `path` is for the message."""
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & others:
        raise PermissionError(errno.EACCES, f"{os.fspath(path)} is not this user's alone")


def open_file(path: Path) -> int:
    """Open a file for reading and writing, and make it if it is missing, in a folder that is this user's alone.

    Raises OSError; PermissionError for any other folder, and for a link of that name."""
    folder, name = os.path.split(os.fspath(path))
    with private(folder) as within:
        try:
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=within)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise PermissionError(errno.EACCES, f"{os.fspath(path)} is a link") from None
            raise


def remove(path: Path, dir_fd: int | None = None, depth: int = 0) -> None:
    """Remove a folder with all that is below it; a link there is removed and never followed.

    Raises the first OSError, and removes what it can nevertheless.
    """
    fd = open_folder(path, dir_fd)
    try:
        empty(fd, depth)
    finally:
        os.close(fd)
    os.rmdir(path, dir_fd=dir_fd)


def remove_private(path: Path) -> None:
    """Remove a folder with all that is below it, if it is this user's alone. Raises OSError."""
    with private(path) as fd:
        empty(fd)
    os.rmdir(path)  # fails for a link, and for a folder that is not empty


def empty(folder: int, depth: int = 0) -> None:
    """Remove all that is below this open folder. Raises the first OSError, and removes what it can nevertheless."""
    if depth > DEPTH_MAX:
        raise OSError(errno.ELOOP, "too many folders within folders")
    first: OSError | None = None
    for name in os.listdir(folder):
        try:
            _remove_entry(name, folder, depth)
        except FileNotFoundError:  # another process removes it too
            continue
        except OSError as error:
            first = first or error
    if first is not None:
        raise first


def _remove_entry(name: str, folder: int, depth: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        remove(name, folder, depth + 1)


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Make a file of this mode, or replace the one of that name, all or nothing. Raises OSError.

    A link of that name is replaced and not followed, and a file of another user is never written into.
    """
    folder, name = os.path.split(os.fspath(path))
    for _ in range(NAME_TRIES_MAX):
        beside = os.path.join(folder, f".{name}.{os.urandom(4).hex()}")
        with contextlib.suppress(FileExistsError):
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            break
    else:
        raise FileExistsError(errno.EEXIST, "all names are taken", folder)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
        os.rename(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
