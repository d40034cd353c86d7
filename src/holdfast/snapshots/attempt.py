"""The commit protocol: writes a snapshot to the disk so that it is complete or absent.

    rank 0       begin         the attempt folder, by an exclusive mkdir; its number is sent to the others
    each rank    write_rank    its file, fsync; its record, fsync, rename; fsync of the folder (not rank 0)
    rank 0       commit        when all records are there: MANIFEST.json, fsync, rename; fsync of the folder;
                               rename of the folder to its committed name; fsync of the snapshot folder

The rename commits. Nothing is written inside a committed folder, ever. It cannot replace another snapshot: no two
attempts have one number, and a rename onto a folder that holds anything fails in the kernel.

The ranks' sizes and digests are exchanged in record files in the attempt folder, not in torch's store: the saver must
be able to finish after the trainer, and with it the store of its generation, has died. Hence all ranks must see one
folder.

Every function takes `at`, which is called with the name of each phase (PHASES) when it is reached: tests kill there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast.protocol.errors import (
    SnapshotDamagedError,
    SnapshotError,
    SnapshotIncompleteError,
)
from holdfast.snapshots import disk
from holdfast.snapshots.disk import chunk_digests, root_digest
from holdfast.snapshots.folder import rename_aside
from holdfast.snapshots.manifest import (
    MANIFEST,
    RECORD_BYTES_MAX,
    FolderKind,
    Key,
    Manifest,
    RankEntry,
    RankRecord,
    attempt_path,
    check_step,
    committed_path,
    parse_name,
    rank_file,
    record_file,
    refusal_file,
)

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
"""How long rank 0 waits for the others' records by default."""
LOOK_S_MIN, LOOK_S_MAX = 0.002, 0.1
REFUSAL_BYTES_MAX = 1 << 16

At = Callable[[str], None]


def nowhere(phase: str) -> None:
    """The default `at`, which does nothing."""


@dataclass(frozen=True)
class SaveRequest:
    """One rank's request to save, and its place: the same object in the worker, in the memory slot and in the saver."""

    folder: str
    """The snapshot folder; absolute, or relative to the working directory of the process that saves."""
    step: int
    attempt: int
    rank: int
    world: int
    note: Mapping[str, Any] = field(default_factory=dict)
    """Goes into the rank's record; JSON."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Rank 0's goes into the manifest; JSON."""

    @property
    def key(self) -> Key:
        """The key of the snapshot."""
        return Key(self.step, self.attempt)

    @property
    def attempt_path(self) -> Path:
        """The folder during the writing."""
        return attempt_path(Path(self.folder), self.key)

    @property
    def committed_path(self) -> Path:
        """The folder after the commit."""
        return committed_path(Path(self.folder), self.key)

    @property
    def save(self) -> int:
        """The number of this save within this life of the worker: several saves may have one step, and their parts must
        not be mixed."""
        save = self.note.get("save", 0)
        return save if type(save) is int else 0

    def of_file(self, data: memoryview) -> memoryview:
        """The part of these bytes that goes into the rank's file: a slot may hold more, for a restart on this node."""
        return data[: self.note.get("file_bytes", len(data))]

    def to_json(self) -> dict[str, Any]:
        """As an object for json.dumps."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> SaveRequest:
        """The request that `to_json` wrote. ValueError for anything else."""
        try:
            request = cls(**value)
        except TypeError as error:
            raise ValueError(f"a request to save: {error}"[:200]) from error
        texts, numbers = (request.folder,), (request.step, request.attempt, request.rank, request.world)
        objects = (request.note, request.metadata)
        for kind, fields in ((str, texts), (int, numbers), (dict, objects)):
            if any(type(each) is not kind for each in fields):
                raise ValueError(f"a request to save: {request}"[:200])
        return request


def begin(folder: str | os.PathLike[str], step: int, *, make: bool = True, at: At = nowhere) -> int:
    """Rank 0: make the attempt folder; returns the attempt's number, which is unique at this step.

    `make`: make the snapshot folder too, when it is missing. Otherwise a missing folder is an error: a new one would
    hide that it vanished. SnapshotFolderError; SnapshotWriteError; ValueError for an invalid step.
    """
    check_step(step)
    path = Path(folder)
    try:
        if make:
            disk.make_folder(path)
        taken = [
            named.key.attempt for name in os.listdir(path) if (named := parse_name(name)) and named.key.step == step
        ]
        attempt = max(taken, default=0) + 1
        while True:
            try:
                attempt_path(path, Key(step, attempt)).mkdir()
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

    The buffer (an image, see image.py) must not change meanwhile. It is written without a copy when it begins at a
    multiple of 4096 in memory, as slots do. On failure the written files are removed, which frees space on a full disk,
    and a refusal is left for rank 0, which then need not wait; rank 0 itself abandons the attempt. SnapshotWriteError;
    SnapshotIncompleteError when rank 0 has abandoned the attempt.
    """
    data = memoryview(buffer).cast("B")
    folder = request.attempt_path
    file = folder / rank_file(request.rank)
    try:
        with chunk_digests(data) as digests:
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
            note=request.note,
        )
        disk.write_atomically(folder / record_file(request.rank), record.dump())
        if request.rank:  # rank 0 syncs the folder in `commit`, with the manifest in it
            disk.sync_folder(folder)
    except FileNotFoundError as error:
        raise SnapshotIncompleteError(
            f"{folder} is not there: rank 0 gave up this save, or does not share the folder"
        ) from error
    except OSError as error:
        told = disk.write_error(error, file, len(data))
        refuse(request, str(told))
        raise told from error
    at("recorded")
    return record


def commit(request: SaveRequest, *, patience: float = PATIENCE_S, at: At = nowhere) -> Path:
    """Rank 0: wait up to `patience` seconds for all ranks' records, then commit; returns the committed folder.

    It is durable when this returns. On any failure the attempt is removed and older snapshots are unchanged.
    SnapshotIncompleteError when a rank refused or is missing; SnapshotDamagedError when a rank's file differs from its
    record; SnapshotWriteError; ValueError for metadata that is not JSON.
    """
    try:
        records = _gather(request, patience)
        at("gathered")
        manifest = Manifest(
            step=request.step,
            attempt=request.attempt,
            ranks=tuple(RankEntry(each.rank, each.size_bytes, each.digest) for each in records),
            metadata=dict(request.metadata),
            saved_unix_s=time.time(),
        )
        _publish(request, manifest.dump(), at)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not request.attempt_path.exists():
            raise SnapshotIncompleteError(
                f"step {request.step} was not saved: the job went on before all ranks had come"
            ) from error
        abandon(request)
        raise disk.write_error(error, request.attempt_path) from error
    except (SnapshotError, ValueError):
        abandon(request)
        raise
    return request.committed_path


def abandon(request: SaveRequest) -> None:
    """Remove the attempt, as far as the disk allows. Ranks that still write to it get a SnapshotIncompleteError."""
    # Renamed first: a half-deleted attempt must not look like one that may still be completed.
    doomed = rename_aside(request.attempt_path, request.key, FolderKind.GONE)
    if doomed is not None:
        shutil.rmtree(doomed, ignore_errors=True)


def _publish(request: SaveRequest, manifest: str, at: At) -> None:
    folder, committed = request.attempt_path, request.committed_path
    disk.write_atomically(folder / MANIFEST, manifest)
    disk.sync_folder(folder)
    at("manifest")
    folder.rename(committed)
    at("renamed")
    disk.sync_folder(committed.parent)
    at("durable")


def _gather(request: SaveRequest, patience: float) -> list[RankRecord]:
    """All ranks' records, in order of rank. Polls, because writes of other nodes cause no local event."""
    folder = request.attempt_path
    awaited, deadline, pause = set(range(request.world)), time.monotonic() + patience, LOOK_S_MIN
    records: dict[int, RankRecord] = {}
    while True:
        names = set(os.listdir(folder))
        for rank in sorted(awaited):
            if refusal_file(rank) in names:
                why = disk.read_text(folder / refusal_file(rank), REFUSAL_BYTES_MAX)
                raise SnapshotIncompleteError(f"step {request.step} was not saved: rank {rank}: {why}")
            if record_file(rank) in names:
                records[rank] = _record(request, rank)
        awaited -= records.keys()
        if not awaited:
            return [records[rank] for rank in range(request.world)]
        if time.monotonic() >= deadline:
            missing = ", ".join(map(str, sorted(awaited)[:8])) + (" …" if len(awaited) > 8 else "")
            raise SnapshotIncompleteError(
                f"step {request.step} was not saved: after {patience:g} s nothing came from rank {missing}"
            )
        time.sleep(pause)
        pause = min(2 * pause, LOOK_S_MAX)


def _record(request: SaveRequest, rank: int) -> RankRecord:
    folder = request.attempt_path
    record = RankRecord.load(disk.read_text(folder / record_file(rank), RECORD_BYTES_MAX))
    size_bytes = (folder / rank_file(rank)).stat().st_size
    expected = (request.step, request.attempt, rank, request.world, size_bytes)
    if (record.step, record.attempt, record.rank, record.world, record.size_bytes) != expected:
        raise SnapshotDamagedError(f"{folder}: the record of rank {rank} is of another save")
    return record


def refuse(request: SaveRequest, why: str) -> None:
    """This rank's part will not come: free its space, and report it to rank 0 at once."""
    folder = request.attempt_path
    with contextlib.suppress(OSError):
        (folder / rank_file(request.rank)).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        disk.write_atomically(folder / refusal_file(request.rank), why)
    if request.rank == 0:  # no commit will follow: free the space of the others' files too
        abandon(request)
