"""Which of a node's addresses states travel over: each is measured once with a few MB, and the fastest is kept. And how
much of the network they take."""

from __future__ import annotations

import contextlib
import threading
import time

from holdfast.protocol.errors import CopyError
from holdfast.snapshots.copy_connection import Address, CopyConnection

SAMPLE = bytes(4 << 20)
SAMPLE_S_MAX = 1.0
"""An address that does not answer costs this once; from a slow one no more is read."""
BETTER_FACTOR = 1.25
"""Another address than the first has to be so much faster: one network card may have several."""


class CopyPaths:
    """The addresses that this process takes. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """While one thread measures, the others wait for the result."""
        self._taken: dict[Address, Address] = {}

    def fastest(self, offered: Address, key: bytes) -> Address:
        """`offered`: a saver's addresses, separated by blanks."""
        hosts, port = offered[0].split(), offered[1]
        if len(hosts) < 2:
            return offered
        with self._lock:
            if offered not in self._taken:
                found = {host: _bytes_s((host, port), key) for host in hosts}
                best = max(hosts, key=lambda host: found[host] * (BETTER_FACTOR if host == hosts[0] else 1))
                if not found[best]:
                    return hosts[0], port  # none is reached now
                self._taken[offered] = best, port
            return self._taken[offered]

    def forget(self, offered: Address) -> None:
        """What was taken does not work any more: measure again."""
        with self._lock:
            self._taken.pop(offered, None)


class Pace:
    """Limits the bytes that all threads together send."""

    def __init__(self, bytes_s: float) -> None:
        """`bytes_s`: bytes per second; 0: no limit."""
        self._bytes_s = bytes_s
        self._turn = threading.Lock()
        self._free_s = 0.0

    def spend(self, size_bytes: int) -> None:
        """Returns when so many more bytes may be sent."""
        if not self._bytes_s:
            return
        with self._turn:
            now_s = time.monotonic()
            begin_s = max(self._free_s, now_s)
            self._free_s = begin_s + size_bytes / self._bytes_s
        time.sleep(begin_s - now_s)


def _bytes_s(address: Address, key: bytes) -> float:
    """0: it is not reached."""
    with contextlib.suppress(CopyError), CopyConnection.call(address, key, stall_s=SAMPLE_S_MAX) as connection:
        connection.say(do="measure")
        connection.hear("found")
        began_s = time.monotonic()
        return connection.drain(len(SAMPLE), SAMPLE_S_MAX) / max(time.monotonic() - began_s, 1e-6)
    return 0.0
