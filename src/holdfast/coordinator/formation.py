"""Decides when the next world is formed, of which candidates, and in which order. Pure functions over plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import inf

from msgspec import Struct

from holdfast.coordinator.world import Member, World, is_local
from holdfast.protocol.messages import Assign
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec
from holdfast.text import spans

BACK_OFF = "a pause before the restart"
FENCE = "workers of an earlier start may still run; they end within this time"
ASKS = "asking the witness whether this job was started before"


class Candidate(Struct, frozen=True):
    node: NodeSpec
    arrival: int


class Gathering(Struct, kw_only=True):
    """Input of the decision to form, kept up to date by the machine. Times are seconds on the coordinator's clock."""

    present: int
    """The number of candidates."""
    began_s: float
    """The time at which the wait began; `join_s` counts from there."""
    last_arrival_s: float
    """The time at which a member joined last."""
    quorum_s: float | None
    """The time since which at least min_nodes have been present; None: they are not."""
    not_before_s: float
    """The time before which nothing is formed, however many are present."""
    regroup: bool
    """A world existed before and enough of its nodes are left: do not wait for new nodes."""
    awaited: int = 0
    """A successor forms at once when this many nodes are present: all that are left of the generation before; 0: none
    is known."""
    pause: str = ""
    """What it waits for until not_before_s, for users; empty: it is a back-off."""
    extends: bool = False
    """It may wait longer than that."""
    asks_until_s: float = -inf
    """Whether this job was started before is asked until then at most."""

    @classmethod
    def begin(cls, now: float) -> Gathering:
        """Nobody is there yet."""
        return cls(present=0, began_s=now, last_arrival_s=now, quorum_s=None, not_before_s=now, regroup=False)

    def count(self, present: int, min_nodes: int, now: float) -> None:
        """Note the number of candidates that are present now."""
        self.present = present
        if present < min_nodes:
            # With too few nodes left the wait begins as at the first start: after a node joins, others get time to
            # join, too.
            self.quorum_s, self.regroup = None, False
        elif self.quorum_s is None:
            self.quorum_s = now


class FormNow(Struct, frozen=True):
    reason: str


class WaitUntil(Struct, frozen=True):
    deadline_s: float
    reason: str
    gives_up: bool = False
    """The deadline ends the job, and not only the wait."""
    at_most: bool = False
    """The wait is not longer."""


class NoQuorum(Struct, frozen=True):
    reason: str


Decision = FormNow | WaitUntil | NoQuorum


def decide(job: JobSpec, limits: Limits, gathering: Gathering, now: float) -> Decision:
    """The formation rule. First match wins.

    | members present          | decision                                                   |
    |--------------------------|------------------------------------------------------------|
    | fewer than min           | wait, no longer than join_s                                |
    | any, back-off running    | wait for its end                                           |
    | any, a witness is asked  | wait for its answer, no longer than asks_until_s           |
    | max or more              | form                                                       |
    | min or more, regrouping  | form                                                       |
    | all that are left of the | form                                                       |
    | previous leader's nodes  |                                                            |
    | min or more, first time  | form when nobody came for settle_s, or last_call_s is over |
    """
    if gathering.present < job.min_nodes or gathering.quorum_s is None:
        deadline = gathering.began_s + limits.join_s
        if now >= deadline:
            return NoQuorum(f"{gathering.present} of at least {job.min_nodes} nodes came within {limits.join_s:g} s")
        # A fence is a second reason to wait, which users have to know. A back-off is over before the missing nodes
        # matter.
        also = f"; {gathering.pause}" if now < gathering.not_before_s and gathering.pause else ""
        return WaitUntil(deadline, f"{gathering.present} of {_range(job)} nodes are here{also}", gives_up=True)
    if now < gathering.not_before_s:
        return WaitUntil(gathering.not_before_s, gathering.pause or BACK_OFF, at_most=not gathering.extends)
    if now < gathering.asks_until_s:
        return WaitUntil(gathering.asks_until_s, ASKS, at_most=True)
    if gathering.present >= job.max_nodes:
        return FormNow(f"all {job.max_nodes} nodes are here")
    if gathering.regroup:
        return FormNow(f"regrouping with the {gathering.present} nodes left")
    # A successor knows how many can come, and waits for no others (test_numbers_and_the_budget_continue).
    if gathering.awaited and gathering.present >= gathering.awaited:
        return FormNow(f"the {gathering.present} nodes that are left are here")
    # Each arrival puts it off, but never beyond the last call (scenarios settle and last_call).
    settled = min(gathering.last_arrival_s + limits.settle_s, gathering.quorum_s + limits.last_call_s)
    if now >= settled:
        return FormNow(f"{gathering.present} of {_range(job)} nodes are here and no other joined")
    return WaitUntil(settled, f"{gathering.present} of {_range(job)} nodes are here, waiting briefly for more")


def _range(job: JobSpec) -> str:
    return str(job.max_nodes) if job.min_nodes == job.max_nodes else f"{job.min_nodes} to {job.max_nodes}"


def seat(candidates: Sequence[Candidate], previous: Sequence[str], job: JobSpec) -> list[NodeSpec]:
    """Choose at most max_nodes candidates and give each a group rank: its index in the result.

    A member that stays keeps its place if the world is large enough for it. Then requests (--node-rank) are granted.
    Then the coordinator's node takes 0 if that is free. The others fill the free places, sorted by their switches (the
    coordinator's come first), by host name (numbers by value) and by arrival.
    """
    # With static rendezvous --node-rank binds: admission lets in one node for each rank.
    if job.fixed_ranks:
        return sorted((c.node for c in candidates), key=lambda node: node.node_rank or 0)
    by_name = {c.node.member: c.node for c in candidates}
    index = {name: i for i, name in enumerate(previous)}
    incumbents = [name for name in previous if name in by_name]
    newcomers = sorted((c for c in candidates if c.node.member not in index), key=lambda c: c.arrival)
    free = max(0, job.max_nodes - len(incumbents))
    # Newcomers push out no node that trains (test_more_than_max_come_incumbents_stay_then_by_arrival).
    chosen = [by_name[name] for name in incumbents[: job.max_nodes]] + [c.node for c in newcomers[:free]]
    seats: list[NodeSpec | None] = [None] * len(chosen)
    seated: set[str] = set()

    def place(node: NodeSpec, at: int) -> None:
        if node.member not in seated and at < len(seats) and seats[at] is None:
            seats[at] = node
            seated.add(node.member)

    # From the strongest claim to the weakest: a place that is taken is not given again.
    for node in chosen:
        if node.member in index:
            place(node, index[node.member])
    for node in chosen:
        if node.node_rank is not None and node.member not in index:
            place(node, node.node_rank)
    for node in chosen:
        if node.hosts_coordinator:
            place(node, 0)
    arrival = {c.node.member: c.arrival for c in candidates}
    # Neighbours in a ring exchange most, so nodes of one switch get places side by side
    # (test_nodes_of_one_switch_are_neighbours_and_those_of_the_coordinator_s_first).
    near = next((node.switches for node in chosen if node.hosts_coordinator), ())
    rest = sorted(
        (node for node in chosen if node.member not in seated),
        # Those that lose their place because the world is smaller come before newcomers.
        key=lambda node: (
            node.member not in index,
            distance(node.switches, near),
            natural(node.host),
            arrival[node.member],
        ),
    )
    others = iter(rest)
    return [node if node is not None else next(others) for node in seats]


def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key in which node2 comes before node10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text) if part)


def distance(
    switches: Sequence[str], near: Sequence[str]
) -> tuple[tuple[bool, tuple[tuple[int, int | str], ...]], ...]:
    """Sort key by which nodes of one switch are neighbours, and those that share switches with `near` come first."""
    return tuple(
        (list(switches[: depth + 1]) != list(near[: depth + 1]), natural(name)) for depth, name in enumerate(switches)
    )


def all_places(seats: Sequence[NodeSpec]) -> dict[str, tuple[int, ...]]:
    """Every local rank of each member."""
    return {node.member: tuple(range(node.nproc)) for node in seats}


def assignments(
    seats: Sequence[NodeSpec],
    places: Mapping[str, tuple[int, ...]],
    *,
    generation: int,
    restart_count: int,
    local_world: bool,
) -> Mapping[str, Assign]:
    """One Assign per member. Ranks are prefix sums in the order of the seats, over all workers that take part and
    within each role. `places`: the local ranks of each member that take part."""
    sizes = [len(places[node.member]) for node in seats]
    world_size, taking_part = sum(sizes), len(seats) - sizes.count(0)
    role_size: dict[str, int] = {}
    for node, size in zip(seats, sizes, strict=True):
        role_size[node.role] = role_size.get(node.role, 0) + size
    led_by = _led_by(seats, sizes)
    result: dict[str, Assign] = {}
    rank_base, role_base = 0, dict.fromkeys(role_size, 0)
    for group_rank, (node, size) in enumerate(zip(seats, sizes, strict=True)):
        result[node.member] = Assign(
            generation=generation,
            restart_count=restart_count,
            group_rank=group_rank,
            group_world_size=taking_part,
            rank_base=rank_base,
            world_size=world_size,
            role_rank_base=role_base[node.role],
            role_world_size=role_size[node.role],
            hosts_store=group_rank == 0,
            local_world=local_world,
            led_by=led_by,
            local_ranks=None if size == node.nproc else places[node.member],
        )
        rank_base += size
        role_base[node.role] += size
    return result


def assigned(
    world: World, members: Mapping[str, Member], restart_count: int, joining: Sequence[Member] = ()
) -> Mapping[str, Assign]:
    """The place of each member of this world. `joining`: members that join it without a rank."""
    there = [*(members[name] for name in world.order), *joining]
    return assignments(
        [member.node for member in there],
        {**world.places, **{member.name: () for member in joining}},
        generation=world.generation,
        restart_count=restart_count,
        local_world=all(is_local(member.address) for member in there),
    )


def _led_by(seats: Sequence[NodeSpec], sizes: Sequence[int]) -> str:
    """Text for the other agents: if that node is lost, no coordinator is left that could name it."""
    first = 0
    for node, size in zip(seats, sizes, strict=True):
        if node.hosts_coordinator and size:
            ranks = range(first, first + size)
            return f"{node.host} (rank{'' if size == 1 else 's'} {spans(ranks)})"
        first += size
    return ""
