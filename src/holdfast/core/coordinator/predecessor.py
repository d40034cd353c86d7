"""What is left of a coordinator before us: the newest generation it formed, and the agents that still run it."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core.coordinator.state import Member
from holdfast.core.protocol import Join, Running


@dataclass(slots=True)
class Predecessor:
    """Collects who comes with a running generation. It goes on only if all its nodes come with living workers."""

    generation: int = 0
    """The newest one anybody told us of; 0: nobody did."""
    broken: bool = False
    """A part of that generation has ended: it cannot go on."""
    parts: dict[int, tuple[Member, Running]] = field(default_factory=dict)
    """Group rank -> who came with it."""

    def heed(self, member: Member, join: Join) -> list[Member]:
        """A member has joined and told of this. Returns those whose running generation has no future."""
        hopeless: list[Member] = []
        if join.last_generation > self.generation:
            hopeless = self._drop_parts()
            self.generation, self.broken = join.last_generation, False
        running = join.running
        if running is not None and running.generation == self.generation and not self.broken:
            self.parts[running.group_rank] = (member, running)
        elif running is not None:
            hopeless.append(member)
        elif join.last_generation == self.generation > 0:
            # It took part and comes with empty hands.
            hopeless += self._break()
        return hopeless

    def lost(self, member: Member) -> list[Member]:
        """A member is gone, or its workers are. Returns those whose running generation has no future by that."""
        came = any(member is one for one, _ in self.parts.values())
        return [other for other in self._break() if other is not member] if came else []

    @property
    def whole(self) -> bool:
        """Every node of the generation has come with its workers alive."""
        return bool(self.parts) and len(self.parts) == next(iter(self.parts.values()))[1].group_world_size

    def _break(self) -> list[Member]:
        self.broken = True
        return self._drop_parts()

    def _drop_parts(self) -> list[Member]:
        members = [member for member, _ in self.parts.values()]
        self.parts.clear()
        return members
