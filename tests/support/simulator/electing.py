"""The processes of a simulated job whose nodes elect a successor.

    ElectingAgent       an agent's process: the agent, its voter, and perhaps the coordinator
    SimWitness          a witness's process
    SimReplicated       a coordinator in an agent's process, and the voters that confirm it

They find the coordinator as the runtime does (`holdfast.runtime.succession`): all likely places are tried side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.agent import voter as vote
from holdfast.authority import voter_events as votes
from holdfast.authority.voters import Voters
from holdfast.coordinator import coordinator_commands as cdo
from holdfast.coordinator import coordinator_events as cevents
from holdfast.coordinator.coordinator import Coordinator
from holdfast.protocol.charter import Charter, Poll, Polled, Renew, Renewed, Seat, Succession
from holdfast.protocol.errors import CoordinatorUnreachableError
from holdfast.protocol.messages import ContestEndpoint, CoordinatorAt, FromCoordinator, Joined
from holdfast.protocol.policy import NodeSpec
from holdfast.protocol.session import Accepted
from tests.support.simulator.drawn import DrawnAgent
from tests.support.simulator.network import FakeEnd
from tests.support.simulator.nodes import Shell, SimCoordinator

if TYPE_CHECKING:
    from tests.support.simulator.succession import SuccessionCluster

ENDPOINT_PORT, AGENT_PORT = 29400, 7000
STAGGER_S, RETRY_S, ELECTION_S_MAX = 0.05, 0.05, 2.0
ASK_S_MAX, ASK_LEADER_S_MAX = 0.5, 5.0
CALL_FIRST_S, CALL_S, CALL_OFTEN_S = 0.25, 0.5, 5.0
"""As in the runtime."""
HOPS_MAX = 2

Place = tuple[str, int]
Process = Any
"""An ElectingAgent or a SimWitness."""


class SimVoter(Shell):
    """A Voter in a process."""

    def __init__(self, cluster: SuccessionCluster, process: Process, name: str, *, stands: bool) -> None:
        super().__init__(
            cluster, f"{process.host}'s voter", cluster.new_voter(name, stands=stands), cluster.next_rank()
        )
        self.cluster = cluster
        self.process = process
        self._kept: Callable[[Renewed], None] = lambda _: None
        self._replies: dict[int, Callable[[Polled], None]] = {}

    @property
    def electing(self) -> bool:
        return bool(self.machine.elects(self.cluster.clock.now))

    def renew_came(self, renew: Renew, answer: Callable[[Renewed], None]) -> None:
        self._kept = answer
        self.handle(vote.RenewCame(renew))

    def poll_came(self, poll: Poll, answer: Callable[[Polled], None]) -> None:
        number = len(self._replies) + 1
        self._replies[number] = answer
        self.handle(vote.PollCame(number, poll))

    def handle(self, event: vote.Event) -> None:
        before = self.machine.leader
        super().handle(event)
        if self.alive and self.machine.leader != before:
            self.process.news()

    def _do(self, command: vote.Command) -> None:
        match command:
            case vote.SendRenewed(renewed):
                self._kept(renewed)
            case vote.AskVote():
                self.cluster.ask(self.process.host, command, self.handle)
            case vote.AnswerPoll(number, polled):
                self._replies[number](polled)
            case vote.Lead(succession):
                self.process.lead(succession)


class SimWitness:
    """A witness: a voter that coordinators connect to."""

    def __init__(self, cluster: SuccessionCluster, host: str) -> None:
        self.cluster, self.host = cluster, host
        self.listening = True
        self.voter = SimVoter(cluster, self, f"{host}#{cluster.events + 1}", stands=False)
        self.coordinator = None
        self._ends: list[FakeEnd] = []

    @property
    def seat(self) -> Seat:
        return Seat(self.voter.machine.name, self.host, self.cluster.address(self.host), ENDPOINT_PORT, witness=True)

    def listens_at(self, port: int) -> bool:
        return port == ENDPOINT_PORT

    def where(self) -> vote.LeaderAddress | None:
        leader: vote.LeaderAddress | None = self.voter.machine.leader
        return leader

    def news(self) -> None:
        """It has no agent to whom this would matter."""

    def accept(self, end: FakeEnd) -> None:
        term = 0

        def heard(message: object) -> None:
            nonlocal term
            if isinstance(message, Renew):
                term = max(term, message.term)
                self.voter.renew_came(message, end.send)
            elif isinstance(message, Poll):
                self.voter.poll_came(message, end.send)

        def closed(_: str) -> None:
            self.voter.handle(vote.Unlinked(term, closed=True))

        end.on_message, end.on_closed = heard, closed
        self._ends.append(end)

    def freeze(self, for_s: float) -> None:
        self.voter.pause(for_s)

    def crash(self, *, silent: bool) -> None:
        self.listening = self.voter.alive = False
        for end in self._ends:
            end.vanish() if silent else end.close("connection reset")


class ElectingAgent(DrawnAgent):
    """The process of an agent."""

    def __init__(self, cluster: SuccessionCluster, node: NodeSpec) -> None:
        super().__init__(cluster, node)
        self.world: SuccessionCluster = cluster
        self.node = node
        self.listening = True
        self.port = AGENT_PORT if cluster.fixed_ports else AGENT_PORT + cluster.events % 50_000 + 1
        self.coordinator: SimReplicated | None = None
        self.voter = SimVoter(cluster, self, node.agent, stands=True)
        self._attempt = 0
        """Number of the search that is under way; the steps of earlier ones end without effect."""
        self._seeking = False
        self._open = 0
        self._founding = False
        self._until_s = 0.0
        self._place: Place | None = None
        """The other end of the newest link."""
        self._term = 0
        """Of the coordinator at the other end; 0: not joined."""
        self._local = False
        self._heard_of_another = False
        cluster.on_host(self.host, self._call_founders, CALL_S)

    # ---------------------------------------------------------------- life

    def listens_at(self, port: int) -> bool:
        return port == self.port or (port == ENDPOINT_PORT and self.host in self.world.endpoints)

    def end(self) -> None:
        """The process ends in order."""
        self.crash(silent=False)

    def crash(self, *, silent: bool) -> None:
        self.listening = self.voter.alive = False
        self._attempt += 1
        if self.coordinator is not None:
            self.coordinator.die(silent=silent)
            self.world.log(self.coordinator.who, "ends")
        self.coordinator = None
        if self.alive or silent:
            self.die(silent=silent)

    def freeze(self, for_s: float) -> None:
        """Its supervisor kills the workers at the fence."""
        fence_at_s = self.machine.fence_at_s
        for shell in (self, self.voter, self.coordinator):
            if shell is not None:
                shell.pause(for_s)
        now = self.world.clock.now
        if fence_at_s is not None and now <= fence_at_s < now + for_s:
            generation = self.generation

            def fence() -> None:
                if self.alive and self.generation == generation:
                    self._kill()
                    self.handle(ev.WorkersFenced())

            self.world.agenda.at(fence_at_s, fence)

    # ---------------------------------------------------------------- the coordinator in this process

    def lead(self, succession: Succession) -> None:
        if self.coordinator is not None:
            self.coordinator.handle(votes.Deposed(succession.term, "", 0))
        if self.coordinator is not None:
            self.voter.handle(vote.Unlinked(succession.term, closed=False, local=True))
            return
        self.coordinator = self.world.lead(self, self.node, succession)
        self.news()

    def stepped_down(self, command: cdo.StepDown) -> None:
        coordinator, self.coordinator = self.coordinator, None
        assert coordinator is not None
        self.world.log(coordinator.who, f"steps down: {command.reason}")
        voters = coordinator.voters
        if voters.charter.voters:
            self.voter.renew_came(Renew(voters.term, 0, voters.charter), lambda _: None)
        self.voter.handle(vote.Unlinked(voters.term, closed=False, local=True, aside=command.aside))
        if command.port:
            coordinator.announce(CoordinatorAt(command.term, command.address, command.port))
            self.voter.handle(vote.HeardOf(command.term, command.address, command.port))
        coordinator.die(silent=False)

    # ---------------------------------------------------------------- finding the coordinator

    def where(self) -> vote.LeaderAddress | None:
        """Where the coordinator is, for others."""
        leader: vote.LeaderAddress | None = self.voter.machine.leader
        if leader is not None and leader.term > self._term:
            return leader
        return self.linked_to()

    def linked_to(self) -> vote.LeaderAddress | None:
        return vote.LeaderAddress(*self._place, self._term) if self._place is not None and self._term else None

    def _dial(self) -> None:
        if self.alive:
            self._until_s = self.world.clock.now + ELECTION_S_MAX
            self._begin()

    def news(self) -> None:
        """Another coordinator is known, or leads here: look again."""
        if self._seeking:
            self._begin()

    def _begin(self) -> None:
        self._attempt += 1
        self._seeking = True
        world, attempt = self.world, self._attempt
        if self.coordinator is not None:
            self._place = None
            self._link_to(self.coordinator)
            return
        places = self._places()
        self._open = len(places)
        self._founding = not self.voter.electing and self.host == world.endpoints[0]
        if self._founding and places:
            limit_s = ASK_S_MAX if self.voter.machine.leader is None else ASK_LEADER_S_MAX
            world.on_host(self.host, lambda: self._give_up(attempt), limit_s)
        if not places:
            world.on_host(self.host, lambda: self._give_up(attempt))
        for number, place in enumerate(places):
            world.on_host(self.host, partial(self._try, attempt, place, HOPS_MAX), STAGGER_S * number)

    def _places(self) -> list[Place]:
        leader, charter = self.voter.machine.leader, self.voter.machine.charter
        places = [(leader.address, leader.port)] if leader is not None else []
        places += [self._place] if self._place is not None else []
        places += [(self.world.address(host), ENDPOINT_PORT) for host in self.world.endpoints]
        places += [(self.world.address(host), ENDPOINT_PORT) for host in self.world.witnesses]
        seats = charter.seats if charter is not None else ()
        places += [(seat.address, seat.port) for seat in seats if not seat.witness]
        own = self.world.address(self.host)
        return list(dict.fromkeys(place for place in places if place[0] != own))

    def _try(self, attempt: int, place: Place, hops: int) -> None:
        if attempt != self._attempt:
            return

        def done(process: Process | str) -> None:
            if attempt != self._attempt or not self.alive:
                return
            where = None if isinstance(process, str) else process.where()
            leader = None if isinstance(process, str) else process.coordinator
            if leader is not None and not self._ignores(leader):
                self._place = place
                self._link_to(leader)
            elif leader is not None:
                self._report_charter(leader)
                self._failed(attempt)
            elif where is not None and hops and where.address != self.world.address(self.host):
                self._try(attempt, (where.address, where.port), hops - 1)
            else:
                self._failed(attempt)

        self.world.reach(self.host, place, done)

    def _call_founders(self) -> None:
        """While its voter follows a coordinator elsewhere: call the endpoint, where the job may be started again."""
        if not (self.alive and self.voter.alive):
            return
        world, endpoint = self.world, self.world.endpoints[0]
        if self.voter.machine.calls and self.host != endpoint:
            world.call(self.host, endpoint, self._met)
        world.on_host(self.host, self._call_founders, CALL_S)

    def _met(self, process: Process) -> None:
        leader = getattr(process, "coordinator", None)
        if not self.alive or leader is None or leader.number == self.coordinator_number:
            return
        if leader.introduction().forms and self.voter.machine.calls:
            self._report_charter(leader)
            self.voter.handle(vote.FounderMet())

    def _failed(self, attempt: int) -> None:
        self._open -= 1
        if not self._open:
            self._give_up(attempt)

    def _give_up(self, attempt: int) -> None:
        """No place leads to the coordinator."""
        if attempt != self._attempt or not self.alive:
            return
        if self._founding:
            self.lead(Succession())
        elif self.voter.electing and self.world.clock.now < self._until_s:
            self.world.on_host(self.host, lambda: self._begin() if attempt == self._attempt else None, RETRY_S)
        else:
            self._attempt += 1
            self._seeking = False
            error = CoordinatorUnreachableError
            self.handle(ev.DialFailed(error.code, error.exit_code, "nobody leads there", final=False))

    def _ignores(self, coordinator: SimReplicated) -> bool:
        about, now = coordinator.introduction(), self.world.clock.now
        return bool(self.voter.machine.ignores(now, about.name, about.term, founded=about.founded))

    def _report_charter(self, coordinator: SimReplicated, end: FakeEnd | None = None) -> None:
        """`end`: of the link by which it joins; None: it does not join."""
        about = coordinator.introduction()
        name = "" if coordinator is self.coordinator else about.name  # as in the runtime
        now, voter = self.world.clock.now, self.voter.machine
        report = voter.charter_report(now, name, about.term, founded=about.founded, forms=about.forms)
        if report is None:
            return
        if end is None:
            link = self.world.network.connect(self.host, coordinator.host)
            coordinator.accept(link.b, self.host)
            end = link.a
            self.world.agenda.after(self.world.limits.poll_s, end.close)
        end.send(report)

    def _link_to(self, coordinator: SimReplicated) -> None:
        self._attempt += 1
        self._seeking = False
        link = self.world.network.connect(self.host, coordinator.host)
        self._end = link.a
        self._term, self._heard_of_another, self._local = 0, False, coordinator.host == self.host
        link.a.on_message = partial(self._on_link, link.a, partial(self._got, link.a))
        link.a.on_closed = partial(self._on_link, link.a, self._link_lost)
        self.coordinator_number = coordinator.number
        coordinator.accept(link.b, self.host)
        self._report_charter(coordinator, link.a)
        self.handle(ev.Dialed(local=False, port=self.port, term=self.voter.machine.term))

    def _on_link(self, end: FakeEnd, action: Callable[[Any], None], what: object) -> None:
        """What comes waits in the socket while the process stands still, and is lost when the process hangs up."""
        until_s = self.world.frozen.get(self.host, 0.0)
        if until_s > self.world.clock.now:
            self.world.agenda.at(until_s, lambda: self._on_link(end, action, what))
        elif end is self._end:
            action(what)

    def _got(self, end: FakeEnd, message: FromCoordinator) -> None:
        match message:
            case Renew():
                self.voter.renew_came(message, end.send)
            case CoordinatorAt(term, address, port):
                self._heard_of_another = True
                self.voter.handle(vote.HeardOf(term, address, port))
            case Joined(term=term):
                self._term = term
                if not self._local or self.coordinator is not None:  # else that one has stepped down meanwhile
                    self.voter.handle(vote.Linked(term))
                self._received(message)
            case _:
                self._received(message)

    def _link_lost(self, reason: str) -> None:
        self._unlinked(closed=not self._heard_of_another)
        super()._link_lost(reason)

    def _unlinked(self, *, closed: bool) -> None:
        term, self._term = self._term, 0
        if term and not self._local:
            self.voter.handle(vote.Unlinked(term, closed))

    def _do(self, command: do.Command) -> None:
        super()._do(command)
        if isinstance(command, do.HangUp):
            self._unlinked(closed=False)


class SimReplicated(SimCoordinator):
    """A coordinator in an agent's process. Renews its connections to witnesses, and calls the other endpoints."""

    def __init__(
        self, world: SuccessionCluster, agent: ElectingAgent, number: int, machine: Coordinator, voters: Voters
    ) -> None:
        super().__init__(world, agent.host, number, machine, f"coordinator on {agent.host}")
        self.cluster = world
        self.agent = agent
        self.voters = voters
        self.began_s = world.clock.now
        self._committed: Charter | None = None
        self._older: Charter | None = None
        self._watched: set[str] = set()
        """Witnesses with a connection."""
        charters = voters._charters
        charters._count = partial(self._count, charters._count)  # type: ignore[method-assign]
        for host in (*world.endpoints, *world.witnesses):
            if host != self.host:
                world.on_host(self.host, partial(self._watch, host))

    def introduction(self) -> Accepted:
        """What an agent that connects learns of it."""
        name, voters = self.agent.voter.machine.name, self.voters
        return Accepted(1, name=name, term=voters.term, founded=voters.founded, forms=voters.forms)

    def announce(self, message: CoordinatorAt) -> None:
        for end in self._ends.values():
            end.send(message)

    def die(self, *, silent: bool) -> None:
        super().die(silent=silent)
        if self.cluster.coordinator is self:
            self.cluster.coordinator = None

    def _handled(self) -> None:
        super()._handled()
        self._look_back()
        self.cluster.jobs.wrote(self.number, self.voters.charter)

    def _look_back(self) -> None:
        """Whether a founder continues another charter."""
        older = self.voters.older
        if older is not None and older is not self._older:
            self._older = older
            self.cluster.jobs.charter_reported(self.number, older)

    def _count(self, count: Callable[[], None]) -> None:
        """Every charter that counts is seen, before anything follows from it: also one without voters, of a coordinator
        that nobody has reached yet."""
        count()
        self._look_back()
        voters = self.voters
        charter = voters.charter
        if charter is not self._committed and not voters.forms and voters._charters.counts:
            self._committed = charter
            self.cluster.jobs.committed(self.number, voters.term, charter)

    def _do(self, command: cdo.Command) -> None:
        match command:
            case cdo.StepDown():
                self.agent.stepped_down(command)
            case votes.ProveCaller(contest):
                self.cluster.reach(self.host, (contest.address, contest.port), partial(self._found_caller, contest))
            case votes.ProveVoterGone(seat):
                self.cluster.reach(self.host, (seat.address, seat.port), partial(self._proved, seat))
            case _:
                super()._do(command)

    def _found_caller(self, contest: ContestEndpoint, process: Process | str) -> None:
        if not self.alive or isinstance(process, str | SimWitness) or process.coordinator is None:
            return
        it = process.coordinator.introduction()
        if it.name == contest.name:
            about = it.name, not it.founded, it.forms
            self.handle(votes.Deposed(it.term, contest.address, contest.port, *about))

    def _proved(self, seat: Seat, process: Process | str) -> None:
        another = not isinstance(process, str) and process.voter.machine.name != seat.name
        if process == "refused" or another:
            self.handle(votes.VoterGone(seat.name))

    def _watch(self, host: str) -> None:
        """Connect to a witness, or call another endpoint: a node that returned there may have founded the job again."""
        if not self.alive:
            return
        if host not in self._watched:
            self.cluster.reach(self.host, (self.cluster.address(host), ENDPOINT_PORT), partial(self._reached, host))
        often = self.cluster.clock.now < self.began_s + CALL_OFTEN_S
        self.cluster.on_host(self.host, lambda: self._watch(host), CALL_FIRST_S if often else CALL_S)

    def _reached(self, host: str, process: Process | str) -> None:
        if self.alive and not isinstance(process, SimWitness):
            self.handle(votes.NoWitness(host, ENDPOINT_PORT))
        if isinstance(process, str) or not self.alive or host in self._watched:
            return
        link = self.cluster.network.connect(self.host, host)
        if isinstance(process, SimWitness):
            self._watched.add(host)
            process.accept(link.b)
            self._links += 1
            number, end = self._links, link.a
            self._ends[number] = end
            end.on_message = lambda message: self.handle(cevents.Heard(number, message))  # type: ignore[arg-type]

            def closed(reason: str) -> None:
                self._watched.discard(host)
                self._ends.pop(number, None)
                self.handle(cevents.LinkClosed(number, reason))

            end.on_closed = closed
            self.handle(votes.WitnessOpened(number, process.seat))
            return
        contest = self.voters.contest(self.cluster.address(self.host), self.agent.port)
        if process.coordinator is not None:
            link.a.on_message = self._answered
            process.coordinator.accept(link.b, self.host)
            link.a.send(contest)
            self.cluster.agenda.after(self.cluster.limits.poll_s, link.a.close)
            return
        process.voter.handle(vote.HeardOf(contest.term, contest.address, contest.port))
        where = process.linked_to()  # what it only heard of may be lost
        if where is not None and where.term > contest.term:
            self._answered(CoordinatorAt(where.term, where.address, where.port))

    def _answered(self, message: object) -> None:
        if isinstance(message, CoordinatorAt):
            self.handle(
                votes.Deposed(message.term, message.address, message.port, message.name, elected=message.elected)
            )
