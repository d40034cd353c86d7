"""How long each part of a generation's start took on this node: the event `phases` in events.jsonl, once per generation.

    detect          a worker of the one before has ended in failure  →  its end is ordered
    stop            → nothing of it lives
    form            → (or: the agent begins) the order to start: the nodes meet, are assigned and prepared
    spawn           → all workers run
    import          → they ask for their process group: imports, the nursery's too if they had to wait for them, and
                    whatever else the script does first
    store           → they are connected to the store
    process_group   → they have their process group
    first_step      → the first step of an optimizer is done

A part that was not there (no failure, no process group, no optimizer) is left out; what follows is measured from the last
moment there was. Where workers differ, the slowest counts. Knows the board and the clock; decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.core import board as layout
from holdfast.runtime.workers.board import Board

LOOK_FIRST_S, LOOK_AGAIN_S_MAX, LOOK_BACKOFF = 0.25, 10.0, 1.5
"""Between two looks at the board, until the first step is there; each look costs some microseconds."""
DIGITS = 4

MARKS = {
    "import": layout.MEETING,
    "store": layout.STORE,
    "process_group": layout.GROUP,
    "first_step": layout.FIRST_STEP,
}


class Phases:
    """Of one node, generation after generation. `write` gets the journal's event, and each moment is told as it is."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._told: dict[str, float] = {}
        """The phases of the generation that starts or runs, seconds."""
        self._generation: dict[str, int] = {}
        """Its numbers, once it has been ordered to start."""
        self._last_s = self._loop.time()
        """The end of the last phase."""
        self._trouble_s: float | None = None
        self._stopping = False
        self._awaited = 0
        """Workers that do not run yet."""
        self._board: Board | None = None
        self._timer: asyncio.TimerHandle | None = None

    def trouble(self) -> None:
        """A worker has ended in failure, and the generation still stands."""
        if self._trouble_s is None and not self._stopping:
            self._trouble_s = self._loop.time()

    def stop(self) -> None:
        """The generation's end is ordered."""
        if self._stopping:
            return
        self.close()
        self._stopping = True
        self._last_s = self._loop.time() if self._trouble_s is None else self._trouble_s
        if self._trouble_s is not None:
            self._passed("detect")

    def gone(self) -> None:
        """Nothing of the generation lives."""
        if self._stopping:
            self._passed("stop")

    def start(self, generation: int, restart_count: int, nproc: int, board: Board) -> None:
        """The workers are ordered to start."""
        self._passed("form")
        self._stopping, self._trouble_s = False, None
        self._generation = {"generation": generation, "restart_count": restart_count}
        self._awaited, self._board = nproc, board

    def imported(self) -> None:
        """The nursery has imported what the workers need; those that are due have waited for it."""
        if self._awaited:
            self._passed("import")

    def spawned(self) -> None:
        """One more worker runs. Of a generation whose end has been ordered meanwhile it does not matter."""
        if not self._awaited:
            return
        self._awaited -= 1
        if self._awaited == 0:
            self._passed("spawn")
            self._look(LOOK_FIRST_S)

    def close(self) -> None:
        """The generation is over: tell of it what there is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._generation:
            if self._awaited == 0:
                self._read()
            told = {f"{name}_s": s for name, s in self._told.items()}
            self._write("phases", **self._generation, **told, until_monotonic=round(self._last_s, DIGITS))
        self._generation, self._told, self._board, self._awaited = {}, {}, None, 0

    def _passed(self, phase: str, moment_s: float | None = None) -> None:
        now = self._loop.time() if moment_s is None else moment_s
        self._told[phase] = round(self._told.get(phase, 0.0) + max(0.0, now - self._last_s), DIGITS)
        self._last_s = max(now, self._last_s)

    def _look(self, again_s: float) -> None:
        assert self._board is not None
        if self._board.moment(layout.FIRST_STEP) is not None:
            self.close()
        else:
            again_s = min(again_s * LOOK_BACKOFF, LOOK_AGAIN_S_MAX)
            self._timer = self._loop.call_later(again_s, self._look, again_s)

    def _read(self) -> None:
        assert self._board is not None
        for phase, mark in MARKS.items():
            moment_s = self._board.moment(mark)
            if moment_s is not None:
                self._passed(phase, moment_s)
