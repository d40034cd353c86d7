"""Membership: members by name and by link, expired leases, and hosts on back-off. Bookkeeping only: the coordinator
decides what follows from it.

What the coordinator asks for at every event costs the same with ten members and with ten thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from msgspec import structs

from holdfast.coordinator.world import Member, PendingLink
from holdfast.protocol.charter import HOSTS_MAX, HostRecord
from holdfast.protocol.policy import Limits, NodeSpec, doubled

LINKS_PER_ADDRESS_MAX = 1024
"""Limit of links from one address that have not joined; one more closes the oldest. Many agents may share a machine."""


class Membership:
    """Holds the links without a Join, the members, and the candidates for the next world."""

    def __init__(self, host_backoff: HostBackoff, limits: Limits) -> None:
        self._limits = limits
        self._host_backoff = host_backoff
        self.members: dict[str, Member] = {}
        """All members, by name. Changed by `add` and `remove` only."""
        self.pending: dict[int, PendingLink] = {}
        """The links in the order in which they were opened. Changed by `open_link` and `close_link` only."""
        self._pending_of: Counter[str] = Counter()
        """Number of pending links by address."""
        self._by_link: dict[int, str] = {}
        """The name of each member, by its link."""
        self._busy: dict[str, Member] = {}
        """The members whose `busy_generation` is not 0."""
        self._arrivals = 0
        """Number of members so far; it only grows."""
        self._candidates: dict[str, Member] = {}
        """Members that may take part, in order of arrival. Always a part of `members`."""
        self._waiting: list[tuple[Member, float]] = []
        """Members on host back-off, each with the time at which that ends."""
        self._outsiders: dict[str, Member] = {}
        """The candidates that are not in `_outside_of`."""
        self._outside_of: Mapping[str, object] = {}
        """The world for which the outsiders were computed."""
        self._fresh_until_s = -inf
        """The lists of candidates are valid up to this time; -inf: members have changed."""

    def open_link(self, link: int, pending: PendingLink) -> list[int]:
        """Add a link. Returns the oldest one from the same address when there are too many."""
        self.pending[link] = pending
        self._pending_of[pending.address] += 1
        # The limit is for strangers, not for the agent in this process (test_the_local_link_stays).
        if pending.local or self._pending_of[pending.address] <= LINKS_PER_ADDRESS_MAX:
            return []
        return [next(number for number, other in self.pending.items() if other.address == pending.address)]

    def close_link(self, link: int) -> PendingLink | None:
        """Remove a link that was closed or whose agent has joined."""
        pending = self.pending.pop(link, None)
        if pending is not None:
            self._pending_of[pending.address] -= 1
            if not self._pending_of[pending.address]:
                del self._pending_of[pending.address]
        return pending

    def late_links(self, now: float, but: Container[int]) -> list[int]:
        """Links that have been without a member for too long. Not the local one, and not those in `but`: an agent that
        waits for a rank that another one holds has sent its Join."""
        late: list[int] = []
        for link, due_s in self._unjoined(but):
            # They are in the order in which they were opened: all others have more time.
            if now < due_s:
                break
            late.append(link)
        return late

    def unjoined_due_s(self, but: Container[int]) -> float:
        """The time at which `late_links` will have another link."""
        return next((due_s for _, due_s in self._unjoined(but)), inf)

    def _unjoined(self, but: Container[int]) -> Iterator[tuple[int, float]]:
        for link, pending in self.pending.items():
            if not pending.local and link not in but:
                yield link, pending.opened_s + self._limits.unjoined_s

    def by_link(self, link: int) -> Member | None:
        name = self._by_link.get(link)
        return None if name is None else self.members[name]

    def add(self, link: int, node: NodeSpec, *, now: float, heard_s: float) -> Member:
        """Make the agent of a pending link a member."""
        pending = self.close_link(link)
        assert pending is not None
        # Only a link within this process proves it, whatever the agent says of itself.
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
        if self._host_backoff.until_s(node.host, now) > now:
            self.changed()
        # The lists are kept valid: to make them again for each of ten thousand members that join would cost too much
        # (tests/simulation/test_fast_path.py).
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
        """Note that the candidates changed: called when a member starts to leave, or a host's back-off begins or
        ends."""
        self._fresh_until_s = -inf

    def set_busy(self, member: Member, generation: int) -> None:
        """Note that worker processes of this generation may be alive on the member's node; 0: none are."""
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

    def knows_candidates(self, now: float) -> bool:
        """Whether no candidates but those that came or were lost have changed since they were asked for."""
        return now < self._fresh_until_s

    def candidates(self, now: float) -> Collection[Member]:
        """Members that may take part in a world formed now, in order of arrival."""
        self._refresh(now)
        return self._candidates.values()

    def is_candidate(self, member: Member, now: float) -> bool:
        self._refresh(now)
        return member.name in self._candidates

    def waiting(self, now: float) -> list[tuple[Member, float]]:
        """Members on host back-off, each with the time at which it ends."""
        self._refresh(now)
        return self._waiting

    def parked(self) -> list[Member]:
        """Members that take no part because they are not fit for it."""
        return [member for member in self.members.values() if member.parked]

    def next_change_s(self, now: float) -> float:
        """The time at which the next host back-off ends; inf: no member is on host back-off."""
        self._refresh(now)
        return self._fresh_until_s

    def outsiders(self, now: float, world: Mapping[str, object]) -> Collection[Member]:
        """Candidates whose names are not in this world. The result is kept for the newest world only."""
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
            if member.leaving or member.parked:
                continue
            until_s = self._host_backoff.until_s(member.node.host, member.joined_s)
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


@dataclass(slots=True, eq=False, repr=False)
class Liveness:
    """Finds members whose lease expired. Silence counts only while this process was able to receive."""

    limits: Limits
    looked_s: float
    """The time of the newest look. A gap between two looks is a pause of this process."""
    pardoned_s: float = 0.0
    """Silence before this time does not count."""
    next_expiry_s: float = inf
    """The time at which the first of the leases expires that `silent` saw last."""

    early_pardoned_s: float = 0.0
    """The same for members that `early` is asked for: a shorter pause of this process matters to their short lease."""
    next_early_s: float = inf
    """The time at which the first of the short leases expires that had not when `early` saw them last."""

    def next_look_s(self, short_lease_s: float = inf) -> float:
        look_s = self.looked_s + min(self.limits.lease_s, short_lease_s) / 4
        return min(look_s, self.next_expiry_s, self.next_early_s)

    def silent(self, members: Collection[Member], now: float, short_lease_s: float = inf) -> list[Member]:
        """Members whose lease has expired. `short_lease_s`: that of the members that `early` is asked for.

        A pause of this process (stopped, or on a starved machine) does not count: messages that members sent
        meanwhile may be in the sockets, still unread.
        """
        gap = now - self.looked_s
        self.looked_s, self.next_early_s = now, inf
        # This pause matters to the short leases alone: healthy nodes would be lost early
        # (test_a_coordinator_that_stood_still_loses_nobody_for_its_own_pause).
        if gap > short_lease_s / 2:
            self.early_pardoned_s = now - self.limits.ping_interval_s
        if gap > self.limits.lease_s / 2:
            # The members' own times stay as they are: a pardon is no sign of life, by which a dead holder of a rank
            # would deny the claim of the next one (test_a_pardon_is_no_sign_of_life).
            self.pardoned_s, self.next_expiry_s = now - self.limits.ping_interval_s, inf
            return []
        lease_s, found = self.limits.lease_s, []
        heard_s = min([member.last_heard_s for member in members], default=inf)  # nearly always nobody is silent
        if max(heard_s, self.pardoned_s) + lease_s <= now:
            found = [member for member in members if member.last_heard_s + lease_s <= now]
            heard_s = min((m.last_heard_s for m in members if m.last_heard_s + lease_s > now), default=inf)
        self.next_expiry_s = max(heard_s, self.pardoned_s) + lease_s
        return found

    def early(self, members: Collection[Member], now: float, short_lease_s: float) -> list[Member]:
        """Members of these whose short lease has expired, after `silent` has found none. None of them while that of
        another one may be about to expire, too: nodes that are lost together are lost at once."""
        pardoned_s = max(self.pardoned_s, self.early_pardoned_s)
        heard = [(max(member.last_heard_s, pardoned_s), member) for member in members]
        first_s = min((heard_s for heard_s, _ in heard if heard_s + short_lease_s > now), default=inf)
        self.next_early_s = first_s + short_lease_s
        # Both are lost then, and the others go on once (test_nodes_that_fall_silent_together_are_lost_together).
        if first_s + short_lease_s <= now + self.limits.short_lease_of(0.0):
            return []
        return [member for heard_s, member in heard if heard_s + short_lease_s <= now]


@dataclass(slots=True, eq=False, repr=False)
class _Record:
    strikes: int = 0
    """Quick losses of this host in a row."""
    blames: int = 0
    """Generations that ended because of it, since it was last excluded for that."""
    exclusions: int = 0
    """Number of its exclusions; each is longer than the one before."""
    stay_s: float = 0.0
    """Time for which an agent of this host must be a member before the others are regrouped for it (s)."""
    excluded_until_s: float = 0.0


@dataclass(slots=True, eq=False, repr=False)
class HostBackoff:
    """Delays hosts whose agents join and die in a loop, and excludes hosts that are blamed too often. Knows host names
    and times, no members."""

    limits: Limits
    exclude_after: int
    _records: dict[str, _Record] = field(default_factory=dict)
    changes: int = 0
    """Grows with every change of a record that a successor has to know: then the charter is written again."""

    def records(self, now: float) -> tuple[HostRecord, ...]:
        """The newest HOSTS_MAX hosts, for a successor."""
        return tuple(
            HostRecord(host, r.strikes, r.blames, r.exclusions, r.stay_s, max(0.0, r.excluded_until_s - now))
            for host, r in list(self._records.items())[-HOSTS_MAX:]
        )

    def take_over(self, records: Iterable[HostRecord], now: float, age_s: float) -> None:
        """Take the hosts that a coordinator before this one knew. `age_s`: the age of these records."""
        for each in records:
            record = _Record(each.strikes, each.blames, each.exclusions, each.stay_s)
            # A charter has durations: the clocks of two coordinators cannot be compared.
            # Without its age one of 600 s lasted 600 s again
            # (test_a_successor_excludes_a_host_for_the_time_that_is_left).
            record.excluded_until_s = now + each.excluded_s - age_s if each.excluded_s > age_s else 0.0
            self._records[each.host] = record
            # Else the charter of this coordinator had no hosts, and the next one forgot them
            # (test_hosts_on_back_off_are_known_to_the_successor_of_a_successor).
            self.changes += 1

    def lost(self, host: str, *, lived_s: float) -> None:
        """A member on this host was lost `lived_s` after its first workers were started (or else after it joined)."""
        record = self._records.setdefault(host, _Record())
        if lived_s >= self.limits.healthy_s:
            record.strikes, record.stay_s = 0, 0.0
        # Neither a quick death nor a long life: it proves nothing about the host.
        if lived_s >= self.limits.flap_s:
            return
        record.strikes += 1
        self.changes += 1
        # One quick death may be an accident (scenario flapping).
        if record.strikes > 1:
            record.stay_s = doubled(self.limits.flap_first_s, record.strikes - 2, self.limits.flap_max_s)

    def blamed(self, host: str, now: float) -> float:
        """A generation ended because of this host. Returns for how many seconds the host is excluded; 0: it is not."""
        if not self.exclude_after:
            return 0.0
        record = self._records.setdefault(host, _Record())
        record.blames += 1
        self.changes += 1
        if record.blames < self.exclude_after:
            return 0.0
        # The count starts again after each exclusion, and each exclusion is longer than the one before (scenario
        # excluded).
        record.blames = 0
        pause_s = doubled(self.limits.exclude_first_s, record.exclusions, self.limits.exclude_max_s)
        record.exclusions += 1
        record.excluded_until_s = now + pause_s
        return pause_s

    def exclude(self, host: str, until_s: float) -> None:
        """A user excludes this host."""
        self._records.setdefault(host, _Record()).excluded_until_s = until_s
        self.changes += 1

    def readmit(self, host: str) -> None:
        """A user ends its exclusion, and what it was blamed for is forgotten."""
        self._records.pop(host, None)
        self.changes += 1

    def excludes(self, host: str, now: float) -> bool:
        record = self._records.get(host)
        return record is not None and record.excluded_until_s > now

    def until_s(self, host: str, joined_s: float) -> float:
        """The time from which an agent of this host that joined at `joined_s` may take part."""
        record = self._records.get(host)
        if record is None:
            return joined_s
        return max(joined_s + record.stay_s, record.excluded_until_s)
