"""One save, as the saver carries it out; and which step is written after a crash.

Runs in a thread of its own, because a disk may hold it for ever; touches nothing that is shared. Standard library only.

After a crash the newest step is written that every rank of the job still has in memory. Each node's saver knows its
own ranks' slots. On one node that is all there is to know. Several nodes meet in the snapshot folder, which is what
they share when their workers are dead: rank 0's saver makes a meeting place, an attempt that is never committed;
every rank leaves there what it has and whether that was handed over already; and from what all have left each saver
chooses alike. A rank that leaves nothing within the patience ends the rescue: nothing is written with ranks missing.
The savers poll, because other nodes' writes announce themselves nowhere."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from holdfast.protocol.errors import SnapshotDamagedError, SnapshotError, SnapshotIncompleteError, SnapshotWriteError
from holdfast.snapshots import disk, folder, memory_folder, slots
from holdfast.snapshots.attempt import SaveRequest, abandon, commit, write_rank
from holdfast.snapshots.folder import being_written, inspect, is_being_written
from holdfast.snapshots.manifest import FolderKind, Key, attempt_path, parse_name
from holdfast.snapshots.mapping import Mappings

ATTEMPT_MIN, ATTEMPT_MAX = 500_000_000, 899_999_999
"""Numbers of the attempts in which memory steps are written; nothing else has them."""
MEETING_BELOW = 400_000_000
MEETING_MIN = ATTEMPT_MIN - MEETING_BELOW
"""A meeting's number is so much less than that of its attempt; those of other saves, which count from 1, are smaller.
"""
PATIENCE_S = 30.0
"""How long the other ranks are waited for. An agent that ends may have to wait for this, when another node is gone."""
LINGER_S = 5.0
"""How long a rank that has nothing newer than the disk stays for others that may: so they hear it and need not wait."""
LOOK_AGAIN_S = 0.02
OFFER_BYTES_MAX = 1 << 16


def rescue_attempt() -> int:
    """A number for the attempt in which memory steps are written should the workers die; nothing else has it.

    Rank 0 draws it once per generation and tells the others; all put it into the requests of `Tier.commit`. Random,
    because no process is there to agree when it is needed, and an attempt that an earlier crash has left must not be
    met."""
    return random.SystemRandom().randint(ATTEMPT_MIN, ATTEMPT_MAX)


class StepInMemory(NamedTuple):
    """What a rank has in memory; ranks count their saves alike, and several may be of one step."""

    step: int
    save: int


@dataclass(frozen=True)
class Inventory:
    """What one rank brings."""

    steps: tuple[StepInMemory, ...]
    """That it, and all others of its node, could write."""
    asked: int
    """The newest step that it has handed over to be written before the crash; -1: none."""
    on_disk: int
    """The newest committed step that its node sees; -1: none."""

    def dump(self) -> str:
        return json.dumps({"steps": self.steps, "asked": self.asked, "on_disk": self.on_disk})

    @classmethod
    def load(cls, text: str) -> Inventory:
        """SnapshotDamagedError."""
        try:
            found = json.loads(text)
            steps = tuple(StepInMemory(int(step), int(save)) for step, save in found["steps"])
            return cls(steps, int(found["asked"]), int(found["on_disk"]))
        except (ValueError, TypeError, KeyError) as error:
            raise SnapshotDamagedError(f"what a rank has left for the others is not readable: {error}") from None


def choose(offers: Sequence[Inventory]) -> StepInMemory | None:
    """The newest that all have; None: there is none, or it is on the disk, or on its way there from every rank."""
    newest = max(set.intersection(*(set(each.steps) for each in offers)), default=None)
    if newest is None or newest.step <= max(each.on_disk for each in offers):
        return None
    return None if all(each.asked >= newest.step for each in offers) else newest


@dataclass(frozen=True)
class PendingFlush:
    """One rank's states of one snapshot folder, whose workers have all died."""

    memory_folder: Path
    held: Mapping[StepInMemory, tuple[slots.Slot, SaveRequest]]
    """Those that all ranks of the node have. There is at least one."""
    offer: Inventory
    alone: StepInMemory | None = None
    """What is written, where all ranks are on this node: nobody has to be met."""

    @property
    def request(self) -> SaveRequest:
        """Of the newest."""
        return self.held[max(self.held)][1]

    def meet(self, patience_s: float = PATIENCE_S) -> StepInMemory | None:
        """What all ranks of the job write now; None: nothing. SnapshotIncompleteError, SnapshotWriteError."""
        if self.alone is not None:
            return self.alone
        if self.request.step > self.offer.on_disk:
            return self._meet(patience_s)
        with contextlib.suppress(SnapshotIncompleteError, SnapshotWriteError):  # nothing is lost
            self._meet(min(patience_s, LINGER_S))
        return None

    def _meet(self, patience_s: float) -> StepInMemory | None:
        request, deadline = self.request, time.monotonic() + patience_s
        try:
            place = _meeting_place(request, deadline)
            disk.write_atomically(place / _offer_file(request.rank), self.offer.dump())
            return choose(_offers(place, request, deadline))
        except FileNotFoundError as error:
            if request.rank:
                return None  # rank 0 has ended it: nothing is to be written, or it has said why nothing was
            raise SnapshotIncompleteError(
                f"step {request.step}, which is in memory, was not saved: the job went on before all ranks had come"
            ) from error
        except OSError as error:
            raise disk.write_error(error, Path(request.folder)) from error

    def end_meeting(self) -> None:
        """Rank 0, when the others have read what they need, or need to know that nothing is written."""
        if self.request.rank == 0 and self.alone is None:
            shutil.rmtree(_place_of(self.request), ignore_errors=True)


def _place_of(request: SaveRequest) -> Path:
    return attempt_path(Path(request.folder), Key(request.step, request.attempt - MEETING_BELOW))


def _meeting_place(request: SaveRequest, deadline: float) -> Path:
    """Rank 0 makes it, named by its own newest step; the others look for its number. OSError; SnapshotWriteError."""
    if request.rank == 0:
        place = _place_of(request)
        place.mkdir()
        return place
    while True:
        for name in os.listdir(request.folder):
            named = parse_name(name)
            if named and named.kind is FolderKind.ATTEMPT and named.key.attempt == request.attempt - MEETING_BELOW:
                return Path(request.folder) / name
        if time.monotonic() > deadline:
            raise SnapshotWriteError(f"step {request.step}: rank 0 has not begun to save it")
        time.sleep(LOOK_AGAIN_S)


def _offers(place: Path, request: SaveRequest, deadline: float) -> list[Inventory]:
    """Of all ranks. OSError; SnapshotIncompleteError."""
    offers: dict[int, Inventory] = {}
    while True:
        names = set(os.listdir(place))
        for rank in range(request.world):
            if rank not in offers and _offer_file(rank) in names:
                offers[rank] = Inventory.load(disk.read_text(place / _offer_file(rank), OFFER_BYTES_MAX))
        if len(offers) == request.world:
            return list(offers.values())
        if time.monotonic() > deadline:
            missing = [rank for rank in range(request.world) if rank not in offers]
            more = " …" if len(missing) > 8 else ""
            raise SnapshotIncompleteError(
                f"step {request.step}, which is in memory, was not saved: nothing came from rank "
                f"{', '.join(map(str, missing[:8]))}{more}"
            )
        time.sleep(LOOK_AGAIN_S)


def _offer_file(rank: int) -> str:
    return f"rank_{rank:05d}.offer"


def newest_on_disk(folder: str) -> int:
    """The newest committed step by its name; -1: none. Whether it is good is seen when somebody loads it."""
    try:
        found = [named for name in os.listdir(folder) if (named := parse_name(name)) is not None]
    except OSError:
        return -1
    return max((named.key.step for named in found if named.kind is FolderKind.COMMITTED), default=-1)


def pending_flush(
    memory_folder: Path,
    by_rank: Mapping[int, Sequence[tuple[slots.Slot, SaveRequest]]],
    asked: Mapping[tuple[str, int], int],
) -> list[PendingFlush]:
    """Of each snapshot folder and life that all the node's ranks have states of: each rank's, if any may have to be
    written.

    `by_rank`: by local rank. `asked`: by folder and local rank, the newest step that was handed over.
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
        on_disk = newest_on_disk(folder)
        offers = {each: Inventory(tuple(sorted(common)), asked.get((folder, each), -1), on_disk) for each in held}
        alone = choose(list(offers.values())) if len(held) == world else None
        if alone or (common and len(held) < world):
            found += [
                PendingFlush(memory_folder, {step: theirs[step] for step in common}, offers[local_rank], alone)
                for local_rank, theirs in held.items()
            ]
    return found


Tell = Callable[[memory_folder.Packet], None]
GIVE_WAY_S_MAX = 60.0


class Save(NamedTuple):
    """What one thread has to do. The descriptor is its own."""

    fd: int
    sequence: int
    request: SaveRequest
    patience_s: float
    local_rank: int
    mappings: Mappings
    pending_flush: PendingFlush | None = None
    """After a crash: what else of this rank may be written instead, and with whom that has to be agreed."""


def carry_out(save: Save, tell: Tell) -> None:
    """In a thread of its own: write this rank's file, and commit if it is rank 0's."""
    try:
        path = str(_carry_out(save, tell) or "")
    except SnapshotError as error:
        tell(_failed(save, error.code, str(error)))
    except Exception as error:  # noqa: BLE001 - one save that goes wrong must not end the others
        text = f"step {save.request.step} was not saved: {type(error).__name__}: {error}"
        tell(_failed(save, SnapshotWriteError.code, text))
    else:
        tell({"is": "saved", "path": path})


class GiveWay:
    """Called before each piece of work that has time: returns when no rank of this node stages or writes a state.

    Not for ever, because a worker that died in the middle leaves its successor a slot that looks like it:
    GIVE_WAY_S_MAX in all.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._left_s = GIVE_WAY_S_MAX

    def __call__(self) -> None:
        while self._left_s > 0 and self._is_busy():
            time.sleep(LOOK_AGAIN_S)
            self._left_s -= LOOK_AGAIN_S


def read_back(path: Path, is_busy: Callable[[], bool], tell: Tell) -> None:
    """In a thread of its own: read a committed snapshot, check every byte, and tell what is wrong with it."""
    try:
        folder.verify(inspect(path), GiveWay(is_busy))
    except SnapshotError as error:
        tell({"is": "read back", "code": error.code, "text": str(error)})
    except Exception as error:  # noqa: BLE001 - who asked has to hear of it
        text = f"{path} was not read back: {type(error).__name__}: {error}"
        tell({"is": "read back", "code": SnapshotError.code, "text": text})
    else:
        tell({"is": "read back", "code": "", "text": ""})


def _carry_out(save: Save, tell: Tell) -> Path | None:
    if save.pending_flush is None:
        _write(save)
        tell({"is": "written"})
        return commit(save.request, patience=save.patience_s) if save.request.rank == 0 else None
    # Looked for now, before the next life has any.
    older = _older_attempts(save.request)
    try:
        agreed = _agree(save, save.pending_flush)
        if agreed is None:
            return None
        _write(agreed)
        tell({"is": "written"})
        if save.request.rank:
            return None
        path = commit(agreed.request, patience=save.patience_s)
        for each in older:
            if each.key < agreed.request.key and not is_being_written(each.attempt_path):
                abandon(each)
        return path
    finally:  # before anything is told: the saver may end then
        save.pending_flush.end_meeting()


def _failed(save: Save, code: str, text: str) -> memory_folder.Packet:
    """`made_good`: another attempt has brought the step to the disk; for a worker that died meanwhile nothing is to
    tell."""
    made_good = newest_on_disk(save.request.folder) == save.request.step
    return {"is": "failed", "code": code, "text": text, "made_good": made_good}


def _agree(save: Save, pending_flush: PendingFlush) -> Save | None:
    """The same rank's save of what all ranks write; None: nothing. Raises SnapshotError."""
    with contextlib.ExitStack() as failing:
        failing.callback(_let_go, save.fd)
        step = pending_flush.meet()
        if step is None:
            return None
        slot, request = pending_flush.held[step]
        if slot.sequence == save.sequence:
            failing.pop_all()
            return save
        try:
            # Only now: a slot that is lent keeps the next life from staging into it.
            lent = slots.lend(pending_flush.memory_folder, slot)
        except ValueError as error:
            raise SnapshotIncompleteError(f"step {step.step} was not saved: {error}") from error
        return save._replace(fd=lent, sequence=slot.sequence, request=request)


def _older_attempts(request: SaveRequest) -> list[SaveRequest]:
    """Saves of the dead life that are not over. Ranks that died before they had handed over their part would be
    waited for in vain, once what they had is on the disk in another attempt.
    """
    try:
        found = [parse_name(name) for name in os.listdir(request.folder)]
    except OSError:
        return []
    return [
        SaveRequest(request.folder, *named.key, 0, request.world)
        for named in found
        if named and named.kind is FolderKind.ATTEMPT and named.key.attempt < MEETING_MIN
    ]


def _write(save: Save) -> None:
    """The slot is free when this returns, whatever becomes of it."""
    try:
        slot = slots.read_descriptor(save.fd, mappings=save.mappings)
        if slot is None or slot.sequence != save.sequence or slot.step != save.request.step:
            raise SnapshotDamagedError(f"step {save.request.step} was not saved: its memory slot is not what it was.")
        if not os.path.isabs(save.request.folder):
            raise SnapshotWriteError(f"{save.request.folder} is not an absolute path")
        if save.pending_flush is not None:
            _await_attempt(save)
        data = save.request.of_file(slot.data)
        with being_written(save.request.attempt_path):
            write_rank(save.request, data)
    finally:
        _let_go(save.fd)


def _let_go(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a mapping keeps the file open
    os.close(fd)


def _await_attempt(save: Save) -> None:
    """Nobody has begun this attempt: rank 0 does it now, and the others see it come."""
    path = save.request.attempt_path
    if save.request.rank == 0:
        try:
            path.mkdir()
        except OSError as error:
            raise SnapshotWriteError(f"step {save.request.step}: {path}: {error.strerror}") from error
        return
    deadline = time.monotonic() + save.patience_s
    while not path.is_dir():
        if time.monotonic() > deadline or save.request.committed_path.is_dir():
            raise SnapshotWriteError(f"step {save.request.step}: rank 0 has not begun to save it")
        time.sleep(LOOK_AGAIN_S)  # other nodes' writes announce themselves nowhere
