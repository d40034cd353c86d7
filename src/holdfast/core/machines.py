"""What the machines of coordinator and agent have in common: one event and one command. PURE."""

from __future__ import annotations

from msgspec import Struct


class Tick(Struct, frozen=True):
    """Event: a deadline given by next_deadline() has passed."""


class Note(Struct, frozen=True):
    """Command: for the journal, what was decided and why."""

    event: str
    fields: dict[str, object]
