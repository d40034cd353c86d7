"""The authority of a coordinator whose nodes elect a successor when it is lost (c10d, more than one node). PURE.

It releases Start, Resume and Finish only when a majority of its voters holds the charter that they follow from, and
steps down when no majority has confirmed it for a fence. Then everything that the coordinator has started is dead, too:
its answers to pings carry the age of its authority, and the agents' fences count from there.

A successor continues from the charter. It forms nothing while workers of the old generation may run. It continues that
generation if all its nodes come with living workers. Nodes that are missing are lost: that of the old coordinator, if
its process has ended; and if the workers run in ht.survive, all others too, once these must be suspended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

from holdfast.authority.charters import Charters, OlderJob, parts_of, voters_of
from holdfast.authority.succeeded import SucceededNodes
from holdfast.authority.voter_events import Deposed, NoWitness, ProveCaller, ProveVoterGone, VoterGone, WitnessOpened
from holdfast.coordinator.authority import (
    Facts,
    GoesOnWithout,
    Handled,
    Inherited,
    Learned,
    NodeEnded,
    PreviousLeader,
)
from holdfast.coordinator.coordinator_commands import Command, Conclude, DropLink, StepDown, Tell
from holdfast.coordinator.coordinator_events import Event, Heard, LinkClosed
from holdfast.coordinator.formation import Gathering
from holdfast.coordinator.previous_generation import LostPart
from holdfast.coordinator.world import Member, Phase, World
from holdfast.protocol.charter import (
    NO_CHARTER,
    VOTERS_MIN,
    Charter,
    HostRecord,
    LedFrom,
    Poll,
    Polled,
    Renew,
    Renewed,
    Seat,
    Succession,
)
from holdfast.protocol.messages import (
    Answer,
    ContestEndpoint,
    CoordinatorAt,
    Extended,
    Finish,
    Join,
    Joined,
    Pong,
    ReportCharter,
    Resume,
    Start,
)
from holdfast.protocol.policy import Limits, NodeSpec, Note

ENDED = "its coordinator ended", "the coordinator on it ended"
SILENT = ("it stopped answering together with the coordinator",) * 2
"""The reason why a node of the old generation is lost: for the verdict, and for the console."""


class Voters:
    """The coordinator decides what a majority of its voters knows, while a majority confirms it."""

    def __init__(
        self,
        limits: Limits,
        now: float,
        node: NodeSpec,
        succession: Succession,
        *,
        places: Iterable[tuple[str, int]] = (),
    ) -> None:
        """`node`: the agent here. `places`: where witnesses may be, by host and port. Each is found or not."""
        self._limits = limits
        self._began_s = now
        self._succession = succession
        self._facts: Facts
        self._charters = Charters(limits, now, node.agent, succession)
        self._elected = succession.charter is not None
        self._older = OlderJob(limits, now, places)
        self._ask_at_s = now
        """The time at which to ask the witnesses, while it founds the job."""
        self._newest_before = 0
        """The newest generation that the old coordinator may have started. The coordinator forms none with a smaller
        number."""
        self._local_name = ""
        """The member in this process."""
        self._witnesses: dict[int, Seat] = {}
        """The witnesses by link. Each link here is one of the charters' links, too."""
        self._nodes = SucceededNodes(limits, now)
        self._strangers: set[str] = set()
        """Witnesses that know a newer coordinator and have never confirmed this one: they remember another job."""
        self._reseat = False
        """The members have changed, and perhaps the voters should."""
        self._hosts: tuple[int, tuple[HostRecord, ...], float] = (0, (), 0.0)
        """The hosts' records of the newest charter: the number of changes and the job's age (s) at which they were
        made are beside them."""
        self._written: tuple[object, ...] = ()
        """What the newest charter was made of."""
        self._due_s = -inf
        """The time at which something is due; -inf: it has to be found again."""
        self._held: list[Command] = []
        """Orders that wait until the charter counts, with all that follows them. Empty while it does."""

    def begin(self, facts: Facts) -> PreviousLeader | None:
        self._facts = facts
        succession, charter = self._succession, self._succession.charter
        if charter is None:
            return None
        died_s = self._began_s - succession.silent_s
        self._newest_before = charter.generation
        if charter.generation:
            self._nodes.take(charter, died_s)
        # A connection that was closed does not prove that the process has ended: one that is refused does
        # (test_a_coordinator_that_may_live_is_given_its_fence).
        if succession.closed:
            self._charters.prove(charter.leader, self._began_s)
        fenced_at_s = died_s + self._limits.fence_s + self._limits.kill_s
        return PreviousLeader(charter.generation, fenced_at_s, charter, succession.job_s, succession.training_s)

    # ---------------------------------------------------------------- whether it decides

    @property
    def term(self) -> int:
        return self._charters.term

    @property
    def charter(self) -> Charter:
        """The newest one, whether it counts or not."""
        return self._charters.charter

    @property
    def founded(self) -> bool:
        """No voter elected it, and there may be voters of an older job that will elect another one."""
        return not (self._elected or self._older.over)

    @property
    def forms(self) -> bool:
        """No voter elected it and it has formed nothing, so it must learn of every earlier start. This differs from
        `founded`: a founder that has proved that no older voter can elect must still learn how many restarts were used
        (succession seed 2665)."""
        return not self._elected and self._facts.newest_generation == 0

    @property
    def older(self) -> Charter | None:
        """The charter that a founder continues."""
        return self._older.charter

    def decides(self, now: float) -> bool:
        """Whether it has authority: this process may have slept, and there may be a successor."""
        return now < self._charters.authority_s(now) + self._limits.fence_s

    # Each of the rules of `decides`, `age_s`, `release` and `gathers` is needed: `test_each_rule_is_needed` in
    # tests/simulation/test_succession.py leaves out one after the other and names seeds that break a promise then.

    def resign(self) -> StepDown:
        return self._step_down(StepDown(f"no majority of the nodes has answered for {self._limits.fence_s:g} s"))

    def age_s(self, now: float) -> float:
        # Also at a start: a coordinator that heard all nodes, and that none of them heard, started a generation whose
        # fence its own agent counted from too late a time (succession seed 10807).
        return now - self._charters.authority_s(now)

    def succeeds_without(self, agents: Collection[str]) -> bool:
        return self._charters.carried_without(agents)

    def is_quiet(self, now: float) -> bool:
        return now < self._due_s and not self._held

    def due_s(self, now: float) -> float:
        if self._facts.phase is Phase.OVER and not self._held:
            return inf
        if self._due_s == -inf:
            prove_s = self._nodes.due_s if self._facts.world is None else inf
            self._due_s = min(prove_s, self._charters.due_s(now), self._goes_on_at_s())
            if self.forms:
                asks_s = self._ask_at_s if self._witnesses else inf
                self._due_s = min(self._due_s, self._older.due_s(now), asks_s)
        return self._due_s

    def check_invariants(self) -> None:
        newest = self._facts.newest_generation
        assert newest == 0 or newest >= self._newest_before
        assert not (self._held and self._charters.settled)

    # ---------------------------------------------------------------- what it learns

    def hears(self, now: float, event: Event) -> Learned | None:
        self._due_s = -inf
        match event:
            case Deposed(term, address, port, name, elected, forms):
                if self._yields(term, name, elected=elected, forms=forms):
                    text = "the job goes on elsewhere" if term == self.term else f"another coordinator has term {term}"
                    return self._step_down(StepDown(text, term, address, port))
            case VoterGone(name):
                self._charters.gone(name)
                self._older.gone(name)
                return self._on_gone(name)
            case WitnessOpened(link, seat) if seat.name not in self._strangers:
                self._witnesses[link] = seat
                self._charters.linked(seat.name, link, witness=True)
                self._reseat, self._ask_at_s = True, now
                self._older.asked((seat.host, seat.port), now)
            case NoWitness(host, port):
                self._older.answered((host, port))
            case LinkClosed(link):
                self._charters.unlinked(link, now)
                self._reseat = self._witnesses.pop(link, None) is not None or self._reseat
            case Heard(link, Renewed() as renewed) if self._charters.knows(link):
                return self._on_renewed(now, link, renewed)
            case Heard(_, Join(term=term) as join) if term > self.term and not self.forms and self._votes(join.node):
                return self._step_down(StepDown(f"a node knows of a newer coordinator (term {term})", term))
            case Heard(link, ContestEndpoint() as contest):
                return Handled(self._contested(link, contest))
            case Heard(_, ReportCharter() as report) if self.forms:
                return self._continue_older(now, report)
            case Heard(link, Polled() as polled) if self.forms and link in self._witnesses:
                self._older.answered((self._witnesses[link].host, self._witnesses[link].port))
                return self._witnessed(now, polled)
        return None

    def _on_renewed(self, now: float, link: int, renewed: Renewed) -> StepDown | None:
        if renewed.term > self.term and link in self._witnesses and not self._charters.confirmed_by(link):
            # It is the witness of another job, of the same name: its term says nothing about this one.
            self._do_without(link, now)
        elif renewed.term > self.term:
            text = f"the voters have elected another one (term {renewed.term})"
            return self._step_down(StepDown(text, renewed.term))
        self._charters.renewed(link, renewed, now)
        # Voters that hear a coordinator vote for nobody else. One that its voters hear, and most nodes do not, would
        # block the job as long as the network is like that (succession seed 16911).
        few = self._facts.phase is Phase.GATHERING and self._facts.gathering.quorum_s is None
        if few and renewed.rival and self._charters.rivalled:
            return self._step_down(
                StepDown("too few nodes reach it, and another node wants to be the coordinator", aside=True)
            )
        return None

    def _on_gone(self, name: str) -> GoesOnWithout | NodeEnded | None:
        """Continue without the old coordinator's node, if it is that one; or wait no longer for this one."""
        nodes, led_from, waits = self._nodes, self.charter.led_from, self._facts.world is None
        if name == nodes.leader:
            nodes.alone = True
            if waits and led_from is not None and not nodes.has_come(led_from.node.agent):
                return GoesOnWithout({led_from.group_rank: LostPart(led_from, *ENDED)})
        elif waits and nodes.gone(name):
            return NodeEnded()
        return None

    def joined(self, member: Member, join: Join) -> None:
        self._reseat = True
        agent = member.node.agent
        self._charters.linked(agent, member.link)
        if member.node.hosts_coordinator:
            self._local_name = member.name
        if self.forms:  # as in `_witnessed`
            self._older.term = max(self._older.term, join.term)
        self._nodes.came(agent)

    def came_too_late(self, agent: str, link: int) -> None:
        """It is needed as a voter: the outcome, too, counts only with a majority."""
        self._charters.linked(agent, link)

    def leaves(self) -> None:
        self._reseat = True

    def lost(self, now: float, member: Member) -> None:
        self._reseat = True
        self._charters.unlinked(member.link, now)

    # ---------------------------------------------------------------- the coordinator before

    def reported(self, now: float, join: Join) -> float:
        """The voters know when the old coordinator was confirmed last. The time at which one agent lost its link says
        less."""
        if join.last_generation <= self._newest_before:
            return -inf
        died_s = min(self._began_s, now - join.unlinked_s)
        self._older.lost(died_s)
        return died_s + self._limits.fence_s + self._limits.kill_s

    def gathers(self, now: float, gathering: Gathering) -> Mapping[int, LostPart]:
        older, nodes, facts = self._older, self._nodes, self._facts
        gathering.asks_until_s = older.asks_until_s if self.forms else -inf
        if self.forms and older.charter is not None:
            gathering.not_before_s, gathering.extends = older.not_before_s, older.alive
            gathering.pause = older.wait(now)
        if facts.world is not None:
            return {}

        gathering.awaited = max(facts.job.min_nodes, nodes.living) if nodes.left else 0
        lost: dict[int, LostPart] = {}
        if now >= self._goes_on_at_s():
            parts = nodes.without().items()
            lost = {rank: LostPart(part, *SILENT) for rank, part in parts if rank not in facts.previous.missing}
        # No fence is waited for where all have come or are proved to have ended
        # (test_no_fence_for_a_node_that_has_ended).
        if nodes.alone and nodes.left and not nodes.missing:
            gathering.not_before_s = min(gathering.not_before_s, now)  # nobody else runs workers
        return lost

    @property
    def continued_uid(self) -> str | None:
        return self._older.job_uid if self.forms and self._older.charter is not None else None

    def _goes_on_at_s(self) -> float:
        """The time at which those that have come continue without suspended nodes; inf: they do not, or need not."""
        previous = self._facts.previous
        if self._facts.world is not None or previous.all_joined or previous.generation != self._newest_before:
            return inf
        at_s = self._nodes.goes_on_at_s
        return at_s if at_s < inf and previous.can_shrink(self._facts.job) else inf

    # ---------------------------------------------------------------- other coordinators of the job

    def _yields(self, term: int, name: str, *, elected: bool, forms: bool = False) -> bool:
        """Whether another coordinator of the job goes on, and not this one. Of any two, each knows the same answer: one
        that has formed a generation goes on, then the later term. Two founders may have the same one: then their names
        decide."""
        other, own = (term, elected, name), (self.term, not self.founded, self._charters.name)
        return (not forms, *other) > (not self.forms, *own)

    def _votes(self, node: NodeSpec) -> bool:
        """Whether this agent, which has not joined yet, has a vote. What others say of a term deposes nobody."""
        return any(seat.name == node.agent for seat in self.charter.seats)

    def contest(self, address: str, port: int) -> ContestEndpoint:
        """What it says to the coordinator at another endpoint of the job. It listens at this address."""
        return ContestEndpoint(self.term, address, port, self._charters.name, not self.founded, self.forms)

    def _contested(self, link: int, contest: ContestEndpoint) -> tuple[Command, ...]:
        """Another coordinator calls this endpoint. Anybody could: it has to be there."""
        if self._yields(contest.term, contest.name, elected=contest.elected, forms=contest.forms):
            return (ProveCaller(contest),)
        own = next((seat for seat in self.charter.seats if seat.name == self._charters.name), None)
        return () if own is None else (Tell(link, self._coordinator_at(own)),)

    def _coordinator_at(self, own: Seat) -> CoordinatorAt:
        return CoordinatorAt(self.term, own.address, own.port, own.name, elected=not self.founded)

    def _continue_older(self, now: float, report: ReportCharter) -> Inherited | None:
        """There was an older job. Continue it, unless its voters elect another coordinator, or it has one."""
        if not self._older.heard(now, report):
            return None
        self._newest_before = report.charter.generation
        return Inherited(report.charter, report.term)

    def _witnessed(self, now: float, polled: Polled) -> Inherited | None:
        charter, limits = polled.charter, self._limits
        # A witness keeps the term of a job that is over, too. A founder that began before that term got no vote from
        # it: its charters looked older (succession seed 8155).
        self._older.term = max(self._older.term, polled.term)
        if charter is None or charter.outcome is not None:
            return None
        left_s = limits.elect_s if polled.follows else max(0.0, limits.elect_s - polled.silent_s)
        patience_s = left_s if polled.follows or len(charter.seats) >= VOTERS_MIN else 0.0
        report = ReportCharter(charter, polled.term, polled.silent_s, patience_s, follows=bool(polled.follows))
        return self._continue_older(now, report)

    def _ask_witnesses(self, now: float) -> list[Command]:
        """Ask the witnesses whether they know of an older job."""
        if now < self._ask_at_s or not self._witnesses:
            return []
        self._ask_at_s = now + self._limits.prove_s
        nobody_dials_it = Seat(self._charters.name, "", "", 1)
        poll = Poll(self.term, nobody_dials_it, NO_CHARTER)
        return [Tell(link, poll) for link in self._witnesses]

    def _do_without(self, link: int, now: float) -> None:
        self._strangers.add(self._witnesses.pop(link).name)
        self._charters.unlinked(link, now)
        self._reseat = True

    def _step_down(self, order: StepDown) -> StepDown:
        """Drop the orders that are held: they are never released."""
        self._held = []
        return order

    # ---------------------------------------------------------------- orders

    def release(self, now: float, commands: Sequence[Command]) -> list[Command]:
        self._due_s = -inf
        charters, facts, out = self._charters, self._facts, list[Command]()
        for command in (*commands, *self._propose(now)):
            match command:
                # These start and end nothing, so they need not wait behind an order that is held.
                case Tell(_, Pong() | Joined() | CoordinatorAt() | Answer() | Extended()):
                    out.append(command)
                case Tell(_, Start() | Resume() | Finish()) | Conclude() if not charters.settled:
                    self._held.append(command)
                case Tell() | DropLink() if self._held:  # in their order behind what is held
                    self._held.append(command)
                case _:
                    out.append(command)
        if charters.settled and self._held:
            out, self._held = self._held + out, []
        if self.forms:
            out += self._older.advance(now) + self._ask_witnesses(now)
        proofs = self._nodes.provable(now) if facts.world is None else []
        out += charters.advance(now, facts.job_s(now), facts.training_s)
        return out + [ProveVoterGone(seat) for seat in proofs]

    def _propose(self, now: float) -> list[Command]:
        """Bring the charter up to date."""
        charters, world, out = self._charters, self._facts.world, list[Command]()
        # A founder takes a term after all that it knows, without a vote. Another one may be elected in that term at the
        # same moment, so Renew says that nobody has voted: a voter of the other one does not confirm it (succession
        # seed 456).
        if not (self._elected or self.forms) and charters.term <= self._older.term:
            charters.take_term(self._older.term + 1)
            renew = Renew(self.term, 0, founded=True)
            out += [Tell(member.link, renew) for member in self._facts.members.values()]
        if self._state(world) == self._written and self._may_reseat() is None:
            return out
        while charters.propose(now, self._content(now), self._seats()):
            newest = charters.charter
            number, generation, voters = newest.position.number, newest.generation, len(newest.voters)
            out.append(Note("charter", {"number": number, "generation": generation, "voters": voters}))
            if not charters.counts:
                break
        self._written = self._state(world)
        return out

    def _state(self, world: World | None) -> tuple[object, ...]:
        """What shows whether the charter has to be written again; cheap, since every message asks."""
        budget = self._facts.budget
        # The number of the next generation may be known, and the same nodes, before it is known who has workers in it.
        # A charter that left out such a node let a successor start beside its workers (succession seed 1821).
        formed = None if world is None else (world.generation, world.order)
        spent = budget.used, budget.streak, budget.identical, budget.last_signature
        about = (
            self._facts.newest_generation,
            self._newest_before,
            formed,
            spent,
            self._facts.outcome is None,
            self._suspended_after_s(),
        )
        return *about, self._charters.counts, self._facts.host_backoff.changes

    def _content(self, now: float) -> Charter:
        """The charter that this state asks for. Position and voters are added by `Charters`."""
        budget, hosts = self._facts.budget, self._facts.host_backoff
        if hosts.changes != self._hosts[0]:
            self._hosts = hosts.changes, hosts.records(now), self._facts.job_s(now)
        world, before = self._facts.world, self.charter
        nodes, listeners, sizes = before.nodes, before.listeners, before.sizes
        if world is not None:
            nodes, listeners, sizes = parts_of(world, self._facts.members, before)
        return Charter(
            position=NO_CHARTER,
            voters=(),
            generation=max(self._facts.newest_generation, self._newest_before),
            nodes=nodes,
            listeners=listeners,
            led_from=self._led_from(world) if world is not None else before.led_from,
            restarts=budget.used,
            streak=budget.streak,
            identical=budget.identical,
            signature=budget.last_signature,
            hosts=self._hosts[1],
            hosts_job_s=self._hosts[2],
            outcome=self._facts.outcome,
            leader=self._charters.name,
            job_uid=self._facts.job_uid,
            sizes=sizes,
            short_lease_s=before.short_lease_s if world is None else self._suspended_after_s(),
        )

    def _suspended_after_s(self) -> float:
        """The short lease of the generation that runs (s), as in Charter.short_lease_s."""
        world, phase = self._facts.world, self._facts.phase
        return world.short_lease_s if world is not None and phase in (Phase.RUNNING, Phase.DRAINING) else 0.0

    def _led_from(self, world: World) -> LedFrom | None:
        local = self._local()
        if local is None or local.name not in world.places or not world.workers_of(local.name):
            return None
        return LedFrom(local.node, world.order.index(local.name), world.places[local.name])

    def _seats(self) -> tuple[Seat, ...] | None:
        """The voters that the charter should have; None: no change."""
        local = self._may_reseat()
        if local is None:
            return None
        self._reseat = False
        order = {
            name: number for number, name in enumerate(self._facts.world.order if self._facts.world is not None else ())
        }
        members = sorted(self._facts.members.values(), key=lambda m: (order.get(m.name, len(order)), m.arrival))
        return voters_of(members, self._witnesses.values(), self.charter.voters, local)

    def _may_reseat(self) -> Member | None:
        """The member in this process, if the voters may have to change and can; every message asks."""
        if not self._reseat or self._facts.phase is Phase.OVER or self._facts.newest_generation == 0:
            return None
        if self.charter.before or not self._charters.counts:
            return None  # one change at a time
        return self._local()

    def _local(self) -> Member | None:
        return self._facts.members.get(self._local_name)
