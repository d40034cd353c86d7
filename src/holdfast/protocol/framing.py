"""Bytes to frames and back: the preamble and length-prefixed frames. PURE.

Knows nothing of what a frame holds, of sockets or of time. What this file describes never changes between
protocol versions, so that two versions can always tell each other why they part:

    preamble   b"HOLDFAST" + uint16 version      once, first, from each side
    frame      uint32 length + payload           big-endian, from then on
"""

from __future__ import annotations

from holdfast.protocol.errors import ProtocolError

MAGIC = b"HOLDFAST"
PROTOCOL_VERSION = 2
PREAMBLE_BYTES = len(MAGIC) + 2
LENGTH_BYTES = 4

HELLO_BYTES_MAX = 64 * 1024
"""A frame from a peer that is not known yet."""
FRAME_BYTES_MAX = 4 * 1024 * 1024
"""A frame from a peer whose handshake is done."""

STORE_MAGIC = b"\x00\xce\xf7\x85\x3c"
"""What a torch TCPStore client sends first: query VALIDATE (0), then 0x3C85F7CE in little-endian order."""

_STRANGERS = (
    (STORE_MAGIC, "a torch TCPStore client"),
    (b"\x16\x03", "a TLS client"),
    (b"HTTP/", "an HTTP answer"),
    (b"SSH-", "SSH"),
    *(
        (method, "an HTTP request")
        for method in (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"OPTIONS ", b"CONNECT ", b"PRI ")
    ),
)


def preamble(version: int = PROTOCOL_VERSION) -> bytes:
    return MAGIC + version.to_bytes(2, "big")


def read_preamble(data: bytes | bytearray) -> int | None:
    """The peer's protocol version; None while more bytes are needed.

    Raises ProtocolError as soon as the bytes cannot become a preamble.
    """
    if not MAGIC.startswith(data[: len(MAGIC)]):
        raise ProtocolError(f"not the holdfast protocol ({describe_stranger(bytes(data[:16]))})")
    if len(data) < PREAMBLE_BYTES:
        return None
    return int.from_bytes(data[len(MAGIC) : PREAMBLE_BYTES], "big")


def describe_stranger(first: bytes) -> str:
    """Names the protocol that begins with these bytes, for a log line."""
    for start, name in _STRANGERS:
        if first.startswith(start):
            return name
    return f"it begins with {first[:16]!r}"


def frame(payload: bytes) -> bytes:
    """Raises ProtocolError when the payload is larger than any peer would accept."""
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {len(payload)} bytes cannot be sent; the limit is {FRAME_BYTES_MAX}")
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class FrameReader:
    """Cuts a stream into payloads. Holds at most one incomplete frame and the bytes of the last chunk."""

    __slots__ = ("_buffer", "limit_bytes_max")

    def __init__(self, limit_bytes_max: int) -> None:
        self._buffer = bytearray()
        self.limit_bytes_max = limit_bytes_max
        """May be raised between two frames, when the peer is known."""

    @property
    def torn(self) -> bool:
        """A frame has begun and is not complete."""
        return bool(self._buffer)

    def push(self, data: bytes) -> None:
        self._buffer += data

    def pop(self) -> bytes | None:
        """The next whole payload; None while more bytes are needed. Raises ProtocolError on an oversized frame."""
        buffer = self._buffer
        if len(buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(buffer[:LENGTH_BYTES], "big")
        if length > self.limit_bytes_max:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {self.limit_bytes_max}")
        end = LENGTH_BYTES + length
        if len(buffer) < end:
            return None
        payload = bytes(buffer[LENGTH_BYTES:end])
        del buffer[:end]
        return payload

    def feed(self, data: bytes) -> list[bytes]:
        """All payloads that these bytes complete. Raises ProtocolError on an oversized frame."""
        self.push(data)
        payloads = []
        while (payload := self.pop()) is not None:
            payloads.append(payload)
        return payloads
