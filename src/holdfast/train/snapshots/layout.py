"""The format of a snapshot: names in a snapshot folder, MANIFEST.json, the ranks' records and files.

    runs/a/                                  the snapshot folder, one per job
      step_000000120.0001/                   a committed snapshot: step 120, attempt 1
        MANIFEST.json                        what belongs to it, with sizes and digests
        rank_00000.safetensors               one file per rank
        rank_00000.json                      that rank's record: size, digest, digests of its chunks
        rank_00000.checked                   its file was read back (read_back.py)
      attempt.step_000000140.0001/           being written, or debris of a save that did not end
      bad.step_000000100.0001/               found damaged and set aside
      gone.step_000000080.0001/              being deleted
      suspect.step_000000120.0001            a mark on that snapshot: it is not used (lives.py)
      history.json, failure.json             how far earlier lives came, and how they failed (lives.py)
      lease.000003                           which job has the folder

Snapshots are ordered by (step, attempt), never by a time stamp. Records and manifest are JSON, read strictly: bounded,
every field of its type, nothing missing. The manifest holds a digest of its own text, so that an edited one is
detected.

A rank's file is a safetensors file (`Image`), planned before any tensor is copied, and validated when it is read:

    8 bytes, little endian: length of the header | header: JSON, padded with spaces | the tensors, without a gap

The same bytes are the content of a memory slot: the saver copies bytes and knows nothing of tensors. The format allows
no holes, so tensors are laid out such that each begins at a multiple of its item's size, and each whose size is a
multiple of 64 bytes (all large ones are) at a multiple of 64 bytes from the file's start.

Knows names and bytes. Must not open files, and must not know torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from holdfast.protocol.errors import SnapshotDamagedError, SnapshotVersionError
from holdfast.train.snapshots.disk import ALGORITHM, chunk_begins, root_digest

_Value = TypeVar("_Value")

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


def rank_file(rank: int) -> str:
    """Name of one rank's tensors."""
    return f"rank_{rank:05d}.safetensors"


def record_file(rank: int) -> str:
    """Name of one rank's record."""
    return f"rank_{rank:05d}.json"


def refusal_file(rank: int) -> str:
    """Name of the file that a rank leaves when it cannot write its part."""
    return f"rank_{rank:05d}.refused"


NOT_FINITE = "not_finite"
"""Name in the note of a record: the first tensor with a number that is not finite; empty: there is none."""
FINITE = "finite"
"""Name in the metadata: whether all values that training changes are finite; absent: that was not checked."""
DCP_PATHS = "dcp_paths"
"""Name in the metadata of a save by `dcp.save`: the path of each name in the nested state, for a load without a state
dict to fill."""
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
    """The root over `chunks` (`disk.root_digest`)."""
    chunks: tuple[str, ...]
    """The digests of the file's chunks, in order."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """JSON that the saving side adds."""

    def dump(self) -> str:
        """The record's text."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, allow_nan=False)

    @classmethod
    def load(cls, text: str) -> RankRecord:
        """The record with this text. Raises SnapshotDamagedError, SnapshotVersionError."""
        fields = _Fields(text, "the record")
        record = cls(
            step=fields.number("step", STEP_MAX),
            attempt=fields.number("attempt", ATTEMPT_MAX),
            rank=fields.number("rank", RANK_MAX),
            world=fields.number("world", RANK_MAX + 1),
            size_bytes=fields.number("size_bytes"),
            digest=fields.value("digest", str),
            chunks=tuple(fields.items("chunks", str)),
            note=fields.value("note", dict),
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
        """The key by which snapshots are ordered."""
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
    def finite(self) -> bool | None:
        """Whether all values that training changes are finite; None: that was not checked."""
        found = self.metadata.get(FINITE)
        return found if isinstance(found, bool) else None

    @property
    def metrics(self) -> dict[str, float]:
        """The finite numbers by which retention selects the best."""
        metrics = self.metadata.get("metrics")
        return (
            {name: value for name, value in metrics.items() if _is_number(value)} if isinstance(metrics, dict) else {}
        )

    def dump(self) -> str:
        """The text of MANIFEST.json. Raises ValueError for metadata that is not JSON or too large."""
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
        """The manifest with this text. Raises SnapshotDamagedError, SnapshotVersionError."""
        fields = _Fields(text, "MANIFEST.json")
        body = dict(fields.body)
        if body.pop("digest", None) != hashlib.sha256(_canonical(body)).hexdigest():
            raise SnapshotDamagedError("MANIFEST.json was changed after it was written")
        algorithm = fields.value("algorithm", str)
        if algorithm != ALGORITHM:
            raise SnapshotVersionError(f"digests by {algorithm!r}, which this holdfast does not know")
        return cls(
            step=fields.number("step", STEP_MAX),
            attempt=fields.number("attempt", ATTEMPT_MAX),
            ranks=_entries(fields),
            metadata=fields.value("metadata", dict),
            saved_unix_s=fields.real("saved_unix_s"),
        )


def _entries(fields: _Fields) -> tuple[RankEntry, ...]:
    """The manifest's entries, one for every rank. Raises SnapshotDamagedError."""
    entries = []
    for rank, each in enumerate(fields.items("ranks", dict)):
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
    """The JSON over which a digest is made: equal for equal content."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class _Fields:
    """Reads a JSON object and validates every field. Methods raise SnapshotDamagedError."""

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

    def value(self, name: str, kind: type[_Value]) -> _Value:
        value = self.body.get(name)
        if type(value) is not kind:
            raise self._bad(name)
        return value

    def items(self, name: str, kind: type[_Value]) -> list[_Value]:
        items = self.value(name, list)
        if any(type(each) is not kind for each in items):
            raise self._bad(name)
        return items

    def number(self, name: str, limit: int = 2**62) -> int:
        value = self.value(name, int)
        if not 0 <= value <= limit:
            raise self._bad(name)
        return value

    def real(self, name: str) -> float:
        value = self.body.get(name)
        if not _is_number(value):
            raise self._bad(name)
        return float(self.body[name])


ALIGNMENT_BYTES = 64
"""Alignment of large tensors in a file, counted from its start."""
LENGTH_BYTES = 8
"""Size of the number at the beginning of a file: the length of its header."""
HEADER_BYTES_MAX = 100_000_000
"""safetensors' own limit."""
DIMENSIONS_MAX = 64
SIZE_BYTES_MAX = 2**62
METADATA = "__metadata__"
PIECES = "holdfast.pieces"
"""Key of the header's metadata with descriptions of the entries that are not whole tensors of a type of safetensors."""

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of one item, by safetensors' name of the type."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    """The code of its type in safetensors: "F32", "BF16" …"""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of its values in bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Image:
    """The layout of one rank's file."""

    header: bytes
    """All bytes before the first tensor."""
    entries: tuple[TensorEntry, ...]
    """The tensors, in the order of the file."""
    metadata: Mapping[str, str]

    @classmethod
    def plan(cls, entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None = None) -> Image:
        """The image of these tensors. Raises ValueError for a bad name, type or shape."""
        ordered = sorted(entries, key=_order)
        names = {entry.name for entry in ordered}
        if len(names) < len(ordered) or METADATA in names:
            raise ValueError(f"names of tensors must be unique, and none may be {METADATA}")

        described: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
        begin = 0
        for entry in ordered:
            _check(entry)
            end = begin + entry.nbytes
            described[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
            begin = end

        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
        if len(text) > HEADER_BYTES_MAX:
            raise ValueError(f"names and metadata take {len(text)} bytes; the format allows {HEADER_BYTES_MAX}")
        return cls(len(text).to_bytes(LENGTH_BYTES, "little") + text, tuple(ordered), dict(metadata or {}))

    @classmethod
    def read(cls, head: bytes | bytearray | memoryview, size_bytes: int) -> Image:
        """The image whose file begins with `head` (the header at least, see `head_bytes`) and has `size_bytes`.

        Raises SnapshotDamagedError unless the header is complete, and fits the tensors and the size.
        """
        view = memoryview(head).cast("B")
        header_bytes = head_bytes(view[:LENGTH_BYTES], size_bytes)
        header = bytes(view[:header_bytes])
        if len(header) < header_bytes:
            raise SnapshotDamagedError(f"the header has {len(header)} of {header_bytes} bytes")
        described = _parse(header[LENGTH_BYTES:])
        metadata = described.pop(METADATA, {})
        if not _is_text_map(metadata):
            raise SnapshotDamagedError(f"{METADATA} is not a map of text to text")

        claims = [_entry(name, value) for name, value in described.items()]
        claims.sort(key=lambda each: each[1])
        expected = 0
        for entry, begin, end in claims:
            if begin != expected or end != begin + entry.nbytes:
                raise SnapshotDamagedError(f"tensor {entry.name!r} claims bytes {begin} to {end}, not from {expected}")
            expected = end
        if header_bytes + expected != size_bytes:
            raise SnapshotDamagedError(f"the file has {size_bytes} bytes, its header {header_bytes + expected}")
        return cls(header, tuple(entry for entry, _, _ in claims), metadata)

    @cached_property
    def spans(self) -> dict[str, slice]:
        """The bytes of each tensor, counted from the file's start."""
        spans, begin = {}, len(self.header)
        for entry in self.entries:
            spans[entry.name] = slice(begin, begin + entry.nbytes)
            begin += entry.nbytes
        return spans

    @cached_property
    def size_bytes(self) -> int:
        """The size of the whole file in bytes."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def head_bytes(length: bytes | memoryview, size_bytes: int) -> int:
    """The number of bytes before the first tensor, from the file's first eight bytes and its size. Raises
    SnapshotDamagedError."""
    if len(length) < LENGTH_BYTES:
        raise SnapshotDamagedError(f"the file has {size_bytes} bytes, too few for any header")
    header_bytes = LENGTH_BYTES + int.from_bytes(length, "little")
    if header_bytes > min(size_bytes, LENGTH_BYTES + HEADER_BYTES_MAX):
        raise SnapshotDamagedError(f"the header claims {header_bytes} bytes; the file has {size_bytes}")
    return header_bytes


def _order(entry: TensorEntry) -> tuple[bool, int]:
    """Sort key: tensors whose size is a multiple of the alignment come first, then those with larger items. In this
    order each one keeps the next one aligned. Raises ValueError."""
    if entry.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {entry.name!r}: {entry.dtype!r} is no type of safetensors")
    return (entry.nbytes % ALIGNMENT_BYTES != 0, -ITEM_BYTES[entry.dtype])


def _check(entry: TensorEntry) -> None:
    """Raise ValueError for a shape that no tensor has."""
    shape = entry.shape
    sound = len(shape) <= DIMENSIONS_MAX and all(type(each) is int and each >= 0 for each in shape)
    if not sound or entry.nbytes > SIZE_BYTES_MAX:
        raise ValueError(f"tensor {entry.name!r} has the shape {shape}")


def _parse(text: bytes) -> dict[str, Any]:
    try:
        # safetensors requires an object from the first byte on, and each name once.
        described = json.loads(text, object_pairs_hook=_unique) if text.startswith(b"{") else None
    except (ValueError, RecursionError) as error:
        raise SnapshotDamagedError(f"the header is not readable: {error}") from None
    if not isinstance(described, dict):
        raise SnapshotDamagedError("the header is not a JSON object")
    return described


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these names and values. Raises ValueError if a name comes twice."""
    described = dict(pairs)
    if len(described) < len(pairs):
        raise ValueError("a name comes twice")
    return described


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _entry(name: str, value: Any) -> tuple[TensorEntry, int, int]:
    """One described tensor, and the first and last byte that it claims after the header. Raises
    SnapshotDamagedError."""
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        entry = TensorEntry(name, dtype, tuple(shape))
        _order(entry)  # raises for an unknown type
        _check(entry)
        is_valid = type(begin) is int and type(end) is int
    except (TypeError, ValueError, KeyError):
        is_valid = False
    if not is_valid:
        raise SnapshotDamagedError(f"tensor {name!r} is not described as safetensors would")
    return entry, begin, end
