"""Events and commands of a coordinator whose authority is a majority of voters. PURE.

No command has an answer: its effects arrive as events.
"""

from __future__ import annotations

from holdfast.coordinator.coordinator_commands import AuthorityCommand
from holdfast.coordinator.coordinator_events import AuthorityEvent
from holdfast.protocol.charter import Seat
from holdfast.protocol.messages import ContestEndpoint


class WitnessOpened(AuthorityEvent, frozen=True):
    """A witness is connected. Its messages come as Heard, its end as LinkClosed."""

    link: int
    seat: Seat


class NoWitness(AuthorityEvent, frozen=True):
    """It was found that there is none at this place of the job now."""

    host: str
    port: int


class VoterGone(AuthorityEvent, frozen=True):
    """It was proved that the process of this voter has ended."""

    name: str


class Deposed(AuthorityEvent, frozen=True):
    """There is another coordinator, of this term."""

    term: int
    address: str
    port: int
    name: str = ""
    elected: bool = False
    forms: bool = False
    """It has formed no generation yet, as in ContestEndpoint."""


class ProveCaller(AuthorityCommand, frozen=True):
    """Connect to the coordinator that has called. Ends in Deposed if it is there; else in nothing."""

    contest: ContestEndpoint


class ProveVoterGone(AuthorityCommand, frozen=True):
    """Connect to this voter's port. Ends in VoterGone if nobody listens there, or another process; else in nothing."""

    seat: Seat
