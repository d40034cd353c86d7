"""One connection without its socket: preamble, handshake, seal, frames, messages. PURE.

Knows the order of events on a connection. The shells on both sides are thin, and the property tests feed it any bytes
in any chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from msgspec import Struct

from holdfast.protocol.codec import encode
from holdfast.protocol.errors import AuthenticationError, HoldfastError, ProtocolError
from holdfast.protocol.framing import (
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    PREAMBLE_BYTES,
    FrameReader,
    frame,
    preamble,
    read_preamble,
)
from holdfast.protocol.handshake import Handshake

Received = TypeVar("Received")


class Session(Generic[Received]):
    """Turns received bytes into messages, and messages into bytes to send.

    After each `feed`: write what it returned, look at `error` (then the connection is over) and at
    `established`, and `take` the messages.
    """

    def __init__(self, handshake: Handshake, decode: Callable[[bytes], Received]) -> None:
        self._handshake = handshake
        self._decode = decode
        self._first = bytearray()
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._messages: list[Received] = []
        self.met = False
        """The peer's preamble has arrived: the peer is a holdfast, perhaps of another version."""
        self.established = False
        self.error: HoldfastError | None = None

    @property
    def torn(self) -> bool:
        """Whether the received bytes end in the middle of a preamble or a frame."""
        return self._reader.torn or bool(self._first)

    def opening(self) -> bytes:
        """What to send when the connection is made."""
        if not self._handshake.speaks_first:
            return b""
        return preamble() + b"".join(map(frame, self._handshake.opening()))

    def feed(self, data: bytes) -> bytes:
        """Never raises. Returns the bytes to send now."""
        if self.error is not None:
            return b""
        out = bytearray()
        try:
            if not self.met:
                self._first += data
                data = self._meet(out)
            self._reader.push(data)
            while self.error is None and (payload := self._reader.pop()) is not None:
                self._hear(payload, out)
        except (ProtocolError, AuthenticationError) as error:
            self.error = error
        return bytes(out)

    def take(self) -> list[Received]:
        """The messages received since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages

    def pack(self, message: Struct) -> bytes:
        """The bytes of this message. They must be sent in the order of the calls."""
        payload = encode(message)
        seal = self._handshake.seal
        return frame(payload if seal is None else seal.seal(payload))

    def _meet(self, out: bytearray) -> bytes:
        version = read_preamble(self._first)
        if version is None:
            return b""
        self.met = True
        rest = bytes(self._first[PREAMBLE_BYTES:])
        self._first.clear()
        if not self._handshake.speaks_first:
            out += preamble()
        self._answer(self._handshake.meet(version), out)
        return rest

    def _hear(self, payload: bytes, out: bytearray) -> None:
        if self.established:
            seal = self._handshake.seal
            self._messages.append(self._decode(payload if seal is None else seal.open(payload)))
        else:
            self._answer(self._handshake.receive(payload), out)

    def _answer(self, payloads: list[bytes], out: bytearray) -> None:
        for payload in payloads:
            out += frame(payload)
        self.error = self._handshake.error
        if self._handshake.done:
            self.established = True
            self._reader.limit_bytes_max = FRAME_BYTES_MAX
