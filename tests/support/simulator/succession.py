"""A simulated job whose nodes elect a successor when its coordinator is lost: several coordinators may exist at once.

    SuccessionCluster   hosts, witnesses, endpoints, and who reaches whom
    ElectingAgent       an agent's process: the agent, its voter, and perhaps the coordinator
    SimWitness          a witness's process
    SimReplicated       a ReplicatedCoordinator in an agent's process

It finds the coordinator as the runtime does (`holdfast.runtime.succession`): all likely places are tried side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from msgspec import structs

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.agent import voter as vote
from holdfast.coordinator import coordinator_state as cstate
from holdfast.coordinator.coordinator_state import Phase
from holdfast.coordinator.replicated import ReplicatedCoordinator
from holdfast.protocol.charter import VOTERS_MIN, Charter, Seat, Succession
from holdfast.protocol.errors import CoordinatorUnreachableError
from holdfast.protocol.messages import Call, FromCoordinator, Joined, Keep, Kept, Moved, Poll, Polled
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import NodeSpec, Note
from tests.support.simulator.checkers import SuccessionChecker
from tests.support.simulator.cluster import SimCluster, SimOptions
from tests.support.simulator.drawn import DrawnAgent
from tests.support.simulator.network import FakeEnd
from tests.support.simulator.nodes import LINGER_S, Shell, SimCoordinator, simple_judge
from tests.support.simulator.stalls import simple_examine

ENDPOINT_PORT, AGENT_PORT = 29400, 7000
NO_ANSWER_S = 1.0
"""An attempt to connect that nobody answers fails after this time."""
STAGGER_S, RETRY_S, ELECTION_S_MAX = 0.05, 0.05, 2.0
ASK_S_MAX, ASK_LEADER_S_MAX = 0.5, 5.0
CALL_FIRST_S, CALL_S, CALL_OFTEN_S = 0.25, 2.0, 5.0
"""As in the runtime."""
HOPS_MAX = 2
DECISIONS = frozenset({"assigned", "charter", "elected", "regroup_begun", "started", "stopping"})
LOOK_S = 1.0
CALM_S = 30.0
"""A majority that was not disturbed for so long has a job that runs."""

Place = tuple[str, int]
Process = Any
"""An ElectingAgent or a SimWitness."""


@dataclass(frozen=True)
class Weather:
    """What attempts to connect suffer, all the time."""

    loss: float = 0.0
    """Share of those that are not answered."""
    twice: float = 0.0
    """Share of the questions to voters that arrive a second time, later."""


class SuccessionCluster(SimCluster):
    """Nodes `n0` … and witnesses `w0` …; the endpoint is on n0, others may be listed after it."""

    voter_class = vote.Voter
    coordinator_class = ReplicatedCoordinator

    def __init__(
        self,
        seed: int,
        nodes: int,
        options: SimOptions,
        *,
        endpoints: int = 1,
        witnesses: int = 0,
        fixed_ports: bool = False,
        weather: Weather = Weather(),
        story_lines_max: int | None = 60,
    ) -> None:
        self.weather = weather
        self.endpoints = [f"n{i}" for i in range(endpoints)]
        self.fixed_ports = fixed_ports
        self.processes: dict[str, Process] = {}
        """By host; also while a coordinator lingers after its agent."""
        self.witnesses: list[str] = []
        self.dark: set[str] = set()
        """Hosts without power."""
        self.frozen: dict[str, float] = {}
        """Until when the processes of a host stand still."""
        self.torn: dict[str, float] = {}
        """When a host's link was broken while both ends lived, or its agent was killed."""
        self.calm_since_s = 0.0
        self.jobs: SuccessionChecker = SuccessionChecker()
        super().__init__(seed, nodes, options, story_lines_max=story_lines_max)
        self.checker = self.jobs
        for number in range(witnesses):
            self.witnesses.append(f"w{number}")
            self.boot_witness(f"w{number}")
        self.agenda.at(LOOK_S, self._look)
        self._strikes = options.faults.leader_moments

    def trace(self, who: str, what: object) -> None:
        super().trace(who, what)
        decided = isinstance(what, Note) and what.event in DECISIONS
        if decided and self._strikes and self.clock.now < self.options.faults.span_s:
            self._strikes -= 1
            self.faults.strike()

    # ---------------------------------------------------------------- who reaches whom

    def address(self, host: str) -> str:
        return f"10.0.1.{host[1:]}" if host in self.witnesses else f"10.0.0.{host[1:]}"

    def host_at(self, address: str) -> str:
        network, _, number = address.removeprefix("10.0.").partition(".")
        return ("w" if network == "1" else "n") + number

    def on_host(self, host: str, action: Callable[[], None], delay_s: float = 0.0) -> None:
        """Do this in a process of the host, which may stand still."""

        def act() -> None:
            until_s = self.frozen.get(host, 0.0)
            if until_s > self.clock.now:
                self.agenda.at(until_s, act)
            else:
                action()

        self.agenda.after(delay_s, act)

    def reach(self, host: str, place: Place, done: Callable[[Process | str], None]) -> None:
        """Connect. `done` gets the process that listens there, "refused" or "no answer"."""
        to = self.host_at(place[0])
        lost = bool(self.weather.loss) and self.random.random() < self.weather.loss

        def arrive() -> None:
            silent = lost or not self.network.connected(host, to) or to in self.dark or to in self.frozen
            if silent:
                self.on_host(host, lambda: done("no answer"), NO_ANSWER_S)
                return
            process = self.processes.get(to)
            found = process if process is not None and process.listens_at(place[1]) else "refused"
            self.on_host(host, lambda: done(found), self.network.delay(host, to))

        self.agenda.after(self.network.delay(host, to), arrive)

    def ask(self, host: str, question: vote.AskVote, answered: Callable[[vote.Event], None]) -> None:
        """One question to a voter."""
        seat, poll = question.seat, question.poll
        ended = False

        def end(polled: Polled | None, *, gone: bool = False) -> None:
            nonlocal ended
            if not ended:
                ended = True
                failed = vote.PollFailed(seat.name, poll, gone)
                answered(failed if polled is None else vote.PolledCame(seat.name, poll, polled))

        def found(process: Process | str) -> None:
            if isinstance(process, str):
                end(None, gone=process == "refused")
                return
            self.deliver(host, process, poll, end)
            if self.random.random() < self.weather.twice:
                self.agenda.after(self.random.uniform(0.0, 2.0), lambda: self.deliver(host, process, poll, end))

        self.reach(host, (seat.address, seat.port), found)
        self.on_host(host, lambda: end(None), self.limits.poll_s)

    def deliver(self, host: str, process: Process, poll: Poll, answer: Callable[[Polled], None]) -> None:
        def reply(polled: Polled) -> None:
            if self.network.connected(host, process.host):
                self.on_host(host, lambda: answer(polled), self.network.delay(host, process.host))

        def arrive() -> None:
            if process.listening and self.network.connected(host, process.host):
                process.voter.poll_came(poll, reply)

        self.on_host(process.host, arrive, self.network.delay(host, process.host))

    # ---------------------------------------------------------------- life of hosts

    def new_agent(self, node: NodeSpec) -> DrawnAgent:
        old = self.processes.pop(node.host, None)
        if old is not None:
            old.end()
        self.dark.discard(node.host)
        agent = ElectingAgent(self, structs.replace(node, hosts_coordinator=False))
        self.processes[node.host] = agent
        return agent

    def boot_witness(self, host: str) -> None:
        self.dark.discard(host)
        if host not in self.processes:
            self.processes[host] = SimWitness(self, host)

    def crash(self, host: str, *, silent: bool) -> None:
        process = self.processes.pop(host, None)
        if process is None:
            return
        self.log(host, "loses power" if silent else "its process is killed")
        self.agents.pop(host, None)
        self.frozen.pop(host, None)
        if silent:
            self.dark.add(host)
        else:
            self.torn[host] = self.clock.now
        process.crash(silent=silent)

    def freeze(self, host: str, for_s: float) -> None:
        process = self.processes.get(host)
        if process is None or host in self.frozen:
            return
        self.log(host, f"stands still for {for_s} s")
        until_s = self.frozen[host] = self.clock.now + for_s
        process.freeze(for_s)

        def thaw() -> None:
            if self.frozen.get(host) == until_s:
                del self.frozen[host]
                self.disturbed()

        self.agenda.at(until_s, thaw)

    def reset(self, host: str) -> None:
        self.torn[host] = self.clock.now
        self.network.reset(host, self.leader_host())

    def agent_ended(self, host: str, outcome: Outcome) -> None:
        """Without a coordinator the process ends too."""
        self.log(host, f"ends: {outcome.kind.value} {outcome.exit_code}")
        self.kinds[outcome.kind] += 1
        self.outcomes[host] = outcome
        self.agents.pop(host)
        agent = self.processes[host]
        coordinator = agent.coordinator

        def end() -> None:
            if host in self.processes and self.processes[host] is agent:
                del self.processes[host]
                agent.end()

        if coordinator is not None and coordinator.machine.outcome is not None:
            self.agenda.after(LINGER_S, end)
        else:
            end()

    # ---------------------------------------------------------------- coordinators

    def lead(self, agent: ElectingAgent, node: NodeSpec, succession: Succession) -> SimReplicated:
        self.coordinators += 1
        machine = self.replicated(node, succession)
        coordinator = SimReplicated(self, agent, self.coordinators, machine)
        self.jobs.leads(coordinator.number, succession.charter)
        self.log(coordinator.who, f"begins: term {succession.term}, {succession.silent_s:.3f} s, {succession.closed}")
        self.coordinator = coordinator
        return coordinator

    def replicated(self, node: NodeSpec, succession: Succession) -> ReplicatedCoordinator:
        judge, now = simple_judge, self.clock.now
        return self.coordinator_class(self.job, self.limits, judge, now, node, succession, examine=simple_examine)

    def new_voter(self, name: str, *, stands: bool) -> vote.Voter:
        return self.voter_class(name, self.limits, self.clock.now, stands=stands)

    def leader_host(self) -> str:
        return self.coordinator.host if self.coordinator is not None else self.hosts[0]

    def link_lost(self, host: str) -> None:
        """Counts only where a fault broke it."""

    def cut_off(self, coordinator: int) -> set[str]:
        """Hosts whose agent or link a fault has ended: their workers die within a fence. The end of a coordinator is no
        excuse: its successor waits."""
        fence_s = self.limits.fence_s + self.limits.kill_s
        return {host for host, when in self.torn.items() if self.clock.now - when <= fence_s}

    def disturbed(self) -> None:
        self.calm_since_s = self.clock.now

    # ---------------------------------------------------------------- what must go on

    def _look(self) -> None:
        """A majority of voters that is left in peace has a job that runs or is over."""
        charter = self.jobs.newest
        if charter is not None and self.clock.now - self.calm_since_s >= CALM_S and len(charter.seats) >= VOTERS_MIN:
            together = self._together(charter)
            if together and charter.outcome is None:
                text = f"{sorted(together)} hear each other for {CALM_S:g} s, and no job runs there"
                self.jobs.goes_on(text, running=any(self._runs(self.processes[host]) for host in together))
        if self.agents or self.clock.now <= self.last_fault_s:
            self.agenda.after(LOOK_S, self._look)

    def living(self, charter: Charter, but: int = 0) -> dict[str, str]:
        """Hosts of the voters that know of the job and have not given it up, by name. `but`: for a coordinator of this
        term."""
        patient_s = self.clock.now - self.limits.elect_s
        awake = [(host, process.voter.machine) for host, process in self.processes.items() if host not in self.frozen]
        names = {
            voter.name: host
            for host, voter in awake
            if voter.charter is not None
            and (voter._lost_s > patient_s or (voter.stage is vote.Stage.FOLLOWING and voter._followed != but))
        }
        return {seat.name: names[seat.name] for seat in charter.seats if seat.name in names}

    def _together(self, charter: Charter) -> set[str]:
        """Hosts that hear a majority of the voters, and each other; none: there are too few for the job."""
        living = self.living(charter)
        for size in range(len(living), 0, -1):
            for names in combinations(living, size):
                hosts = {living[name] for name in names}
                if charter.carried_by(names) and self._hear_each_other(hosts):
                    hosts |= {host for host in self.agents if self._finds(host, hosts)}
                    if len(hosts & self.agents.keys()) >= self.job.min_nodes and self._hear_each_other(hosts):
                        return hosts
        return set()

    def _finds(self, host: str, hosts: set[str]) -> bool:
        """Whether this agent can find the job of these hosts: by what it knows, or by an endpoint."""
        voter = self.processes[host].voter.machine
        ways = [each for each in (*self.endpoints, *self.witnesses) if each in self.processes]
        known = voter.charter is not None or any(self._hear_each_other({*hosts, host, way}) for way in ways)
        return known and self._hear_each_other({*hosts, host})

    def _hear_each_other(self, hosts: Iterable[str]) -> bool:
        return all(self.network.connected(a, b) for a, b in combinations(sorted(hosts), 2)) and not any(
            host in self.frozen for host in hosts
        )

    @staticmethod
    def _runs(process: Process) -> bool:
        coordinator = getattr(process, "coordinator", None)
        return coordinator is not None and coordinator.machine.phase in (Phase.RUNNING, Phase.DRAINING, Phase.OVER)


class SimVoter(Shell):
    """A Voter in a process."""

    def __init__(self, cluster: SuccessionCluster, process: Process, name: str, *, stands: bool) -> None:
        super().__init__(
            cluster, f"{process.host}'s voter", cluster.new_voter(name, stands=stands), cluster.next_rank()
        )
        self.cluster = cluster
        self.process = process
        self._kept: Callable[[Kept], None] = lambda _: None
        self._replies: dict[int, Callable[[Polled], None]] = {}

    @property
    def electing(self) -> bool:
        return bool(self.machine.elects(self.cluster.clock.now))

    def keep_came(self, keep: Keep, answer: Callable[[Kept], None]) -> None:
        self._kept = answer
        self.handle(vote.KeepCame(keep))

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
            case vote.SendKept(kept):
                self._kept(kept)
            case vote.AskVote():
                self.cluster.ask(self.process.host, command, self.handle)
            case vote.AnswerPoll(ticket, polled):
                self._replies[ticket](polled)
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

    def where(self) -> vote.Where | None:
        leader: vote.Where | None = self.voter.machine.leader
        return leader

    def news(self) -> None:
        """It has no agent to whom this would matter."""

    def accept(self, end: FakeEnd) -> None:
        term = 0

        def heard(message: object) -> None:
            nonlocal term
            if isinstance(message, Keep):
                term = max(term, message.term)
                self.voter.keep_came(message, end.send)

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
        self._moved = False

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
        self.coordinator = self.world.lead(self, self.node, succession)
        self.news()

    def stepped_down(self, command: cstate.StepDown) -> None:
        coordinator, self.coordinator = self.coordinator, None
        assert coordinator is not None
        self.world.log(coordinator.who, f"steps down: {command.reason}")
        if command.port:
            coordinator.announce(Moved(command.term, command.address, command.port))
            self.voter.handle(vote.HeardOf(command.term, command.address, command.port))
        coordinator.die(silent=False)

    # ---------------------------------------------------------------- finding the coordinator

    def where(self) -> vote.Where | None:
        """Where the coordinator is, for others."""
        leader: vote.Where | None = self.voter.machine.leader
        if leader is not None and leader.term > self._term:
            return leader
        return self.linked_to()

    def linked_to(self) -> vote.Where | None:
        return vote.Where(*self._place, self._term) if self._place is not None and self._term else None

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
            if not isinstance(process, str) and process.coordinator is not None and not self._ignores(process):
                self._place = place
                self._link_to(process.coordinator)
            elif where is not None and hops and where.address != self.world.address(self.host):
                self._try(attempt, (where.address, where.port), hops - 1)
            else:
                self._open -= 1
                if not self._open:
                    self._give_up(attempt)

        self.world.reach(self.host, place, done)

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

    def _ignores(self, process: Process) -> bool:
        leader, name = process.coordinator.machine, process.voter.machine.name
        return bool(self.voter.machine.ignores(self.world.clock.now, name, leader.term, founded=leader.founded))

    def _link_to(self, coordinator: SimReplicated) -> None:
        self._attempt += 1
        self._seeking = False
        link = self.world.network.connect(self.host, coordinator.host)
        self._end = link.a
        self._term, self._moved, self._local = 0, False, coordinator.host == self.host
        link.a.on_message = partial(self._on_link, link.a, partial(self._got, link.a))
        link.a.on_closed = partial(self._on_link, link.a, self._link_lost)
        self.coordinator_number = coordinator.number
        coordinator.accept(link.b, self.host)
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
            case Keep():
                self.voter.keep_came(message, end.send)
            case Moved(term, address, port):
                self._moved = True
                self.voter.handle(vote.HeardOf(term, address, port))
            case Joined(term=term):
                self._term = term
                self.voter.handle(vote.Linked(term))
                self._received(message)
            case _:
                self._received(message)

    def _link_lost(self, reason: str) -> None:
        self._unlinked(closed=not self._moved)
        super()._link_lost(reason)

    def _unlinked(self, *, closed: bool) -> None:
        term, self._term = self._term, 0
        if term:
            self.voter.handle(vote.Unlinked(term, closed, local=self._local))

    def _do(self, command: do.Command) -> None:
        super()._do(command)
        if isinstance(command, do.HangUp):
            self._unlinked(closed=False)


class SimReplicated(SimCoordinator):
    """A coordinator in an agent's process. Keeps its connections to witnesses, and calls the other endpoints."""

    def __init__(
        self, world: SuccessionCluster, agent: ElectingAgent, number: int, machine: ReplicatedCoordinator
    ) -> None:
        super().__init__(world, agent.host, number, machine, f"coordinator on {agent.host}")
        self.cluster = world
        self.agent = agent
        self._began_s = world.clock.now
        self._committed: Charter | None = None
        self._watched: set[str] = set()
        """Witnesses with a connection."""
        for host in (*world.endpoints, *world.witnesses):
            if host != self.host:
                world.on_host(self.host, partial(self._watch, host))

    def announce(self, message: Moved) -> None:
        for end in self._ends.values():
            end.send(message)

    def die(self, *, silent: bool) -> None:
        super().die(silent=silent)
        if self.cluster.coordinator is self:
            self.cluster.coordinator = None

    def _handled(self) -> None:
        super()._handled()
        machine = self.machine
        self.cluster.jobs.wrote(self.number, machine.charter)
        if machine.charter is not self._committed and machine.charter.voters and machine._charters.counts:
            self._committed = machine.charter
            living = self.cluster.living(self.cluster.jobs.newest or machine.charter, machine.term)
            agents = [
                self.cluster.processes[host].voter.machine for host in living.values() if host in self.cluster.hosts
            ]
            known = max((voter.charter for voter in agents), key=lambda charter: charter.position, default=None)
            able = known is not None and known.carried_by(living)  # as far as they know who votes
            self.cluster.jobs.committed(self.number, machine.term, machine.charter, living if able else ())

    def _do(self, command: cstate.Command) -> None:
        match command:
            case cstate.StepDown():
                self.agent.stepped_down(command)
            case cstate.ProveVoterGone(seat):
                self.cluster.reach(self.host, (seat.address, seat.port), partial(self._proved, seat))
            case _:
                super()._do(command)

    def _proved(self, seat: Seat, process: Process | str) -> None:
        another = not isinstance(process, str) and process.voter.machine.name != seat.name
        if process == "refused" or another:
            self.handle(cstate.VoterGone(seat.name))

    def _watch(self, host: str) -> None:
        """Connect to a witness, or call another endpoint: a node that returned there may have founded the job again."""
        if not self.alive:
            return
        if host not in self._watched:
            self.cluster.reach(self.host, (self.cluster.address(host), ENDPOINT_PORT), partial(self._reached, host))
        often = self.cluster.clock.now < self._began_s + CALL_OFTEN_S
        self.cluster.on_host(self.host, lambda: self._watch(host), CALL_FIRST_S if often else CALL_S)

    def _reached(self, host: str, process: Process | str) -> None:
        if isinstance(process, str) or not self.alive or host in self._watched:
            return
        link = self.cluster.network.connect(self.host, host)
        if isinstance(process, SimWitness):
            self._watched.add(host)
            process.accept(link.b)
            self._links += 1
            number, end = self._links, link.a
            self._ends[number] = end
            end.on_message = lambda message: self.handle(cstate.Heard(number, message))  # type: ignore[arg-type]

            def closed(reason: str) -> None:
                self._watched.discard(host)
                self._ends.pop(number, None)
                self.handle(cstate.LinkClosed(number, reason))

            end.on_closed = closed
            self.handle(cstate.WitnessOpened(number, process.seat))
            return
        call = Call(self.machine.term, self.cluster.address(self.host), self.agent.port)
        if process.coordinator is not None:
            link.a.on_message = self._answered
            process.coordinator.accept(link.b, self.host)
            link.a.send(call)
            self.cluster.agenda.after(self.cluster.limits.poll_s, link.a.close)
            return
        process.voter.handle(vote.HeardOf(call.term, call.address, call.port))
        where = process.linked_to()  # what it only heard of may be lost
        if where is not None and where.term > call.term:
            self._answered(Moved(where.term, where.address, where.port))

    def _answered(self, message: object) -> None:
        if isinstance(message, Moved):
            self.handle(cstate.Deposed(message.term, message.address, message.port))
