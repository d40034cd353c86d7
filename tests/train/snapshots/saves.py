"""What tests of snapshots share: savers to try, and small snapshots to damage."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast import memory_folder
from holdfast.protocol.errors import SaverLostError
from holdfast.train.snapshots import changes, folder, saver_connection
from holdfast.train.snapshots.changes import At, SaveRequest, nowhere
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.layout import Image, TensorEntry
from holdfast.train.snapshots.saver_client import SaverClient
from holdfast.train.snapshots.saver_connection import SaverAddress
from holdfast.train.snapshots.slots import Slot, Slots
from tests.support.limits import limit_s, until

SIZE = 2 << 20
WAIT_S = limit_s(20.0)


def savers(place: Path) -> list[int]:
    """Of this shared-memory folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"holdfast.train.snapshots.saver" in (line := path.read_bytes()) and os.fsencode(place) in line:
                found.append(int(path.parent.name))
    return found


def put(own: Slots, step: int, data: bytes, request: SaveRequest | None = None) -> Slot:
    """Stage and commit a state."""
    memory = own.stage(step, len(data))
    assert memory is not None
    memory[:] = data
    return own.commit(request)


class Memory:
    """A shared-memory folder, and the anchor of its saver: a process that the test ends."""

    def __init__(self) -> None:
        self.anchor = subprocess.Popen(["sleep", "600"])
        self.held = memory_folder.MemoryFolder.make("bench")
        self.path = self.held.path

    def address(self, local_rank: int = 0, generation: int = 0) -> SaverAddress:
        """A worker's. Its saver keeps the folder, and removes it in the end."""
        return SaverAddress(self.path, local_rank, generation, self.anchor.pid, self.held)

    def end(self) -> None:
        """The launcher's."""
        self.anchor.kill()
        self.anchor.wait()
        self.held.close()

    def close(self) -> None:
        self.end()
        for pid in savers(self.path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        until(self._is_gone, "the shared-memory folder is gone")

    def _is_gone(self) -> bool:
        if not savers(self.path):  # without a saver the next start removes it
            memory_folder.clean()
        return not self.path.exists()


class Bench:
    """A worker in this process, with its saver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory = Memory()
        self.place = SaverAddress(self.memory.path, 0, 0, self.memory.anchor.pid)
        self.connect()

    def connect(self) -> None:
        """The worker, or its successor."""
        self.client = SaverClient(self.place)
        self.slots = self.client.slots

    def hand_over(self, request: SaveRequest, size: int = SIZE) -> None:
        """Stage this step and have it saved; it is not written of the saver's own accord."""
        memory = self.client.stage(request.step, size)
        assert memory is not None
        memory[:] = bytes([request.step]) * size
        self.client.commit(None)
        self.client.persist(request)

    def stage(self, step: int, size: int = SIZE) -> Slot:
        return put(self.slots, step, bytes([step]) * size)

    def persist(self, step: int, size: int = SIZE) -> None:
        number = changes.begin(self.folder, step)
        self.hand_over(SaveRequest(str(self.folder), step, number, 0, 1, metadata={"step": step}), size)

    def read_back(self, path: Path, patience_s: float = WAIT_S) -> None:
        """By the saver."""
        saver_connection.read_back(self.place.folder, path, patience_s)

    def is_read_by_another(self, path: Path) -> bool:
        """By the saver that replaces one that was killed."""
        self.client.check()  # notices that its saver is gone, and starts another one
        with contextlib.suppress(SaverLostError):
            self.read_back(path)
            return True
        return False

    def save(self, step: int) -> None:
        """It is on the disk when this returns."""
        self.persist(step)
        self.client.wait(WAIT_S)

    @property
    def saver(self) -> int:
        (pid,) = until(lambda: savers(self.place.folder), "a saver has started")
        return int(pid)

    def close(self) -> None:
        self.client.close()
        self.memory.close()


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
    path: Path,
    step: int,
    world: int = 2,
    metadata: Mapping[str, Any] | None = None,
    items: int = WEIGHT_ITEMS,
    at: At = nowhere,
) -> Path:
    """Save one step of all ranks; returns the committed folder."""
    number = changes.begin(path, step, at=at)
    for rank in range(world):
        changes.write_rank(SaveRequest(str(path), step, number, rank, world), content(step, rank, items), at=at)
    return changes.commit(SaveRequest(str(path), step, number, 0, world, metadata=metadata or {}), at=at)


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
