"""Finds, for each node that has no states in memory, the nodes that have those of its ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from holdfast.extensions.saver.messages import HeldStates, Holds, StateSources
from holdfast.protocol.extension import (
    CoordinatorExtension,
    Happened,
    Job,
    MemberLost,
    NodeSeen,
    Orders,
    StartFollows,
    ToNode,
)


class AtCoordinator(CoordinatorExtension):
    messages = Holds

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._held: dict[str, Holds] = {}
        """What each member has said last, by its name."""

    def heard(self, now: float, member: str, message: Holds) -> Orders:  # noqa: ARG002
        self._held[member] = message
        return ()

    def happened(self, now: float, event: Happened) -> Orders:  # noqa: ARG002
        match event:
            case StartFollows(generation):
                held = {name: each.states for name, each in self._held.items() if each.generation == generation}
                found = offers(self.job.nodes(), self.job.world_size, held)
                return [ToNode(member, StateSources(generation, states)) for member, states in found.items() if states]
            case MemberLost(member):
                self._held.pop(member, None)
        return ()


def offers(
    nodes: Sequence[NodeSeen], world_size: int, held: Mapping[str, HeldStates]
) -> dict[str, tuple[HeldStates, ...]]:
    """Find, for each member that has no states in memory, all that have those of its ranks, of the job's last life and
    of as many ranks."""
    found: dict[str, tuple[HeldStates, ...]] = {}
    at: dict[int, list[HeldStates]] = {}
    # The word of the last life is the most frequent one: a node that was away may have states of an older life
    # (test_states_of_an_older_life_are_not_offered).
    words = Counter(states.word for states in held.values()).most_common(1)
    for states in held.values():
        # A state fits only a world of the size in which it was made.
        for rank in states.ranks if (states.world, states.word) == (world_size, words[0][0]) else ():
            at.setdefault(rank, []).append(states)
    for node in nodes if at else ():
        if node.member not in held:
            ranks = range(node.rank_base, node.rank_base + len(node.local_ranks))
            found[node.member] = tuple(dict.fromkeys(states for rank in ranks for states in at.get(rank, ())))
    return found
