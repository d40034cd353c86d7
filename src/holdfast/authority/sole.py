"""The authority of a coordinator that nobody could replace: one node holds the job's only endpoint (standalone, static,
two nodes of c10d without a witness). PURE.

If its process is started again there, agents may still run a generation that the coordinator before it had formed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf

from holdfast.coordinator.authority import Facts, Learned, PreviousLeader
from holdfast.coordinator.coordinator_commands import Command, StepDown
from holdfast.coordinator.coordinator_events import Event
from holdfast.coordinator.formation import Gathering
from holdfast.coordinator.previous_generation import LostPart
from holdfast.coordinator.world import Member
from holdfast.protocol.messages import Join
from holdfast.protocol.policy import Limits


class Sole:
    """It always decides."""

    term = 0
    continued_uid: str | None = None

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._began_s = now

    def begin(self, facts: Facts) -> PreviousLeader | None:  # noqa: ARG002
        return None

    def decides(self, now: float) -> bool:  # noqa: ARG002
        return True

    def resign(self) -> StepDown | None:
        return None

    def age_s(self, now: float) -> float:  # noqa: ARG002
        return 0.0

    def succeeds_without(self, agents: Collection[str]) -> bool:  # noqa: ARG002
        return False

    def is_quiet(self, now: float) -> bool:  # noqa: ARG002
        return True

    def due_s(self, now: float) -> float:  # noqa: ARG002
        return inf

    def check_invariants(self) -> None:
        """There is nothing to check."""

    def hears(self, now: float, event: Event) -> Learned | None:  # noqa: ARG002
        return None

    def joined(self, member: Member, join: Join) -> None:
        """It needs no members."""

    def came_too_late(self, agent: str, link: int) -> None:
        """It needs no voters."""

    def leaves(self) -> None:
        """It needs no members."""

    def lost(self, now: float, member: Member) -> None:
        """It needs no members."""

    def reported(self, now: float, join: Join) -> float:
        """Agents kill their workers one fence after that coordinator died, which was before this one began and before
        the reporting agent lost its link. A host that came back within milliseconds formed a world beside workers whose
        agents had not noticed yet (seeds 1136 and 2115)."""
        died_s = min(self._began_s, now - join.unlinked_s)
        return died_s + self._limits.fence_s + self._limits.kill_s

    def gathers(self, now: float, gathering: Gathering) -> Mapping[int, LostPart]:  # noqa: ARG002
        return {}

    def release(self, now: float, commands: Sequence[Command]) -> list[Command]:  # noqa: ARG002
        return list(commands)
