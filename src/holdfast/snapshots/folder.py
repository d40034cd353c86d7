"""What is in a snapshot folder: committed snapshots in order, debris, what was set aside; which one to resume from.

`survey` checks what is cheap: manifests, names, sizes. The tensors' digests are checked whenever they are read
(reader.py). Nothing here looks at a time stamp, and nothing writes except `quarantine` and `clear_debris`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import (
    NoValidSnapshotError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotGoneError,
)
from holdfast.snapshots import disk, layout
from holdfast.snapshots.layout import FolderKind, Key
from holdfast.snapshots.manifest import MANIFEST_BYTES_MAX, Manifest

WHY = "WHY.txt"
SUFFIX_MAX = 1000


@dataclass(frozen=True)
class Snapshot:
    """A committed snapshot whose manifest and sizes are as they should be."""

    path: Path
    manifest: Manifest

    @property
    def key(self) -> Key:
        """Its place in the order: (step, attempt)."""
        return self.manifest.key

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self.manifest.step


@dataclass(frozen=True)
class Problem:
    """A folder named like a committed snapshot that is none, or that cannot be read now."""

    path: Path
    key: Key
    error: SnapshotError

    @property
    def damaged(self) -> bool:
        """It will never be a snapshot; otherwise (permissions, a newer version) it may well be a good one."""
        return is_damage(self.error)


@dataclass(frozen=True)
class Survey:
    """What is in a snapshot folder. Everything is in ascending order of (step, attempt)."""

    path: Path
    committed: tuple[Snapshot, ...] = ()
    problems: tuple[Problem, ...] = ()
    debris: tuple[Path, ...] = ()
    """Attempts that did not end (or that are under way now), and what retention did not finish deleting."""
    quarantined: tuple[Path, ...] = ()

    @property
    def newest_valid(self) -> Snapshot | None:
        """The newest whose manifest and sizes are right; its digests are checked when it is read."""
        return self.committed[-1] if self.committed else None

    @property
    def fresh(self) -> bool:
        """Nobody ever saved here."""
        return not (self.committed or self.problems or self.debris or self.quarantined)


def survey(folder: str | os.PathLike[str]) -> Survey:
    """Look at a snapshot folder; one that does not exist is empty. Files that are not ours are ignored. SnapshotError."""
    path = Path(folder)
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return Survey(path)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from error
    ours = sorted((named.key, name, named.kind) for name in names if (named := layout.parse(name)))
    committed, problems = [], []
    for key, name, kind in ours:
        if kind is not FolderKind.COMMITTED:
            continue
        try:
            committed.append(inspect(path / name))
        except SnapshotGoneError:
            continue
        except SnapshotError as error:
            problems.append(Problem(path / name, key, error))
    return Survey(
        path,
        committed=tuple(committed),
        problems=tuple(problems),
        debris=tuple(path / name for _, name, kind in ours if kind in (FolderKind.ATTEMPT, FolderKind.GONE)),
        quarantined=tuple(path / name for _, name, kind in ours if kind is FolderKind.BAD),
    )


def inspect(path: Path) -> Snapshot:
    """The snapshot in this committed folder. SnapshotDamagedError; SnapshotGoneError; SnapshotVersionError."""
    try:
        manifest = Manifest.load(disk.read_text(path / layout.MANIFEST, MANIFEST_BYTES_MAX))
        if manifest.key.name != path.name:
            raise SnapshotDamagedError(f"its manifest is that of {manifest.key.name}")
        for entry in manifest.ranks:
            size_bytes = (path / entry.file).stat().st_size
            if size_bytes != entry.size_bytes:
                raise SnapshotDamagedError(f"{entry.file} has {size_bytes} bytes, not {entry.size_bytes}")
    except SnapshotError as error:
        raise type(error)(f"{path}: {error}") from None
    except OSError as error:
        raise unreadable(path, error) from error
    return Snapshot(path, manifest)


def is_damage(error: SnapshotError) -> bool:
    """Whether this snapshot will never be one; otherwise (permissions, a newer version) it may well be good."""
    return isinstance(error, SnapshotDamagedError)


def unreadable(snapshot: Path, error: OSError) -> SnapshotError:
    """What it means that a file of a committed snapshot cannot be read: damage, the whole is gone, or neither."""
    if error.errno in (errno.ENOENT, errno.ESTALE) and not snapshot.exists():
        return SnapshotGoneError(f"{snapshot} was removed meanwhile; look for a newer one")
    if error.errno == errno.ENOENT:
        return SnapshotDamagedError(f"{snapshot}: {Path(error.filename or '').name} is missing")
    return disk.read_error(error, Path(error.filename or snapshot))


def choose(found: Survey, *, fresh_ok: bool = False) -> Snapshot | None:
    """The snapshot to resume from; None to start anew.

    NoValidSnapshotError when something was saved here and nothing of it is valid, unless `fresh_ok`. What cannot be
    read now, but may be good and newer than the newest valid one, is an error: it is not passed over in silence.
    """
    newest = found.newest_valid
    for problem in reversed(found.problems):
        if not problem.damaged and (newest is None or problem.key > newest.key) and not fresh_ok:
            raise problem.error
    if newest is not None or fresh_ok or found.fresh:
        return newest
    remains = [*(problem.path for problem in found.problems), *found.debris, *found.quarantined]
    names = ", ".join(path.name for path in remains[:4]) + (" …" if len(remains) > 4 else "")
    raise NoValidSnapshotError(
        f"{found.path} holds no valid snapshot, only {names}.\n"
        "To start from zero on purpose, pass fresh_ok=True or choose another folder."
    )


def quarantine(path: Path, why: str) -> Path | None:
    """Set a damaged snapshot aside, so that nobody takes it again; returns its new place.

    None when that cannot be done (read-only, or somebody else was faster): then the caller has to pass it over.
    """
    named = layout.parse(path.name)
    if named is None or named.kind is not FolderKind.COMMITTED:
        raise ValueError(f"{path} is no committed snapshot")
    aside = rename_aside(path, named.key, FolderKind.BAD)
    if aside is not None:
        with contextlib.suppress(OSError):
            disk.write_atomically(aside / WHY, f"{path.name} was set aside: {why}\n")
            disk.sync_folder(path.parent)
    return aside


def rename_aside(path: Path, key: Key, kind: FolderKind) -> Path | None:
    """Give a folder the name of this kind (a free one); None when the disk does not let us."""
    for number in range(1, SUFFIX_MAX):
        target = path.with_name(key.named(kind) + (f".{number}" if number > 1 else ""))
        # The kernel refuses to rename a folder onto one that holds anything: nothing is replaced, whoever else is at it.
        try:
            path.rename(target)
        except FileNotFoundError:
            return None
        except OSError:
            if not target.exists():
                return None
        else:
            return target
    return None


@contextlib.contextmanager
def being_written(path: Path) -> Iterator[None]:
    """Whoever writes to this attempt says so: a lock that goes with the process, for others on this machine to see."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # what is wrong with it is told where it is written to
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def is_being_written(path: Path) -> bool:
    """Whether a process of this machine is at it. False: none is, or it is on another one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def clear_debris(found: Survey) -> list[Path]:
    """Delete what unfinished saves left; returns what is gone. Only for the job that has the folder, and while it saves nothing."""
    cleared = []
    for path in found.debris:
        named = layout.parse(path.name)
        doomed = (
            path if named is None or named.kind is FolderKind.GONE else rename_aside(path, named.key, FolderKind.GONE)
        )
        if doomed is not None:
            shutil.rmtree(doomed, ignore_errors=True)
            with contextlib.suppress(OSError):
                doomed.unlink()  # no folder at all: a file, or a link, whose target is somebody else's
            if not os.path.lexists(doomed):
                cleared.append(path)
    return cleared
