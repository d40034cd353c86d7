"""Converts between bytes and frames: the preamble and length-prefixed frames. PURE.

Knows nothing about the content of frames, sockets or time. This format never changes between protocol versions, so that
two versions can always exchange the reason of a refusal:

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
"""Limit of a frame during the handshake."""
FRAME_BYTES_MAX = 4 * 1024 * 1024
"""Limit of a frame after the handshake."""

STORE_MAGIC = b"\x00\xce\xf7\x85\x3c"
"""First bytes of a torch TCPStore client: query VALIDATE (0), then 0x3C85F7CE in little-endian order."""

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
    """The name of the protocol that begins with these bytes, for a log line."""
    for start, name in _STRANGERS:
        if first.startswith(start):
            return name
    return f"it begins with {first[:16]!r}"


def frame(payload: bytes) -> bytes:
    """The payload as a frame. Raises ProtocolError when it is larger than any peer would accept."""
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {len(payload)} bytes cannot be sent; the limit is {FRAME_BYTES_MAX}")
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class FrameReader:
    """Cuts a stream into payloads. Holds at most one incomplete frame and the bytes of the last chunk."""

    __slots__ = ("_buffer", "limit_bytes_max")

    def __init__(self, limit_bytes_max: int) -> None:
        self._buffer = bytearray()
        self.limit_bytes_max = limit_bytes_max
        """May be raised between two frames, after the handshake."""

    @property
    def torn(self) -> bool:
        """Whether the newest frame is incomplete."""
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
