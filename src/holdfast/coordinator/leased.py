"""The coordinator under a leader lease. It ignores every event once the lease is over, and forms nothing until the workers of
the previous leader must have been fenced. Pure: a function says whether the lease is held.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.coordinator.coordinator_machine import CoordinatorMachine
from holdfast.coordinator.coordinator_state import Command, Event
from holdfast.coordinator.ending import Judge
from holdfast.coordinator.monitor import cannot_tell
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
    ) -> None:
        """`floor`: the newest generation that the previous leader may have started. `tail_s`: its workers may live for so
        long from now where nobody hears of them (a fence at most)."""
        super().__init__(job, limits, judge, now, examine=examine)
        self._holds = holds
        self._told = floor
        if floor:  # as if an agent of the previous leader's came, which lost it so long ago that only the tail is left
            self._previous_leader.generation = floor
            super()._wait_for_fence_previous_leader(now - (limits.fence_s + limits.kill_s - tail_s), floor)

    def handle(self, now: float, event: Event) -> list[Command]:
        """Without the lease nothing is decided any more: the process may have slept, and somebody else be in charge."""
        if not self._holds():
            return []
        return super().handle(now, event)

    @property
    def workers_may_live(self) -> bool:
        """Of a member, in a generation of ours."""
        return self._membership.anybody_busy

    def _wait_for_fence_previous_leader(self, died_s: float, generation: int) -> None:
        """What etcd remembers tells when the previous leader's workers are gone: an agent's broken link does not, for it
        may have broken before that coordinator ended."""
        if generation > self._told:
            super()._wait_for_fence_previous_leader(died_s, generation)
