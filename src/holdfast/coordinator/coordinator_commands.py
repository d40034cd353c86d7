"""Commands of the coordinator's machine. None has an answer: their effects arrive as events."""

from __future__ import annotations

from msgspec import Struct

from holdfast.protocol.messages import FromCoordinator
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import Note


class Tell(Struct, frozen=True):
    link: int
    message: FromCoordinator


class DropLink(Struct, frozen=True):
    """Close this link. The machine has already removed it; no LinkClosed must follow."""

    link: int
    reason: str


class Conclude(Struct, frozen=True):
    """The job is over and all agents were informed. Emitted exactly once."""

    outcome: Outcome


class StepDown(Struct, frozen=True):
    """This coordinator has no authority any more: close all its links. The machine ignores every later event."""

    reason: str
    term: int = 0
    address: str = ""
    """The address of the coordinator of that newer term; empty: unknown."""
    port: int = 0
    aside: bool = False
    """There is no newer one yet: this node's voter lets the others stand first."""


class AuthorityCommand(Struct, frozen=True):
    """An order of the authority to the shell."""


Command = Tell | DropLink | Conclude | StepDown | AuthorityCommand | Note
