"""Who is a member, by name and by link. Bookkeeping only: what follows from it is the machine's affair.

Everything that is asked for at every event costs the same with ten members and with ten thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping
from math import inf

from msgspec import structs

from holdfast.core.coordinator.probation import Probation
from holdfast.core.coordinator.state import Member, Pending
from holdfast.core.policy import NodeSpec

LINKS_PER_ADDRESS_MAX = 1024
"""Links from one address that have not joined: one more costs the oldest of them. Many agents may share a machine."""


class Membership:
    """Links without a Join, members, and who of them may take part in the next world."""

    def __init__(self, probation: Probation) -> None:
        self._probation = probation
        self.members: dict[str, Member] = {}
        self.pending: dict[int, Pending] = {}
        """In the order in which they were opened. Changed through `open_link` and `close_link`."""
        self._pending_of: Counter[str] = Counter()
        """By address."""
        self._by_link: dict[int, str] = {}
        self._busy: dict[str, Member] = {}
        self._arrivals = 0
        self._candidates: dict[str, Member] = {}
        self._waiting: list[tuple[Member, float]] = []
        self._outsiders: dict[str, Member] = {}
        self._outside_of: Mapping[str, object] = {}
        """The world that the outsiders are outside of."""
        self._fresh_until_s = -inf
        """The lists of candidates are true up to this time; -inf: members have changed."""

    def open_link(self, link: int, pending: Pending) -> int | None:
        """A link was opened. Returns the oldest one from the same address when they are too many."""
        self.pending[link] = pending
        self._pending_of[pending.address] += 1
        if pending.local or self._pending_of[pending.address] <= LINKS_PER_ADDRESS_MAX:
            return None
        return next(number for number, other in self.pending.items() if other.address == pending.address)

    def close_link(self, link: int) -> Pending | None:
        """It is gone, or its agent has joined."""
        pending = self.pending.pop(link, None)
        if pending is not None:
            self._pending_of[pending.address] -= 1
            if not self._pending_of[pending.address]:
                del self._pending_of[pending.address]
        return pending

    def oldest_link(self, but: Container[int]) -> tuple[int, float] | None:
        """The link that has been without a member for longest, and since when; but for the local one and those named."""
        for link, pending in self.pending.items():
            if not pending.local and link not in but:
                return link, pending.opened_s
        return None

    def by_link(self, link: int) -> Member | None:
        name = self._by_link.get(link)
        return None if name is None else self.members[name]

    def add(self, link: int, node: NodeSpec, *, now: float, heard_s: float) -> Member:
        """The agent behind a pending link becomes a member."""
        pending = self.close_link(link)
        assert pending is not None
        node = structs.replace(node, hosts_coordinator=pending.local)
        self._arrivals += 1
        member = Member(
            node=node,
            link=link,
            address=pending.address,
            reached_at=pending.reached_at,
            arrival=self._arrivals,
            joined_s=now,
            last_heard_s=heard_s,
        )
        self.members[node.member] = member
        self._by_link[link] = node.member
        if self._probation.until_s(node.host, now) > now:
            self.changed()
        elif self._fresh_until_s > now:
            self._candidates[member.name] = member
            if member.name not in self._outside_of:
                self._outsiders[member.name] = member
        return member

    def remove(self, member: Member) -> None:
        del self.members[member.name]
        del self._by_link[member.link]
        self._busy.pop(member.name, None)
        self._candidates.pop(member.name, None)
        self._outsiders.pop(member.name, None)
        if any(member is waiting for waiting, _ in self._waiting):
            self.changed()

    def changed(self) -> None:
        """Somebody wants to go, or was put on probation or taken off it."""
        self._fresh_until_s = -inf

    def set_busy(self, member: Member, generation: int) -> None:
        """Worker processes of this generation may be alive there; 0: none are."""
        member.busy_generation = generation
        if generation:
            self._busy[member.name] = member
        else:
            self._busy.pop(member.name, None)

    def busy(self) -> Collection[Member]:
        return self._busy.values()

    @property
    def anybody_busy(self) -> bool:
        return bool(self._busy)

    def candidates(self, now: float) -> Collection[Member]:
        """Members that may take part in a world formed now, in order of arrival."""
        self._refresh(now)
        return self._candidates.values()

    def waiting(self, now: float) -> list[tuple[Member, float]]:
        """Members on probation, and from when on they may take part."""
        self._refresh(now)
        return self._waiting

    def next_change_s(self, now: float) -> float:
        """When somebody's probation ends; inf: nobody is on probation."""
        self._refresh(now)
        return self._fresh_until_s

    def outsiders(self, now: float, world: Mapping[str, object]) -> Collection[Member]:
        """Candidates whose names are not in this world. Asked about one world after the other."""
        self._refresh(now)
        if self._outside_of is not world:
            self._outside_of = world
            self._find_outsiders()
        return self._outsiders.values()

    def _find_outsiders(self) -> None:
        self._outsiders = {name: one for name, one in self._candidates.items() if name not in self._outside_of}

    def _refresh(self, now: float) -> None:
        if now < self._fresh_until_s:
            return
        self._candidates, self._waiting = {}, []
        for member in self.members.values():
            if member.leaving:
                continue
            until_s = self._probation.until_s(member.node.host, member.joined_s)
            if until_s > now:
                self._waiting.append((member, until_s))
            else:
                self._candidates[member.name] = member
        self._find_outsiders()
        self._fresh_until_s = min((until_s for _, until_s in self._waiting), default=inf)

    def check_invariants(self) -> None:
        assert len(self._by_link) == len(self.members)
        assert self._candidates.keys() <= self.members.keys()
        for name, member in self.members.items():
            assert self._by_link[member.link] == name
            assert (name in self._busy) == bool(member.busy_generation)
