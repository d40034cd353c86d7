"""The authority of a coordinator under a leader lease, in etcd or in another store's value. PURE: a function says
whether the lease is held.

The shell releases orders while the lease is fresh and steps down when it is lost (`runtime.leadership`): only the
storage can tell it when.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from holdfast.authority.sole import Sole
from holdfast.coordinator.authority import Facts, PreviousLeader
from holdfast.protocol.messages import Join
from holdfast.protocol.policy import Limits


class Leased(Sole):
    """It decides while the lease is held. Another coordinator can follow, and one may have been before."""

    def __init__(
        self,
        limits: Limits,
        now: float,
        *,
        holds: Callable[[], bool],
        newest_before: int = 0,
        workers_may_live_s: float = 0.0,
    ) -> None:
        """`newest_before`: the newest generation that the previous leader may have started. `workers_may_live_s`: for
        how long from now its workers may live on nodes that do not report to this coordinator (one fence at most)."""
        super().__init__(limits, now)
        self._holds = holds
        self._newest_before = newest_before
        self._workers_may_live_s = workers_may_live_s

    def begin(self, facts: Facts) -> PreviousLeader | None:  # noqa: ARG002
        if not self._newest_before:
            return None
        return PreviousLeader(self._newest_before, self._began_s + self._workers_may_live_s)

    def decides(self, now: float) -> bool:  # noqa: ARG002
        """Whether it has the lease: this process may have slept, and another one may hold the lease now."""
        return self._holds()

    def is_quiet(self, now: float) -> bool:  # noqa: ARG002
        # A shell answers pings without an event while this is true (test_without_the_lease_no_ping_is_answered).
        return self._holds()

    def reported(self, now: float, join: Join) -> float:
        """The record in the storage says when the previous leader's workers are gone. The time at which an agent lost
        its link does not: the link may have broken before that coordinator ended."""
        return super().reported(now, join) if join.last_generation > self._newest_before else -inf
