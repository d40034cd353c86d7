"""Collects the stacks of all ranks for a user. Pure.

The samples for the detection of hangs are another thing (`extensions/hangs`): they may end a generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.extensions.stacks.messages import About, Samples, TakeSamples, body_of, view_of
from holdfast.protocol.collecting import CollectingExtension, Collection
from holdfast.protocol.extension import NodeSeen, Order, Orders, ToNode, UserRequest
from holdfast.protocol.policy import Note
from holdfast.protocol.rank_progress import RankSample

SAMPLED_S_MAX = 5.0
"""Limit for the nodes to answer (s). Those that have not are listed as silent."""


@dataclass(slots=True, kw_only=True)
class _SampleCollection(Collection):
    """The samples for one request: host, rank and sample of each."""

    generation: int
    world_size: int


class AtCoordinator(CollectingExtension):
    questions = {"stacks": About}
    messages = Samples

    def asked(self, now: float, request: UserRequest) -> Orders:
        number, job = request.number, self.job
        awaited = {node.member: node for node in job.nodes()}
        collection = _SampleCollection(
            awaited=awaited, due_s=now + SAMPLED_S_MAX, generation=job.generation, world_size=job.world_size
        )
        orders: list[Order] = [Note("stacks_asked", {"by": request.by})]
        orders += [ToNode(member, TakeSamples(number)) for member in awaited]
        return [*orders, *self.collect(number, collection)]

    def found_in(
        self, node: NodeSeen, ranks: Mapping[int, int], message: Samples
    ) -> Iterator[tuple[str, int, RankSample]]:
        for each in message.samples:
            if each.local_rank in ranks:
                yield node.host, ranks[each.local_rank], each

    def body(self, collection: Collection) -> bytes:
        assert isinstance(collection, _SampleCollection)
        generation, size = collection.generation, collection.world_size
        return body_of(view_of(self.job.run_id, generation, size, collection.found, collection.silent))
