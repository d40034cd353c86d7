"""Who has been silent too long. Silence counts only while we were listening ourselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from holdfast.core.coordinator.state import Member
from holdfast.core.policy import Limits


@dataclass(slots=True)
class Liveness:
    limits: Limits
    looked_s: float
    pardoned_s: float = 0.0
    """Nobody counts as silent since before this."""
    next_expiry_s: float = inf
    """When the first of the leases seen at the last look runs out."""

    def next_look_s(self) -> float:
        return min(self.looked_s + self.limits.lease_s / 4, self.next_expiry_s)

    def silent(self, members: Iterable[Member], now: float) -> list[Member]:
        """Members whose lease has run out.

        If we come back from a pause of our own (stopped process, starved machine), the time of that pause is not
        held against anybody: what they sent meanwhile may still lie unread in our sockets.
        """
        gap = now - self.looked_s
        self.looked_s = now
        if gap > self.limits.lease_s / 2:
            self.pardoned_s, self.next_expiry_s = now - self.limits.ping_interval_s, inf
            return []
        expiries = [(max(member.last_heard_s, self.pardoned_s) + self.limits.lease_s, member) for member in members]
        self.next_expiry_s = min((expiry for expiry, _ in expiries if expiry > now), default=inf)
        return [member for expiry, member in expiries if expiry <= now]
