"""The parts of a snapshot: names in a snapshot folder, one record per rank, MANIFEST.json over all records.

    runs/a/                                  the snapshot folder, one per job
      step_000000120.0001/                   a committed snapshot: step 120, attempt 1
        MANIFEST.json                        what belongs to it, with sizes and digests
        rank_00000.safetensors               one file per rank
        rank_00000.json                      that rank's record: size, digest, digests of its chunks
      attempt.step_000000140.0001/           being written, or debris of a save that did not end
      bad.step_000000100.0001/               found damaged and set aside
      gone.step_000000080.0001/              being deleted
      lease.000003                           which job has the folder

Order is (step, attempt), never a time stamp. Records and manifest are JSON, read strictly: bounded, every field of its
type, nothing missing. The manifest holds a digest of its own text, so that an edited one is detected. Knows names and
texts, opens nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.protocol.errors import SnapshotDamagedError, SnapshotVersionError
from holdfast.snapshots.disk import ALGORITHM, chunk_begins, root_digest

MANIFEST = "MANIFEST.json"
STEP_MAX = 10**18 - 1
ATTEMPT_MAX = 10**9 - 1
RANK_MAX = 10**6 - 1

_NAME = re.compile(r"(?:(attempt|bad|gone)\.)?step_([0-9]{9,18})\.([0-9]{4,9})(\.[0-9]+)?")


class FolderKind(Enum):
    """The kind of a folder, by its name."""

    COMMITTED = ""
    ATTEMPT = "attempt"
    BAD = "bad"
    GONE = "gone"


class Key(NamedTuple):
    """The key of a snapshot; snapshots are ordered by it."""

    step: int
    attempt: int

    @property
    def name(self) -> str:
        """Name of the committed folder."""
        return f"step_{self.step:09d}.{self.attempt:04d}"

    def named(self, kind: FolderKind) -> str:
        """Name of the folder while it is of this kind."""
        return f"{kind.value}.{self.name}" if kind.value else self.name


class Named(NamedTuple):
    """The information in a folder's name."""

    kind: FolderKind
    key: Key


def parse_name(name: str) -> Named | None:
    """The information in a folder's name; None when the folder is not ours."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    key, kind = Key(int(found[2]), int(found[3])), FolderKind(found[1] or "")
    # A snapshot has one valid name: with extra zeros, or a suffix on a name in use, the folder is not ours.
    suffix = found[4] or ""
    if name != key.named(kind) + suffix or (suffix and kind not in (FolderKind.BAD, FolderKind.GONE)):
        return None
    return Named(kind, key)


def check_step(step: int) -> None:
    """ValueError for an invalid step."""
    if not 0 <= step <= STEP_MAX:
        raise ValueError(f"step {step} is not between 0 and {STEP_MAX}")


def attempt_path(folder: Path, key: Key) -> Path:
    """The path of a snapshot while it is written."""
    return folder / key.named(FolderKind.ATTEMPT)


def committed_path(folder: Path, key: Key) -> Path:
    """The path of a snapshot after the commit."""
    return folder / key.name


def rank_file(rank: int) -> str:
    """Name of one rank's tensors."""
    return f"rank_{rank:05d}.safetensors"


def record_file(rank: int) -> str:
    """Name of one rank's record."""
    return f"rank_{rank:05d}.json"


def refusal_file(rank: int) -> str:
    """Name of the file that a rank leaves when it cannot write its part."""
    return f"rank_{rank:05d}.refused"


FORMAT = "holdfast-snapshot"
VERSION = 1
MANIFEST_BYTES_MAX = 256 << 20
RECORD_BYTES_MAX = 64 << 20
"""Enough for the digests of 4 TB in one file."""
METADATA_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class RankRecord:
    """One rank's part of a snapshot, as that rank recorded it."""

    step: int
    attempt: int
    rank: int
    world: int
    size_bytes: int
    digest: str
    """The root over `chunks`."""
    chunks: tuple[str, ...]
    note: Mapping[str, Any] = field(default_factory=dict)
    """Any data that the saving side adds; JSON."""

    def dump(self) -> str:
        """The record's text."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, allow_nan=False)

    @classmethod
    def load(cls, text: str) -> RankRecord:
        """The record with this text. SnapshotDamagedError, SnapshotVersionError."""
        fields = _Fields(text, "the record")
        record = cls(
            step=fields.number("step", STEP_MAX),
            attempt=fields.number("attempt", ATTEMPT_MAX),
            rank=fields.number("rank", RANK_MAX),
            world=fields.number("world", RANK_MAX + 1),
            size_bytes=fields.number("size_bytes"),
            digest=fields.text("digest"),
            chunks=fields.texts("chunks"),
            note=fields.map("note"),
        )
        chunks = len(chunk_begins(record.size_bytes))
        if len(record.chunks) != chunks or root_digest(record.size_bytes, record.chunks) != record.digest:
            raise SnapshotDamagedError("the record's digests do not fit together")
        return record


@dataclass(frozen=True)
class RankEntry:
    """One rank's file in the manifest."""

    rank: int
    size_bytes: int
    digest: str

    @property
    def file(self) -> str:
        """The file's name."""
        return rank_file(self.rank)


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json."""

    step: int
    attempt: int
    ranks: tuple[RankEntry, ...]
    """All ranks of the world that saved, in order."""
    metadata: Mapping[str, Any]
    """The user's metadata, and "metrics" for retention; JSON."""
    saved_unix_s: float
    """The wall clock at the commit: for people and for Keep(every="6h"); no order depends on it."""

    @property
    def key(self) -> Key:
        """Its place in the order."""
        return Key(self.step, self.attempt)

    @property
    def world(self) -> int:
        """The number of ranks that saved it."""
        return len(self.ranks)

    @property
    def size_bytes(self) -> int:
        """Bytes of all ranks' files."""
        return sum(entry.size_bytes for entry in self.ranks)

    @property
    def metrics(self) -> dict[str, float]:
        """The finite numbers by which retention selects the best."""
        metrics = self.metadata.get("metrics")
        return (
            {name: value for name, value in metrics.items() if _is_number(value)} if isinstance(metrics, dict) else {}
        )

    def dump(self) -> str:
        """MANIFEST.json's text. ValueError for metadata that is not JSON or too large."""
        metadata = finite(self.metadata)
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "world": self.world,
            "saved_unix_s": self.saved_unix_s,
            "algorithm": ALGORITHM,
            "ranks": [
                {"file": entry.file, "size_bytes": entry.size_bytes, "digest": entry.digest} for entry in self.ranks
            ],
            "metadata": metadata,
        }
        try:
            size_bytes = len(_canonical(metadata))
            body["digest"] = hashlib.sha256(_canonical(body)).hexdigest()
        except TypeError as error:
            raise ValueError(f"metadata of a snapshot is JSON: {error}") from None
        if size_bytes > METADATA_BYTES_MAX:
            raise ValueError(f"metadata of a snapshot takes {size_bytes} bytes; {METADATA_BYTES_MAX} are allowed")
        return json.dumps(body, indent=1, allow_nan=False) + "\n"

    @classmethod
    def load(cls, text: str) -> Manifest:
        """The manifest with this text. SnapshotDamagedError, SnapshotVersionError."""
        fields = _Fields(text, "MANIFEST.json")
        body = dict(fields.body)
        if body.pop("digest", None) != hashlib.sha256(_canonical(body)).hexdigest():
            raise SnapshotDamagedError("MANIFEST.json was changed after it was written")
        if fields.text("algorithm") != ALGORITHM:
            raise SnapshotVersionError(f"digests by {fields.text('algorithm')!r}, which this holdfast does not know")
        return cls(
            step=fields.number("step", STEP_MAX),
            attempt=fields.number("attempt", ATTEMPT_MAX),
            ranks=_entries(fields),
            metadata=fields.map("metadata"),
            saved_unix_s=fields.real("saved_unix_s"),
        )


def _entries(fields: _Fields) -> tuple[RankEntry, ...]:
    described = fields.maps("ranks")
    entries = []
    for rank, each in enumerate(described):
        size_bytes, root = each.get("size_bytes"), each.get("digest")
        named = each.get("file") == rank_file(rank)
        if not named or type(size_bytes) is not int or size_bytes < 0 or not isinstance(root, str):
            raise SnapshotDamagedError(f"MANIFEST.json: the entry of rank {rank} is wrong")
        entries.append(RankEntry(rank, size_bytes, root))
    if not entries or len(entries) != fields.number("world", RANK_MAX + 1):
        raise SnapshotDamagedError("MANIFEST.json: not one entry for every rank")
    return tuple(entries)


def finite(value: Any) -> Any:
    """The same value with null for every number that JSON cannot hold: a loss that is NaN must not prevent a save."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class _Fields:
    """Reads a JSON object and validates every field."""

    def __init__(self, text: str, what: str) -> None:
        self._what = what
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SnapshotDamagedError(f"{what} is not readable: {error}") from None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise SnapshotDamagedError(f"{what} is not holdfast's")
        self.body: dict[str, Any] = body
        version = self.number("version")
        if version > VERSION:
            raise SnapshotVersionError(f"{what} has version {version}; this holdfast knows versions up to {VERSION}")

    def _bad(self, name: str) -> SnapshotDamagedError:
        return SnapshotDamagedError(f"{self._what}: {name} is missing or wrong")

    def number(self, name: str, limit: int = 2**62) -> int:
        value = self.body.get(name)
        if type(value) is not int or not 0 <= value <= limit:
            raise self._bad(name)
        return value

    def real(self, name: str) -> float:
        value = self.body.get(name)
        if not _is_number(value):
            raise self._bad(name)
        return float(self.body[name])

    def text(self, name: str) -> str:
        value = self.body.get(name)
        if not isinstance(value, str):
            raise self._bad(name)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.body.get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._bad(name)
        return tuple(value)

    def map(self, name: str) -> dict[str, Any]:
        value = self.body.get(name)
        if not isinstance(value, dict):
            raise self._bad(name)
        return value

    def maps(self, name: str) -> list[dict[str, Any]]:
        value = self.body.get(name)
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self._bad(name)
        return value
