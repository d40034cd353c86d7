"""A saver to try: its worker is the test's own process, its anchor a process that the test ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.snapshots import attempt, folder, reader, shelf
from holdfast.snapshots.attempt import Ticket
from holdfast.snapshots.folder import Snapshot
from holdfast.snapshots.image import Image, TensorEntry
from holdfast.snapshots.saver_client import SaverAddress, SaverClient
from holdfast.snapshots.slots import Slot
from tests.support.limits import limit_s, until

SIZE = 2 << 20
WAIT_S = limit_s(20.0)


def savers(place: Path) -> list[int]:
    """Of this shelf."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"holdfast.snapshots.saver" in (line := path.read_bytes()) and os.fsencode(place) in line:
                found.append(int(path.parent.name))
    return found


class Bench:
    """A worker in this process, with a saver whose anchor is a process that the test ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.anchor = subprocess.Popen(["sleep", "600"])
        held = shelf.Shelf.make("bench")
        self.place = SaverAddress(held.path, 0, 0, self.anchor.pid, held)
        self.slots = self.place.slots(rank=0, world=1)
        self.client = SaverClient(self.place)

    def stage(self, step: int, size: int = SIZE) -> Slot:
        memory = self.slots.stage(step, size)
        assert memory is not None
        memory[:] = bytes([step]) * size
        return self.slots.commit()

    def persist(self, step: int, size: int = SIZE) -> None:
        slot = self.stage(step, size)
        ticket = Ticket(str(self.folder), step, attempt.begin(self.folder, step), 0, 1)
        self.client.persist(slot, ticket, {"step": step})

    @property
    def saver(self) -> int:
        (pid,) = until(lambda: savers(self.place.folder), "a saver has started")
        return int(pid)

    def close(self) -> None:
        self.client.close()
        self.slots.close()
        self.place.close()
        self.anchor.kill()
        self.anchor.wait()
        for pid in savers(self.place.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        until(lambda: not self.place.folder.exists(), "the shelf is gone")


# --- snapshots to damage: small, of several ranks, made by the real commit protocol -----------------------------------


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
        attempt.write_rank(Ticket(str(path), step, number, rank, world), content(step, rank, items))
    return attempt.commit(Ticket(str(path), step, number, 0, world), metadata)


def load(snapshot: Snapshot) -> list[bytes]:
    """All ranks' files, with their digests checked."""
    loaded = []
    for rank in range(snapshot.manifest.world):
        with reader.RankFile(snapshot, rank) as file:
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
