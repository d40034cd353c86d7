"""Shared by the machines of coordinator and agent: an event, a command, and growing pauses. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct


class Tick(Struct, frozen=True):
    """Event: a deadline given by next_deadline() has passed."""


class Note(Struct, frozen=True):
    """Command: write a decision and its reason into the journal."""

    event: str
    fields: dict[str, object]


GROWTH = 2.0
PAUSE_S_MAX = 60.0


@dataclass(slots=True)
class Pauses:
    """Times at which a wait is reported again: soon at first, then after growing pauses."""

    first_s: float
    at_s: float
    """When the next report is due."""
    pause_s: float

    @classmethod
    def begin(cls, now: float, first_s: float) -> Pauses:
        return cls(first_s, now + first_s, first_s)

    def due(self, now: float) -> bool:
        """Whether a report is due now; if so, the next pause begins."""
        if now < self.at_s:
            return False
        self.pause_s = min(GROWTH * self.pause_s, max(PAUSE_S_MAX, self.first_s))
        self.at_s = now + self.pause_s
        return True
