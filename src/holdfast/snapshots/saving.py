"""One save, as the saver carries it out: a slot that somebody lent, a ticket, and what has to be told.

Runs in a thread of its own, because a disk may hold it for ever; touches nothing that is shared. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.core.errors import SnapshotDamagedError, SnapshotError, SnapshotWriteError
from holdfast.snapshots import layout, packets, slots
from holdfast.snapshots.attempt import Ticket, commit, write_rank
from holdfast.snapshots.folder import being_written
from holdfast.snapshots.layout import Kind

RESCUE_PATIENCE_S = 30.0
"""How long the other ranks are waited for when a memory step is written after a crash. An agent that ends may have to
wait for this, when another node is gone."""
LOOK_AGAIN_S = 0.02

Tell = Callable[[packets.Packet], None]


class Save(NamedTuple):
    """What one thread has to do. The descriptor is its own."""

    fd: int
    sequence: int
    ticket: Ticket
    metadata: dict[str, Any]
    patience_s: float
    local_rank: int
    mappings: slots.Mappings
    rescue: bool = False


def carry_out(save: Save, tell: Tell) -> None:
    """In a thread of its own: write this rank's file, and commit if it is rank 0's."""
    try:
        _write(save)
        tell({"is": "written"})
        path = ""
        if save.ticket.rank == 0:
            path = str(commit(save.ticket, save.metadata, patience=save.patience_s))
        tell({"is": "saved", "path": path})
    except SnapshotError as error:
        tell({"is": "failed", "code": error.code, "text": str(error)})
    except Exception as error:  # noqa: BLE001 - one save that goes wrong must not end the others
        text = f"step {save.ticket.step} was not saved: {type(error).__name__}: {error}"
        tell({"is": "failed", "code": SnapshotWriteError.code, "text": text})


def _write(save: Save) -> None:
    """The slot is free when this returns, whatever becomes of it."""
    try:
        slot = slots.read_descriptor(save.fd, mappings=save.mappings)
        if slot is None or slot.sequence != save.sequence or slot.step != save.ticket.step:
            raise SnapshotDamagedError(f"step {save.ticket.step} was not saved: its memory slot is not what it was.")
        if not os.path.isabs(save.ticket.folder):
            raise SnapshotWriteError(f"{save.ticket.folder} is not an absolute path")
        if save.rescue:
            _await_attempt(save)
        # A slot may hold more than the rank's file, for a restart on this node.
        data = slot.data[: save.ticket.note.get("file_bytes", len(slot.data))]
        with being_written(save.ticket.attempt_path):
            write_rank(save.ticket, data)
    finally:
        fcntl.flock(save.fd, fcntl.LOCK_UN)  # closing is not enough: a mapping keeps a descriptor of its own
        os.close(save.fd)


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


def newest_on_disk(folder: str) -> int:
    """The newest committed step by its name; -1: none. Whether it is good is seen when somebody loads it."""
    try:
        found = [named for name in os.listdir(folder) if (named := layout.parse(name)) is not None]
    except OSError:
        return -1
    return max((named.key.step for named in found if named.kind is Kind.COMMITTED), default=-1)
