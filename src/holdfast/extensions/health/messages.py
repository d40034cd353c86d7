"""What a node reports about its health, and what the coordinator answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.policy import Count, Seconds, Words

REASON_CHARACTERS_MAX = 300
DEVICE_CHARACTERS_MAX = 100


class Unfit(Struct, frozen=True, tag="unfit"):
    """The check has failed: this node takes no part."""

    generation: Count
    reason: Annotated[str, Meta(max_length=REASON_CHARACTERS_MAX)]


class Recovered(Struct, frozen=True, tag="recovered"):
    """A node that was unfit has passed the check."""


class Checked(Struct, frozen=True, tag="checked"):
    """A node that has passed its preflight, and what it has: the coordinator compares all of them."""

    generation: Count
    """The generation for which it is prepared; 0: it is parked because it differs."""
    nodes: Count
    """Number of nodes of that generation."""
    traits: Words
    """Values by the names of doctor/majority.py."""


class DeviceSeen(Struct, frozen=True, tag="device"):
    """Something has happened to a GPU, a network port or a network card of this node. Sent again if the network was too
    slow, or no link was there: each time with the age that it has then."""

    number: Count
    """Counts the events of this agent."""

    device: Annotated[str, Meta(max_length=DEVICE_CHARACTERS_MAX)]
    text: Annotated[str, Meta(max_length=REASON_CHARACTERS_MAX)]
    severe: bool
    age_s: Seconds
    """Time since it happened (s)."""


class DeviceNoted(Struct, frozen=True, tag="noted"):
    """The coordinator has this event."""

    number: Count


class Differs(Struct, frozen=True, tag="differs"):
    """This node is parked because it differs from most others: it reads its traits again from time to time."""
