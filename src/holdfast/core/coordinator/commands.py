"""What the coordinator wants done. None of these has an answer: what follows comes as an event of its own."""

from __future__ import annotations

from msgspec import Struct

from holdfast.core.machines import Note
from holdfast.core.outcome import Outcome
from holdfast.core.protocol import FromCoordinator


class Tell(Struct, frozen=True):
    link: int
    message: FromCoordinator


class DropLink(Struct, frozen=True):
    """Close this link. The machine has already forgotten it; no LinkClosed is owed."""

    link: int
    reason: str


class Conclude(Struct, frozen=True):
    """The job is over; everybody has been told. Emitted exactly once."""

    outcome: Outcome


Command = Tell | DropLink | Conclude | Note
