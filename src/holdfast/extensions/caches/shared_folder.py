"""A folder of compiled kernels that nodes share (--cache-from): a node whose own folder is empty begins with a copy of
it, and a job that ends well adds what is new.

A file has its name only when all of its bytes are there, and a temporary name before. This holds for a node that reads
while another one writes, and for a copy that is killed in the middle.

The files of Inductor and Triton are copied: their names follow from all that they were made of, except the processor,
which is in the name of the folder. Those of torch's C++ extensions have neither in their names, and the driver's have
an index; they stay on the node.

What is in the folder is executed by workers, so the rules of --cache-dir are those of this folder as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from holdfast import own_folders
from holdfast.compile_caches import BYTES_MAX, OTHERS_WRITE, CacheEntry, CacheFolder, bound_entries, entries
from holdfast.linux import read_text

KINDS = ("inductor", "triton")
"""The folders that are copied."""
LOCKS = "locks"
"""Inductor's folder of locks."""
UNFINISHED = re.compile(r"^\.|^tmp\.|\.tmp\b|\.lock$")
"""Names that the libraries give to what is not complete yet."""
GROUP = "__grp__"
"""The beginning of the names of Triton's lists of what belongs together: one that is there must find its files."""
STAGING = ".seeding"
"""The folder in which the copy for a node is made, in the node's own."""
INCOMING = ".incoming"
"""The folder in which files have their temporary names, in the shared one."""
ABANDONED_S = 3600.0
"""Age from which a temporary file belongs to a copy that was killed (s): a copy has COPY_S_MAX."""
CHUNK_BYTES = 2**20
PROCESSOR = re.compile(r"^(vendor_id|cpu family|model|model name|flags|Features|CPU \w+)\s*:", re.ASCII)
"""The lines of /proc/cpuinfo from which the instructions of a processor follow."""


class Copied(NamedTuple):
    """The result of a copy."""

    files: int = 0
    bytes: int = 0
    whole: bool = True
    """False: a limit of bytes or time was reached before the end."""


class SharedFolder:
    """The part of the folder that is for processors as this one."""

    def __init__(self, path: str, root: str = "/") -> None:
        """Make the folder if it is missing. Raises OSError; PermissionError if others own it or may write into it, or
        if this user may not."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        self.path = path
        self._processor = processor_key(root)
        with own_folders.private(path, OTHERS_WRITE):
            if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, f"{path} is not writable")

    def seed(self, folder: CacheFolder, bytes_max: int, over: Callable[[], bool]) -> Copied | None:
        """Fill what is empty in a node's folder, the newest entries first. Stops when `over` says so. None: another
        agent does it at this moment. Raises OSError."""
        with own_folders.private(folder.path, OTHERS_WRITE) as own, _staging(own) as staging:
            if staging is None:
                return None
            kinds = [kind for kind in KINDS if _is_empty(kind, own)]
            with self._part() as part:
                if part is None:
                    return Copied()
                copied = _Copy(part, staging, staging, bytes_max, over, kinds=kinds).run()
            for kind in kinds:
                # A folder that another job has begun to fill stays as it is.
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    _rename_folder(kind, staging, own)
        return copied

    def add(
        self, folder: CacheFolder, wanted: Callable[[float], bool], bytes_max: int, over: Callable[[], bool]
    ) -> Copied | None:
        """Copy what is new in a node's folder, if `wanted` says so of the time at which a file was written; then remove
        the oldest entries above the limit of all. Stops when `over` says so. None: another job uses the node's folder,
        and may be writing. Raises OSError."""
        with folder.alone() as alone, own_folders.private(folder.path, OTHERS_WRITE) as own:
            if not alone:
                return None
            with self._part(make=True) as part:
                assert part is not None
                incoming = _made(INCOMING, part)
                try:
                    _clear(incoming)
                    copied = _Copy(own, part, incoming, bytes_max, over, wanted, durable=True).run()
                finally:
                    os.close(incoming)
                bound_entries(part, BYTES_MAX, over)
        return copied

    @contextlib.contextmanager
    def _part(self, *, make: bool = False) -> Iterator[int | None]:
        """The open folder for this processor; None: there is none."""
        with own_folders.private(self.path, OTHERS_WRITE) as shared:
            try:
                part = _made(self._processor, shared) if make else own_folders.open_folder(self._processor, shared)
            except FileNotFoundError:
                yield None
                return
            try:
                own_folders.check(part, os.path.join(self.path, self._processor), OTHERS_WRITE)
                yield part
            finally:
                os.close(part)


def processor_key(root: str = "/") -> str:
    """The name of the folder for what runs on this processor: Inductor's C++ is compiled for exactly one model, and its
    file names say nothing of it. Another C library could be too old for it."""
    lines = read_text(os.path.join(root, "proc/cpuinfo")).partition("\n\n")[0].splitlines()
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except ValueError:
        library = ""
    about = "\n".join([*(line for line in lines if PROCESSOR.match(line)), library])
    return f"{os.uname().machine}-{hashlib.sha256(about.encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def _staging(own: int) -> Iterator[int | None]:
    """An empty folder of this process in a node's folder; None: another agent has it."""
    staging = _made(STAGING, own)
    try:
        try:
            fcntl.flock(staging, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
            return
        own_folders.empty(staging)  # of a copy that was killed
        try:
            yield staging
        finally:
            with contextlib.suppress(OSError):
                own_folders.empty(staging)
    finally:
        os.close(staging)


def _is_empty(name: str, folder: int) -> bool:
    """Whether nothing is in this folder, or it is missing."""
    try:
        with _opened((name,), folder) as fd:
            return not os.listdir(fd)
    except FileNotFoundError:
        return True


def _rename_folder(name: str, source: int, target: int) -> None:
    """Move a folder to where there is none, or an empty one. Raises FileExistsError for any other."""
    try:
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, "it is not empty", name) from error
        raise


def _clear(incoming: int) -> None:
    """Remove the temporary files of copies that were killed. The clock is that of the file system."""
    name = _temporary_name()
    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=incoming))
    now_s = os.stat(name, dir_fd=incoming).st_mtime
    os.unlink(name, dir_fd=incoming)
    for each in os.listdir(incoming):
        with contextlib.suppress(FileNotFoundError):
            if now_s - os.stat(each, dir_fd=incoming, follow_symlinks=False).st_mtime > ABANDONED_S:
                os.unlink(each, dir_fd=incoming)


def _temporary_name() -> str:
    return f".{os.urandom(8).hex()}"


def _made(name: str, within: int) -> int:
    """The open folder of this name; it is made if it is missing."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=within)
    return own_folders.open_folder(name, within)


class _OverError(Exception):
    """The time is over."""


class _Copy:
    """Copies files from below one open folder to below another one, where they are missing."""

    def __init__(
        self,
        source: int,
        target: int,
        temporary: int,
        bytes_max: int,
        over: Callable[[], bool],
        wanted: Callable[[float], bool] = lambda _: True,
        *,
        kinds: Sequence[str] = KINDS,
        durable: bool = False,
    ) -> None:
        """`temporary`: the open folder in which a file has another name until all of it is there, on the file system of
        the target. `durable`: each file is on the disk before it has its name; without this a loss of power may leave
        an empty one, as it may of the libraries' own files."""
        self._source = source
        self._target = target
        self._temporary = temporary
        self._room = bytes_max
        self._over = over
        self._wanted = wanted
        self._kinds = kinds
        self._durable = durable
        self._files = self._bytes = 0
        self._whole = True

    def run(self) -> Copied:
        try:
            for entry in sorted(self._found(), reverse=True):
                self._entry(entry)
        except _OverError:
            self._whole = False
        return Copied(self._files, self._bytes, self._whole)

    def _found(self) -> list[CacheEntry]:
        found: list[CacheEntry] = []
        for kind in self._kinds:
            with contextlib.suppress(FileNotFoundError), _opened((kind,), self._source) as folder:
                found += entries(folder, (kind,), self._over)
        if self._over():
            raise _OverError
        return [entry for entry in found if LOCKS not in entry.folders and not any(map(_unfinished, entry.folders))]

    def _entry(self, entry: CacheEntry) -> None:
        # Another process may remove or write it meanwhile: then the rest of it is left out, the list of it as well.
        with (
            contextlib.suppress(FileNotFoundError),
            _opened(entry.folders, self._source) as source,
            _opened(entry.folders, self._target, make=True) as target,
        ):
            complete = True
            for name in sorted(entry.names, key=lambda name: (name.startswith(GROUP), name)):
                if self._over():
                    raise _OverError
                if not _unfinished(name) and (complete or not name.startswith(GROUP)):
                    complete = self._file(name, source, target) and complete

    def _file(self, name: str, source: int, target: int) -> bool:
        """Whether the target has this file now. Raises FileNotFoundError if it is not there, or not complete."""
        if _exists(name, target):
            return True
        if not stat.S_ISREG(os.stat(name, dir_fd=source, follow_symlinks=False).st_mode):
            return False
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=source), "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size > self._room:
                self._whole = False
                return False
            if not self._wanted(found.st_mtime):
                return False
            beside = _temporary_name()
            try:
                self._write(file, found, beside)
                os.rename(beside, name, src_dir_fd=self._temporary, dst_dir_fd=target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(beside, dir_fd=self._temporary)
                raise
        self._files += 1
        self._bytes += found.st_size
        self._room -= found.st_size
        return True

    def _write(self, file: BinaryIO, found: os.stat_result, beside: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(beside, flags, 0o600 | found.st_mode & stat.S_IXUSR, dir_fd=self._temporary), "wb") as copy:
            while chunk := file.read(CHUNK_BYTES):
                if self._over():
                    raise _OverError
                copy.write(chunk)
                if copy.tell() > found.st_size:
                    break
            copy.flush()
            if self._durable:
                os.fsync(copy.fileno())
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns, copy.tell()) != (found.st_size, found.st_mtime_ns, found.st_size):
                raise FileNotFoundError(errno.ENOENT, "it is being written", beside)


def _unfinished(name: str) -> bool:
    return UNFINISHED.search(name) is not None


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _opened(way: tuple[str, ...], within: int, *, make: bool = False) -> Iterator[int]:
    """The open folder at the end of this way."""
    opened: list[int] = []
    try:
        for name in way:
            above = opened[-1] if opened else within
            opened.append(_made(name, above) if make else own_folders.open_folder(name, above))
        yield opened[-1]
    finally:
        for fd in opened:
            os.close(fd)
