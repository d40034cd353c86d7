"""Authentication with the job token: keys, proofs and the MAC on every frame. PURE.

Knows the token and the transcript of the handshake; knows no messages. HMAC-SHA256 throughout. Frames are
authenticated, not encrypted: nothing secret travels on the control plane.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

from holdfast.protocol.errors import AuthenticationError

Role = Literal["agent", "coordinator"]

MAC_BYTES = 16
SEQUENCE_BYTES = 8


def transcript(hello: bytes, nonce: bytes) -> bytes:
    """The text that proofs cover: the agent's whole hello (with its nonce) and the coordinator's nonce."""
    return hashlib.sha256(len(hello).to_bytes(4, "big") + hello + nonce).digest()


def prove(token: bytes, role: Role, transcript: bytes) -> bytes:
    """A proof that this side knows the token. It contains the role, so that a peer cannot send one side's proof back as
    its own."""
    return hmac.digest(token, b"holdfast proof of " + role.encode() + b"\0" + transcript, "sha256")


def same(one: bytes, other: bytes) -> bool:
    """Compare in constant time: the duration must not show how many bytes are right."""
    return hmac.compare_digest(one, other)


class Seal:
    """Puts a MAC and an (implied) sequence number on each frame, one key and count per direction.

    A frame that was altered, dropped, repeated, reordered or turned around does not open.
    """

    __slots__ = ("_opened", "_receive_key", "_sealed", "_send_key")

    def __init__(self, token: bytes, role: Role, transcript: bytes) -> None:
        """`role` is that of this side."""
        other: Role = "coordinator" if role == "agent" else "agent"
        self._send_key = _direction_key(token, role, transcript)
        self._receive_key = _direction_key(token, other, transcript)
        self._sealed = 0
        """Number of frames that were sealed."""
        self._opened = 0
        """Number of frames that were opened."""

    def seal(self, payload: bytes) -> bytes:
        """The payload with its MAC in front. Frames must be sent in the order of the calls."""
        mac = _mac(self._send_key, self._sealed, payload)
        self._sealed += 1
        return mac + payload

    def open(self, payload: bytes) -> bytes:
        """The frame without its MAC. Raises AuthenticationError unless it is the peer's next frame, unchanged."""
        mac, content = payload[:MAC_BYTES], payload[MAC_BYTES:]
        if not same(mac, _mac(self._receive_key, self._opened, content)):
            raise AuthenticationError("a frame's MAC is wrong: it was altered on its way or is not the peer's")
        self._opened += 1
        return content


def _direction_key(token: bytes, sender: Role, transcript: bytes) -> bytes:
    return hmac.digest(token, b"holdfast frames from " + sender.encode() + b"\0" + transcript, "sha256")


def _mac(key: bytes, sequence: int, content: bytes) -> bytes:
    return hmac.digest(key, sequence.to_bytes(SEQUENCE_BYTES, "big") + content, "sha256")[:MAC_BYTES]
