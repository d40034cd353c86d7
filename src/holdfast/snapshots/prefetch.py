"""What a node without states in memory fetches from other nodes while its workers start, so that they resume at once.

The coordinator reports to the agent which savers have the states of its ranks (protocol/policy.py: HeldStates). The
agent makes the folder `PREFETCH` below its shared-memory folder, starts its workers, and orders its saver to fetch the
newest state of each rank. While there is that folder a worker that opens its slots asks the saver, and waits: to fetch
the rest of a state takes less time than to begin again. What arrived whole is that worker's own slot then. Without it
the worker fetches what the ranks agree on, as ever: that is why an error here is not reported.

Standard library only."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from holdfast.protocol.errors import CopyError, SnapshotMemoryError
from holdfast.snapshots.copy_service import fetch
from holdfast.snapshots.memory_folder import PREFETCH, Packet, field, key_of_life, remove_folder
from holdfast.snapshots.slots import SlotOwner, Slots, committed_slots, slot_path

Tell = Callable[[Packet], None]


class WantedState(NamedTuple):
    """One rank's state, and who has it."""

    local_rank: int
    rank: int
    host: str
    port: int
    word: str
    """Of the life that left it (`key_of_life`)."""
    path: str
    """Of the snapshot folder."""


class Prefetch:
    """The saver's part. For its main thread."""

    def __init__(self, folder: Path, in_thread: Callable[..., None]) -> None:
        """`in_thread(work, tell=)`: see Saver."""
        self._folder, self._in_thread = folder, in_thread
        self._under_way = 0
        self._fetched: dict[int, Packet] = {}
        """By local rank."""
        self._waiting: list[tuple[int, Tell]] = []

    def begin(self, packet: Packet) -> None:
        """The agent's order. ValueError."""
        for each in field(packet, "states", list):
            self._under_way += 1
            self._in_thread(partial(prefetch, self._folder, WantedState(*each)), tell=self._over)

    def when_over(self, local_rank: int, answer: Tell) -> None:
        """Answer with what was fetched for this local rank, once nothing is under way any more."""
        self._waiting.append((local_rank, answer))
        self._answer()

    def _over(self, fetched: Packet) -> None:
        self._under_way -= 1
        if fetched:
            self._fetched[fetched.pop("local_rank")] = fetched
        self._answer()

    def _answer(self) -> None:
        if self._under_way:
            return
        waiting, self._waiting = self._waiting, []
        for local_rank, answer in waiting:
            answer({"is": "prefetched", "fetched": self._fetched.pop(local_rank, {})})
        if not self._fetched:  # nobody has to ask any more
            with contextlib.suppress(OSError):
                remove_folder(self._folder / PREFETCH)


def prefetch(folder: Path, wanted: WantedState, tell: Tell) -> None:
    """Fetch the newest state of this rank into its worker's slot, which nobody uses yet; `tell` gets what was fetched:
    nothing when it was not."""
    began_s = time.monotonic()
    fetched: Packet = {}
    with contextlib.suppress(CopyError, SnapshotMemoryError, OSError), _slots(folder / PREFETCH, wanted) as into:
        key = key_of_life(folder, wanted.word)
        way = fetch(folder, (wanted.host, wanted.port), key, wanted.path, None, wanted.rank, into)
        (slot,) = committed_slots(folder / PREFETCH, wanted.local_rank)
        if not committed_slots(folder, wanted.local_rank):
            os.rename(slot_path(folder / PREFETCH, wanted.local_rank, 0), slot_path(folder, wanted.local_rank, 0))
            about = {"local_rank": wanted.local_rank, "rank": wanted.rank, "step": slot.step, "of": way}
            fetched = {**about, "took_s": round(time.monotonic() - began_s, 3)}
    tell(fetched)


@contextlib.contextmanager
def _slots(folder: Path, wanted: WantedState) -> Iterator[Slots]:
    slots = Slots(folder, SlotOwner(wanted.local_rank, wanted.rank), 1)
    try:
        yield slots
    finally:
        slots.close()
