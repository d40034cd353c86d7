"""The coordinator under a leader lease. It ignores every event once the lease is over, and forms nothing until the
workers of the previous leader must have been fenced. Pure: a function says whether the lease is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.coordinator.coordinator_machine import CoordinatorMachine
from holdfast.coordinator.coordinator_state import Command, Event
from holdfast.coordinator.ending import Judge
from holdfast.coordinator.monitor import cannot_tell
from holdfast.protocol.extension import CoordinatorHalf
from holdfast.protocol.policy import JobSpec, Limits
from holdfast.protocol.rank_progress import Examine


class LeasedCoordinator(CoordinatorMachine):
    """Forms nothing before the previous leader's workers are gone, and nothing at all without the lease."""

    def __init__(
        self,
        job: JobSpec,
        limits: Limits,
        judge: Judge,
        now: float,
        *,
        holds: Callable[[], bool],
        floor: int = 0,
        tail_s: float = 0.0,
        examine: Examine = cannot_tell,
        extensions: Sequence[CoordinatorHalf] = (),
    ) -> None:
        """`floor`: the newest generation that the previous leader may have started. `tail_s`: for how long from now
        its workers may live on nodes that do not report to this coordinator (one fence at most)."""
        super().__init__(job, limits, judge, now, examine=examine, extensions=extensions)
        self._holds = holds
        self._floor = floor
        if floor:  # as if an agent of the previous leader joined whose fence ends after tail_s
            self._previous_leader.generation = floor
            super()._wait_for_fence_previous_leader(now - (limits.fence_s + limits.kill_s - tail_s), floor)

    def _is_quiet(self, now: float) -> bool:
        return self._holds() and super()._is_quiet(now)

    def handle(self, now: float, event: Event) -> list[Command]:
        """Decide nothing without the lease: this process may have slept, and another one may hold the lease now."""
        if not self._holds():
            return []
        return super().handle(now, event)

    @property
    def workers_may_live(self) -> bool:
        """Whether a member may still run workers of a generation of this coordinator."""
        return self._membership.anybody_busy

    def _wait_for_fence_previous_leader(self, died_s: float, generation: int) -> None:
        """The record in etcd says when the previous leader's workers are gone. The time at which an agent lost its link
        does not: the link may have broken before that coordinator ended."""
        if generation > self._floor:
            super()._wait_for_fence_previous_leader(died_s, generation)
