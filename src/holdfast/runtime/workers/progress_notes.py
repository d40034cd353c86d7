"""How far the workers of this node are, in the journal: the event `progress`, now and then and at their end.

Knows the board and the journal's event; decides nothing. One event costs some microseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.core.progress import RankProgress
from holdfast.runtime.workers.board import Board

FIRST_S, EVERY_S, GROWTH = 1.0, 10.0, 2.0
"""Between two events: soon after the start, so that short runs have a picture too, then rarely."""
DIGITS = 3


class ProgressNotes:
    """Of one node, generation after generation. `write` gets the journal's event."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._note: Callable[[], None] | None = None
        """Writes one event of the generation that runs."""
        self._timer: asyncio.TimerHandle | None = None

    def start(
        self, generation: int, rank_base: int, board: Board, look: Callable[[], tuple[RankProgress, ...]]
    ) -> None:
        """The workers of this generation are ordered to start."""
        self._note = None  # of an older one whose board is closed
        self.close()

        def note() -> None:
            ranks = look()
            told = [board.job_steps(each.local_rank) for each in ranks]
            self._write(
                "progress",
                generation=generation,
                rank_base=rank_base,
                stages=[each.stage.value for each in ranks],
                steps=[each.steps for each in ranks],
                ages_s=[round(each.age_s, DIGITS) for each in ranks],
                own_s=[round(each.own_s, DIGITS) for each in ranks],
                began_at=[began for began, _ in told],
                at=[at for _, at in told],
            )

        self._note = note
        self._again(FIRST_S)

    def close(self) -> None:
        """The generation is over; its board is still there."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._note is not None:
            note, self._note = self._note, None
            note()

    def _again(self, after_s: float) -> None:
        self._timer = self._loop.call_later(after_s, self._ring, min(after_s * GROWTH, EVERY_S))

    def _ring(self, then_s: float) -> None:
        if self._note is not None:
            self._note()
            self._again(then_s)
