"""Snapshots to damage: small, of several ranks, made by the real commit protocol."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.snapshots import attempt, folder
from holdfast.snapshots.attempt import SaveRequest
from holdfast.snapshots.folder import Snapshot
from holdfast.snapshots.image import Image, TensorEntry

WEIGHT_ITEMS = 300_000


def content(step: int, rank: int, items: int = WEIGHT_ITEMS) -> bytes:
    """A rank's file: a weight of 4 × `items` bytes and two small tensors. Equal sizes for all ranks and steps."""
    image = Image.plan(
        [TensorEntry("weight", "F32", (items,)), TensorEntry("bias", "F16", (3,)), TensorEntry("step", "I64", ())],
        {"rank": f"{rank:06d}"},
    )
    data = bytearray(random.Random(f"{step} {rank}").randbytes(image.size_bytes))
    data[: len(image.header)] = image.header
    return bytes(data)


def save(
    path: Path, step: int, world: int = 2, metadata: Mapping[str, Any] | None = None, items: int = WEIGHT_ITEMS
) -> Path:
    """Save one step of all ranks; returns the committed folder."""
    number = attempt.begin(path, step)
    for rank in range(world):
        attempt.write_rank(SaveRequest(str(path), step, number, rank, world), content(step, rank, items))
    return attempt.commit(SaveRequest(str(path), step, number, 0, world, metadata=metadata or {}))


def load(snapshot: Snapshot) -> list[bytes]:
    """All ranks' files, with their digests checked."""
    loaded = []
    for rank in range(snapshot.manifest.world):
        with folder.RankFile(snapshot, rank) as file:
            loaded.append(bytes(file.load()))
    return loaded


def newest(path: Path) -> Snapshot:
    """The newest valid one; there is one."""
    found = folder.survey(path).newest_valid
    assert found is not None
    return found


def is_whole(snapshot: Snapshot) -> bool:
    """Bit-exact what `save` saved."""
    return load(snapshot) == [content(snapshot.step, rank) for rank in range(snapshot.manifest.world)]
