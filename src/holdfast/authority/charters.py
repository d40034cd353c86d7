"""Replicates the coordinator's charter to its voters, and measures its authority: since when a majority confirms it.
Keeps what a founder hears of an older job.

Bookkeeping only: `voters.py` says what the charter contains, holds orders back until it counts, and steps down.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec import structs

from holdfast.authority.voter_events import ProveVoterGone
from holdfast.coordinator.coordinator_commands import Command, Tell
from holdfast.coordinator.formation import FENCE
from holdfast.coordinator.world import Member, World
from holdfast.protocol.charter import (
    NO_CHARTER,
    NODES_MAX,
    Charter,
    CharterPosition,
    Renew,
    Renewed,
    Seat,
    Succession,
    electorate,
    majority,
)
from holdfast.protocol.messages import ReportCharter
from holdfast.protocol.policy import Limits, agent_of
from holdfast.text import listed

RENEWALS_OPEN_MAX = 16
"""Renews of one voter without an answer. An answer to an older one counts for nothing."""


@dataclass(slots=True)
class VoterRecord:
    """A voter as the coordinator knows it."""

    seat: Seat
    link: int | None = None
    held: CharterPosition = NO_CHARTER
    """The position of the charter that it holds."""
    confirmed_s: float = -inf
    """The time at which the newest Renew was sent that it has acknowledged."""
    open: dict[int, float] = field(default_factory=dict)
    """The times at which the Renews without an answer were sent, by number."""
    prove_at_s: float = inf
    """The time of the next attempt to prove that its process has ended, while it has no link."""


class Charters:
    """The charter of one coordinator, and the voters that hold it."""

    def __init__(self, limits: Limits, now: float, name: str, succession: Succession) -> None:
        """`name`: the coordinator's own agent, which confirms everything at once."""
        self.term = succession.term
        self._founded = succession.charter is None
        self.charter = succession.charter or Charter(NO_CHARTER, ())
        """The newest one. Its position only grows."""
        self.counts = succession.charter is None
        """A majority holds the newest charter. The empty one of a founder needs none."""
        self.settled = self.counts
        """A majority holds what it says, but perhaps not yet its voters. True whenever `counts` is."""
        self._limits = limits
        self.name = name
        self._since_s = now - succession.asked_s
        """The voters gave their votes after this time."""
        self._voters: dict[str, VoterRecord] = {seat.name: VoterRecord(seat) for seat in self.charter.seats}
        """One for each of the charter's seats, by name."""
        self._links: dict[str, int] = {}
        """Links of agents and witnesses, voters or not, by name."""
        self._names: dict[int, str] = {}
        """The same, by link."""
        self._gone: set[str] = set()
        """Voters whose process was proved to have ended. None of them has a link."""
        self._confirmed_s: float | None = None
        """The value of `authority_s`, which every message asks for; None: it has to be found again."""
        self._uninformed: set[str] = set()
        """Agents without a vote that do not know the present voters, one of which may be the next coordinator, and
        witnesses without a vote that do not know the newest charter."""
        self._witnesses: set[str] = set()
        """Those with a link. Without a vote they keep the charter, too: a node that founds the job again asks them.
        Else the numbers of generations went back when the last of two nodes was lost (seeds 56 and 65 of `pair`)."""
        self._rival_since_s, self._rival_s = inf, -inf
        """The begin and end of the time in which another voter asked for the votes without a pause longer than a
        lease."""
        self._number = 0
        """The number of the newest Renew."""
        self._send_at_s = now
        """The time at which the next Renews are due."""
        if succession.charter is not None:  # its own term's first charter: it counts only with a majority for this term
            self.charter = structs.replace(self.charter, position=CharterPosition(self.term, self._next_number()))

    # ---------------------------------------------------------------- what the coordinator asks

    @property
    def elects(self) -> bool:
        """Whether another voter could become the coordinator."""
        return len(self._voters) > (self.name in self._voters)

    def authority_s(self, now: float) -> float:
        """The latest time at which a majority had confirmed this coordinator."""
        if self._confirmed_s is None:
            self._confirmed_s = self._find_confirmed_s()
        return min(now, self._confirmed_s)

    def _find_confirmed_s(self) -> float:
        """inf: its own vote is a majority, or nobody else has one."""
        if not self.elects:
            return inf
        # While the voters change, nobody is elected without a majority of those before ("only the new voters" in
        # `test_each_rule_is_needed`).
        voters = self.charter.before or self.charter.voters
        times = {seat.name: inf if seat.name == self.name else self._voters[seat.name].confirmed_s for seat in voters}
        for time_s in sorted(set(times.values()), reverse=True):
            if time_s <= self._since_s:
                break
            if majority(voters, [name for name, each in times.items() if each >= time_s], self._gone):
                return time_s
        return self._since_s

    def due_s(self, now: float) -> float:
        """The time at which `advance` has something to do, or the authority ends."""
        if not self.elects:
            return self._send_at_s if self._others() else inf
        prove_s = min(voter.prove_at_s for voter in self._voters.values())
        return min(self._send_at_s, prove_s, self.authority_s(now) + self._limits.fence_s)

    # ---------------------------------------------------------------- changes

    def propose(self, now: float, content: Charter, seats: tuple[Seat, ...] | None) -> bool:
        """Make this the newest charter. Its position and voters are ignored. `seats`: the voters that it should have;
        None: as before. They change only while the charter before counts. Returns whether anything has changed."""
        present = self.charter
        voters, before, elected = present.voters, present.before, self.elects
        # Both majorities have it: those before are not asked any more
        # (test_while_the_voters_change_both_majorities_are_needed).
        if self.counts and before:
            before = ()
        elif self.counts and seats is not None and seats != voters:
            voters, before = seats, voters
        changed = structs.replace(content, position=present.position, voters=voters, before=before)
        if changed == present:
            return False
        self.charter = structs.replace(changed, position=CharterPosition(self.term, self._next_number()))
        same = structs.replace(changed, voters=present.voters, before=present.before) == present
        self.settled = self.settled and same
        if not elected:  # until now nobody could take its place
            self._since_s, self._confirmed_s = now, None
        self._seat()
        if (elected or self.elects) and (voters, before) != (present.voters, present.before):
            self._uninformed.update(self._links)
        self._uninformed |= self._witnesses
        self._count()
        self._send_at_s = -inf
        return True

    def take_term(self, term: int) -> None:
        """A founder that learns of an earlier term continues after it."""
        self.term = max(self.term, term)

    def linked(self, name: str, link: int, *, witness: bool = False) -> None:
        self._names.pop(self._links.get(name, link), None)
        self._links[name], self._names[link] = link, name
        self._gone.discard(name)
        self._confirmed_s = None
        if name in self._voters:
            voter = self._voters[name]
            voter.link, voter.prove_at_s = link, inf
            voter.open.clear()
        elif self.elects or witness:
            self._uninformed.add(name)
        if witness:
            self._witnesses.add(name)
        self._send_at_s = -inf

    def unlinked(self, link: int, now: float) -> None:
        name = self._names.pop(link, None)
        if name is not None:
            del self._links[name]
            self._witnesses.discard(name)
            if name in self._voters:
                self._voters[name].link, self._voters[name].prove_at_s = None, now

    def carried_without(self, names: Collection[str]) -> bool:
        """Whether the voters that have a link are a majority without these: they can elect a successor."""
        return self.charter.carried_by(self._links.keys() - set(names))

    def knows(self, link: int) -> bool:
        """Whether a member or a witness is behind this link."""
        return link in self._names

    def confirmed_by(self, link: int) -> bool:
        """Whether the voter behind this link has acknowledged a Renew of this coordinator."""
        return any(voter.link == link and voter.confirmed_s > -inf for voter in self._voters.values())

    def prove(self, name: str, now: float) -> None:
        """Try to prove that the process of this voter has ended."""
        if name in self._voters:
            self._voters[name].prove_at_s = now

    def gone(self, name: str) -> None:
        """Its process has ended: it holds nothing and cannot vote any more."""
        # With a link it lives, or it was started again under this name: an older proof is void.
        if name in self._voters and name not in self._links:
            self._gone.add(name)
            self._confirmed_s = None
            self._voters[name].prove_at_s = inf
            self._count()

    def renewed(self, link: int, renewed: Renewed, now: float) -> None:
        voter = next((each for each in self._voters.values() if each.link == link), None)
        if voter is None or renewed.term != self.term:
            return
        if renewed.rival:
            # One that asks now and then is no reason to step aside (test_one_that_asks_now_and_then_does_not_stand).
            if now > self._rival_s + self._limits.lease_s:
                self._rival_since_s = now
            self._rival_s = now
        sent_s = voter.open.pop(renewed.probe, None)
        if sent_s is not None:
            voter.confirmed_s, self._confirmed_s = max(voter.confirmed_s, sent_s), None
        voter.held = max(voter.held, renewed.held)
        self._count()

    @property
    def rivalled(self) -> bool:
        """Whether another node has wanted to be the coordinator for a lease, and still does."""
        return self._rival_s >= self._rival_since_s + self._limits.lease_s

    def advance(self, now: float, job_s: float, training_s: float) -> list[Command]:
        """What is due: Renews, which carry these times of the job, and proofs that a voter is gone."""
        out: list[Command] = []
        if now >= self._send_at_s and (self.elects or self._others()):
            self._send_at_s = now + self._limits.renew_interval_s
            voters = [voter for voter in self._voters.values() if voter.link is not None] if self.elects else []
            out += [self._renew(now, voter, job_s, training_s) for voter in voters]
            # An agent without a vote needs the charter to find the voters, and for a founder's budget, and not the
            # roster: a large job would send that as often as it has agents.
            about = job_s, training_s, self._founded
            brief = Renew(self.term, 0, structs.replace(self.charter, nodes=(), listeners=(), sizes=()), *about)
            for name in sorted(self._others()):
                renew = brief
                if name in self._witnesses:
                    charter = self.charter if name in self._uninformed else None
                    renew = Renew(self.term, 0, charter, *about)
                out.append(Tell(self._links[name], renew))
            self._uninformed.clear()
        if not self.elects:
            return out
        for voter in self._voters.values():
            if now >= voter.prove_at_s:
                voter.prove_at_s = now + self._limits.prove_s
                out.append(ProveVoterGone(voter.seat))
        return out

    # ---------------------------------------------------------------- small steps

    def _others(self) -> set[str]:
        """Those without a vote to whom something is sent now. A founder without voters has nothing to say."""
        if not self.charter.voters:
            return set()
        wanted = self._uninformed | self._witnesses  # few, while links are many
        return {name for name in wanted if name in self._links and name not in self._voters}

    def _renew(self, now: float, voter: VoterRecord, job_s: float, training_s: float) -> Command:
        assert voter.link is not None
        self._number += 1
        voter.open[self._number] = now
        while len(voter.open) > RENEWALS_OPEN_MAX:
            voter.open.pop(next(iter(voter.open)))
        charter = self.charter if voter.held < self.charter.position else None
        return Tell(voter.link, Renew(self.term, self._number, charter, job_s, training_s, self._founded))

    def _seat(self) -> None:
        """The voters of a new charter."""
        before, self._voters = self._voters, {}
        for seat in self.charter.seats:
            voter = before.get(seat.name) or VoterRecord(seat, self._links.get(seat.name))
            voter.seat = seat
            self._voters[seat.name] = voter
        self._gone.intersection_update(self._voters)
        self._confirmed_s = None

    def _count(self) -> None:
        position = self.charter.position
        # The voter in this process holds it only once it has said so: it outlives a coordinator that steps down, and
        # may be asked for its vote then.
        holders = [name for name, voter in self._voters.items() if voter.held >= position or not self.elects]
        self.counts = self.charter.carried_by(holders, self._gone)
        self.settled = self.settled or self.counts

    def _next_number(self) -> int:
        return self.charter.position.number + 1


class OlderJob:
    """What a coordinator that founded the job learns of an earlier start of it, from agents and witnesses that took
    part. It waits while the voters of that one may elect, and then continues the newest charter."""

    def __init__(self, limits: Limits, now: float, places: Iterable[tuple[str, int]] = ()) -> None:
        """`places`: where witnesses may be. Their first answers are waited for, from now on for a short time."""
        self._unheard = set(places)
        self._asks_until_s = now + limits.poll_s
        self.charter: Charter | None = None
        """The newest one; None: there was no earlier start, as far as it knows."""
        self.term = 0
        """The newest term that an agent knew."""
        self._limits = limits
        self._ended: set[str] = set()
        """Voters whose process has ended."""
        self._fenced_s = -inf
        """No worker of it is alive from then on."""
        self._patience_s = -inf
        """Its voters wait until then for each other."""
        self.alive = False
        """The sender of the newest ReportCharter follows its coordinator."""
        self._prove_at_s = inf

    @property
    def asks_until_s(self) -> float:
        """The time until which there may be news of an older start; -inf: everybody has answered."""
        return self._asks_until_s if self._unheard else -inf

    def asked(self, place: tuple[str, int], now: float) -> None:
        """A witness at this place gets a first question."""
        if place in self._unheard and now < self._asks_until_s:
            self._asks_until_s = now + self._limits.poll_s

    def answered(self, place: tuple[str, int]) -> None:
        """A witness at this place has answered, or there is none."""
        self._unheard.discard(place)

    @property
    def over(self) -> bool:
        """It is proved that its voters cannot elect any more."""
        charter = self.charter
        return charter is not None and not charter.carried_without(self._ended)

    @property
    def job_uid(self) -> str:
        """Its uid, for a founder that continues it where nobody else can: it is over, and its coordinator has ended.
        Empty: it may live on the other side of a cut, and must not be taken for the same job."""
        charter = self.charter
        return charter.job_uid if charter is not None and self.over and charter.leader in self._ended else ""

    @property
    def not_before_s(self) -> float:
        """The earliest time at which another generation may be formed."""
        return self._fenced_s if self.over else max(self._fenced_s, self._patience_s)

    def wait(self, now: float) -> str:
        """What it waits for until then, for users."""
        if self.charter is None or self.over or now >= self._patience_s:
            return FENCE
        voters = self.charter.voters
        if self.alive:
            return (
                "another node reaches this job's coordinator, and this one does not: check the network between this "
                f"node and {voters[0].host}, or end the agent there"
            )
        living = {seat.host for seat in voters if seat.name not in self._ended and not seat.witness}
        return (
            f"this job was started before, and {listed(sorted(living), 4) or 'other nodes'} may still run it; "
            "this node joins them when they answer. If they have ended, it starts after this wait. "
            "For another job, use another --rdzv-id"
        )

    def heard(self, now: float, report: ReportCharter) -> bool:
        """Returns whether the charter is newer than those before."""
        self.alive = report.follows
        self.term = max(self.term, report.term, report.charter.position.term)
        self.lost(now - report.lost_s)
        self._patience_s = max(self._patience_s, now + report.patience_s)
        if self.charter is not None and report.charter.position <= self.charter.position:
            return False
        self.charter, self._prove_at_s = report.charter, now
        return True

    def lost(self, when_s: float) -> None:
        """An agent lost its coordinator then."""
        self._fenced_s = max(self._fenced_s, when_s + self._limits.fence_s + self._limits.kill_s)

    def gone(self, name: str) -> None:
        self._ended.add(name)

    def due_s(self, now: float) -> float:
        """The time at which `advance` has something to do."""
        return inf if self.over or now >= self._patience_s else self._prove_at_s

    def advance(self, now: float) -> list[Command]:
        """Proofs that its voters are gone, as they are due."""
        if self.charter is None or now < self.due_s(now):
            return []
        self._prove_at_s = now + self._limits.prove_s
        return [ProveVoterGone(seat) for seat in self.charter.seats if seat.name not in self._ended]


def voters_of(
    members: Sequence[Member], witnesses: Iterable[Seat], present: Sequence[Seat], local: Member
) -> tuple[Seat, ...]:
    """The voters that a coordinator should have: its own agent first, then those that it has already, then the others
    in the order of `members`, those that leave last, then the witnesses. How many of each: `electorate`."""
    known = next((seat for seat in present if seat.name == local.node.agent), None)
    own = seat_of(local, members) or known
    seats = {own.name: own} if own is not None else {}
    names = [seat.name for seat in present]
    others = [m for m in members if m.port and m is not local]
    # Each change of the voters needs the consent of those before. One that leaves would take its vote along
    # (test_a_node_that_leaves_gives_its_vote_to_another_one).
    for member in sorted(others, key=lambda m: (bool(m.leaving), m.node.agent not in names)):  # stable
        if (seat := seat_of(member, members)) is not None:
            seats.setdefault(seat.name, seat)
    if own is None:
        return ()
    watching = tuple(witnesses)
    count = electorate(len(seats), len(watching))
    return (*tuple(seats.values())[: count.agents], *watching[: count.witnesses])


def parts_of(
    world: World, members: Mapping[str, Member], before: Charter
) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...], tuple[int, ...]]:
    """Nodes, listeners and sizes of a charter: of this world. `before`: the charter before."""
    names = [name for name in world.order if world.workers_of(name)]
    if len(names) > NODES_MAX:
        return (), (), ()
    known = dict(zip(before.nodes, before.listeners, strict=False))
    for member in filter(None, map(members.get, names)):
        if (seat := seat_of(member, members.values())) is not None:
            known[member.node.agent] = seat.address, seat.port
    nodes = tuple(map(agent_of, names))
    return nodes, tuple(known.get(node, ("", 0)) for node in nodes), tuple(len(world.places[name]) for name in names)


def seat_of(member: Member, members: Iterable[Member]) -> Seat | None:
    """None: nobody has reached this node yet, so its address is unknown."""
    address = member.node.local_addr or ""
    if not address and member.node.hosts_coordinator:
        address = next((other.reached_at for other in members if not other.node.hosts_coordinator), "")
    elif not address:
        address = member.address
    return Seat(member.node.agent, member.node.host, address, member.port) if address and member.port else None
