"""Changes of a snapshot folder. Killed at any point, they leave only snapshots that are complete or absent.

**Writing**, by the commit protocol:

    rank 0       begin         the attempt folder, by an exclusive mkdir; its number is sent to the others
    each rank    write_rank    its file, fsync; its record, fsync, rename; fsync of the folder (not rank 0)
    rank 0       commit        when all records are there: MANIFEST.json, fsync, rename; fsync of the folder;
                               rename of the folder to its committed name; fsync of the snapshot folder

The rename commits. Nothing but the files of read_back.py is written inside a committed folder, ever. It cannot replace
another snapshot: no two attempts have one number, and the kernel renames no folder onto one that holds anything.

The ranks' sizes and digests are exchanged in record files in the attempt folder, not in torch's store: the saver must
be able to finish after the trainer and its store have died. Hence all ranks must see one folder.

**Deleting**, by `prune`. `Keep` decides from manifests alone which snapshots are kept. `prune` counts a snapshot only
after it was read back whole, and deletes only snapshots that are superfluous given the verified ones: a damaged
newest one never costs a good older one. Deletion renames first: after a crash the folder's name shows that it is being
deleted, and no reader finds half a snapshot.

In an object store, which has no rename, a conditional put of the manifest commits: remote_commit.py.

Functions take `at`, which is called with the name of each phase when it is reached: tests kill there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from holdfast.protocol.errors import (
    NotFiniteError,
    RetentionError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotIncompleteError,
)
from holdfast.text import seconds_of
from holdfast.train.snapshots import disk, remote_commit
from holdfast.train.snapshots.disk import ChunkDigests, root_digest
from holdfast.train.snapshots.folder import (
    Snapshot,
    attempt_location,
    first_of,
    is_being_written,
    is_lasting,
    quarantine,
    rename_aside,
    survey,
    verify,
)
from holdfast.train.snapshots.layout import (
    FINITE,
    MANIFEST,
    NOT_FINITE,
    RECORD_BYTES_MAX,
    FolderKind,
    Key,
    Manifest,
    RankEntry,
    RankRecord,
    check_step,
    parse_name,
    rank_file,
    record_file,
    refusal_file,
)
from holdfast.train.snapshots.not_finite import NotFiniteSearch, Part
from holdfast.train.snapshots.remote import STORE_POLL_S, Location, RemotePath, location_of

PHASES = (
    "begun",  # the attempt folder is there
    "written",  # a rank's file is on the disk
    "recorded",  # and its record
    "gathered",  # rank 0 has seen all records
    "manifest",  # MANIFEST.json is on the disk
    "renamed",  # the folder has its committed name
    "durable",  # and will keep it
)
PATIENCE_S = 600.0
"""Rank 0 waits this long for the others' records, unless the caller chooses another limit (s)."""
LEFT_S = 10.0
"""Rank 0 waits this long for the next change of an attempt, if the ranks have gone on without a lost one (s)."""
POLL_S_MIN, POLL_S_MAX = 0.002, 0.1
"""Pause between two listings of an attempt on a file system; it doubles from the first to the second (s)."""
STOPPED = (
    "This state was not saved, and the next start goes on from the newest one whose values are finite "
    "(SnapshotOptions(nonfinite='stop'))."
)
MARKED = "The snapshot is marked: resume() prefers an older one, and retention keeps the newest without such values."
REFUSAL_BYTES_MAX = 1 << 16
"""Only this much of another rank's refusal is read."""

At = Callable[[str], None]
"""Called with the name of each phase when it is reached (`PHASES`)."""


def nowhere(phase: str) -> None:
    """The default `at`."""


@dataclass(frozen=True)
class SaveRequest:
    """One rank's request to save: the same object in the worker, in the memory slot and in the saver."""

    folder: str
    """The snapshot folder; absolute, or relative to the working directory of the process that saves. Or a URL."""
    step: int
    attempt: int
    """The number of the attempt, unique at this step; for a state in memory that of the life that made it."""
    rank: int
    world: int
    """The number of ranks that save."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """JSON that goes into the rank's record."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON; that of rank 0 goes into the manifest."""
    trained: Sequence[Part] | None = None
    """The parts of the file in which `write_rank` looks for numbers that are not finite; None: it does not look."""
    stops_not_finite: bool = False
    """Whether there is no commit if it finds one."""

    @property
    def key(self) -> Key:
        """The key of the snapshot."""
        return Key(self.step, self.attempt)

    @property
    def attempt_path(self) -> Location:
        """The folder during the writing."""
        return attempt_location(self.folder, self.key)

    @property
    def committed_path(self) -> Location:
        """The folder after the commit."""
        return location_of(self.folder) / self.key.name

    @property
    def save(self) -> int:
        """The number of this save in this life of the worker: several saves may have one step."""
        save = self.note.get("save", 0)
        return save if type(save) is int else 0

    @property
    def identity(self) -> tuple[int, int, int]:
        """What distinguishes states in memory: step, attempt (the number of the life that left it) and save."""
        return self.step, self.attempt, self.save

    def of_file(self, data: memoryview) -> memoryview:
        """The part of these bytes that goes into the rank's file: a slot may hold more, for a restart on this node."""
        return data[: self.note.get("file_bytes", len(data))]

    def to_json(self) -> dict[str, Any]:
        """The fields, for a message or a slot's header."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> SaveRequest:
        """The request that `to_json` wrote. ValueError for anything else."""
        try:
            request = cls(**value)
        except TypeError as error:
            raise ValueError(f"a request to save: {error}"[:200]) from error

        texts, numbers = (request.folder,), (request.step, request.attempt, request.rank, request.world)
        objects, lists = (request.note, request.metadata), () if request.trained is None else (request.trained,)
        truths = (request.stops_not_finite,)
        for kind, fields in ((str, texts), (int, numbers), (dict, objects), (list, lists), (bool, truths)):
            if any(type(each) is not kind for each in fields):
                raise ValueError(f"a request to save: {request}"[:200])
        return request


def begin(folder: str | os.PathLike[str] | RemotePath, step: int, *, make: bool = True, at: At = nowhere) -> int:
    """Make the attempt folder; rank 0 calls it. Returns the attempt's number, which is unique at this step.

    `make`: make the snapshot folder too, when it is missing. Otherwise a missing folder is an error: a new one would
    hide that it vanished. Raises SnapshotFolderError; SnapshotWriteError; ValueError for an invalid step.
    """
    check_step(step)
    path = location_of(folder)
    try:
        if make:
            disk.make_folder(path)
        named = [each for name in disk.listed(path) if (each := parse_name(name))]
        attempt = max((each.key.attempt for each in named if each.key.step == step), default=0) + 1

        # Another process may take the same number after our listing: the first that makes the folder has it.
        if isinstance(path, RemotePath):
            attempt = remote_commit.begin(path, step, attempt)
        while isinstance(path, Path):
            try:
                (path / Key(step, attempt).named(FolderKind.ATTEMPT)).mkdir()
            except FileExistsError:
                attempt += 1
            else:
                break
    except FileNotFoundError as error:
        raise disk.vanished(path) from error
    except OSError as error:
        raise disk.write_error(error, path) from error
    at("begun")
    return attempt


def write_rank(request: SaveRequest, buffer: bytes | bytearray | memoryview, *, at: At = nowhere) -> RankRecord:
    """Write this rank's file and its record. Both are durable when this returns; rank 0's by name only after `commit`.

    The buffer (an image, see layout.py) must not change meanwhile. It is written without a copy when it begins at a
    multiple of 4096 in memory, as slots do. On failure the written files are removed, which frees space on a full disk,
    and a refusal is left for rank 0, which then need not wait; rank 0 itself abandons the attempt. Raises
    SnapshotWriteError; SnapshotIncompleteError when rank 0 has abandoned the attempt.
    """
    data = memoryview(buffer).cast("B")
    folder = request.attempt_path
    file = folder / rank_file(request.rank)
    record: RankRecord | None = None
    try:
        if isinstance(folder, RemotePath):
            remote_commit.check_open(folder)  # an object store would let us replace objects of a committed snapshot
        search = None if request.trained is None else NotFiniteSearch(data, request.trained)
        with ChunkDigests(data, None if search is None else search.look) as digests:
            disk.write_all(file, data, beside=digests.start)
            at("written")
            chunks = digests.results()

        record = RankRecord(
            step=request.step,
            attempt=request.attempt,
            rank=request.rank,
            world=request.world,
            size_bytes=len(data),
            digest=root_digest(len(data), chunks),
            chunks=chunks,
            note=request.note if search is None else {**request.note, NOT_FINITE: search.first()},
        )
        disk.write_atomically(folder / record_file(request.rank), record.dump())
        if request.rank:
            _sync_part(folder)
    except FileNotFoundError as error:
        # Rank 0 may have read the record, the last one that it waited for, and committed before this rank has synced.
        committed = request.committed_path
        if record is not None and not isinstance(committed, RemotePath) and committed.exists():
            return record
        raise SnapshotIncompleteError(
            f"{folder} is not there: rank 0 gave up this save, or does not share the folder"
        ) from error
    except OSError as error:
        failure = disk.write_error(error, file, len(data))
        refuse(request, str(failure))
        raise failure from error
    at("recorded")
    return record


def _sync_part(folder: Location) -> None:
    """Sync the folder of a part whose record is there. An error gives up no part: rank 0 may have read the record, and
    syncs the folder, too, with the manifest in it. Raises FileNotFoundError."""
    try:
        disk.sync_folder(folder)
    except FileNotFoundError:
        raise
    except OSError:
        pass


def commit(
    request: SaveRequest,
    *,
    patience: float = PATIENCE_S,
    at: At = nowhere,
    left: threading.Event | None = None,
    warn: Callable[[str], object] = nowhere,
) -> Location:
    """Wait up to `patience` seconds for all ranks' records, then commit; rank 0 calls it. Returns the committed folder.
    `left`: set when the ranks have gone on without a lost one, whose record may never come (LEFT_S). `warn`: called
    with a text for the user if some value is not finite.

    It is durable when this returns. On any failure the attempt is removed and older snapshots are unchanged. Raises
    SnapshotIncompleteError when a rank refused or is missing; SnapshotDamagedError when a rank's file differs from its
    record; NotFiniteError if the request says so; SnapshotWriteError; ValueError for metadata that is not JSON.
    """
    try:
        records = _gather(request, patience, left)
        at("gathered")
        metadata = dict(request.metadata)
        bad = _not_finite(request, records)
        if bad or all(NOT_FINITE in each.note for each in records):  # else it is not known of some rank's file
            metadata[FINITE] = not bad
            if bad and request.stops_not_finite:
                raise NotFiniteError(f"{bad}\n{STOPPED}")
            if bad:
                warn(f"{bad}. {MARKED}")
        manifest = Manifest(
            step=request.step,
            attempt=request.attempt,
            ranks=tuple(RankEntry(each.rank, each.size_bytes, each.digest) for each in records),
            metadata=metadata,
            saved_unix_s=time.time(),
        )
        _publish(request, manifest.dump(), at)
    except OSError as error:
        # The attempt is gone when another rank, on a full disk, renamed it (`refuse`), or a next life removed it.
        path = request.attempt_path
        if isinstance(error, FileNotFoundError) and (isinstance(path, RemotePath) or not path.exists()):
            raise SnapshotIncompleteError(
                f"step {request.step} was not saved: another rank could not write its part, or the job went on before "
                "all ranks had saved"
            ) from error
        abandon(request)
        raise disk.write_error(error, request.attempt_path) from error
    except (SnapshotError, ValueError):
        abandon(request)
        raise
    return request.committed_path


def _not_finite(request: SaveRequest, records: Iterable[RankRecord]) -> str:
    """The first rank and its first tensor with a value that is not finite, as a sentence; empty: all are finite."""
    found = ((each.note.get(NOT_FINITE), each.rank) for each in records)
    return next(
        (f"{name} of rank {n} has values that are not finite after step {request.step}" for name, n in found if name),
        "",
    )


def abandon(request: SaveRequest) -> None:
    """Remove the attempt, as far as the disk allows. Ranks that still write to it get a SnapshotIncompleteError."""
    if isinstance(request.attempt_path, RemotePath):
        remote_commit.give_up(request.attempt_path)
        return
    # Renamed first: a half-deleted attempt must not look like one that may still be completed.
    renamed = rename_aside(request.attempt_path, request.key, FolderKind.GONE)
    if renamed is not None:
        disk.remove(renamed)


def _publish(request: SaveRequest, manifest: str, at: At) -> None:
    """Write the manifest, and give the attempt its committed name. OSError; SnapshotIncompleteError."""
    folder, committed = request.attempt_path, request.committed_path
    if isinstance(folder, RemotePath):
        remote_commit.publish(folder, manifest)
        return at("durable")
    disk.write_atomically(folder / MANIFEST, manifest)
    disk.sync_folder(folder)
    at("manifest")

    folder.rename(cast("Path", committed))
    at("renamed")
    disk.sync_folder(committed.parent)
    return at("durable")


class _Quiet:
    """Knows for how long an attempt has not changed, while no process of this machine writes it."""

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        self._seen: set[tuple[str, int]] = set()
        self._since_s = time.monotonic()

    def lasts_s(self, names: Iterable[str]) -> float:
        """The time of it (s). `names`: the files that are there now."""
        seen = {(name, self._size_bytes(name)) for name in names}
        if seen != self._seen or is_being_written(self._folder):
            self._seen, self._since_s = seen, time.monotonic()
        return time.monotonic() - self._since_s

    def _size_bytes(self, name: str) -> int:
        """The size of this file; -1: it was renamed since it was listed, which is a change, too."""
        try:
            return disk.size(self._folder / name)
        except FileNotFoundError:
            return -1


def _gather(request: SaveRequest, patience: float, left: threading.Event | None) -> list[RankRecord]:
    """All ranks' records, in order of rank. It polls, because writes of other nodes cause no local event."""
    folder = request.attempt_path
    longest = STORE_POLL_S if isinstance(folder, RemotePath) else POLL_S_MAX
    awaited, deadline, pause = set(range(request.world)), time.monotonic() + patience, POLL_S_MIN
    watch = disk.RefusalWatch(folder) if isinstance(folder, Path) else None
    records: dict[int, RankRecord] = {}
    quiet: _Quiet | None = None
    while True:
        names = set(disk.names(folder))
        if isinstance(folder, RemotePath) and MANIFEST in names:
            remote_commit.check_open(folder)
        elif watch is not None:
            watch.check()  # when it raises, no rank can write its part, and none can leave a refusal

        for rank in sorted(awaited):
            if refusal_file(rank) in names:
                why = disk.read_text(folder / refusal_file(rank), REFUSAL_BYTES_MAX)
                raise SnapshotIncompleteError(f"step {request.step} was not saved: rank {rank}: {why}")
            if record_file(rank) in names:
                records[rank] = _record(request, rank)

        awaited -= records.keys()
        if not awaited:
            return [records[rank] for rank in range(request.world)]
        if left is not None and left.is_set():
            quiet = quiet or _Quiet(folder)
            if quiet.lasts_s(names) >= LEFT_S:
                missing = first_of(sorted(awaited), 8)
                raise SnapshotIncompleteError(
                    f"step {request.step} was not saved: rank {missing} was lost before its part was written"
                )
        if time.monotonic() >= deadline:
            missing = first_of(sorted(awaited), 8)
            raise SnapshotIncompleteError(
                f"step {request.step} was not saved: after {patience:g} s nothing came from rank {missing}"
            )
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _record(request: SaveRequest, rank: int) -> RankRecord:
    """The record of this rank, which must be of this save and fit the rank's file. OSError; SnapshotDamagedError."""
    folder = request.attempt_path
    record = RankRecord.load(disk.read_text(folder / record_file(rank), RECORD_BYTES_MAX))
    size_bytes = disk.size(folder / rank_file(rank))
    expected = (request.step, request.attempt, rank, request.world, size_bytes)
    if (record.step, record.attempt, record.rank, record.world, record.size_bytes) != expected:
        raise SnapshotDamagedError(f"{folder}: the record of rank {rank} is of another save")
    return record


def refuse(request: SaveRequest, why: str) -> None:
    """Give up this rank's part: free its space, and report `why` to rank 0 at once."""
    folder = request.attempt_path
    with contextlib.suppress(OSError):
        disk.delete(folder / rank_file(request.rank))
    noted = False
    with contextlib.suppress(OSError):
        disk.write_atomically(folder / refusal_file(request.rank), why)
        noted = True
    # If this is rank 0, no commit will follow: the space of the others' files is freed, too. Another rank does the same
    # if the disk is so full that it takes not even the refusal: rank 0 stops waiting when the folder is gone, and a
    # rename needs no space.
    if request.rank == 0 or not (noted or isinstance(folder, RemotePath)):
        abandon(request)


# --- deleting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keep:
    """The rule by which retention keeps snapshots: the newest `last`, one per interval of `every` or of `every_steps`,
    and the `best`. The newest whose values are all finite stays in any case. Raises RetentionError for other values."""

    last: int = 3
    """The number of newest snapshots that stay; at least 1."""
    every: str | float | None = None
    """An interval of time: seconds, or a text such as "90s", "30min", "6h", "1d". None: no snapshot stays for it."""
    every_steps: int | None = None
    """An interval of steps; at least 1. None: no snapshot stays for it."""
    best: tuple[str, str] | tuple[str, str, int] | None = None
    """(metric, "min" or "max"), or (metric, "min" or "max", number of snapshots); without a number one stays."""

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
        stays |= {snapshot.key for snapshot in [each for each in found if each.manifest.finite][-1:]}
        return stays | self._best(found)

    def _best(self, found: Sequence[Snapshot]) -> set[Key]:
        """The best by a metric; of two equal ones the newer. Snapshots without the metric are not considered."""
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

    read: Callable[[Snapshot], None] = verify
    """Reads a snapshot and checks every byte. Raises SnapshotDamagedError, SnapshotGoneError, SnapshotError."""
    digests: set[tuple[Location, str]] = field(default_factory=set)
    """Folder and manifest text of each verified snapshot: another snapshot of the same name is read again."""

    def check(self, snapshot: Snapshot) -> None:
        """Read it back unless that was done before. Raises SnapshotDamagedError, SnapshotGoneError, SnapshotError."""
        identity = (snapshot.path, snapshot.manifest.dump())
        if identity not in self.digests:
            self.read(snapshot)
            self.digests.add(identity)

    def forget(self, path: Location) -> None:
        """Forget a snapshot that was deleted."""
        self.digests = {each for each in self.digests if each[0] != path}


@dataclass(frozen=True)
class Pruned:
    """The actions of `prune`, done or, in a dry run, planned."""

    kept: tuple[Snapshot, ...]
    deleted: tuple[Location, ...]
    damaged: tuple[tuple[Location, SnapshotError], ...]
    """Snapshots that were found damaged when they were read back, and renamed (not in a dry run)."""


def prune(
    path: str | os.PathLike[str] | RemotePath,
    keep: Keep,
    *,
    verified: Verified | None = None,
    dry_run: bool = False,
    at: At = nowhere,
) -> Pruned:
    """Delete what `keep` does not keep. Call it after a commit: the new snapshot is durable then.

    Only the job that has the folder's lease may call it. Snapshots that cannot be read at the moment stay, and do not
    count as kept ones. `at` is called with "aside" when the names are gone, and with "deleted" after each deletion:
    tests kill there. Raises SnapshotError when the folder cannot be read; SnapshotWriteError when it cannot be written.
    """
    verified = Verified() if verified is None else verified
    found = list(survey(path).committed)
    damaged: list[tuple[Location, SnapshotError]] = []
    unread: set[Key] = set()

    # A damaged one among those to keep is taken out, and the choice is made again without it: an older one then stays.
    while True:
        # Kept snapshots have to be good; deleted ones need not be read.
        stays = keep.choose(found)
        bad = _first_bad([snapshot for snapshot in reversed(found) if snapshot.key in stays], verified)
        if bad is None:
            break
        snapshot, error = bad
        found.remove(snapshot)
        unread.add(snapshot.key)
        if is_lasting(error):
            damaged.append((snapshot.path, error))
            if not dry_run:
                quarantine(snapshot.path, str(error))

    superfluous = [snapshot for snapshot in found if snapshot.key not in stays]
    return Pruned(
        kept=tuple(snapshot for snapshot in found if snapshot.key in stays),
        deleted=tuple(snapshot.path for snapshot in (superfluous if dry_run else _delete(superfluous, verified, at))),
        damaged=tuple(damaged),
    )


def _first_bad(snapshots: Sequence[Snapshot], verified: Verified) -> tuple[Snapshot, SnapshotError] | None:
    """The first of these that cannot be read back, and why; None: all are good."""
    for snapshot in snapshots:
        try:
            verified.check(snapshot)
        except SnapshotError as error:
            return snapshot, error
    return None


def _delete(superfluous: Sequence[Snapshot], verified: Verified, at: At) -> list[Snapshot]:
    """Delete these snapshots, the oldest first. Returns those that the disk allowed to delete. All names are durably
    changed before the first byte is deleted."""
    renamed = {}
    for snapshot in superfluous:
        aside = rename_aside(snapshot.path, snapshot.key, FolderKind.GONE)
        if aside is not None:
            verified.forget(snapshot.path)
            renamed[aside] = snapshot
    if renamed:
        parent = superfluous[0].path.parent
        try:
            disk.sync_folder(parent)
        except OSError as error:
            raise disk.write_error(error, parent) from error
        at("aside")
    for aside in renamed:
        disk.remove(aside)
        at("deleted")
    return list(renamed.values())


def seconds(every: str | float) -> float:
    """A duration in seconds, from a number or a text such as "90s", "30min", "6h", "1d". Raises RetentionError."""
    value = seconds_of(every)
    if value is None:
        raise RetentionError(f"{every!r} is not a duration; write 90s, 30min, 6h or 1d")
    return value


def _spaced(found: Sequence[tuple[float, Key]], interval: float) -> set[Key]:
    """The oldest, and then each that is at least `interval` away from the one kept before it. Counting from the oldest
    makes the choice stable: a kept one stays kept when newer ones come."""
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
