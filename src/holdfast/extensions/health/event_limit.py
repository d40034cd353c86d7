"""Limits the number of device events that one watch of a node reports."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.doctor.device_events import DeviceEvent

EVENTS_MAX = 200
"""Events of one watch, and as many that are severe: a broken link must not fill the journal."""


class EventLimit:
    """Counts severe events apart: a counter that grows in each reading must not hide what is lost hours later
    (test_many_small_events_do_not_hide_a_severe_one)."""

    def __init__(self) -> None:
        self._counts = Counter[bool]()
        """Number of events that were reported: those that are severe, and the others."""

    def admits(self, event: DeviceEvent) -> bool:
        """Whether this event is reported. It counts if it is."""
        if self._counts[event.severe] >= EVENTS_MAX:
            return False
        self._counts[event.severe] += 1
        return True
