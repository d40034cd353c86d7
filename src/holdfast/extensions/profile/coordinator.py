"""Orders the profiles of some ranks, and collects them. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from math import inf

import msgspec

from holdfast.extensions.profile.messages import (
    COLLECTED_S_MAX,
    About,
    ProfiledRank,
    Profiles,
    ProfileView,
    TakeProfiles,
)
from holdfast.protocol.extension import (
    AnswerRequest,
    CoordinatorExtension,
    Happened,
    Job,
    MemberLost,
    NodeSeen,
    Order,
    Orders,
    RefuseRequest,
    ToNode,
    UserRequest,
)
from holdfast.protocol.policy import Note
from holdfast.text import plural, spans


@dataclass(slots=True)
class _ProfileCollection:
    """The profiles for one request."""

    name: str
    awaited: dict[str, NodeSeen]
    """The nodes that have not answered, by member."""
    due_s: float
    ranks: list[ProfiledRank] = field(default_factory=list)


class AtCoordinator(CoordinatorExtension):
    questions = {"profile": About}
    messages = Profiles

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._collections: dict[int, _ProfileCollection] = {}
        """The collections in progress, by number of the request."""
        self._count = itertools.count(1)

    def asked(self, now: float, request: UserRequest) -> Orders:
        about: About = request.about
        wanted, nodes = set(about.ranks), self.job.nodes()
        running = {node.rank_base + place for node in nodes for place in range(len(node.local_ranks))}
        if not wanted:
            return [RefuseRequest(request.number, "no ranks are named")]
        if missing := wanted - running:
            size = plural(self.job.world_size, "rank")
            return [RefuseRequest(request.number, f"no rank {spans(missing)} runs now; there are {size}")]
        name = f"{about.name}-{next(self._count)}"
        noted = {"name": name, "ranks": sorted(wanted), "steps": about.steps, "for_s": about.for_s}
        orders: list[Order] = [Note("profile_asked", {"by": request.by, **noted})]
        collection = self._collections[request.number] = _ProfileCollection(name, {}, now + COLLECTED_S_MAX)
        for node in nodes:
            chosen = tuple(each for place, each in enumerate(node.local_ranks) if node.rank_base + place in wanted)
            if chosen:
                collection.awaited[node.member] = node
                order = TakeProfiles(request.number, self.job.generation, name, chosen, about.steps, about.for_s)
                orders.append(ToNode(node.member, order))
        return orders

    def heard(self, now: float, member: str, message: Profiles) -> Orders:  # noqa: ARG002
        collection = self._collections.get(message.number)
        node = collection.awaited.pop(member, None) if collection is not None else None
        if collection is not None and node is not None:
            ranks = {local_rank: node.rank_base + place for place, local_rank in enumerate(node.local_ranks)}
            collection.ranks += [
                ProfiledRank(ranks[each.local_rank], node.host, each.files, each.operations, each.why, each.note)
                for each in message.ranks
                if each.local_rank in ranks
            ]
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
            ranks = tuple(sorted(each.ranks, key=lambda one: one.rank))
            silent = tuple(node.host for node in each.awaited.values())
            view = ProfileView(name=each.name, ranks=ranks, silent=silent)
            orders.append(AnswerRequest(number, msgspec.json.encode(view)))
        return orders
