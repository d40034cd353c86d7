"""Where a rank's image is put together, and who writes it to the disk.

MemoryTier: a slot in /dev/shm, written by the saver: the copy outlives this process, and so does a save. PrivateTier:
memory of this process, written by a thread of its own: what is left where /dev/shm has no room. A save ends with the
process then.

Both hold a staged image still while it is written, and neither ever waits unless it is asked to.
"""

from __future__ import annotations

import mmap
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.core.errors import (
    SaverLostError,
    SnapshotError,
    SnapshotIncompleteError,
    SnapshotMemoryError,
    SnapshotWriteError,
)
from holdfast.snapshots import attempt, folder, saver_client
from holdfast.snapshots.attempt import Ticket
from holdfast.snapshots.folder import Snapshot
from holdfast.snapshots.saver_client import SaverAddress, SaverClient
from holdfast.snapshots.slots import Slot, committed_slots, local_ranks

PATIENCE_S = 600.0
"""How long a save that has to be durable waits for those before it, and for the disk."""
SLOWEST_BYTES_S = 20e6
"""A disk that reads more slowly is as good as none."""


@dataclass(frozen=True)
class InheritedState:
    """A state that a predecessor has left in this node's memory: one rank's part."""

    step: int
    life: int
    """Which life of the job left it: a number that its ranks drew together."""
    save: int
    """Which save of that life: several may be of one step, and their parts must not be mixed."""
    sequence: int
    """Of one local rank: what it left later has a higher one."""
    data: memoryview
    path: Path
    """The slot's file."""


class Tier(Protocol):
    """See the module's docstring. SnapshotError comes out of every method."""

    in_memory: bool
    place: str
    """Where a successor on this node looks for what we leave; agents that share a /dev/shm have one each."""

    def reserve(self, size_bytes: int) -> None:
        """Have room at hand, so that no `stage` has to get it."""

    def stage(self, step: int, size_bytes: int, *, wait: bool) -> memoryview | None:
        """Where to put an image; None when there is no room before something is written out, and not `wait`."""

    def commit(self, ticket: Ticket, metadata: Mapping[str, Any]) -> None:
        """What was staged is whole. Should this process die before it is on disk, it goes there as the ticket says."""

    def persist(self, ticket: Ticket, metadata: Mapping[str, Any]) -> None:
        """Write what was committed last. Returns at once."""

    @property
    def busy(self) -> bool:
        """Something is being written."""

    def check(self) -> None:
        """Raise what went wrong in the background."""

    def wait(self) -> None:
        """Until all that was handed over is on the disk; raises what went wrong."""

    def await_predecessor(self) -> None:
        """Until nothing that a predecessor left is being written by this node; what waits for other ranks may wait
        on.
        """

    def held(self, folder: str) -> list[InheritedState]:
        """What this node's memory has of this snapshot folder, of all local ranks."""

    def forget(self, above_step: int) -> None:
        """Memory of later steps is of a history that was given up."""

    def read_back(self, snapshot: Snapshot) -> None:
        """Read a committed snapshot and check every byte. SnapshotError. For any thread."""

    def close(self, *, ahead: bool) -> None:
        """Let go. `ahead`: memory is newer than the disk, and what is newer shall get there without us."""


class MemoryTier:
    """Slots and the saver."""

    in_memory = True

    def __init__(self, place: SaverAddress, *, rank: int, world: int) -> None:
        """SnapshotMemoryError when there is no memory or no saver."""
        self._place = place
        self.place = str(place.folder)
        self._saver = SaverClient(place)
        self._slots = place.slots(rank=rank, world=world)
        self._slot: Slot | None = None
        self._newest_step = -1
        self._reserving = threading.Lock()
        """Held by whoever takes memory in the background, and to close."""
        self._closing = threading.Event()
        self._making_huge: threading.Thread | None = None

    def reserve(self, size_bytes: int) -> None:
        with self._reserving:
            if self._closing.is_set():
                return
            self._slots.reserve(size_bytes)

    def stage(self, step: int, size_bytes: int, *, wait: bool) -> memoryview | None:
        memory = self._slots.stage(step, size_bytes)
        deadline = time.monotonic() + PATIENCE_S
        while memory is None and wait:
            if not self._saver.wait_for_slot(max(deadline - time.monotonic(), 0.0)):
                self._saver.check()
                raise SnapshotIncompleteError(f"step {step} was not saved: earlier saves are still being written")
            memory = self._slots.stage(step, size_bytes)
        return memory

    def commit(self, ticket: Ticket, metadata: Mapping[str, Any]) -> None:
        self._slot = self._slots.commit(ticket.to_json(), metadata)
        if self._making_huge is None:
            # By a thread of the ordinary priority, which a thread that steps back could not start: who touches a page
            # waits for it.
            self._making_huge = threading.Thread(
                target=self._slots.make_huge, args=(self._closing,), name="holdfast-huge", daemon=True
            )
            self._making_huge.start()

    def persist(self, ticket: Ticket, metadata: Mapping[str, Any]) -> None:
        assert self._slot is not None
        self._saver.persist(self._slot, ticket, metadata)

    @property
    def busy(self) -> bool:
        return bool(self._saver.in_flight)

    def check(self) -> None:
        self._saver.check()
        for text in self._saver.news:
            warnings.warn(f"holdfast: {text}", RuntimeWarning, stacklevel=3)
        self._saver.news.clear()

    def wait(self) -> None:
        idle = self._saver.wait_own(PATIENCE_S)
        self.check()
        if not idle:
            raise SnapshotIncompleteError(f"after {PATIENCE_S:g} s the saver is still writing")

    def await_predecessor(self) -> None:
        self._saver.wait_written(PATIENCE_S)
        self.check()

    def held(self, folder: str) -> list[InheritedState]:
        found = [
            InheritedState(
                slot.step,
                slot.ticket["attempt"],
                slot.ticket["note"].get("save", 0),
                slot.sequence,
                slot.data,
                self._place.folder / f"{slot.local_rank}.{slot.number}",
            )
            for local_rank in local_ranks(self._place.folder)
            for slot in committed_slots(self._place.folder, local_rank)
            if slot.ticket is not None and slot.ticket.get("folder") == folder
        ]
        self._newest_step = max((held.step for held in found), default=-1)
        return found

    def forget(self, above_step: int) -> None:
        if self._newest_step > above_step:  # looking costs a few milliseconds
            self._slots.forget(above_step=above_step)

    def read_back(self, snapshot: Snapshot) -> None:
        """By the saver: threads of this process that hash keep the interpreter and its memory map from training."""
        try:
            patience_s = PATIENCE_S + snapshot.manifest.size_bytes / SLOWEST_BYTES_S
            saver_client.read_back(self._place, snapshot.path, patience_s)
        except SaverLostError:
            folder.verify(snapshot, lambda: None)

    def close(self, *, ahead: bool) -> None:
        self._closing.set()
        self._saver.close(ahead=ahead)
        if self._making_huge is not None:
            self._making_huge.join()
        with self._reserving:
            self._slots.close()
        self._place.close()


class PrivateTier:
    """Memory of this process and a thread that writes."""

    in_memory = False
    place = ""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._size_bytes = 0
        self._thread: threading.Thread | None = None
        self._failures: list[SnapshotError] = []

    def reserve(self, size_bytes: int) -> None:
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = mmap.mmap(-1, size_bytes)

    def stage(self, step: int, size_bytes: int, *, wait: bool) -> memoryview | None:  # noqa: ARG002
        if self.busy and not wait:
            return None
        self._join()
        self.reserve(size_bytes)
        self._size_bytes = size_bytes
        assert self._memory is not None
        return memoryview(self._memory)[:size_bytes]

    def commit(self, ticket: Ticket, metadata: Mapping[str, Any]) -> None:
        """Nobody could write it after our end."""

    def persist(self, ticket: Ticket, metadata: Mapping[str, Any]) -> None:
        assert self._memory is not None
        data = memoryview(self._memory)[: ticket.note.get("file_bytes", self._size_bytes)]
        self._thread = threading.Thread(target=self._write, args=(ticket, data, metadata), name="holdfast-save")
        self._thread.start()

    def _write(self, ticket: Ticket, data: memoryview, metadata: Mapping[str, Any]) -> None:
        try:
            attempt.write_rank(ticket, data)
            if ticket.rank == 0:
                attempt.commit(ticket, metadata)
        except SnapshotError as error:
            self._failures.append(error)
        except (OSError, ValueError) as error:
            self._failures.append(SnapshotWriteError(f"step {ticket.step} was not saved: {error}"))

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        if self._failures:
            raise self._failures.pop(0)

    def wait(self) -> None:
        self._join()
        self.check()

    def await_predecessor(self) -> None:
        """It took its saves along."""

    def held(self, folder: str) -> list[InheritedState]:  # noqa: ARG002
        return []

    def forget(self, above_step: int) -> None:
        """Nothing is remembered."""

    def read_back(self, snapshot: Snapshot) -> None:
        folder.verify(snapshot, lambda: None)

    def close(self, *, ahead: bool) -> None:  # noqa: ARG002
        self._join()


def open_tier(*, rank: int, world: int, wanted: bool = True) -> Tier:
    """The memory tier, or with one warning the other."""
    if not wanted:
        return PrivateTier()
    try:
        place = SaverAddress.find()
        try:
            return MemoryTier(place, rank=rank, world=world)
        except SnapshotMemoryError:
            place.close()
            raise
    except SnapshotMemoryError as error:
        warn_of_disk(error)
        return PrivateTier()


def warn_of_disk(error: SnapshotError) -> None:
    """Once for each Snapshots."""
    warnings.warn(
        f"holdfast: no snapshots in memory: {error}\n"
        "Snapshots go to the disk only; a restart reads them there, and a save ends with its process.",
        RuntimeWarning,
        stacklevel=4,
    )
