"""One save, as the saver carries it out; and the choice of the step that is written after a crash.

Each save runs in its own thread, because a disk may block it for ever; it touches no shared state. Standard library
only.

After a crash the saver writes the newest step that every rank of the job still has in memory. Each node's saver knows
its own ranks' slots, which is enough on one node. Several nodes exchange what they have through the snapshot folder,
which they still share when their workers are dead. Rank 0's saver makes a meeting place, an attempt that is never
committed. Every rank lists there the steps that it has, and which of them were handed over already. From all lists each
saver makes the same choice. A rank that leaves no list within the patience ends the rescue: a step is never written
with ranks missing. A newer snapshot ends it, too: the workers of the other nodes live, and have gone on without this
one. The savers poll, because writes of other nodes cause no local event. When a next life begins that has copies of
states on other nodes, it goes on from memory, and the wait ends."""

from __future__ import annotations

import contextlib
import json
import mmap
import random
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from holdfast.protocol.errors import (
    HoldfastError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotIncompleteError,
    SnapshotWriteError,
)
from holdfast.train.snapshots import disk, slots
from holdfast.train.snapshots.changes import SaveRequest, abandon, commit, refuse
from holdfast.train.snapshots.folder import attempt_location, entries, first_of, inspect, is_being_written
from holdfast.train.snapshots.layout import FolderKind, Key, parse_name
from holdfast.train.snapshots.lease import FOLDER_ID, is_of_another_folder
from holdfast.train.snapshots.mapping import Mappings
from holdfast.train.snapshots.read_back import READ_BACK, ReadBacks, Written, write
from holdfast.train.snapshots.refusals import Refusals
from holdfast.train.snapshots.remote import STORE_POLL_S, Location, RemotePath, location_of
from holdfast.train.snapshots.saver_connection import Packet, Tell

ATTEMPT_MIN, ATTEMPT_MAX = 500_000_000, 899_999_999
"""Numbers of the attempts in which memory steps are written; no other attempts have them."""
MEETING_BELOW = 400_000_000
MEETING_MIN = ATTEMPT_MIN - MEETING_BELOW
"""The distance between a meeting's number and that of its attempt. Numbers of other saves, which count from 1, are
smaller."""
PATIENCE_S = 30.0
"""Limit of the wait for the other ranks. An agent that ends may have to wait this long when another node is gone."""
LINGER_S = 5.0
"""Time for which a rank that has nothing newer than the disk stays in the meeting, for others that may have something
newer: they read its list at once."""
POLL_S = 0.02
"""Pause between two looks into a snapshot folder on a file system (s)."""
INVENTORY_BYTES_MAX = 1 << 16
UNLISTED = OSError, HoldfastError
"""Errors of a listing. The second: this process may lack the driver of an object store that the worker has."""


def rescue_attempt() -> int:
    """A unique number for the attempt in which memory steps are written if the workers die.

    Rank 0 draws it once per generation and sends it to the others; all put it into the requests of `Tier.commit`. It is
    random, because no process can agree on it when it is needed, and it must differ from an attempt of an earlier
    crash.
    """
    return random.SystemRandom().randint(ATTEMPT_MIN, ATTEMPT_MAX)


def meeting_number(attempt: int) -> int:
    """The number of the meeting place, among attempts, of the ranks that have states of this life in memory."""
    return attempt - MEETING_BELOW


class StepInMemory(NamedTuple):
    """A state in a rank's memory. All ranks count their saves alike, and several saves may have one step."""

    step: int
    save: int
    """The number of the save in the life of the worker (`SaveRequest.save`)."""


@dataclass(frozen=True)
class Inventory:
    """The list that one rank brings to the meeting."""

    steps: tuple[StepInMemory, ...]
    """Steps that this rank, and all others of its node, could write."""
    asked: int
    """The newest step that this rank handed over to be written before the crash; -1: none."""
    on_disk: int
    """The newest committed step that this rank's node sees; -1: none."""

    def dump(self) -> str:
        """The text of the file that the other ranks read."""
        return json.dumps({"steps": self.steps, "asked": self.asked, "on_disk": self.on_disk})

    @classmethod
    def load(cls, text: str) -> Inventory:
        """The list with this text. Raises SnapshotDamagedError."""
        try:
            found = json.loads(text)
            steps = tuple(StepInMemory(int(step), int(save)) for step, save in found["steps"])
            return cls(steps, int(found["asked"]), int(found["on_disk"]))
        except (ValueError, TypeError, KeyError) as error:
            raise SnapshotDamagedError(f"the list that a rank left for the others cannot be read: {error}") from None


def choose(inventories: Sequence[Inventory]) -> StepInMemory | None:
    """The newest step that all ranks have; None: there is none, or every rank has written it or is writing it."""
    newest = max(set.intersection(*(set(each.steps) for each in inventories)), default=None)
    if newest is None or newest.step <= max(each.on_disk for each in inventories):
        return None
    return None if all(each.asked >= newest.step for each in inventories) else newest


class _OutrunError(Exception):
    """A newer state has come to the disk meanwhile: nothing has to be written any more."""


@dataclass(frozen=True)
class PendingFlush:
    """One rank's states of one snapshot folder, after all workers of the node have died."""

    held: Mapping[StepInMemory, tuple[slots.Slot, SaveRequest]]
    """States that all ranks of the node have, with this rank's slot. There is at least one."""
    inventory: Inventory
    alone: StepInMemory | None = None
    """The step to write when all ranks are on this node: no meeting is needed. None: a meeting decides."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set when rank 0, if it is on this node, has saved or given up. The ranks of a node share it."""

    @property
    def request(self) -> SaveRequest:
        """The request of the newest state."""
        return self.held[max(self.held)][1]

    def meet(self, needless: threading.Event, patience_s: float = PATIENCE_S) -> StepInMemory | None:
        """The step that all ranks of the job write now; None: none. The wait ends when `needless` is set. Raises
        SnapshotIncompleteError, SnapshotWriteError."""
        if self.alone is not None:
            return self.alone
        newer = self.request.step > self.inventory.on_disk
        try:
            found = self._meet(needless, patience_s if newer else min(patience_s, LINGER_S))
        except (SnapshotIncompleteError, SnapshotWriteError):
            if newer and not needless.is_set():
                raise
            return None  # nothing is lost: the disk has this rank's newest state, or the next life goes on from memory
        return found if newer else None

    def _meet(self, needless: threading.Event, patience_s: float) -> StepInMemory | None:
        request, step = self.request, max(self.inventory.on_disk + 1, self.request.step)
        limit = WaitLimit(time.monotonic() + patience_s, needless, request.folder, step)
        try:
            meeting = _meeting_place(request, limit)
            disk.write_atomically(meeting / _inventory_file(request.rank), self.inventory.dump())
            return choose(_inventories(meeting, request, limit))
        except _OutrunError:
            return None
        except FileNotFoundError as error:
            if request.rank:
                return None  # rank 0 has ended the meeting: nothing to write, or it has reported the error
            raise SnapshotIncompleteError(
                f"step {request.step}, which is in memory, was not saved: the job continued before all ranks had saved"
            ) from error
        except OSError as error:
            raise disk.write_error(error, location_of(request.folder)) from error

    def end_meeting(self) -> None:
        """If this is rank 0, remove the meeting place: the others have read it, or must see that nothing is written."""
        if self.request.rank == 0:
            self.over.set()
            if self.alone is None:
                disk.remove(_meeting_location(self.request))

    def given_up(self) -> bool:
        """Whether rank 0 will not begin the attempt any more. Other ranks ask while the attempt is not there."""
        if self.over.is_set():
            return True
        return self.alone is None and not _has_meeting_place(self.request)


def _meeting_location(request: SaveRequest) -> Location:
    """The location at which rank 0 makes the meeting place: it is named by rank 0's own newest step."""
    return attempt_location(request.folder, Key(request.step, meeting_number(request.attempt)))


def _has_meeting_place(request: SaveRequest) -> bool:
    """Whether rank 0's meeting place is there; its step may be another one. True where that is not known."""
    try:
        found = disk.listed(location_of(request.folder))
    except UNLISTED:
        return True
    number = meeting_number(request.attempt)
    return any((named := parse_name(name)) is not None and named.key.attempt == number for name in found)


class WaitLimit(NamedTuple):
    """What ends a rank's wait for the others."""

    deadline: float
    """The latest time (monotonic s)."""
    needless: threading.Event
    """Set when the next life goes on from memory."""
    folder: str
    step: int
    """The step whose arrival on the disk shows that the others have gone on. An object store is not asked for it."""

    def is_over(self, location: Location) -> bool:
        """Whether the wait is over. Returns False when it is time to look again. Raises _OutrunError."""
        if time.monotonic() > self.deadline:
            return True
        if isinstance(location, RemotePath):
            return self.needless.wait(STORE_POLL_S)
        if newest_on_disk(self.folder) >= self.step:
            raise _OutrunError
        return self.needless.wait(POLL_S)


def _meeting_place(request: SaveRequest, limit: WaitLimit) -> Location:
    """The meeting place. Rank 0 makes it; the others wait for it, and recognize it by its number, since its step may
    not be theirs. OSError; SnapshotWriteError, _OutrunError."""
    if request.rank == 0:
        own = _meeting_location(request)
        if isinstance(own, Path):
            own.mkdir()
        return own
    folder = location_of(request.folder)
    while True:
        for name in disk.listed(folder):
            named = parse_name(name)  # no other attempt has this number
            if named and named.key.attempt == meeting_number(request.attempt):
                return folder / name
        if limit.is_over(folder):
            raise SnapshotWriteError(f"step {request.step}: rank 0 has not begun to save it")


def _inventories(meeting: Location, request: SaveRequest, limit: WaitLimit) -> list[Inventory]:
    """The lists of all ranks. OSError; SnapshotIncompleteError, _OutrunError."""
    inventories: dict[int, Inventory] = {}
    while True:
        names = set(disk.names(meeting))
        for rank in range(request.world):
            if rank not in inventories and _inventory_file(rank) in names:
                inventories[rank] = Inventory.load(disk.read_text(meeting / _inventory_file(rank), INVENTORY_BYTES_MAX))
        if len(inventories) == request.world:
            return list(inventories.values())
        if limit.is_over(meeting):
            missing = first_of([rank for rank in range(request.world) if rank not in inventories], 8)
            raise SnapshotIncompleteError(
                f"step {request.step}, which is in memory, was not saved: nothing came from rank {missing}"
            )


def _inventory_file(rank: int) -> str:
    return f"rank_{rank:05d}.offer"


def newest_on_disk(folder: str) -> int:
    """The newest committed step that is not suspect, by its name; -1: none. It is validated only when it is loaded."""
    try:
        ours, marks = entries(location_of(folder))
    except UNLISTED:
        return -1
    steps = (named.key.step for _, named in ours if named.kind is FolderKind.COMMITTED and named.key not in marks)
    return max(steps, default=-1)


def pending_flush(
    by_rank: Mapping[int, Sequence[tuple[slots.Slot, SaveRequest]]],
    asked: Mapping[tuple[str, int], int],
) -> list[PendingFlush]:
    """The states that may have to be written: one entry for each rank, for each snapshot folder and life of which all
    the node's ranks have states.

    `by_rank`: each local rank's valid slots. `asked`: by folder and local rank, the newest step that was handed over.
    """
    found: list[PendingFlush] = []
    lives = {(request.folder, request.attempt, request.world) for held in by_rank.values() for _, request in held}
    for life in sorted(lives):
        held = {
            local_rank: {
                StepInMemory(request.step, request.save): (slot, request)
                for slot, request in theirs
                if (request.folder, request.attempt, request.world) == life
            }
            for local_rank, theirs in by_rank.items()
        }
        folder, _, world = life
        common = set.intersection(*(set(each) for each in held.values()))
        # The saver's only thread for sockets calls this and must not wait for an object store. Nothing is lost: a step
        # that the store has was handed over by this node, too, which `asked` says.
        on_disk = -1 if isinstance(location_of(folder), RemotePath) else newest_on_disk(folder)
        inventories = {each: Inventory(tuple(sorted(common)), asked.get((folder, each), -1), on_disk) for each in held}
        alone = choose(list(inventories.values())) if len(held) == world else None
        if alone or (common and len(held) < world):
            over = threading.Event()
            found += [
                PendingFlush({step: theirs[step] for step in common}, inventories[local_rank], alone, over)
                for local_rank, theirs in held.items()
            ]
    return found


class Save(NamedTuple):
    """The work of one thread."""

    fd: int
    """The slot's file, locked against staging. The thread owns this descriptor and releases it."""
    sequence: int
    """The slot's sequence number at the time of the request."""
    request: SaveRequest
    patience_s: float
    """Limit of rank 0's wait for the others' records."""
    local_rank: int
    mappings: Mappings
    refusals: Refusals
    pending_flush: PendingFlush | None = None
    """The states of this rank among which the ranks choose after a crash; None: a save that a worker asked for."""
    stage: str = ""
    """A local folder to which the slot is copied, so that it is free before the upload to an object store begins;
    empty: the slot itself is uploaded."""
    needless: threading.Event | None = None
    """Set when the next life goes on from memory: it needs this slot more than the disk does."""
    left: threading.Event | None = None
    """Set when the workers have gone on in another generation, without one that was lost."""


def carry_out(save: Save, read_backs: ReadBacks, tell: Tell) -> None:
    """Write this rank's file, and commit if this is rank 0; then read the file back, if the request says so. It runs in
    its own thread, and `tell` gets the answers to the worker (saver_connection.py)."""
    written: list[Written] = []
    warnings: list[str] = []
    try:
        path = _carry_out(save, written, tell, warnings.append)
    except SnapshotError as error:
        tell(_failed(save, error.code, str(error)))
    except Exception as error:  # noqa: BLE001 - one failed save must not end the others
        text = f"step {save.request.step} was not saved: {type(error).__name__}: {error}"
        tell(_failed(save, SnapshotWriteError.code, text))
    else:
        if path is not None and READ_BACK in save.request.note:
            read_backs.committed(path)
        tell({"is": "saved", "path": str(path or ""), "warning": "\n".join(warnings)})
        while written:
            read_backs.own(written.pop())
    for each in written:
        each.close()


def read_back(path: Location, read_backs: ReadBacks, tell: Tell) -> None:
    """Make sure that every byte of a committed snapshot was read back, and report any damage to `tell`. It runs in its
    own thread."""
    try:
        read_backs.rest(inspect(path))
    except SnapshotError as error:
        tell({"is": "read back", "code": error.code, "text": str(error)})
    except Exception as error:  # noqa: BLE001 - the requester must get the error
        text = f"{path} was not read back: {type(error).__name__}: {error}"
        tell({"is": "read back", "code": SnapshotError.code, "text": text})
    else:
        tell({"is": "read back", "code": "", "text": ""})


def _carry_out(save: Save, written: list[Written], tell: Tell, warn: Callable[[str], object]) -> Location | None:
    if save.pending_flush is None:
        _write(save, written, tell)
        if save.request.rank:
            return None
        return commit(save.request, patience=save.patience_s, left=save.left, warn=warn)

    # Listed now, before the next life of the workers has any attempts.
    older = _older_attempts(save.request)
    try:
        agreed = _agree(save, save.pending_flush)
        if agreed is None:
            return None
        _write(agreed, written, tell)
        if save.request.rank:
            return None
        path = commit(agreed.request, patience=save.patience_s, warn=warn)
        for each in older:
            if each.key < agreed.request.key:
                # A thread that has written its file waits in vain for the ranks that have handed over nothing: the end
                # of the attempt ends that wait. A thread that is still writing is left to finish first.
                while is_being_written(each.attempt_path):
                    time.sleep(POLL_S)
                abandon(each)
        return path
    finally:  # before the report: the saver may end after it
        save.pending_flush.end_meeting()


def _failed(save: Save, code: str, text: str) -> Packet:
    """The report of a failed save. Its `made_good` is true when nobody has to know of the failure if the worker has
    died meanwhile: another attempt has brought the step to the disk, or the failure follows from one of rank 0 on this
    node, which is reported."""
    flush = save.pending_flush
    follows = (
        flush is not None and save.request.rank > 0 and flush.over.is_set() and code == SnapshotIncompleteError.code
    )
    newest = newest_on_disk(save.request.folder)
    left = save.left is not None and save.left.is_set()
    made_good = follows or newest == save.request.step or (left and newest > save.request.step)
    return {"is": "failed", "code": code, "text": text, "made_good": made_good}


def _agree(save: Save, pending_flush: PendingFlush) -> Save | None:
    """This rank's save of the step that all ranks write; None: no step is written. Raises SnapshotError. The
    descriptor of a save that is not returned is released."""
    with contextlib.ExitStack() as failing:
        failing.callback(slots.release, save.fd)
        folder_id = save.request.note.get(FOLDER_ID)
        if folder_id and is_of_another_folder(location_of(save.request.folder), folder_id):
            return None  # the folder was removed: its states are not needed
        step = pending_flush.meet(save.needless or threading.Event())
        if step is None:
            return None

        slot, request = pending_flush.held[step]
        if slot.sequence == save.sequence:
            failing.pop_all()
            return save
        try:
            # Only now: a lent slot keeps the next life from staging into it.
            lent = slots.lend(slot)
        except ValueError as error:
            raise SnapshotIncompleteError(f"step {step.step} was not saved: {error}") from error
        return save._replace(fd=lent, sequence=slot.sequence, request=request)


def _older_attempts(request: SaveRequest) -> list[SaveRequest]:
    """Saves of the dead life that are not over. Once the newest state is on the disk in another attempt, they must not
    wait any longer for ranks that died before they had handed over their part."""
    try:
        found, _ = entries(location_of(request.folder))
    except UNLISTED:
        return []
    return [
        SaveRequest(request.folder, *named.key, 0, request.world)
        for _, named in found
        if named.kind is FolderKind.ATTEMPT and named.key.attempt < MEETING_MIN
    ]


def _data_of(save: Save) -> memoryview:
    """The bytes to write, on the local disk if they are staged there. Raises SnapshotError."""
    slot = slots.read_descriptor(save.fd, mappings=save.mappings)
    if slot is None or slot.sequence != save.sequence or slot.step != save.request.step:
        raise SnapshotDamagedError(f"step {save.request.step} was not saved: its memory slot has changed.")
    data = save.request.of_file(slot.data)
    return _staged(data, save.stage) if save.stage else data


def _write(save: Save, written: list[Written], tell: Tell) -> None:
    """Write the slot. It is free when this returns, whether the save succeeded or not; `tell` gets the message that it
    is free. `written` gets what is to be read back. Raises SnapshotError."""
    with contextlib.ExitStack() as releasing:
        releasing.callback(slots.release, save.fd)
        location = location_of(save.request.folder)
        if isinstance(location, Path) and not location.is_absolute():  # this process has another working directory
            raise SnapshotWriteError(f"{save.request.folder} is not an absolute path")
        if save.pending_flush is not None:
            _await_attempt(save)
        try:
            data = _data_of(save)
        except SnapshotError as error:
            refuse(save.request, str(error))  # otherwise rank 0 would wait for this rank's part
            raise
        if save.stage:
            releasing.close()
            tell({"is": "written"})
        try:
            back = write(save.request, data, None if save.stage else (save.fd, save.sequence))
        except SnapshotWriteError as error:
            save.refusals.insist(save.request, str(error))
            raise
        written += [] if back is None else [back]
    if not save.stage:
        tell({"is": "written"})


def _staged(data: memoryview, stage: str) -> memoryview:
    """A copy of the bytes in a file without a name, which ends with this process. SnapshotWriteError."""
    try:
        with tempfile.TemporaryFile(dir=stage) as file:
            file.write(data)
            file.flush()
            return memoryview(mmap.mmap(file.fileno(), len(data), prot=mmap.PROT_READ))
    except OSError as error:
        raise disk.write_error(error, Path(stage), len(data)) from error


def _await_attempt(save: Save) -> None:
    """Begin the attempt of a rescue, which no rank has begun before: rank 0 makes the folder, and the others wait for
    it. SnapshotIncompleteError, SnapshotWriteError."""
    path = save.request.attempt_path
    if isinstance(path, RemotePath):
        return  # an object store needs no folder, and all ranks know the name

    if save.request.rank == 0:
        try:
            path.mkdir()
        except OSError as error:
            raise SnapshotWriteError(f"step {save.request.step}: {path}: {error.strerror}") from error
        return
    deadline = time.monotonic() + save.patience_s
    assert save.pending_flush is not None
    while not path.is_dir():
        if save.pending_flush.given_up() and not path.is_dir():
            raise SnapshotIncompleteError(f"step {save.request.step}: rank 0 could not save it")
        if time.monotonic() > deadline or path.with_name(save.request.key.name).is_dir():
            raise SnapshotWriteError(f"step {save.request.step}: rank 0 has not begun to save it")
        time.sleep(POLL_S)  # writes of other nodes cause no local event
