"""The job in plain data for people, from what the coordinator remembers. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.core.coordinator.membership import Membership
from holdfast.core.coordinator.pace import Pace, Paces
from holdfast.core.coordinator.state import Member, Phase, World
from holdfast.core.hang import Finding
from holdfast.core.progress import JobView, NodeView, RankView, Standing

__all__ = ["JobView", "nodes"]

IN_WORLD = {
    Phase.PREPARING: "starting",
    Phase.RUNNING: "running",
    Phase.DRAINING: "draining",
    Phase.STOPPING: "stopping",
}


def nodes(
    members: Iterable[Member],
    world: World | None,
    phase: Phase,
    paces: Paces | None,
    membership: Membership,
    now: float,
    hang: Finding | None = None,
) -> tuple[NodeView, ...]:
    """The nodes of the world by group rank, then the others in the order of their arrival. `hang`: one that was reported."""
    found = _places(hang)
    places = {name: place for place, name in enumerate(world.order)} if world is not None and phase in IN_WORLD else {}
    on_probation = {member.name for member, _ in membership.waiting(now)}
    views: list[NodeView] = []
    for member in sorted(members, key=lambda one: (places.get(one.name, len(places)), one.arrival)):
        in_world = world if member.name in places else None
        at_work = in_world is not None and phase is not Phase.PREPARING
        known = paces if at_work and paces is not None and paces.generation == in_world.generation else None  # type: ignore[union-attr]
        views.append(
            NodeView(
                member=member.name,
                host=member.node.host,
                group_rank=places.get(member.name),
                state=_state(member, in_world, phase, on_probation),
                heard_s=now - member.last_heard_s,
                ranks=tuple(_rank(pace, now, found) for pace in known.of_member(member.name, member.node.nproc))
                if known is not None
                else (),
            )
        )
    return tuple(views)


def _state(member: Member, world: World | None, phase: Phase, on_probation: set[str]) -> str:
    if world is None:
        if member.leaving:
            return "leaving"
        if member.name in on_probation:
            return "on probation"
        return "arriving" if phase is Phase.GATHERING else "spare"
    if phase is Phase.PREPARING:
        return "prepared" if member.name in world.prepared else "starting"
    if world.finished(member.name):
        return "done"
    return "leaving" if member.leaving else IN_WORLD[phase]


def _places(hang: Finding | None) -> dict[int, tuple[Standing, str]]:
    """By rank: what it does in this hang, and where."""
    found: dict[int, tuple[Standing, str]] = {}
    if hang is None:
        return found
    for place in hang.groups:
        for rank in place.ranks:
            waits = Standing.WAITING if place.words.startswith("waits ") else Standing.STILL
            found[rank] = (Standing.HUNG if rank in hang.culprits else waits, place.words)
    return found


def _rank(pace: Pace, now: float, found: Mapping[int, tuple[Standing, str]]) -> RankView:
    standing, place = found.get(pace.rank, (None, ""))
    return RankView(
        rank=pace.rank,
        local_rank=pace.local_rank,
        stage=pace.stage,
        steps=pace.steps,
        step_s=pace.step_s,
        own_s=pace.own_step_s,
        age_s=max(0.0, now - pace.newest_s),
        standing=standing,
        place=place,
    )
