"""JSON messages with descriptors over SOCK_SEQPACKET sockets: one message, one packet, sent whole or not at all.

A message that is too long for a packet travels in a memory file, whose descriptor comes first. Knows nothing of the
meaning of messages. Standard library only and nothing of holdfast: worker/fork_server.py loads it by its path, under
any Python.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Message = dict[str, Any]

PACKET_BYTES_MAX = 64 * 1024
"""Length of JSON in a packet, well below the kernel's limit; longer messages go into a memory file."""
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""Length of a message, far above any environment that the kernel would accept at exec."""
DESCRIPTORS_MAX = 64
POLL_MS_MAX = 2**31 - 1
"""The longest wait of poll(2): 24 days. Python refuses a longer one."""
CREDENTIALS = struct.Struct("3i")
"""Layout of SO_PEERCRED: process, user, group."""
LONG = b"0"
"""The packet of a message in a memory file."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Make a pair of sockets: ours, which never blocks, and the other side's. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a unix socket when it connected; the process is 0 when it is not visible
    here. Raises OSError."""
    pid, uid, _gid = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid


def is_readable(fd: int | socket.socket, within_s: float = 0.0) -> bool:
    """Whether there is something to read or to accept, or a process has ended."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(min(within_s * 1000, POLL_MS_MAX)))


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message. Raises ValueError above the limits, BlockingIOError when the socket is full, OSError."""
    packet, memory = _packed(message, len(fds))
    try:
        _send(sock, packet, [*memory, *fds])
    finally:
        _close(memory)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Receive a message and its descriptors, which the caller then owns. None: the other side is gone.

    Raises BlockingIOError when there is none now, ValueError when the packet is not a message of ours.
    """
    numbers = array.array("i")
    space = socket.CMSG_SPACE((DESCRIPTORS_MAX + 1) * numbers.itemsize)
    try:
        packet, ancillary, flags, _ = sock.recvmsg(PACKET_BYTES_MAX, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # the peer ended without reading all; what it sent before is still to come
        packet, ancillary, flags, _ = sock.recvmsg(PACKET_BYTES_MAX, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])

    fds = list(numbers)
    try:
        if not packet:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a packet above the limits")
        try:
            message = json.loads(_long(fds) if packet == LONG else packet)
        except RecursionError:
            raise ValueError("a message that is nested too deeply") from None
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")  # noqa: TRY004 - the content is wrong, not the caller
        received, fds = fds, []
        return message, received
    finally:
        _close(fds)  # those of a message that is refused


class Outbox:
    """Queued messages. Owns duplicates of their descriptors until they are sent."""

    def __init__(self) -> None:
        self._queue: deque[tuple[bytes, list[int]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a message; the caller may close `fds` afterwards. Raises ValueError above the limits."""
        packet, memory = _packed(message, len(fds))
        self._queue.append((packet, [*memory, *(os.dup(fd) for fd in fds)]))

    def flush(self, sock: socket.socket) -> None:
        """Send as many messages as a nonblocking socket takes now. Raises OSError when the other side is gone."""
        while self._queue:
            packet, fds = self._queue[0]
            try:
                _send(sock, packet, fds)
            except BlockingIOError:
                return
            self._queue.popleft()
            _close(fds)

    def clear(self) -> None:
        """Drop the queued messages and close their descriptors."""
        for _, fds in self._queue:
            _close(fds)
        self._queue.clear()


def _packed(message: Message, descriptors: int) -> tuple[bytes, list[int]]:
    """The packet, and the memory file of a long message, which the caller must close."""
    body = json.dumps(message).encode("ascii")
    if len(body) > MESSAGE_BYTES_MAX or descriptors > DESCRIPTORS_MAX:
        raise ValueError(f"a message of {len(body)} bytes with {descriptors} descriptors is above the limits")
    if len(body) <= PACKET_BYTES_MAX:
        return body, []
    memory = os.memfd_create("message", os.MFD_CLOEXEC)
    try:
        done = 0
        while done < len(body):
            done += os.write(memory, body[done:])
    except OSError:
        os.close(memory)
        raise
    return LONG, [memory]


def _long(fds: list[int]) -> bytes:
    """The content of the first descriptor, which is closed. Raises ValueError."""
    if not fds:
        raise ValueError("a long message without its descriptor")
    memory = fds.pop(0)
    try:
        body = os.pread(memory, MESSAGE_BYTES_MAX + 1, 0)
    except OSError as error:
        raise ValueError(f"a long message that cannot be read: {error.strerror}") from None
    finally:
        os.close(memory)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError("a message above the limits")
    return body


def _send(sock: socket.socket, packet: bytes, fds: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([packet], rights)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
