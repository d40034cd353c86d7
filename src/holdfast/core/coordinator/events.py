"""What can happen to the coordinator. The shell makes these; the machine never asks."""

from __future__ import annotations

from msgspec import Struct

from holdfast.core.machines import Tick
from holdfast.core.protocol import FromAgent


class LinkOpened(Struct, frozen=True):
    """An agent passed the handshake. A link is a number the shell never uses twice."""

    link: int
    address: str
    """The agent's address as seen from here."""
    reached_at: str
    """The address of ours at which it reached us."""
    local: bool = False
    """The agent that hosts us."""


class LinkClosed(Struct, frozen=True):
    link: int
    reason: str


class Heard(Struct, frozen=True):
    link: int
    message: FromAgent


class QuitAsked(Struct, frozen=True):
    """Somebody on one of the nodes wants the job to end."""

    drain: bool
    by: str


Event = LinkOpened | LinkClosed | Heard | QuitAsked | Tick
