"""A question that several nodes answer together: what extensions of this kind share at the coordinator. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from holdfast.protocol.extension import (
    AnswerRequest,
    CoordinatorExtension,
    Happened,
    Job,
    MemberLost,
    NodeSeen,
    Order,
    Orders,
)


@dataclass(slots=True, kw_only=True)
class Collection:
    """The answers of the nodes to one request."""

    awaited: dict[str, NodeSeen]
    """The nodes that have not answered, by member."""
    due_s: float
    """The time at which the request is answered without the nodes that have not (s of the coordinator's clock)."""
    found: list[Any] = field(default_factory=list)
    """What the nodes have reported: see `CollectingExtension.found_in`."""

    @property
    def silent(self) -> tuple[str, ...]:
        """Hosts of the nodes that have not answered."""
        return tuple(node.host for node in self.awaited.values())


class CollectingExtension(CoordinatorExtension):
    """An extension that asks nodes, and answers a request when all of them have answered, were lost, or are late.

    The messages of its halves on the nodes have a `number`, which is that of the request."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._collections: dict[int, Collection] = {}
        """The collections in progress, by number of the request."""

    def found_in(self, node: NodeSeen, ranks: Mapping[int, int], message: Any) -> Iterable[Any]:
        """What this node's message reports. `ranks`: the rank of each local rank that the node has in its generation;
        what the message says of others is of another generation."""
        raise NotImplementedError

    def body(self, collection: Collection) -> bytes:
        """The JSON that answers the request of this collection, which is over."""
        raise NotImplementedError

    def collect(self, number: int, collection: Collection) -> list[Order]:
        """Begin to collect for the request of this number. The orders answer requests that wait for no node."""
        self._collections[number] = collection
        return self._complete()

    def heard(self, now: float, member: str, message: Any) -> Orders:  # noqa: ARG002
        collection = self._collections.get(message.number)
        node = collection.awaited.pop(member, None) if collection is not None else None
        if collection is not None and node is not None:
            ranks = {local_rank: node.rank_base + place for place, local_rank in enumerate(node.local_ranks)}
            collection.found += self.found_in(node, ranks, message)
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
            orders.append(AnswerRequest(number, self.body(each)))
        return orders
