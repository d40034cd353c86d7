"""What a node reports about its health, and what the coordinator answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.policy import Count, Port, Seconds, Words

REASON_CHARACTERS_MAX = 300
DEVICE_CHARACTERS_MAX = 100
ROUNDS_MAX = 7
"""Rounds in which nodes measure each other; with more than 8 nodes not every pair is measured."""
ROUND_S = 1.0
"""Duration of one round (s)."""
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]


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


class Measurable(Struct, frozen=True, tag="measurable"):
    """A node that has passed its preflight waits for its order to measure other nodes."""

    generation: Count
    nodes: Count
    """Number of nodes of that generation."""
    port: Port
    """The port at which it answers those who measure it."""
    key: Key
    """The key: nobody else is answered."""


class PairsMeasured(Struct, frozen=True, tag="pairs"):
    """What a node has measured in its rounds."""

    generation: Count
    attempt: Count
    rates: Annotated[dict[Count, float], Meta(max_length=ROUNDS_MAX)]
    """Bytes per second by the index of the receiver; 0: there was no answer in time."""


class PairPeer(Struct, frozen=True, array_like=True):
    """The other node of a pair."""

    index: Count
    address: str
    port: Port
    key: Key


class MeasurePairs(Struct, frozen=True, tag="measure"):
    """Send to these nodes, one in each round."""

    generation: Count
    attempt: Count
    me: Count
    """The index of this node."""
    partners: Annotated[tuple[PairPeer | None, ...], Meta(max_length=ROUNDS_MAX)]
    """None: this node has none in that round."""


class PairsOver(Struct, frozen=True, tag="over"):
    """Nothing is to be measured in this generation any more."""

    generation: Count


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
