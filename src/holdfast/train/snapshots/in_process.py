"""Saving where /dev/shm has no room: the state is staged in memory of this process, and written by a thread of it. A
save ends with the process.

`InProcessStaging` is a `Tier` of saver_client.py, where the methods are described. Standard library only."""

from __future__ import annotations

import mmap
import threading
import warnings
from collections.abc import Generator

from holdfast.protocol.errors import NotFiniteError, SnapshotError, SnapshotMemoryError, SnapshotWriteError
from holdfast.train.snapshots import changes
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.read_back import ReadBacks, write
from holdfast.train.snapshots.refusals import Refusals
from holdfast.train.snapshots.saver_client import SaverClient, Tier
from holdfast.train.snapshots.saver_connection import SaverAddress
from holdfast.train.snapshots.slots import Slot


class InProcessStaging:
    """The tier without shared memory: one state in this process, and a thread that writes it."""

    in_memory = False
    place = ""
    states = 2

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._size_bytes = 0
        self._thread: threading.Thread | None = None
        self._failures: list[SnapshotError] = []
        self._warnings: list[str] = []
        self.not_finite_step = -1
        self._read_backs = ReadBacks(lambda: self.busy)
        self._refusals = Refusals()

    def regroup(self, rank: int, world: int, generation: int) -> None:
        """Do nothing: only a request names the rank here."""

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
        """Do nothing: no other process could write the state after the end of this one."""

    def persist(self, request: SaveRequest) -> None:
        assert self._memory is not None
        data = request.of_file(memoryview(self._memory)[: self._size_bytes])
        self._thread = threading.Thread(target=self._write, args=(request, data), name="holdfast-save")
        self._thread.start()

    def _write(self, request: SaveRequest, data: memoryview) -> None:
        written = None
        try:
            written = write(request, data)
            path = changes.commit(request, warn=self._warnings.append) if request.rank == 0 else None
            if path is not None and written is not None:
                self._read_backs.committed(path)
        except SnapshotError as error:
            if isinstance(error, NotFiniteError):
                self.not_finite_step = request.step
            self._failures.append(error)
            self._refusals.insist(request, str(error))
        except (OSError, ValueError) as error:
            self._failures.append(SnapshotWriteError(f"step {request.step} was not saved: {error}"))
        else:
            # Another thread reads it back: the end of this one means that the save is done.
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
        while self._warnings:
            warnings.warn(f"holdfast: {self._warnings.pop(0)}", RuntimeWarning, stacklevel=3)

    def wait(self) -> None:
        self._join()
        self.check()

    def await_previous_worker(self) -> None:
        """Do nothing: the saves of a previous worker ended with it."""

    def held(self, folder: str) -> list[Slot]:  # noqa: ARG002
        return []

    def forget(self, above_step: int) -> None:
        """Do nothing: no state outlives its save."""

    def drop(self, above_step: int) -> None:
        """Do nothing: no state outlives its save."""

    def read_back(self, snapshot: Snapshot) -> None:
        self._read_backs.rest(snapshot)

    def close(self, *, ahead: bool) -> None:  # noqa: ARG002
        self._join()


def open_tier(*, rank: int, world: int, remote: bool = False, stage: str = "", copies: bool = False) -> Tier:
    """The tier of this worker: shared memory and the saver; where these are not possible, memory of this process, with
    a warning.

    `remote`: the target is an object store. `stage`: see `Save.stage`. `copies`: other nodes get copies."""
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
    """Warn that snapshots go to the disk only. It is called once for each Snapshots object."""
    warnings.warn(
        f"holdfast: no snapshots in memory: {error}\n"
        "Snapshots go to the disk only; a restart reads them there, and a save ends with its process.",
        RuntimeWarning,
        stacklevel=4,
    )
