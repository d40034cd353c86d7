"""Orders the profiles of some ranks, and collects them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.extensions.profile.messages import (
    COLLECTED_S_MAX,
    About,
    ProfiledRank,
    Profiles,
    ProfileView,
    TakeProfiles,
)
from holdfast.protocol.collecting import CollectingExtension, Collection
from holdfast.protocol.extension import Job, NodeSeen, Order, Orders, RefuseRequest, ToNode, UserRequest
from holdfast.protocol.policy import Note
from holdfast.text import plural, ranks_text


@dataclass(slots=True, kw_only=True)
class _ProfileCollection(Collection):
    """The profiles for one request."""

    name: str
    """Name of the folder with the files."""


class AtCoordinator(CollectingExtension):
    questions = {"profile": About}
    messages = Profiles

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._count = itertools.count(1)

    def asked(self, now: float, request: UserRequest) -> Orders:
        about: About = request.about
        wanted, nodes = set(about.ranks), self.job.nodes()
        running = {node.rank_base + place for node in nodes for place in range(len(node.local_ranks))}
        if not wanted:
            return [RefuseRequest(request.number, "no ranks are named")]
        if missing := wanted - running:
            size = plural(self.job.world_size, "rank")
            return [RefuseRequest(request.number, f"{ranks_text(missing)}: not running now; there are {size}")]
        name = f"{about.name}-{next(self._count)}"
        noted = {"name": name, "ranks": sorted(wanted), "steps": about.steps, "for_s": about.for_s}
        orders: list[Order] = [Note("profile_asked", {"by": request.by, **noted})]
        awaited: dict[str, NodeSeen] = {}
        for node in nodes:
            chosen = tuple(each for place, each in enumerate(node.local_ranks) if node.rank_base + place in wanted)
            if chosen:
                awaited[node.member] = node
                order = TakeProfiles(request.number, self.job.generation, name, chosen, about.steps, about.for_s)
                orders.append(ToNode(node.member, order))
        collection = _ProfileCollection(awaited=awaited, due_s=now + COLLECTED_S_MAX, name=name)
        return [*orders, *self.collect(request.number, collection)]

    def found_in(self, node: NodeSeen, ranks: Mapping[int, int], message: Profiles) -> Iterator[ProfiledRank]:
        for each in message.ranks:
            if each.local_rank in ranks:
                rank = ranks[each.local_rank]
                yield ProfiledRank(rank, node.host, each.files, each.operations, each.why, each.note)

    def body(self, collection: Collection) -> bytes:
        assert isinstance(collection, _ProfileCollection)
        ranks = tuple(sorted(collection.found, key=lambda each: each.rank))
        return msgspec.json.encode(ProfileView(name=collection.name, ranks=ranks, silent=collection.silent))
