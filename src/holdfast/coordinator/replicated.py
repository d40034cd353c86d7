"""The coordinator of a job whose nodes elect a successor when it is lost (c10d, more than one node).

It sends Start, Resume and Finish only when a majority of its voters holds the charter that they follow from, and steps
down when no majority has confirmed it for a fence. Then everything that it has started is dead, too: its answers to
pings carry the age of its authority, and the agents' fences count from there.

A successor continues from the charter. It forms nothing while workers of the old generation may run. It continues that
generation if all its nodes come with living workers. Nodes that are missing are lost: that of the old coordinator, if
its process has ended; and if the workers run in ht.survive, all others too, once these must be suspended.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from msgspec import structs

from holdfast.coordinator.charters import Charters, OlderJob, parts_of, voters_of
from holdfast.coordinator.coordinator_machine import CoordinatorMachine, is_frequent
from holdfast.coordinator.coordinator_state import (
    Command,
    Conclude,
    Deposed,
    DropLink,
    Event,
    Heard,
    LinkClosed,
    Member,
    NoWitness,
    Phase,
    ProveCaller,
    ProveVoterGone,
    StepDown,
    Tell,
    VoterGone,
    WitnessOpened,
    World,
)
from holdfast.coordinator.ending import Judge
from holdfast.coordinator.monitor import cannot_tell
from holdfast.coordinator.succeeded import SucceededNodes
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
from holdfast.protocol.messages import Finish, Join, Joined, Moved, Pong, Recall, Resume, Start, Supersede
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec
from holdfast.protocol.rank_progress import Examine

ENDED = "its coordinator ended", "the coordinator on it ended"
SILENT = "it stopped answering together with the coordinator"


class ReplicatedCoordinator(CoordinatorMachine):
    """Decides only what a majority of its voters knows."""

    def __init__(
        self,
        job: JobSpec,
        limits: Limits,
        judge: Judge,
        now: float,
        node: NodeSpec,
        succession: Succession,
        *,
        examine: Examine = cannot_tell,
        places: Iterable[tuple[str, int]] = (),
    ) -> None:
        """`node`: the agent here. `places`: where witnesses may be, by host and port. Each is found or not."""
        super().__init__(job, limits, judge, now, examine=examine)
        charters = self._charters = Charters(limits, now, node.agent, succession)
        self._regrouping.succeeded = charters.carried_without
        self._elected = succession.charter is not None
        self._older = OlderJob(limits, now, places)
        self._ask_at_s = now
        """While it founds the job: when to ask the witnesses."""
        self._floor = 0
        """The newest generation that the old coordinator may have started."""
        self._local_name = ""
        """The member in this process."""
        self._witnesses: dict[int, Seat] = {}
        self._nodes = SucceededNodes(limits, now)
        self._strangers: set[str] = set()
        """Witnesses that know a newer coordinator and have never confirmed this one: they remember another job."""
        self._reseat = False
        """The members have changed, and perhaps the voters should."""
        self._hosts: tuple[int, tuple[HostRecord, ...]] = (0, ())
        self._written: tuple[object, ...] = ()
        """What the newest charter was made of."""
        self._own_due_s = -inf
        """When something besides `_due_s` is due; -inf: it has to be found again."""
        self._held: list[Command] = []
        """Orders that wait until the charter counts."""
        self.stepped_down = False
        if succession.charter is not None:
            self._succeed(now, succession.charter, succession)

    @property
    def term(self) -> int:
        return self._charters.term

    @property
    def charter(self) -> Charter:
        """The newest one, whether it counts or not."""
        return self._charters.charter

    @property
    def founded(self) -> bool:
        """It was elected by nobody, and there may be voters of an older job that will elect another one."""
        return not (self._elected or self._older.over)

    @property
    def forms(self) -> bool:
        """It was elected by nobody and has formed nothing."""
        return not self._elected and self.newest_generation == 0

    @property
    def older(self) -> Charter | None:
        """The charter that a founder continues."""
        return self._older.charter

    def _continue(self, now: float, charter: Charter) -> None:
        budget = self.budget
        budget.used, budget.streak = charter.restarts, charter.streak
        budget.identical, budget.last_signature = charter.identical, charter.signature
        self.host_backoff.take_over(charter.hosts, now)
        self._floor = charter.generation

    def _succeed(self, now: float, charter: Charter, succession: Succession) -> None:
        self._continue(now, charter)
        self._job_began_s = now - succession.job_s
        self._monitor.take_over(succession.training_s)
        self.job_uid = charter.job_uid
        if charter.generation:
            self._previous_leader.generation = charter.generation
            died_s = now - succession.silent_s
            self._nodes.take(charter, died_s)
            self._await_left()
            super()._wait_for_fence_previous_leader(died_s, charter.generation)
        if succession.closed:
            self._charters.prove(charter.leader, now)
        if charter.led_from is not None:
            self._why = f"lost {charter.led_from.node.host}, which had the coordinator"
        if charter.outcome is not None:
            self._finish(charter.outcome)

    # ---------------------------------------------------------------- surface

    def _is_quiet(self, now: float) -> bool:
        return now < self._own_due_s and not (self._held or self.stepped_down) and super()._is_quiet(now)

    def _handle(self, now: float, event: Event) -> list[Command]:
        """Decide nothing without authority: this process may have slept, and there may be a successor."""
        if self.stepped_down:
            return []
        if now < self._own_due_s and not self._held and is_frequent(event):
            commands = super()._handle(now, event)
            if self._due_s > -inf:  # nothing has changed, and nothing is due
                return commands
            self._own_due_s = -inf
            return self._settle(now, commands)
        self._own_due_s = -inf
        if now >= self._charters.authority_s(now) + self.limits.fence_s:
            return self._step_down(StepDown(f"no majority of the nodes has answered for {self.limits.fence_s:g} s"))
        match event:
            case Deposed(term, address, port, name, elected, forms):
                if self._yields(term, name, elected=elected, forms=forms):
                    text = "the job goes on elsewhere" if term == self.term else f"another coordinator has term {term}"
                    return self._step_down(StepDown(text, term, address, port))
            case VoterGone(name):
                self._charters.gone(name)
                self._older.gone(name)
                self._on_gone(name)
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
                if renewed.term > self.term and link in self._witnesses and not self._charters.confirmed_by(link):
                    self._do_without(link, now)
                elif renewed.term > self.term:
                    text = f"the voters have elected another one (term {renewed.term})"
                    return self._step_down(StepDown(text, renewed.term))
                self._charters.renewed(link, renewed, now)
                few = self.phase is Phase.GATHERING and self._gathering.quorum_s is None
                if few and renewed.rival and self._charters.rivalled:
                    return self._step_down(
                        StepDown("too few nodes reach it, and another node wants to be the coordinator", aside=True)
                    )
            case Heard(_, Join(term=term) as join) if term > self.term and not self.forms and self._votes(join.node):
                return self._step_down(StepDown(f"a node knows of a newer coordinator (term {term})", term))
            case Heard(link, Supersede() as call):
                return self._called(link, call)
            case Heard(_, Recall() as recall) if self.forms:
                self._recalled(now, recall)
            case Heard(link, Polled() as polled) if self.forms and link in self._witnesses:
                self._older.answered((self._witnesses[link].host, self._witnesses[link].port))
                self._witnessed(now, polled)
        return self._settle(now, super()._handle(now, event))

    def next_deadline(self) -> float | None:
        deadline = None if self.stepped_down else super().next_deadline()
        if deadline is None and not self._held:
            return None
        if self._own_due_s == -inf:
            prove_s = self._nodes.due_s if self.world is None else inf
            self._own_due_s = min(prove_s, self._charters.due_s(self._now), self._goes_on_at_s())
            if self.forms:
                asks_s = self._ask_at_s if self._witnesses else inf
                self._own_due_s = min(self._own_due_s, self._older.due_s(self._now), asks_s)
        return min(inf if deadline is None else deadline, self._own_due_s)

    def _authority_age_s(self) -> float:
        return self._now - self._charters.authority_s(self._now)

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self.generation == 0 or self.generation >= self._floor
        assert not (self._held and self._charters.settled)

    def _on_gone(self, name: str) -> None:
        """Continue without the old coordinator's node, if it is that one; or wait no longer for this one."""
        nodes, led_from = self._nodes, self.charter.led_from
        if name == nodes.leader:
            nodes.alone = True
            if self.world is None and led_from is not None and not nodes.has_come(led_from.node.agent):
                self._previous_leader.missing[led_from.group_rank] = led_from
        elif self.world is None and nodes.gone(name):
            self._await_left()
            self._abandon(self._previous_leader.end())

    def _await_left(self) -> None:
        """The nodes that are left may form the next generation as soon as all have come."""
        self._gathering.awaited = max(self.job.min_nodes, self._nodes.living) if self._nodes.left else 0

    def _goes_on_at_s(self) -> float:
        """When those that have come continue the generation without suspended nodes; inf: they do not, or need not."""
        previous = self._previous_leader
        if self.world is not None or previous.whole or previous.generation != self._floor:
            return inf
        at_s = self._nodes.goes_on_at_s
        return at_s if at_s < inf and previous.spares(self.job) else inf

    # ---------------------------------------------------------------- authority

    def _yields(self, term: int, name: str, *, elected: bool, forms: bool = False) -> bool:
        """Whether another coordinator of the job goes on, and not this one. Of any two, each knows the same answer: one
        that has formed a generation goes on, then the later term. Two founders may have the same one: then their names
        decide."""
        other, own = (term, elected, name), (self.term, not self.founded, self._charters.name)
        return (not forms, *other) > (not self.forms, *own)

    def _votes(self, node: NodeSpec) -> bool:
        """Whether this agent, which has not joined yet, has a vote. What others say of a term deposes nobody."""
        return any(seat.name == node.agent for seat in self.charter.seats)

    def call(self, address: str, port: int) -> Supersede:
        """What it says to the coordinator at another endpoint of the job. It listens at this address."""
        return Supersede(self.term, address, port, self._charters.name, not self.founded, self.forms)

    def _called(self, link: int, call: Supersede) -> list[Command]:
        """Another coordinator calls this endpoint. Anybody could: it has to be there."""
        if self._yields(call.term, call.name, elected=call.elected, forms=call.forms):
            return [ProveCaller(call)]
        own = next((seat for seat in self.charter.seats if seat.name == self._charters.name), None)
        return [] if own is None else [Tell(link, self._moved(own))]

    def _moved(self, own: Seat) -> Moved:
        return Moved(self.term, own.address, own.port, own.name, elected=not self.founded)

    def _recalled(self, now: float, recall: Recall, *, alive: bool = False) -> None:
        """There was an older job. Continue it, unless its voters elect another coordinator, or it has one."""
        if self._older.heard(now, recall, alive=alive):
            charter = recall.charter
            self._note("recalled", number=charter.position.number, term=recall.term, generation=charter.generation)
            self._continue(now, charter)
            self._abandon(self._previous_leader.heard_of(charter.generation))

    def _witnessed(self, now: float, polled: Polled) -> None:
        charter, limits = polled.charter, self.limits
        self._older.term = max(self._older.term, polled.term)  # a witness keeps that of a job that is over, too
        if charter is not None and charter.outcome is None:
            left_s = limits.elect_s if polled.follows else max(0.0, limits.elect_s - polled.silent_s)
            patience_s = left_s if polled.follows or len(charter.seats) >= VOTERS_MIN else 0.0
            recall = Recall(charter, polled.term, polled.silent_s, patience_s)
            self._recalled(now, recall, alive=bool(polled.follows))

    def _ask_witnesses(self, now: float) -> list[Command]:
        """Whether they know of an older job."""
        if now < self._ask_at_s or not self._witnesses:
            return []
        self._ask_at_s = now + self.limits.prove_s
        nobody_dials_it = Seat(self._charters.name, "", "", 1)
        poll = Poll(self.term, nobody_dials_it, NO_CHARTER)
        return [Tell(link, poll) for link in self._witnesses]

    def _do_without(self, link: int, now: float) -> None:
        self._strangers.add(self._witnesses.pop(link).name)
        self._charters.unlinked(link, now)
        self._reseat = True

    def _step_down(self, command: StepDown) -> list[Command]:
        self.stepped_down = True
        self._note("steps_down", reason=command.reason, term=self.term)
        out, self._out, self._held = self._out, [], []
        return [*out, command]

    def _settle(self, now: float, commands: list[Command]) -> list[Command]:
        """What may be carried out now, of these commands and of those that were held back."""
        charters = self._charters
        self._propose(now)
        commands, self._out = commands + self._out, []
        out: list[Command] = []
        for command in commands:
            match command:
                case Tell(_, Pong() | Joined() | Moved()):
                    out.append(command)
                case Tell(_, Start() | Resume() | Finish()) | Conclude() if not charters.settled:
                    self._held.append(command)
                case Tell() | DropLink() if self._held:
                    self._held.append(command)
                case _:
                    out.append(command)
        if charters.settled and self._held:
            out, self._held = self._held + out, []
        if self.forms:
            out += self._older.advance(now) + self._ask_witnesses(now)
        job_s = now - self._job_began_s
        proofs = self._nodes.provable(now) if self.world is None else []
        out += charters.advance(now, job_s, self._monitor.training_s)
        return out + [ProveVoterGone(seat) for seat in proofs]

    def _propose(self, now: float) -> None:
        """Bring the charter up to date."""
        charters, world = self._charters, self.world
        if not (self._elected or self.forms) and charters.term <= self._older.term:  # it continues after them
            charters.take_term(self._older.term + 1)
            for member in self.members.values():
                self._tell(member, Renew(self.term, 0, founded=True))
        if self._state(world) == self._written and self._may_reseat() is None:
            return
        while charters.propose(now, self._content(now), self._seats()):
            newest = charters.charter
            self._note(
                "charter", number=newest.position.number, generation=newest.generation, voters=len(newest.voters)
            )
            if not charters.counts:
                break
        self._written = self._state(world)

    def _state(self, world: World | None) -> tuple[object, ...]:
        """What shows whether the charter has to be written again; cheap, since every message asks."""
        budget = self.budget
        # The number of the next generation may be known, and the same nodes, before it is known who has workers in it.
        formed = None if world is None else (world.generation, world.order)
        spent = budget.used, budget.streak, budget.identical, budget.last_signature
        about = self.newest_generation, self._floor, formed, spent, self.outcome is None, self._suspended_after_s()
        return *about, self._charters.counts, self.host_backoff.changes

    def _content(self, now: float) -> Charter:
        """The charter that this state asks for. Position and voters are added by `Charters`."""
        budget, hosts = self.budget, self.host_backoff
        if hosts.changes != self._hosts[0]:
            self._hosts = hosts.changes, hosts.records(now)
        world, before = self.world, self.charter
        nodes, listeners, sizes = before.nodes, before.listeners, before.sizes
        if world is not None:
            nodes, listeners, sizes = parts_of(world, self.members, before)
        return Charter(
            position=NO_CHARTER,
            voters=(),
            generation=max(self.newest_generation, self._floor),
            nodes=nodes,
            listeners=listeners,
            led_from=self._led_from(world) if world is not None else before.led_from,
            restarts=budget.used,
            streak=budget.streak,
            identical=budget.identical,
            signature=budget.last_signature,
            hosts=self._hosts[1],
            outcome=self.outcome,
            leader=self._charters.name,
            job_uid=self.job_uid,
            sizes=sizes,
            short_lease_s=before.short_lease_s if world is None else self._suspended_after_s(),
        )

    def _suspended_after_s(self) -> float:
        """As in Charter.short_lease_s, of the generation that runs."""
        running = self.world is not None and self.phase in (Phase.RUNNING, Phase.DRAINING)
        return self._world().short_lease_s if running else 0.0

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
        order = {name: number for number, name in enumerate(self.world.order if self.world is not None else ())}
        members = sorted(self.members.values(), key=lambda m: (order.get(m.name, len(order)), m.arrival))
        return voters_of(members, self._witnesses.values(), self.charter.voters, local)

    def _may_reseat(self) -> Member | None:
        """The member in this process, if the voters may have to change and can; every message asks."""
        if not self._reseat or self.phase is Phase.OVER or self.newest_generation == 0:
            return None
        if self.charter.before or not self._charters.counts:
            return None  # one change at a time
        return self._local()

    def _local(self) -> Member | None:
        return self.members.get(self._local_name)

    # ---------------------------------------------------------------- the coordinator before

    def _joined(self) -> Joined:
        return structs.replace(super()._joined(), term=self.term)

    def _on_join(self, now: float, link: int, join: Join) -> None:
        if self.outcome is not None:  # it will not be a member, and is needed as a voter
            self._charters.linked(join.node.agent, link)
        super()._on_join(now, link, join)

    def _observe_previous_leader(self, now: float, member: Member, join: Join) -> None:
        self._reseat = True
        agent = member.node.agent
        self._charters.linked(agent, member.link)
        if member.node.hosts_coordinator:
            self._local_name = member.name
        if self.forms:
            self._older.term = max(self._older.term, join.term)
        self._nodes.came(agent)
        self._previous_leader.came(agent)
        super()._observe_previous_leader(now, member, join)

    def _wait_for_fence_previous_leader(self, died_s: float, generation: int) -> None:
        """The voters know when the old coordinator was confirmed last. The time at which one agent lost its link says
        less."""
        if generation > self._floor:
            self._older.lost(died_s)
            super()._wait_for_fence_previous_leader(died_s, generation)

    def _on_leave(self, now: float, member: Member, reason: str, *, drain: bool) -> None:
        self._reseat = True
        super()._on_leave(now, member, reason, drain=drain)

    def _advance_gathering(self, now: float) -> None:
        older, gathering = self._older, self._gathering
        gathering.asks_until_s = older.asks_until_s if self.forms else -inf
        if self.forms and older.charter is not None:
            gathering.not_before_s, gathering.extends = older.not_before_s, older.alive
            gathering.pause, self.job_uid = older.wait(now), older.job_uid
        nodes = self._nodes
        if now >= self._goes_on_at_s():
            self._previous_leader.missing = nodes.without() | self._previous_leader.missing
        if self.world is None and nodes.alone and nodes.left and not nodes.missing:
            self._gathering.not_before_s = min(self._gathering.not_before_s, now)  # nobody else runs workers
        super()._advance_gathering(now)

    def _resume(self, now: float) -> None:
        super()._resume(now)
        for part in self._previous_leader.missing.values():
            ended = part.node.agent == self._nodes.leader and self._nodes.alone
            reason, why = ENDED if ended else (SILENT, SILENT)
            self._world().lost(part.node.member, part.node.host, reason)
            self._lost.append(f"{part.node.host} was lost: {why}")
        if self._lost:
            self._on_lost(now)

    def _lose(self, now: float, member: Member, reason: str) -> None:
        self._reseat = True
        self._charters.unlinked(member.link, now)
        super()._lose(now, member, reason)
