"""The agent's side of its lease: when it sent the newest message that the coordinator confirmed, by its own clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.protocol.policy import PINGS_PER_SUSPENSION

PINGS_OPEN_MAX = 64


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """The agent's side of its lease: counts pings and answers. The coordinator renewed the lease after the answered
    message was sent."""

    fence_s: float
    ping_interval_s: float
    confirmed_s: float
    """The time at which the newest confirmed message was sent. The coordinator's lease was renewed at this time or
    later."""
    ping_at_s: float
    """The time at which the next ping is due."""
    suspend_s: float = 0.0
    """The age of the lease at which workers are suspended (s), as in Joined."""
    lease_s: float = 0.0
    """The age at which suspended workers are killed (s), as in Joined."""
    _number: int = 0
    """The number of the newest ping, over all links."""
    _open: dict[int, float] = field(default_factory=dict)
    """The times at which the pings without an answer were sent, by number: the newest PINGS_OPEN_MAX of this link."""

    @property
    def fence_at_s(self) -> float:
        return self.confirmed_s + self.fence_s

    def granted(
        self,
        lease_s: float,
        fence_s: float,
        ping_interval_s: float,
        suspend_s: float,
        *,
        confirmed_s: float,
        now: float,
    ) -> None:
        """The agent has joined."""
        self.fence_s, self.ping_interval_s, self.suspend_s = fence_s, ping_interval_s, suspend_s
        self.lease_s = lease_s
        self.confirmed_s = confirmed_s
        self.ping_at_s = now + ping_interval_s
        # An answer to a ping of the link before may come from another coordinator.
        self._open.clear()

    def hurry(self, now: float) -> None:
        """Ping from now on as often as workers need it that are suspended without an answer."""
        if self.suspend_s:
            self.ping_interval_s = min(self.ping_interval_s, self.suspend_s / PINGS_PER_SUSPENSION)
            self.ping_at_s = min(self.ping_at_s, now + self.ping_interval_s)

    def confirm(self, sent_s: float) -> None:
        """The coordinator has received a message that was sent at `sent_s`."""
        # Answers of several kinds renew it, and not in the order in which the messages were sent.
        self.confirmed_s = max(self.confirmed_s, sent_s)

    def ping(self, now: float) -> int:
        """The number of the ping to send now."""
        self._number += 1
        self._open[self._number] = now
        while len(self._open) > PINGS_OPEN_MAX:
            self._open.pop(next(iter(self._open)))
        self.ping_at_s = now + self.ping_interval_s
        return self._number

    def answered(self, number: int, age_s: float) -> None:
        """`age_s`: how old the coordinator's authority was when it answered."""
        sent_s = self._open.pop(number, None)
        if sent_s is not None:
            # The coordinator's own right may be older than its answer
            # (test_what_a_fence_counts_from_carries_the_age_of_its_authority).
            self.confirm(sent_s - age_s)
