"""Which snapshots stay, and how the others go.

`Keep` decides from manifests alone. `prune` counts a snapshot only after it has read it back whole, and deletes only
what the remaining, read-back ones make superfluous: a damaged newest one never costs a good older one. Deleting renames
first: a crash in the middle leaves a folder that says that it is going, and no reader ever finds half a snapshot.
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
        """What stays of these, which are in ascending order."""
        stays = {snapshot.key for snapshot in found[-self.last :]}
        if self.every is not None:
            stays |= _spaced(
                [(snapshot.manifest.saved_unix_s, snapshot.key) for snapshot in found], seconds(self.every)
            )
        if self.every_steps is not None:
            stays |= _spaced([(snapshot.step, snapshot.key) for snapshot in found], self.every_steps)
        return stays | self._best(found)

    def _best(self, found: Sequence[Snapshot]) -> set[Key]:
        """The best by a metric; of equals the newer. Snapshots without the metric are none of them."""
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
    """Snapshots that were read back whole, so that each is read once. Kept by whoever prunes repeatedly."""

    read: Callable[[Snapshot], None] = folder.verify
    """Reads one and checks every byte. SnapshotDamagedError, SnapshotGoneError, SnapshotError."""
    digests: set[tuple[Path, str]] = field(default_factory=set)
    """Folder and manifest text's identity: another snapshot of the same name is read again."""

    def check(self, snapshot: Snapshot) -> None:
        """Read it back unless that was done. SnapshotDamagedError, SnapshotGoneError, SnapshotError."""
        identity = (snapshot.path, snapshot.manifest.dump())
        if identity not in self.digests:
            self.read(snapshot)
            self.digests.add(identity)

    def forget(self, path: Path) -> None:
        """It is gone."""
        self.digests = {each for each in self.digests if each[0] != path}


@dataclass(frozen=True)
class Pruned:
    """What `prune` did, or would do."""

    kept: tuple[Snapshot, ...]
    deleted: tuple[Path, ...]
    damaged: tuple[tuple[Path, SnapshotError], ...]
    """Found damaged while reading them back; set aside (not in a dry run)."""


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
        # What stays has to be good; what goes need not be read.
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
    """Oldest first; returns what the disk let go. All names are gone for good before the first byte is deleted."""
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
    """A time: seconds, or "90s", "30min", "6h", "1d". RetentionError."""
    value = seconds_of(every)
    if value is None:
        raise RetentionError(f"{every!r} is no time; write 90s, 30min, 6h or 1d")
    return value


def _spaced(found: Sequence[tuple[float, Key]], interval: float) -> set[Key]:
    """From the oldest on, each that is far enough from the one kept before it: what stays now stays later."""
    stays: set[Key] = set()
    before: float | None = None
    for at, key in found:
        # A clock that was set back (at < before) must not let everything after it go.
        if before is None or at >= before + interval or at < before:
            stays.add(key)
            before = at
    return stays


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
