"""What the nodes of a doctor's visit tell each other, and how it becomes bytes. PURE.

    visitor  Here ──▶  desk                     I am up, others reach me at this port
             ◀── Roster | Full                  who came, and how to reach each
    visitor  Told ──▶                           what I found
             ◀── Outcome                        what all found; whether an all-reduce follows
    visitor  StorePort ──▶                      the first node alone
             ◀── Go                             where the store is
    visitor  Result ──▶                         how the all-reduce went here
             ◀── Over                           and everywhere

The handshake before it is a run's (wire/handshake.py), with `doctor` as its backend: so a doctor and a job that meet
at one endpoint refuse each other, and a token counts as it does in a run.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from holdfast.core.bounds import Port, PortOrNone, Rank
from holdfast.core.doctor import NodeReport, Reduced, Visit
from holdfast.core.errors import ProtocolError
from holdfast.wire.words import clean

KEY_BYTES = 16


class Here(Struct, frozen=True, tag=True):
    host: str
    port: Port
    """Of this node's probe listener."""
    address: str = ""
    """--local-addr; empty: the one that the desk sees."""
    at_desk: bool = False
    """The desk is in this very process."""


class Peer(Struct, frozen=True, array_like=True):
    name: str
    host: str
    address: str
    port: Port


class Roster(Struct, frozen=True, tag=True):
    me: Rank
    """Index of whoever gets it."""
    key: bytes
    """Opens the probe listeners of this visit."""
    peers: tuple[Peer, ...]


class Full(Struct, frozen=True, tag=True):
    """The visit goes on without this node."""

    text: str


class Told(Struct, frozen=True, tag=True):
    report: NodeReport


class CheckOutcome(Struct, frozen=True, tag="Outcome"):
    visit: Visit
    reduce: bool = False
    """An all-reduce follows."""


class StorePort(Struct, frozen=True, tag=True):
    port: PortOrNone
    """0: there is no store, the all-reduce fails."""


class Go(Struct, frozen=True, tag=True):
    port: PortOrNone


class Result(Struct, frozen=True, tag=True):
    reduced: Reduced


class CheckOver(Struct, frozen=True, tag="Over"):
    reduced: tuple[Reduced | None, ...]


Message = Here | Roster | Full | Told | CheckOutcome | StorePort | Go | Result | CheckOver

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Raises ProtocolError on anything but one well-formed message."""
    try:
        return clean(_decoder.decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of a doctor: {error}") from None
