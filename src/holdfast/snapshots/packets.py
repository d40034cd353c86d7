"""What workers, the saver and the agent say to each other: JSON, one packet of a SOCK_SEQPACKET socket each.

    worker → saver   {"do": "hello", "local_rank", "generation"}      the first one
                     {"do": "persist", "id", "sequence", "ticket", "metadata", "patience_s"} with the slot's descriptor,
                                                                      which carries a shared lock on it
                     {"do": "wait", "id"}                             to be told when nothing of this local rank is in flight
                     {"do": "read back", "path"}                      a committed snapshot; on a connection of its own, no hello
                     {"do": "bye"}                                    it ends as it should: nothing is rescued
    saver → worker   {"is": "written", "id"}                          this rank's file is durable, its slot is free
                     {"is": "saved", "id", "path"}                    all is done; rank 0: the snapshot is committed
                     {"is": "failed", "id", "code", "text"}
                     {"is": "idle", "id"}
                     {"is": "read back", "code", "text"}              no code: every byte is what was saved
                     {"is": "news", "text"}                           what became of a predecessor's save
    agent → saver    {"do": "finish"}                                 end when nothing is in flight any more
    saver → agent    {"is": "up"}                                     it listens
                     {"is": "news", "text"}                           for the user

Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAVER_VARIABLE = "HOLDFAST_SAVER"
"""In a worker's environment: `SHELF@GENERATION@LOCAL_RANK`, where its slots and its saver are and which are its own."""
PACKET_BYTES_MAX = 64 * 1024
BACKLOG = 256
"""Connections that may wait for the saver to come up; all local ranks come at once."""
FINISH_LIMIT_S = 120.0
"""At the agent's end: how long saves in flight are waited for. What is not done then is an uncommitted attempt."""
Packet = dict[str, Any]

_CREDENTIALS = struct.Struct("3i")
_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from holdfast.snapshots.saver import main; main()"


def send(sock: socket.socket, packet: Packet, fds: Sequence[int] = ()) -> None:
    """Send it whole or not at all. Raises ValueError when it is too long, OSError as the socket does."""
    encoded = json.dumps(packet).encode()
    if len(encoded) > PACKET_BYTES_MAX:
        raise ValueError(f"{len(encoded)} bytes are too many for the saver, at most {PACKET_BYTES_MAX} are allowed")
    socket.send_fds(sock, [encoded], fds)


def receive(sock: socket.socket) -> tuple[Packet, list[int]] | None:
    """One packet and its descriptors, which are the caller's to close; None: the other side is gone.

    Raises BlockingIOError when there is none now, ValueError when it is no packet of ours.
    """
    try:
        encoded, fds, flags, _address = socket.recv_fds(sock, PACKET_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    try:
        if not encoded:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a packet above the limit")
        try:
            packet = json.loads(encoded)
        except RecursionError:
            raise ValueError("a packet that is nested too deeply") from None
        if not isinstance(packet, dict):
            raise ValueError("a packet that is no object")  # noqa: TRY004 - it is what came, not who called
        taken, fds = fds, []
        return packet, taken
    finally:
        for fd in fds:
            os.close(fd)


def field(packet: Packet, name: str, kind: type[Any]) -> Any:
    """A field of this type. Raises ValueError."""
    value = packet.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}, {kind.__name__} expected"[:200])
    return value


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end when it connected; the process is 0 when it cannot be seen from here."""
    pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def listen(path: Path) -> socket.socket:
    """Where workers find the saver; the folder keeps others out. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def saver_argv(folder: Path, *, listening: int, control: int = -1, anchor: int = 0) -> list[str]:
    """The saver's command line: `listening` is a descriptor's number in it, and so is `control`, the agent's socket.

    Without an agent: `anchor` is the process whose end is the job's.
    """
    # Our package is found by its place, and nothing else is: no site-packages, no PYTHONPATH, no folder of the user's.
    root = str(Path(__file__).resolve().parents[2])
    return [
        sys.executable,
        *("-I", "-S", "-c", _PROGRAM.format(root=root)),
        *(str(folder), str(listening), str(control), str(anchor)),
    ]
