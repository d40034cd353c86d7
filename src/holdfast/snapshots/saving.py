"""One save, as the saver carries it out: a slot that somebody lent, a ticket, and what has to be told.

Runs in a thread of its own, because a disk may hold it for ever; touches nothing that is shared. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.errors import SnapshotDamagedError, SnapshotError, SnapshotIncompleteError, SnapshotWriteError
from holdfast.snapshots import layout, packets, reader, rescue, slots
from holdfast.snapshots.attempt import Ticket, abandon, commit, write_rank
from holdfast.snapshots.folder import being_written, inspect, is_being_written
from holdfast.snapshots.layout import FolderKind
from holdfast.snapshots.mapping import Mappings
from holdfast.snapshots.rescue import LOOK_AGAIN_S, Stranded, newest_on_disk

Tell = Callable[[packets.Packet], None]
GIVE_WAY_S_MAX = 60.0


class Save(NamedTuple):
    """What one thread has to do. The descriptor is its own."""

    fd: int
    sequence: int
    ticket: Ticket
    metadata: dict[str, Any]
    patience_s: float
    local_rank: int
    mappings: Mappings
    stranded: Stranded | None = None
    """After a crash: what else of this rank may be written instead, and with whom that has to be agreed."""


def carry_out(save: Save, tell: Tell) -> None:
    """In a thread of its own: write this rank's file, and commit if it is rank 0's."""
    try:
        path = str(_carry_out(save, tell) or "")
    except SnapshotError as error:
        tell(_failed(save, error.code, str(error)))
    except Exception as error:  # noqa: BLE001 - one save that goes wrong must not end the others
        text = f"step {save.ticket.step} was not saved: {type(error).__name__}: {error}"
        tell(_failed(save, SnapshotWriteError.code, text))
    else:
        tell({"is": "saved", "path": path})


class GiveWay:
    """Called before each piece of work that has time: returns when no rank of this node stages or writes a state.

    Not for ever, because a worker that died in the middle leaves its successor a slot that looks like it: GIVE_WAY_S_MAX
    in all.
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
        reader.verify(inspect(path), GiveWay(is_busy))
    except SnapshotError as error:
        tell({"is": "read back", "code": error.code, "text": str(error)})
    except Exception as error:  # noqa: BLE001 - who asked has to hear of it
        text = f"{path} was not read back: {type(error).__name__}: {error}"
        tell({"is": "read back", "code": SnapshotError.code, "text": text})
    else:
        tell({"is": "read back", "code": "", "text": ""})


def _carry_out(save: Save, tell: Tell) -> Path | None:
    if save.stranded is None:
        _write(save)
        tell({"is": "written"})
        return commit(save.ticket, save.metadata, patience=save.patience_s) if save.ticket.rank == 0 else None
    # Looked for now, before the next life has any.
    older = _older_attempts(save.ticket)
    try:
        agreed = _agree(save, save.stranded)
        if agreed is None:
            return None
        _write(agreed)
        tell({"is": "written"})
        if save.ticket.rank:
            return None
        path = commit(agreed.ticket, agreed.metadata, patience=save.patience_s)
        for each in older:
            if each.key < agreed.ticket.key and not is_being_written(each.attempt_path):
                abandon(each)
        return path
    finally:  # before anything is told: the saver may end then
        save.stranded.end_meeting()


def _failed(save: Save, code: str, text: str) -> packets.Packet:
    """`made_good`: another attempt has brought the step to the disk; for a worker that died meanwhile nothing is to tell."""
    made_good = newest_on_disk(save.ticket.folder) == save.ticket.step
    return {"is": "failed", "code": code, "text": text, "made_good": made_good}


def _agree(save: Save, stranded: Stranded) -> Save | None:
    """The same rank's save of what all ranks write; None: nothing. Raises SnapshotError."""
    with contextlib.ExitStack() as failing:
        failing.callback(_let_go, save.fd)
        step = stranded.meet()
        if step is None:
            return None
        slot, ticket = stranded.held[step]
        if slot.sequence == save.sequence:
            failing.pop_all()
            return save
        try:
            # Only now: a slot that is lent keeps the next life from staging into it.
            lent = slots.lend(stranded.shelf, slot)
        except ValueError as error:
            raise SnapshotIncompleteError(f"step {step.step} was not saved: {error}") from error
        return save._replace(fd=lent, sequence=slot.sequence, ticket=ticket, metadata=slot.metadata)


def _older_attempts(ticket: Ticket) -> list[Ticket]:
    """Saves of the dead life that are not over. Ranks that died before they had handed over their part would be waited for
    in vain, once what they had is on the disk in another attempt.
    """
    try:
        found = [layout.parse(name) for name in os.listdir(ticket.folder)]
    except OSError:
        return []
    return [
        Ticket(ticket.folder, *named.key, 0, ticket.world)
        for named in found
        if named and named.kind is FolderKind.ATTEMPT and named.key.attempt < rescue.MEETING_MIN
    ]


def _write(save: Save) -> None:
    """The slot is free when this returns, whatever becomes of it."""
    try:
        slot = slots.read_descriptor(save.fd, mappings=save.mappings)
        if slot is None or slot.sequence != save.sequence or slot.step != save.ticket.step:
            raise SnapshotDamagedError(f"step {save.ticket.step} was not saved: its memory slot is not what it was.")
        if not os.path.isabs(save.ticket.folder):
            raise SnapshotWriteError(f"{save.ticket.folder} is not an absolute path")
        if save.stranded is not None:
            _await_attempt(save)
        # A slot may hold more than the rank's file, for a restart on this node.
        data = slot.data[: save.ticket.note.get("file_bytes", len(slot.data))]
        with being_written(save.ticket.attempt_path):
            write_rank(save.ticket, data)
    finally:
        _let_go(save.fd)


def _let_go(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a mapping keeps the file open
    os.close(fd)


def _await_attempt(save: Save) -> None:
    """Nobody has begun this attempt: rank 0 does it now, and the others see it come."""
    path = save.ticket.attempt_path
    if save.ticket.rank == 0:
        try:
            path.mkdir()
        except OSError as error:
            raise SnapshotWriteError(f"step {save.ticket.step}: {path}: {error.strerror}") from error
        return
    deadline = time.monotonic() + save.patience_s
    while not path.is_dir():
        if time.monotonic() > deadline or save.ticket.committed_path.is_dir():
            raise SnapshotWriteError(f"step {save.ticket.step}: rank 0 has not begun to save it")
        time.sleep(LOOK_AGAIN_S)  # other nodes' writes announce themselves nowhere


def ticket_of(value: packets.Packet) -> Ticket:
    """Raises ValueError."""
    for name, kind in (("folder", str), ("step", int), ("attempt", int), ("rank", int), ("world", int)):
        packets.field(value, name, kind)
    try:
        return Ticket.from_json(value)
    except TypeError as error:
        raise ValueError(f"ticket: {error}"[:200]) from error
