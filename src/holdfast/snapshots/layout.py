"""Names in a snapshot folder, and their order.

    runs/a/                                  the snapshot folder, one per job
      step_000000120.0001/                   a committed snapshot: step 120, attempt 1
        MANIFEST.json                        what belongs to it, with sizes and digests
        rank_00000.safetensors               one file per rank
        rank_00000.json                      that rank's record: size, digest, digests of its chunks
      attempt.step_000000140.0001/           being written, or debris of a save that did not end
      bad.step_000000100.0001/               found damaged and set aside
      gone.step_000000080.0001/              being deleted
      lease.000003                           which job has the folder

Knows names only, opens nothing. Order is (step, attempt), never a time stamp.
"""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import NamedTuple

MANIFEST = "MANIFEST.json"
STEP_MAX = 10**18 - 1
ATTEMPT_MAX = 10**9 - 1
RANK_MAX = 10**6 - 1

_NAME = re.compile(r"(?:(attempt|bad|gone)\.)?step_([0-9]{9,18})\.([0-9]{4,9})(\.[0-9]+)?")


class FolderKind(Enum):
    """What a folder is, by its name."""

    COMMITTED = ""
    ATTEMPT = "attempt"
    BAD = "bad"
    GONE = "gone"


class Key(NamedTuple):
    """Which snapshot; they are ordered by it."""

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
    """What a folder's name tells."""

    kind: FolderKind
    key: Key


def parse(name: str) -> Named | None:
    """What the name of a folder tells; None when it is none of ours."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    key, kind = Key(int(found[2]), int(found[3])), FolderKind(found[1] or "")
    # One snapshot has one name: with zeros too many, or a suffix on what may be in use, it is somebody else's folder.
    suffix = found[4] or ""
    if name != key.named(kind) + suffix or (suffix and kind not in (FolderKind.BAD, FolderKind.GONE)):
        return None
    return Named(kind, key)


def check_step(step: int) -> None:
    """ValueError for a step that has no name."""
    if not 0 <= step <= STEP_MAX:
        raise ValueError(f"step {step} is not between 0 and {STEP_MAX}")


def attempt_path(folder: Path, key: Key) -> Path:
    """Where a snapshot is while it is written."""
    return folder / key.named(FolderKind.ATTEMPT)


def committed_path(folder: Path, key: Key) -> Path:
    """Where it is once it is committed."""
    return folder / key.name


def rank_file(rank: int) -> str:
    """Name of one rank's tensors."""
    return f"rank_{rank:05d}.safetensors"


def record_file(rank: int) -> str:
    """Name of one rank's record."""
    return f"rank_{rank:05d}.json"


def refusal_file(rank: int) -> str:
    """Name of what a rank leaves when it cannot write its part."""
    return f"rank_{rank:05d}.refused"
