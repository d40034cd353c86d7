"""Which step is written after a crash: the newest that every rank of the job still has in memory.

Each node's saver knows its own ranks' slots. On one node that is all there is to know. Several nodes meet in the snapshot
folder, which is what they share when their workers are dead: rank 0's saver makes a meeting place, an attempt that is never
committed; every rank leaves there what it has and whether that was handed over already; and from what all have left each
saver chooses alike. A rank that says nothing within the patience ends the rescue: nothing is written with ranks missing.

Looks again and again, because other nodes' writes announce themselves nowhere. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.errors import SnapshotDamagedError, SnapshotIncompleteError, SnapshotWriteError
from holdfast.snapshots import disk, layout, slots
from holdfast.snapshots.attempt import Ticket
from holdfast.snapshots.layout import FolderKind, Key

ATTEMPT_MIN, ATTEMPT_MAX = 500_000_000, 899_999_999
"""Numbers of the attempts in which memory steps are written; nothing else has them."""
MEETING_BELOW = 400_000_000
MEETING_MIN = ATTEMPT_MIN - MEETING_BELOW
"""A meeting's number is so much less than that of its attempt; those of other saves, which count from 1, are smaller."""
PATIENCE_S = 30.0
"""How long the other ranks are waited for. An agent that ends may have to wait for this, when another node is gone."""
LINGER_S = 5.0
"""How long a rank that has nothing newer than the disk stays for others that may: so they hear it and need not wait."""
LOOK_AGAIN_S = 0.02
OFFER_BYTES_MAX = 1 << 16


class StepInMemory(NamedTuple):
    """What a rank has in memory; ranks count their saves alike, and several may be of one step."""

    step: int
    save: int


@dataclass(frozen=True)
class Offer:
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
    def load(cls, text: str) -> Offer:
        """SnapshotDamagedError."""
        try:
            found = json.loads(text)
            steps = tuple(StepInMemory(int(step), int(save)) for step, save in found["steps"])
            return cls(steps, int(found["asked"]), int(found["on_disk"]))
        except (ValueError, TypeError, KeyError) as error:
            raise SnapshotDamagedError(f"what a rank has left for the others is not readable: {error}") from None


def choose(offers: Sequence[Offer]) -> StepInMemory | None:
    """The newest that all have; None: there is none, or it is on the disk, or on its way there from every rank."""
    newest = max(set.intersection(*(set(each.steps) for each in offers)), default=None)
    if newest is None or newest.step <= max(each.on_disk for each in offers):
        return None
    return None if all(each.asked >= newest.step for each in offers) else newest


@dataclass(frozen=True)
class Stranded:
    """One rank's states of one snapshot folder, whose workers have all died."""

    shelf: Path
    held: Mapping[StepInMemory, tuple[slots.Slot, Ticket]]
    """Those that all ranks of the node have. There is at least one."""
    offer: Offer
    alone: StepInMemory | None = None
    """What is written, where all ranks are on this node: nobody has to be met."""

    @property
    def ticket(self) -> Ticket:
        """Of the newest."""
        return self.held[max(self.held)][1]

    def meet(self, patience_s: float = PATIENCE_S) -> StepInMemory | None:
        """What all ranks of the job write now; None: nothing. SnapshotIncompleteError, SnapshotWriteError."""
        if self.alone is not None:
            return self.alone
        if self.ticket.step > self.offer.on_disk:
            return self._meet(patience_s)
        with contextlib.suppress(SnapshotIncompleteError, SnapshotWriteError):  # nothing is lost
            self._meet(min(patience_s, LINGER_S))
        return None

    def _meet(self, patience_s: float) -> StepInMemory | None:
        ticket, deadline = self.ticket, time.monotonic() + patience_s
        try:
            place = _meeting_place(ticket, deadline)
            disk.write_atomically(place / _offer_file(ticket.rank), self.offer.dump())
            return choose(_offers(place, ticket, deadline))
        except FileNotFoundError as error:
            if ticket.rank:
                return None  # rank 0 has ended it: nothing is to be written, or it has said why nothing was
            raise SnapshotIncompleteError(
                f"step {ticket.step}, which is in memory, was not saved: the job went on before all ranks had come"
            ) from error
        except OSError as error:
            raise disk.write_error(error, Path(ticket.folder)) from error

    def end_meeting(self) -> None:
        """Rank 0, when the others have read what they need, or need to know that nothing is written."""
        if self.ticket.rank == 0 and self.alone is None:
            shutil.rmtree(_place_of(self.ticket), ignore_errors=True)


def _place_of(ticket: Ticket) -> Path:
    return layout.attempt_path(Path(ticket.folder), Key(ticket.step, ticket.attempt - MEETING_BELOW))


def _meeting_place(ticket: Ticket, deadline: float) -> Path:
    """Rank 0 makes it, named by its own newest step; the others look for its number. OSError; SnapshotWriteError."""
    if ticket.rank == 0:
        place = _place_of(ticket)
        place.mkdir()
        return place
    while True:
        for name in os.listdir(ticket.folder):
            named = layout.parse(name)
            if named and named.kind is FolderKind.ATTEMPT and named.key.attempt == ticket.attempt - MEETING_BELOW:
                return Path(ticket.folder) / name
        if time.monotonic() > deadline:
            raise SnapshotWriteError(f"step {ticket.step}: rank 0 has not begun to save it")
        time.sleep(LOOK_AGAIN_S)


def _offers(place: Path, ticket: Ticket, deadline: float) -> list[Offer]:
    """Of all ranks. OSError; SnapshotIncompleteError."""
    offers: dict[int, Offer] = {}
    while True:
        names = set(os.listdir(place))
        for rank in range(ticket.world):
            if rank not in offers and _offer_file(rank) in names:
                offers[rank] = Offer.load(disk.read_text(place / _offer_file(rank), OFFER_BYTES_MAX))
        if len(offers) == ticket.world:
            return list(offers.values())
        if time.monotonic() > deadline:
            missing = [rank for rank in range(ticket.world) if rank not in offers]
            more = " …" if len(missing) > 8 else ""
            raise SnapshotIncompleteError(
                f"step {ticket.step}, which is in memory, was not saved: nothing came from rank "
                f"{', '.join(map(str, missing[:8]))}{more}"
            )
        time.sleep(LOOK_AGAIN_S)


def _offer_file(rank: int) -> str:
    return f"rank_{rank:05d}.offer"


def newest_on_disk(folder: str) -> int:
    """The newest committed step by its name; -1: none. Whether it is good is seen when somebody loads it."""
    try:
        found = [named for name in os.listdir(folder) if (named := layout.parse(name)) is not None]
    except OSError:
        return -1
    return max((named.key.step for named in found if named.kind is FolderKind.COMMITTED), default=-1)


def stranded(
    shelf: Path, by_rank: Mapping[int, Sequence[tuple[slots.Slot, Ticket]]], asked: Mapping[tuple[str, int], int]
) -> list[Stranded]:
    """Of each snapshot folder and life that all the node's ranks have states of: each rank's, if any may have to be written.

    `by_rank`: by local rank. `asked`: by folder and local rank, the newest step that was handed over.
    """
    found: list[Stranded] = []
    lives = {(ticket.folder, ticket.attempt, ticket.world) for held in by_rank.values() for _, ticket in held}
    for life in sorted(lives):
        held = {
            local_rank: {
                StepInMemory(ticket.step, _save_of(ticket)): (slot, ticket)
                for slot, ticket in theirs
                if (ticket.folder, ticket.attempt, ticket.world) == life
            }
            for local_rank, theirs in by_rank.items()
        }
        folder, _, world = life
        common = set.intersection(*(set(each) for each in held.values()))
        on_disk = newest_on_disk(folder)
        offers = {each: Offer(tuple(sorted(common)), asked.get((folder, each), -1), on_disk) for each in held}
        alone = choose(list(offers.values())) if len(held) == world else None
        if alone or (common and len(held) < world):
            found += [
                Stranded(shelf, {step: theirs[step] for step in common}, offers[local_rank], alone)
                for local_rank, theirs in held.items()
            ]
    return found


def _save_of(ticket: Ticket) -> int:
    save: Any = ticket.note.get("save", 0)
    return save if type(save) is int else 0
