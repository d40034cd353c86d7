"""Who has been silent too long. Silence counts only while we were listening ourselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.core.coordinator.state import Member
from holdfast.core.policy import Limits


@dataclass(slots=True)
class Liveness:
    limits: Limits
    looked_s: float
    pardoned_s: float = 0.0
    """Nobody counts as silent since before this."""

    def next_look_s(self) -> float:
        return self.looked_s + self.limits.lease_s / 4

    def silent(self, members: Iterable[Member], now: float) -> list[Member]:
        """Members whose lease has run out.

        If we come back from a pause of our own (stopped process, starved machine), the time of that pause is not
        held against anybody: what they sent meanwhile may still lie unread in our sockets.
        """
        gap = now - self.looked_s
        self.looked_s = now
        if gap > self.limits.lease_s / 2:
            self.pardoned_s = now - self.limits.ping_interval_s
            return []
        return [m for m in members if now - max(m.last_heard_s, self.pardoned_s) > self.limits.lease_s]
