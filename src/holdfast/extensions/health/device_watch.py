"""Watches GPUs and network ports while workers run, in a thread: the driver's XIDs as they come, and counters now and
then. A driver that hangs leaves the thread behind, and nothing else waits for it. Decides nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from holdfast.doctor.device_events import DeviceEvent, changes, of_xid
from holdfast.doctor.machine_reader import XidSource, has_nvidia, read_machine
from holdfast.extensions.health.event_limit import EventLimit

READ_EVERY_S = 30.0
"""Time between two readings of all counters (s)."""
WAIT_MS = 500
"""Limit of one wait for an XID, after which the thread looks whether it is to end."""
SAME_S = 60.0
"""An event that repeats is reported once in this time (s)."""


class DeviceWatch:
    """`report` gets each event and the time at which it came (monotonic s), `fault` the exception that ends the watch,
    both in the thread."""

    def __init__(
        self,
        report: Callable[[DeviceEvent, float], None],
        fault: Callable[[Exception], None],
        read_every_s: float = READ_EVERY_S,
    ) -> None:
        self._report = report
        self._fault = fault
        self._read_every_s = read_every_s
        self._over = threading.Event()
        self._reported_s: dict[DeviceEvent, float] = {}
        """The time at which each event was reported last (monotonic s)."""
        self._limit = EventLimit()

    def start(self) -> None:
        # There may be no more threads now: the job does not need this one.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._run, name="holdfast-devices", daemon=True).start()

    def stop(self) -> None:
        """The thread ends by itself, within the limit of a wait."""
        self._over.set()

    def _run(self) -> None:
        try:
            self._look()
        except Exception as error:  # noqa: BLE001 - what cannot be watched ends no job
            self._fault(error)

    def _look(self) -> None:
        source = self._source()
        before = read_machine()
        read_s = time.monotonic()
        while not self._over.is_set():
            if source is None:
                self._over.wait(self._read_every_s)
            else:
                try:
                    found = source.wait(WAIT_MS)
                except Exception:  # noqa: BLE001 - NVML's own errors; its module is loaded late
                    # The next call would fail at once, too, and this loop would spin. Counters are read all the same.
                    source = None
                    continue
                if found is not None:
                    self._came(of_xid(*found))
            now_s = time.monotonic()
            if now_s - read_s >= self._read_every_s and not self._over.is_set():
                after, read_s = read_machine(), now_s
                for event in changes(before, after):
                    self._came(event)
                before = after
        if source is not None:
            with contextlib.suppress(Exception):
                source.close()

    def _source(self) -> XidSource | None:
        if not has_nvidia():
            return None
        try:
            source = XidSource()
        except Exception:  # noqa: BLE001 - as in _look: counters are read all the same
            return None
        return source if source.gpus else None

    def _came(self, event: DeviceEvent) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s.get(event, -SAME_S) >= SAME_S and self._limit.admits(event):
            self._reported_s[event] = now_s
            self._report(event, now_s)
