"""The frames between agent and keeper: 4 bytes of length, big-endian, then that much JSON; descriptors ride along.

Descriptors travel by SCM_RIGHTS with the first byte of their frame, and a frame says how many it brings ("fds"), so
that they are told apart however the stream is cut. Standard library only; knows nothing of what the frames mean.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Far above any environment the kernel would accept at exec."""
DESCRIPTORS_PER_FRAME_MAX = 64
READ_BYTES = 65_536

_LENGTH_BYTES = 4
Message = dict[str, Any]


class Outbox:
    """Frames on their way out. Owns duplicates of their descriptors until they are sent."""

    def __init__(self) -> None:
        self._queue: deque[tuple[bytearray, list[int]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a message; the caller may close `fds` afterwards. Raises ValueError above the limits."""
        body = json.dumps({**message, "riding": len(fds)}).encode("ascii")
        if len(body) > FRAME_BYTES_MAX or len(fds) > DESCRIPTORS_PER_FRAME_MAX:
            raise ValueError(f"a frame of {len(body)} bytes with {len(fds)} descriptors is above the limits")
        self._queue.append((bytearray(len(body).to_bytes(_LENGTH_BYTES, "big") + body), [os.dup(fd) for fd in fds]))

    def flush(self, sock: socket.socket) -> None:
        """Send what a non-blocking socket takes now. Raises OSError when the other side is gone."""
        while self._queue:
            data, fds = self._queue[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = sock.sendmsg([data], ancillary)
            except BlockingIOError:
                return
            while fds:
                os.close(fds.pop())
            del data[:sent]
            if not data:
                self._queue.popleft()

    def clear(self) -> None:
        """Forget what is queued and close its descriptors."""
        for _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()


class Inbox:
    """Frames on their way in."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def receive(self, sock: socket.socket) -> list[tuple[Message, list[int]]] | None:
        """What one read brings: messages with the descriptors that belong to them, which the caller then owns.

        None when the other side is gone. Raises ValueError for a frame above the limit.
        """
        space = socket.CMSG_SPACE(DESCRIPTORS_PER_FRAME_MAX * array.array("i").itemsize)
        try:
            data, ancillary, _flags, _address = sock.recvmsg(READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                self._fds.extend(numbers)
        if not data:
            return None
        self._data += data
        return self._frames()

    def _frames(self) -> list[tuple[Message, list[int]]]:
        frames: list[tuple[Message, list[int]]] = []
        while len(self._data) >= _LENGTH_BYTES:
            size = int.from_bytes(self._data[:_LENGTH_BYTES], "big")
            if size > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {size} bytes is above the limit")
            if len(self._data) < _LENGTH_BYTES + size:
                break
            message: Message = json.loads(self._data[_LENGTH_BYTES : _LENGTH_BYTES + size])
            del self._data[: _LENGTH_BYTES + size]
            frames.append((message, [self._fds.popleft() for _ in range(message.pop("riding"))]))
        return frames

    def clear(self) -> None:
        """Close the descriptors that came without their frame."""
        while self._fds:
            os.close(self._fds.popleft())
