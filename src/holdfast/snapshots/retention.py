"""Decides which snapshots are kept, and deletes the others.

`Keep` decides from manifests alone. `prune` counts a snapshot only after it has read it back whole, and deletes only
snapshots that are superfluous given the verified ones: a damaged newest one never costs a good older one. Deletion
renames first: after a crash the folder's name shows that it is being deleted, and no reader finds half a snapshot.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.protocol.errors import RetentionError, SnapshotDamagedError, SnapshotError
from holdfast.snapshots import disk, folder
from holdfast.snapshots.attempt import At, nowhere
from holdfast.snapshots.folder import Snapshot
from holdfast.snapshots.manifest import FolderKind, Key
from holdfast.text import seconds_of


@dataclass(frozen=True)
class Keep:
    """What to keep: the newest `last`, one for `every` so much time ("6h") or `every_steps`, the `best`.

    `best` is (metric, "min" or "max") or (metric, "min" or "max", how many). RetentionError for anything else."""

    last: int = 3
    every: str | float | None = None
    """Seconds, or a text such as "90s", "30min", "6h", "1d"."""
    every_steps: int | None = None
    best: tuple[str, str] | tuple[str, str, int] | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.last):
            raise RetentionError(f"Keep(last={self.last!r}): at least one snapshot has to stay")
        if self.every is not None:
            seconds(self.every)
        if self.every_steps is not None and not _is_count(self.every_steps):
            raise RetentionError(f"Keep(every_steps={self.every_steps!r}): a number of steps, at least 1")
        if self.best is not None:
            sound = len(self.best) in (2, 3) and isinstance(self.best[0], str) and self.best[1] in ("min", "max")
            if not sound or not _is_count(self.best[2] if len(self.best) == 3 else 1):
                raise RetentionError(f'Keep(best={self.best!r}): it looks like ("loss", "min") or ("loss", "min", 3)')

    def choose(self, found: Sequence[Snapshot]) -> set[Key]:
        """The keys to keep of these snapshots, which are in ascending order."""
        stays = {snapshot.key for snapshot in found[-self.last :]}
        if self.every is not None:
            stays |= _spaced(
                [(snapshot.manifest.saved_unix_s, snapshot.key) for snapshot in found], seconds(self.every)
            )
        if self.every_steps is not None:
            stays |= _spaced([(snapshot.step, snapshot.key) for snapshot in found], self.every_steps)
        return stays | self._best(found)

    def _best(self, found: Sequence[Snapshot]) -> set[Key]:
        """The best by a metric; of equal ones the newer. Snapshots without the metric are not considered."""
        if self.best is None:
            return set()
        name, sense = self.best[:2]
        count = self.best[2] if len(self.best) == 3 else 1
        sign = -1.0 if sense == "min" else 1.0
        rated = [
            (sign * snapshot.manifest.metrics[name], snapshot.key)
            for snapshot in found
            if name in snapshot.manifest.metrics
        ]
        return {key for _, key in sorted(rated, reverse=True)[:count]}


@dataclass
class Verified:
    """Snapshots that were read back whole, so that each is read once. Keep this object between calls of `prune`."""

    read: Callable[[Snapshot], None] = folder.verify
    """Reads one and checks every byte. SnapshotDamagedError, SnapshotGoneError, SnapshotError."""
    digests: set[tuple[Path, str]] = field(default_factory=set)
    """Folder and a hash of the manifest's text: another snapshot of the same name is read again."""

    def check(self, snapshot: Snapshot) -> None:
        """Read it back unless that was done before. SnapshotDamagedError, SnapshotGoneError, SnapshotError."""
        identity = (snapshot.path, snapshot.manifest.dump())
        if identity not in self.digests:
            self.read(snapshot)
            self.digests.add(identity)

    def forget(self, path: Path) -> None:
        """The snapshot was deleted."""
        self.digests = {each for each in self.digests if each[0] != path}


@dataclass(frozen=True)
class Pruned:
    """The actions of `prune`, done or, in a dry run, planned."""

    kept: tuple[Snapshot, ...]
    deleted: tuple[Path, ...]
    damaged: tuple[tuple[Path, SnapshotError], ...]
    """Found damaged when they were read back, and renamed (not in a dry run)."""


def prune(
    path: str | os.PathLike[str],
    keep: Keep,
    *,
    verified: Verified | None = None,
    dry_run: bool = False,
    at: At = nowhere,
) -> Pruned:
    """Delete what `keep` does not keep. Call it after a commit: the new snapshot is durable then.

    Only for the job that has the folder. Snapshots that cannot be read at the moment stay and count for nothing.
    `at` is called with "aside" when the names are gone, and with "deleted" after each deletion: tests kill there.
    SnapshotError when the folder cannot be read; SnapshotWriteError when it cannot be written."""
    verified = Verified() if verified is None else verified
    found = list(folder.survey(path).committed)
    damaged: list[tuple[Path, SnapshotError]] = []
    unread: set[Key] = set()
    while True:
        # Kept snapshots have to be good; deleted ones need not be read.
        stays = keep.choose(found)
        bad = _first_bad([snapshot for snapshot in reversed(found) if snapshot.key in stays], verified)
        if bad is None:
            break
        snapshot, error = bad
        found.remove(snapshot)
        unread.add(snapshot.key)
        if isinstance(error, SnapshotDamagedError):
            damaged.append((snapshot.path, error))
            if not dry_run:
                folder.quarantine(snapshot.path, str(error))
    doomed = [snapshot for snapshot in found if snapshot.key not in stays]
    return Pruned(
        kept=tuple(snapshot for snapshot in found if snapshot.key in stays),
        deleted=tuple(snapshot.path for snapshot in (doomed if dry_run else _delete(doomed, verified, at))),
        damaged=tuple(damaged),
    )


def _first_bad(snapshots: Sequence[Snapshot], verified: Verified) -> tuple[Snapshot, SnapshotError] | None:
    for snapshot in snapshots:
        try:
            verified.check(snapshot)
        except SnapshotError as error:
            return snapshot, error
    return None


def _delete(doomed: Sequence[Snapshot], verified: Verified, at: At) -> list[Snapshot]:
    """Delete the oldest first; returns the deleted ones. All names are durably changed before the first byte is
    deleted."""
    going = {}
    for snapshot in doomed:
        aside = folder.rename_aside(snapshot.path, snapshot.key, FolderKind.GONE)
        if aside is not None:
            verified.forget(snapshot.path)
            going[aside] = snapshot
    if going:
        parent = doomed[0].path.parent
        try:
            disk.sync_folder(parent)
        except OSError as error:
            raise disk.write_error(error, parent) from error
        at("aside")
    for aside in going:
        shutil.rmtree(aside, ignore_errors=True)
        at("deleted")
    return list(going.values())


def seconds(every: str | float) -> float:
    """A duration: seconds, or "90s", "30min", "6h", "1d". RetentionError."""
    value = seconds_of(every)
    if value is None:
        raise RetentionError(f"{every!r} is no time; write 90s, 30min, 6h or 1d")
    return value


def _spaced(found: Sequence[tuple[float, Key]], interval: float) -> set[Key]:
    """From the oldest on, each that is far enough from the one kept before it, so that a kept one stays kept later."""
    stays: set[Key] = set()
    before: float | None = None
    for at, key in found:
        # A clock that was set back (at < before) must not delete everything after it.
        if before is None or at >= before + interval or at < before:
            stays.add(key)
            before = at
    return stays


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
