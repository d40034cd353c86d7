"""What the machines of coordinator and agent have in common: an event, a command, and growing pauses. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct


class Tick(Struct, frozen=True):
    """Event: a deadline given by next_deadline() has passed."""


class Note(Struct, frozen=True):
    """Command: for the journal, what was decided and why."""

    event: str
    fields: dict[str, object]


GROWTH = 2.0
PAUSE_S_MAX = 60.0


@dataclass(slots=True)
class Pauses:
    """When to report again that something is still being waited for: soon at first, then at growing pauses."""

    first_s: float
    at_s: float
    """When to say it next."""
    pause_s: float

    @classmethod
    def begin(cls, now: float, first_s: float) -> Pauses:
        return cls(first_s, now + first_s, first_s)

    def due(self, now: float) -> bool:
        """Whether it is to be said now; then the next pause begins."""
        if now < self.at_s:
            return False
        self.pause_s = min(GROWTH * self.pause_s, max(PAUSE_S_MAX, self.first_s))
        self.at_s = now + self.pause_s
        return True
