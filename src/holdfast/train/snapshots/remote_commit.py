"""Commit, abandonment and deletion of snapshots in an object store, which has no rename and no exclusive mkdir.

    s3://bucket/run/step_000000120.0001/rank_00000.safetensors     the pieces: plain objects under their final names
    s3://bucket/run/step_000000120.0001/MANIFEST.json              last, by a conditional put: this commits

MANIFEST.json alone decides, and it is always read by its name: listings only propose what to read. Without it the
pieces are an unfinished attempt. Who gives an attempt up puts a tombstone there, under the same condition. So either
the commit or the end of the attempt wins, however late the other one comes. Retention and quarantine replace the
manifest of a committed snapshot by a tombstone, which keeps the manifest's text.

A committed prefix that is copied to a disk is a committed snapshot there.
"""

from __future__ import annotations

import contextlib
import json
import random

from holdfast.protocol.errors import SnapshotDamagedError, SnapshotIncompleteError
from holdfast.train.snapshots import disk
from holdfast.train.snapshots.layout import MANIFEST, MANIFEST_BYTES_MAX, FolderKind, Key, Named
from holdfast.train.snapshots.remote import RemotePath

TOMBSTONE = "holdfast-tombstone"
MARKER = "BEGUN"
"""An object by which an attempt is taken where no lease numbers it."""


def with_kinds(path: RemotePath, found: list[tuple[str, Named]]) -> list[tuple[str, Named]]:
    """What was listed under this URL, by its manifest. OSError."""
    return [(name, Named(kind_of(path / name), named.key)) for name, named in found if name == named.key.name]


def kind_of(path: RemotePath) -> FolderKind:
    """What there is, by its manifest. OSError."""
    try:
        text = disk.read_text(path / MANIFEST, MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        return FolderKind.ATTEMPT
    except SnapshotDamagedError:
        return FolderKind.COMMITTED
    return tombstone_kind(text) or FolderKind.COMMITTED


def tombstone_kind(text: str) -> FolderKind | None:
    """The kind of this tombstone; None: it is none."""
    with contextlib.suppress(ValueError, AttributeError):
        if TOMBSTONE in text[:64]:
            return FolderKind(json.loads(text).get("kind"))
    return None


def _tombstone(kind: FolderKind, was: str = "") -> bytes:
    # No two are equal: `RemotePath.create` tells them apart.
    mark = f"{random.SystemRandom().getrandbits(64):x}"
    return json.dumps({"format": TOMBSTONE, "kind": kind.value, "mark": mark, "was": was}).encode()


def begin(path: RemotePath, step: int, attempt: int) -> int:
    """Take the first free number from this one on, by a conditional put. OSError."""
    mark = f"{random.SystemRandom().getrandbits(64):x}".encode()
    while not (path / Key(step, attempt).name / MARKER).create(mark):
        attempt += 1
    return attempt


def publish(path: RemotePath, manifest: str) -> None:
    """Commit, unless the attempt was given up. OSError; SnapshotIncompleteError."""
    if not (path / MANIFEST).create(manifest.encode()):
        raise SnapshotIncompleteError(f"{path} was not saved: the job continued before all ranks had saved")


def check_open(path: RemotePath) -> None:
    """Nobody has committed the attempt or given it up. OSError; SnapshotIncompleteError."""
    if kind_of(path) is not FolderKind.ATTEMPT:
        raise SnapshotIncompleteError(f"{path} was not saved: rank 0 gave up this save, or it was committed before")


def give_up(path: RemotePath) -> bool:
    """An attempt will not be committed any more, and its pieces are deleted. The tombstone stays, for writers that are
    late, until `clear` finds it. False: it was committed, or the store cannot be reached."""
    with contextlib.suppress(OSError):
        before = kind_of(path)  # for a store that ignores the condition
        if before is FolderKind.ATTEMPT and (path / MANIFEST).create(_tombstone(FolderKind.GONE)):
            before = FolderKind.GONE
        if before is FolderKind.GONE:
            disk.remove(path, keep=MANIFEST)
            return True
    return False


def set_aside(path: RemotePath, kind: FolderKind) -> bool:
    """A committed snapshot is not used any more. False: the store cannot be reached."""
    with contextlib.suppress(OSError, SnapshotDamagedError):
        was = disk.read_text(path / MANIFEST, MANIFEST_BYTES_MAX)
        (path / MANIFEST).put(_tombstone(kind, was))
        return True
    return False


def clear(path: RemotePath) -> bool:
    """Delete what an unfinished attempt, or an unfinished deletion, has left."""
    with contextlib.suppress(OSError):
        if kind_of(path) is not FolderKind.GONE:
            return give_up(path)
        disk.remove(path)
        return True
    return False
