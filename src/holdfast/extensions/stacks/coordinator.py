"""Collects the stacks of all ranks for a user. Pure.

The samples for the detection of hangs are another thing (`coordinator.monitor`): they end generations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from holdfast.extensions.stacks.messages import About, Samples, TakeSamples, body_of, view_of
from holdfast.protocol.extension import (
    AnswerRequest,
    CoordinatorExtension,
    Happened,
    Job,
    MemberLost,
    NodeSeen,
    Order,
    Orders,
    ToNode,
    UserRequest,
)
from holdfast.protocol.policy import Note
from holdfast.protocol.rank_progress import RankSample

SAMPLED_S_MAX = 5.0
"""Limit for the nodes to answer (s). Those that have not are listed as silent."""


@dataclass(slots=True)
class _SampleCollection:
    """The samples for one request."""

    generation: int
    world_size: int
    awaited: dict[str, NodeSeen]
    """The nodes that have not answered, by member."""
    due_s: float
    seen: list[tuple[str, int, RankSample]] = field(default_factory=list)
    """Host, rank and sample."""


class AtCoordinator(CoordinatorExtension):
    questions = {"stacks": About}
    messages = Samples

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._collections: dict[int, _SampleCollection] = {}
        """The collections in progress, by number of the request."""

    def asked(self, now: float, request: UserRequest) -> Orders:
        number, job = request.number, self.job
        awaited = {node.member: node for node in job.nodes()}
        self._collections[number] = _SampleCollection(job.generation, job.world_size, awaited, now + SAMPLED_S_MAX)
        orders: list[Order] = [Note("stacks_asked", {"by": request.by})]
        orders += [ToNode(member, TakeSamples(number)) for member in awaited]
        return [*orders, *self._complete()]

    def heard(self, now: float, member: str, message: Samples) -> Orders:  # noqa: ARG002
        collection = self._collections.get(message.number)
        node = collection.awaited.pop(member, None) if collection is not None else None
        if collection is not None and node is not None:
            ranks = {local_rank: node.rank_base + place for place, local_rank in enumerate(node.local_ranks)}
            found = [each for each in message.samples if each.local_rank in ranks]
            collection.seen += [(node.host, ranks[each.local_rank], each) for each in found]
        return self._complete()

    def happened(self, now: float, event: Happened) -> Orders:  # noqa: ARG002
        if isinstance(event, MemberLost):
            for collection in self._collections.values():
                collection.awaited.pop(event.member, None)
        return self._complete()

    def due_s(self) -> float:
        return min((each.due_s for each in self._collections.values()), default=inf)

    def due(self, now: float) -> Orders:
        return self._complete(now)

    def _complete(self, now: float = -inf) -> list[Order]:
        """Answer the requests that wait for no node any more, or whose time is over."""
        over = {n: each for n, each in self._collections.items() if not each.awaited or now >= each.due_s}
        orders: list[Order] = []
        for number, each in over.items():
            del self._collections[number]
            silent = tuple(node.host for node in each.awaited.values())
            view = view_of(self.job.run_id, each.generation, each.world_size, each.seen, silent)
            orders.append(AnswerRequest(number, body_of(view)))
        return orders
