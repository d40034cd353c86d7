"""Virtual time: a clock that moves only when it is told to, and a queue of what is to happen when."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class ManualClock:
    """Seconds since the start of a test. Never goes back."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def advance_to(self, then: float) -> None:
        assert then >= self.now, f"time cannot go back from {self.now} to {then}"
        self.now = then


class Agenda:
    """Actions by time; equal times keep the order in which they were planned, so that a seed gives one history."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when: float, action: Callable[[], None], *, rank: int = 0) -> None:
        """`rank`: of the actions of one time, the lower ranks come first. Ticks have ranks above 0."""
        self._number += 1
        heapq.heappush(self._heap, (max(when, self.clock.now), rank, self._number, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.clock.now + delay_s, action)

    def next_time(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def settled(self) -> bool:
        """Nothing is left for this moment but Ticks."""
        return not self._heap or self._heap[0][:2] > (self.clock.now, 0)

    def step(self) -> bool:
        """Do the next action; False when there is none."""
        if not self._heap:
            return False
        when, _, _, action = heapq.heappop(self._heap)
        self.clock.advance_to(when)
        action()
        return True
