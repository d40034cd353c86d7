"""How long ago the coordinator provably had word of us, and when that makes a fence. Times by our own clock only."""

from __future__ import annotations

from dataclasses import dataclass, field

PINGS_OPEN_MAX = 64


@dataclass(slots=True)
class Lease:
    """Pings out, answers in. What was answered had been sent before the coordinator's lease on us was renewed."""

    fence_s: float
    ping_interval_s: float
    confirmed_s: float
    """When the newest message that the coordinator provably got had been sent: its lease on us began no earlier."""
    ping_at_s: float
    _number: int = 0
    _open: dict[int, float] = field(default_factory=dict)

    @property
    def fence_at_s(self) -> float:
        return self.confirmed_s + self.fence_s

    def granted(self, fence_s: float, ping_interval_s: float, *, asked_s: float, now: float) -> None:
        """Joined: the request of `asked_s` was heard."""
        self.fence_s, self.ping_interval_s = fence_s, ping_interval_s
        self.confirmed_s = asked_s
        self.ping_at_s = now + ping_interval_s
        self._open.clear()

    def confirm(self, sent_s: float) -> None:
        """The coordinator has acted on something sent then."""
        self.confirmed_s = max(self.confirmed_s, sent_s)

    def ping(self, now: float) -> int:
        """The number of the ping to send now."""
        self._number += 1
        self._open[self._number] = now
        while len(self._open) > PINGS_OPEN_MAX:
            self._open.pop(next(iter(self._open)))
        self.ping_at_s = now + self.ping_interval_s
        return self._number

    def answered(self, number: int) -> None:
        sent_s = self._open.pop(number, None)
        if sent_s is not None:
            self.confirm(sent_s)
