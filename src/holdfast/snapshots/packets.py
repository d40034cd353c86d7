"""What workers, the saver and the agent say to each other, in messages of seqpacket.py.

    worker → saver   {"do": "hello", "local_rank", "generation"}      the first one
                     {"do": "persist", "id", "sequence", "ticket", "metadata", "patience_s"} with the slot's descriptor,
                                                                      which carries a shared lock on it
                     {"do": "wait", "id"}                             answered when nothing of this rank is in flight
                     {"do": "read back", "path"}                      a committed snapshot; its own connection, no hello
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

Standard library and seqpacket.py only.
"""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path
from typing import Any

from holdfast.seqpacket import receive, send

__all__ = ["Packet", "field", "listen", "peer", "receive", "saver_argv", "send"]

Packet = dict[str, Any]

SAVER_VARIABLE = "HOLDFAST_SAVER"
"""In a worker's environment: `SHELF@GENERATION@LOCAL_RANK`, where its slots and its saver are and which are its own."""
BACKLOG = 256
"""Connections that may wait for the saver to come up; all local ranks come at once."""
FINISH_LIMIT_S = 120.0
"""At the agent's end: how long saves in flight are waited for. What is not done then is an uncommitted attempt."""

_CREDENTIALS = struct.Struct("3i")
_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from holdfast.snapshots.saver import main; main()"


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
