"""Saving where /dev/shm has no room: memory of this process, written by its own thread. A save ends with the process.

It is a `Tier` of saver_client.py. Standard library only."""

from __future__ import annotations

import mmap
import threading
import warnings
from collections.abc import Generator

from holdfast.protocol.errors import SnapshotError, SnapshotMemoryError, SnapshotWriteError
from holdfast.train.snapshots import changes
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.read_back import ReadBacks, write
from holdfast.train.snapshots.saver_client import SaverClient, Tier
from holdfast.train.snapshots.saver_connection import SaverAddress
from holdfast.train.snapshots.slots import Slot


class InProcessStaging:
    """Memory of this process and a thread that writes."""

    in_memory = False
    place = ""
    states = 2

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._size_bytes = 0
        self._thread: threading.Thread | None = None
        self._failures: list[SnapshotError] = []
        self._read_backs = ReadBacks(lambda: self.busy)

    def regroup(self, rank: int, world: int, generation: int) -> None:
        """A request names its rank; nothing else here does."""

    def reserving(self, size_bytes: int) -> Generator[int, None, None]:
        self._reserve(size_bytes)
        yield 1

    def _reserve(self, size_bytes: int) -> None:
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = mmap.mmap(-1, size_bytes)

    def stage(self, step: int, size_bytes: int, *, wait: bool) -> memoryview | None:  # noqa: ARG002
        if self.busy and not wait:
            return None
        self._join()
        self._reserve(size_bytes)
        self._size_bytes = size_bytes
        assert self._memory is not None
        return memoryview(self._memory)[:size_bytes]

    def commit(self, request: SaveRequest) -> None:
        """No other process could write it after our end."""

    def persist(self, request: SaveRequest) -> None:
        assert self._memory is not None
        data = request.of_file(memoryview(self._memory)[: self._size_bytes])
        self._thread = threading.Thread(target=self._write, args=(request, data), name="holdfast-save")
        self._thread.start()

    def _write(self, request: SaveRequest, data: memoryview) -> None:
        written = None
        try:
            written = write(request, data)
            path = changes.commit(request) if request.rank == 0 else None
            if path is not None and written is not None:
                self._read_backs.committed(path)
        except SnapshotError as error:
            self._failures.append(error)
        except (OSError, ValueError) as error:
            self._failures.append(SnapshotWriteError(f"step {request.step} was not saved: {error}"))
        else:
            if written is not None:
                work, given = self._read_backs.own, (written,)
                threading.Thread(target=work, args=given, name="holdfast-check", daemon=True).start()
            return
        if written is not None:
            written.close()

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

    def await_previous_worker(self) -> None:
        """Nothing to wait for: its saves ended with it."""

    def held(self, folder: str) -> list[Slot]:  # noqa: ARG002
        return []

    def forget(self, above_step: int) -> None:
        """Nothing is kept."""

    def drop(self, above_step: int) -> None:
        """Nothing is kept."""

    def read_back(self, snapshot: Snapshot) -> None:
        self._read_backs.rest(snapshot)

    def close(self, *, ahead: bool) -> None:  # noqa: ARG002
        self._join()


def open_tier(*, rank: int, world: int, remote: bool = False, stage: str = "", copies: bool = False) -> Tier:
    """The memory tier; where it is not possible, the in-process one with a warning. `remote`: the target is an object
    store; `stage`, `copies`: see Snapshots."""
    try:
        address = SaverAddress.find()
        try:
            return SaverClient(address, rank=rank, world=world, remote=remote, stage=stage, copies=copies)
        except SnapshotMemoryError:
            address.close()
            raise
    except SnapshotMemoryError as error:
        warn_of_disk(error)
        return InProcessStaging()


def warn_of_disk(error: SnapshotError) -> None:
    """Called once for each Snapshots object."""
    warnings.warn(
        f"holdfast: no snapshots in memory: {error}\n"
        "Snapshots go to the disk only; a restart reads them there, and a save ends with its process.",
        RuntimeWarning,
        stacklevel=4,
    )
