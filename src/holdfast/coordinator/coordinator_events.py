"""Events of the coordinator's machine. The shell makes them; the machine never asks."""

from __future__ import annotations

from msgspec import Struct

from holdfast.protocol.messages import FromAgent
from holdfast.protocol.policy import Tick


class LinkOpened(Struct, frozen=True):
    """An agent passed the handshake. `link` is a number that the shell never uses twice."""

    link: int
    address: str
    """The agent's address as seen from here."""
    reached_at: str
    """This coordinator's address to which the agent connected."""
    local: bool = False
    """The agent in the coordinator's own process."""


class LinkClosed(Struct, frozen=True):
    link: int
    reason: str


class Heard(Struct, frozen=True):
    link: int
    message: FromAgent


class AuthorityEvent(Struct, frozen=True):
    """Concerns the authority alone (`coordinator.authority`): what it means for the coordinator, that one says."""


Event = LinkOpened | LinkClosed | Heard | AuthorityEvent | Tick
