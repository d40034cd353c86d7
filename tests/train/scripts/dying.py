"""How a rank of a test kills itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import NamedTuple, NoReturn

PATIENCE_S = 0.5
"""On a quiet machine."""


def die() -> NoReturn:
    """Kill this process when its peers have read what it has sent them, so that the test does not depend on chance.

    Otherwise a peer whose threads had no processor for some milliseconds may answer two messages of a dead process. gloo
    loses the second answer, and waits for that operation until its time-out (docs/internals/decisions.md): no test of
    survivors could pass then. The operations themselves are still under way. A peer that reads nothing, since it is
    suspended, is not waited for.
    """
    deadline_s = time.monotonic() + PATIENCE_S * float(os.environ["TEST_SLOWNESS"])
    while _peers_have_unread() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def _peers_have_unread() -> bool:
    """Whether a process on this host has not read everything that came through a connection from this process."""
    ours = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            ours.add(os.readlink(f"/proc/self/fd/{name}"))
    connections = [_connection(line) for kind in ("tcp", "tcp6") for line in _lines(f"/proc/self/net/{kind}")]
    own = {(each.local, each.remote) for each in connections if f"socket:[{each.inode}]" in ours}
    return any(each.unread and (each.remote, each.local) in own for each in connections)


class Connection(NamedTuple):
    local: str
    remote: str
    unread: bool
    inode: str


def _connection(line: str) -> Connection:
    fields = line.split()
    return Connection(fields[1], fields[2], int(fields[4].partition(":")[2], 16) > 0, fields[9])


def _lines(path: str) -> list[str]:
    with open(path) as file:
        return file.readlines()[1:]
