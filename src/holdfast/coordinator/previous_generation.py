"""The newest generation of an earlier coordinator, and the agents that still run it: a coordinator that forms nothing
itself yet may continue it. Bookkeeping only: the coordinator decides what follows.

Who that coordinator was, and when its workers are gone, is known to the authority (`coordinator.authority`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from holdfast.coordinator.world import Member, World
from holdfast.protocol.charter import LedFrom
from holdfast.protocol.messages import Join, Running
from holdfast.protocol.policy import JobSpec, NodeSpec
from holdfast.protocol.train_contract import Survive


class LostPart(Struct, frozen=True):
    """A part of that generation without which the others are enough: it ended with that coordinator, or its workers are
    suspended for good."""

    part: LedFrom
    reason: str
    """The reason why it is lost, for the verdict."""
    text: str
    """The same, for the console."""


def _places(node: NodeSpec, local_ranks: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(range(node.nproc)) if local_ranks is None else local_ranks


@dataclass(slots=True, eq=False, repr=False)
class PreviousGeneration:
    """It continues only if all its nodes join with living workers, but for those that it can go on without."""

    generation: int = 0
    """The newest one that an agent reported; 0: none did."""
    broken: bool = False
    """A part of that generation has ended, so it cannot continue."""
    parts: dict[int, tuple[Member, Running]] = field(default_factory=dict)
    """Members that joined with a part of it, by group rank."""
    missing: dict[int, LostPart] = field(default_factory=dict)
    """Parts that are not waited for, by group rank."""

    def observe(self, member: Member, join: Join) -> list[Member]:
        """A member joined with this report. Returns members that have to stop the generation that they run."""
        hopeless = self.heard_of(join.last_generation)
        running = join.running
        if running is not None and running.generation == self.generation and not self.broken:
            self.parts[running.group_rank] = (member, running)
        # An older generation, or one that cannot continue: its workers must not live beside the next
        # (test_who_comes_with_a_generation_that_was_replaced_is_told_to_kill_it).
        elif running is not None:
            hopeless.append(member)
        elif join.last_generation == self.generation > 0:
            # It took part in the generation but has no living workers.
            hopeless += self.end()
        return hopeless

    def heard_of(self, generation: int) -> list[Member]:
        """There was a generation of this number. Returns members that have to stop an older one."""
        if generation <= self.generation:
            return []
        self.generation, self.broken = generation, False
        self.missing.clear()
        return self._drop_parts()

    def lost(self, member: Member) -> list[Member]:
        """A member or its workers are gone. Returns members that have to stop the generation that they run."""
        came = any(member is one for one, _ in self.parts.values())
        # This member gets no order: it is gone, or its workers are.
        return [other for other in self.end() if other is not member] if came else []

    @property
    def all_joined(self) -> bool:
        """Whether every node of the generation that can has joined with living workers."""
        size = len(self.parts) + len(self.missing)
        return bool(self.parts) and size == next(iter(self.parts.values()))[1].group_world_size

    def can_shrink(self, job: JobSpec) -> bool:
        """Whether those that have joined could go on without the others."""
        parts = [(_places(member.node, part.local_ranks), part) for member, part in self.parts.values()]
        can_go_on = all(set(part.can_go_on).issuperset(places) and not part.done for places, part in parts)
        ranks = sum(len(places) for places, _ in parts)
        enough = ranks >= max(1, job.min_ranks) and len(parts) >= job.min_nodes
        return enough and can_go_on and job.survive is Survive.SHRINK

    @property
    def restart_count(self) -> int:
        return max(running.restart_count for _, running in self.parts.values())

    def world(self, now: float) -> World:
        """That generation as a world of this coordinator."""
        places = {rank: (m.name, _places(m.node, part.local_ranks)) for rank, (m, part) in self.parts.items()}
        places |= {rank: (each.part.node.member, each.part.local_ranks) for rank, each in self.missing.items()}
        ordered = [place for _, place in sorted(places.items())]
        order = tuple(name for name, _ in ordered)
        world = World(generation=self.generation, order=order, places=dict(ordered), started_s=now)
        for member, running in self.parts.values():
            for local_rank in running.done:
                world.mark_done(member.name, local_rank)
            world.set_can_go_on(member.name, running.can_go_on)
        return world

    def go_on_without(self, parts: Mapping[int, LostPart]) -> None:
        """It can continue without these."""
        self.missing.update(parts)

    def came(self, agent: str) -> None:
        """This agent has joined: it is not missing."""
        self.missing = {rank: each for rank, each in self.missing.items() if each.part.node.agent != agent}

    def end(self) -> list[Member]:
        """It cannot continue. Returns members that have to stop it."""
        self.broken = True
        return self._drop_parts()

    def _drop_parts(self) -> list[Member]:
        members = [member for member, _ in self.parts.values()]
        self.parts.clear()
        return members
