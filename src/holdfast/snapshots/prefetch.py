"""What a node without states in memory fetches from other nodes while its workers start, so that they resume at once.

The coordinator reports to the agent which savers have the states of its ranks (protocol/policy.py: HeldStates). The
agent makes the folder `PREFETCH` below its shared-memory folder, starts its workers, and orders its saver to fetch the
newest state of each rank. While that folder exists, a worker that opens its slots asks the saver, and waits: to fetch
the rest of a state takes less time than to begin again. A state that arrived whole is that worker's own slot then.
Otherwise the worker fetches what the ranks agree on: that is why an error here is not reported.

Standard library only."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.protocol.errors import CopyError, SnapshotMemoryError
from holdfast.snapshots.copy_paths import CopyPaths
from holdfast.snapshots.copy_service import fetch
from holdfast.snapshots.memory_folder import PREFETCH, Packet, field, key_of_life, remove_folder
from holdfast.snapshots.slots import SlotOwner, Slots, committed_slots, slot_path

Tell = Callable[[Packet], None]


class WantedState(NamedTuple):
    """One rank's state, and who has it."""

    local_rank: int
    rank: int
    sources: Sequence[tuple[str, int, str, str]]
    """Of each saver that has it: host, port, word of the life that left it (`key_of_life`), snapshot folder."""


class Prefetch:
    """The saver's part. For its main thread."""

    def __init__(self, folder: Path, in_thread: Callable[..., None]) -> None:
        """`in_thread(work, tell=)`: see Saver."""
        self._folder, self._in_thread = folder, in_thread
        self._paths = CopyPaths()
        self._under_way = 0
        self._fetched: dict[int, Packet] = {}
        """By local rank."""
        self._waiting: list[tuple[int, Tell]] = []

    def begin(self, packet: Packet) -> None:
        """The agent's order. ValueError."""
        for each in field(packet, "states", list):
            self._under_way += 1
            self._in_thread(partial(prefetch, self._folder, WantedState(*each), self._paths), tell=self._over)

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


def prefetch(folder: Path, wanted: WantedState, paths: CopyPaths, tell: Tell) -> None:
    """Fetch the newest state of this rank into its worker's slot, which nobody uses yet; `tell` gets what was fetched:
    nothing when it was not."""
    fetched: Packet = {}
    try:
        for source in wanted.sources if not committed_slots(folder, wanted.local_rank) else ():
            with contextlib.suppress(CopyError, SnapshotMemoryError, OSError):
                fetched = _fetched(folder, wanted, source, paths)
                break
    finally:
        tell(fetched)


def _fetched(folder: Path, wanted: WantedState, source: Sequence[Any], paths: CopyPaths) -> Packet:
    began_s = time.monotonic()
    host, port, word, path = source
    slots = Slots(folder / PREFETCH, SlotOwner(wanted.local_rank, wanted.rank), 1)
    try:
        way = fetch(folder, (host, port), key_of_life(folder, word), path, None, wanted.rank, slots, paths)
        (slot,) = slots.committed()
        assert slot.request is not None
        there = slot_path(folder / PREFETCH, wanted.local_rank, 0)
        os.link(there, slot_path(folder, wanted.local_rank, 0))  # fails if the worker has made one meanwhile
        os.unlink(there)
    finally:
        slots.close()
    about = {"local_rank": wanted.local_rank, "rank": wanted.rank, "step": slot.step, "of": way}
    return {**about, "state": slot.request.identity, "took_s": round(time.monotonic() - began_s, 3)}
