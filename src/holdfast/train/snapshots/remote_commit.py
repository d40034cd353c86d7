"""Commit, abandonment and deletion of snapshots in an object store, which has no rename and no exclusive mkdir.

    s3://bucket/run/step_000000120.0001/rank_00000.safetensors     the pieces: plain objects under their final names
    s3://bucket/run/step_000000120.0001/MANIFEST.json              last, by a conditional put: this commits

MANIFEST.json alone decides, and it is always read by its name: listings only propose what to read. Without it the
pieces are an unfinished attempt. A process that gives an attempt up puts a tombstone in its place, under the same
condition. So either the commit or the end of the attempt wins, however late the other one comes. Retention and
quarantine replace the manifest of a committed snapshot by a tombstone, which keeps the manifest's text.

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
"""Name of the object by which an attempt is taken: its conditional put makes the attempt's number unique."""


def with_kinds(path: RemotePath, found: list[tuple[str, Named]]) -> list[tuple[str, Named]]:
    """The listed folders under this URL, each with the kind that its manifest says. OSError."""
    return [(name, Named(kind_of(path / name), named.key)) for name, named in found if name == named.key.name]


def kind_of(path: RemotePath) -> FolderKind:
    """The kind of this folder, by its manifest. OSError."""
    try:
        text = disk.read_text(path / MANIFEST, MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        return FolderKind.ATTEMPT
    except SnapshotDamagedError:
        return FolderKind.COMMITTED  # it was committed; `inspect` reports the damage
    return tombstone_kind(text) or FolderKind.COMMITTED


def tombstone_kind(text: str) -> FolderKind | None:
    """The kind that this tombstone says; None: the text is not a tombstone."""
    with contextlib.suppress(ValueError, AttributeError):
        if TOMBSTONE in text[:64]:
            return FolderKind(json.loads(text).get("kind"))
    return None


def _tombstone(kind: FolderKind, was: str = "") -> bytes:
    """A new tombstone. `was`: the text of the manifest that it replaces."""
    # The random mark makes each one different: `RemotePath.create` distinguishes writers by their content.
    mark = f"{random.SystemRandom().getrandbits(64):x}"
    return json.dumps({"format": TOMBSTONE, "kind": kind.value, "mark": mark, "was": was}).encode()


def begin(path: RemotePath, step: int, attempt: int) -> int:
    """Take the first free attempt number, counting from `attempt`, by a conditional put. Returns it. OSError."""
    mark = f"{random.SystemRandom().getrandbits(64):x}".encode()
    while not (path / Key(step, attempt).name / MARKER).create(mark):
        attempt += 1
    return attempt


def publish(path: RemotePath, manifest: str) -> None:
    """Commit, unless the attempt was given up. Raises OSError; SnapshotIncompleteError."""
    if not (path / MANIFEST).create(manifest.encode()):
        raise SnapshotIncompleteError(f"{path} was not saved: the job continued before all ranks had saved")


def check_open(path: RemotePath) -> None:
    """Raise SnapshotIncompleteError if the attempt was committed or given up. OSError."""
    if kind_of(path) is not FolderKind.ATTEMPT:
        raise SnapshotIncompleteError(f"{path} was not saved: rank 0 gave up this save, or it was committed before")


def give_up(path: RemotePath) -> bool:
    """End an attempt: it cannot be committed any more, and its pieces are deleted. The tombstone stays, for writers
    that are late, until `clear` finds it. Returns False if it was committed, or the store cannot be reached."""
    with contextlib.suppress(OSError):
        before = kind_of(path)  # asked first, for a store that ignores the condition of a put
        if before is FolderKind.ATTEMPT and (path / MANIFEST).create(_tombstone(FolderKind.GONE)):
            before = FolderKind.GONE
        if before is FolderKind.GONE:
            disk.remove(path, keep=MANIFEST)
            return True
    return False


def set_aside(path: RemotePath, kind: FolderKind) -> bool:
    """Put a tombstone of this kind on a committed snapshot, so that it is not used any more. Returns False if the store
    cannot be reached."""
    with contextlib.suppress(OSError, SnapshotDamagedError):
        was = disk.read_text(path / MANIFEST, MANIFEST_BYTES_MAX)
        (path / MANIFEST).put(_tombstone(kind, was))
        return True
    return False


def clear(path: RemotePath) -> bool:
    """Delete the objects of an unfinished attempt or of an unfinished deletion. Returns whether that was done."""
    with contextlib.suppress(OSError):
        if kind_of(path) is not FolderKind.GONE:
            return give_up(path)
        disk.remove(path)
        return True
    return False
