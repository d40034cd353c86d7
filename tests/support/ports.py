"""Ports that nobody else takes between the moment they are picked and the moment they are used."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from itertools import chain
from pathlib import Path

FIRST = 10_240
SHARED = Path(tempfile.gettempdir()) / f"holdfast-test-ports-{os.getuid()}"
"""The newest port that a test process of this user has picked; its lock is held while one picks."""


def free_port() -> int:
    """A free port that the kernel gives to nobody by itself, and that no other test picks for a long time."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with open(SHARED, "a+") as shared:
        fcntl.flock(shared, fcntl.LOCK_EX)
        shared.seek(0)
        last = int(shared.read() or FIRST)
        port = next((each for each in chain(range(last + 1, end), range(FIRST, end)) if _is_free(each)), 0)
        shared.truncate(0)
        shared.write(str(port or FIRST))
    if port:
        return port
    with socket.create_server(("127.0.0.1", 0)) as free:  # all ports are the kernel's on this machine
        return int(free.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
