"""The shell of the simulation: what runtime/ does with asyncio and processes, done with an agenda and a fake network.

    World           hosts by name; the endpoint is the first one's, so its agent hosts the coordinator
    SimCoordinator  a Coordinator on a host
    SimAgent        an Agent on a host; what its pretend workers do is said by a subclass

Every machine's invariants are checked after every event.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.agent.agent import Agent
from holdfast.agent.local_generation import Work
from holdfast.authority.sole import Sole
from holdfast.coordinator import coordinator_commands as cdo
from holdfast.coordinator import coordinator_events as cevents
from holdfast.coordinator.authority import Authority
from holdfast.coordinator.coordinator import Coordinator
from holdfast.extensions.hangs.messages import Look, Looked
from holdfast.protocol.codec import encode_extended
from holdfast.protocol.errors import CoordinatorUnreachableError
from holdfast.protocol.messages import Answer, Assign, Extended
from holdfast.protocol.outcome import Evidence, Failure, Outcome, Verdict
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec, Tick
from tests.support.simulator.checkers import BrokenPromiseError
from tests.support.simulator.network import FakeEnd, FakeNetwork
from tests.support.simulator.stalls import SIMULATED

STANDSTILL_EVENTS_MAX = 10_000
"""So many events at one instant of virtual time: somebody asks for a Tick again and again."""
COORDINATOR_RANK = 1
LOOPBACK = "127.0.0.1"
LINGER_S = 2.0
"""The coordinator stays for so long after its host's agent, as in production."""


def simple_judge(evidence: Evidence) -> Verdict:
    """The first report is the culprit. Enough for simulations."""
    first = evidence.failures[0] if evidence.failures else evidence.hung
    cause = f"exit code {first.exit_code}" if first else f"lost {', '.join(evidence.lost_nodes)}"
    return Verdict(
        code=evidence.hang.code if evidence.hang else "HF200",
        cause=evidence.hang.text if evidence.hang else cause,
        culprit=first,
        generation=evidence.generation,
        restarts=evidence.restarts,
        gave_up=evidence.gave_up,
    )


class World:
    """Hosts, their agents, the coordinator, the network between them, and the time. A subclass says what happens."""

    def __init__(self, job: JobSpec, limits: Limits, network: FakeNetwork) -> None:
        self.job = job
        self.limits = limits
        self.network = network
        self.agenda = network.agenda
        self.clock = network.agenda.clock
        self.hosts: list[str] = []
        self.agents: dict[str, Any] = {}
        """The SimAgent of each host that has one."""
        self.coordinator: SimCoordinator | None = None
        self.coordinators = 0
        self.outcomes: dict[str, Outcome] = {}
        """The newest outcome of each host's agent."""
        self.events = 0
        self._agents = 0
        self._instant_s = 0.0
        self._instant_events = 0

    def trace(self, who: str, what: object) -> None:
        """A host or "coordinator", and its command, its new phase, or the message that it gets."""

    def step(self) -> bool:
        """Do what is next; False when there is nothing. Raises BrokenPromiseError when time stands still."""
        if not self.agenda.step():
            return False
        self.events += 1
        if self.clock.now > self._instant_s:
            self._instant_s, self._instant_events = self.clock.now, 0
        self._instant_events += 1
        if self._instant_events > STANDSTILL_EVENTS_MAX:
            raise BrokenPromiseError(f"time stands still: {STANDSTILL_EVENTS_MAX} events at one instant")
        return True

    def address(self, host: str) -> str:
        return f"10.0.0.{self.hosts.index(host) + 1}"

    def next_rank(self) -> int:
        """Of Ticks for the same time the coordinator's comes first, then the oldest agent's."""
        self._agents += 1
        return COORDINATOR_RANK + self._agents

    def agent_machine(self, node: NodeSpec) -> Agent:
        return Agent(node, self.limits, self.clock.now)

    def coordinator_machine(self) -> Coordinator:
        now = self.clock.now
        return self.new_coordinator(Sole(self.limits, now))

    def new_coordinator(self, authority: Authority) -> Coordinator:
        return Coordinator(
            self.job,
            self.limits,
            simple_judge,
            self.clock.now,
            authority,
            extensions=SIMULATED,
        )

    def claim(self, host: str) -> None:
        """As before every attempt to reach the coordinator: whoever can bind the endpoint hosts it."""
        if host == self.hosts[0] and self.coordinator is None:
            self.coordinators += 1
            self.coordinator = SimCoordinator(self, host, self.coordinators)

    def crash(self, host: str, *, silent: bool) -> None:
        """Kill the agent (its supervisor kills the workers); `silent`: the whole machine, nobody is told."""
        self.agents.pop(host).die(silent=silent)
        if self.coordinator is not None and self.coordinator.host == host:
            self.end_coordinator(silent=silent)

    def end_coordinator(self, *, silent: bool = False) -> None:
        """The coordinator is gone. Where it ends alone, its agent is not."""
        if self.coordinator is not None:
            self.coordinator.die(silent=silent)
            self.coordinator = None

    def agent_ended(self, host: str, outcome: Outcome) -> None:
        self.outcomes[host] = outcome
        self.agents.pop(host, None)
        coordinator = self.coordinator
        if coordinator is None or coordinator.host != host:
            return
        if coordinator.machine.outcome is None:
            self.end_coordinator()
        else:
            self.agenda.after(LINGER_S, lambda: self.end_coordinator() if self.coordinator is coordinator else None)

    def link_lost(self, host: str) -> None:
        """One end of this host's link has seen it break."""


class Shell:
    """Event, machine, commands, timer."""

    def __init__(self, world: World, who: str, machine: Any, rank: int) -> None:
        self.world = world
        self.who = who
        self.machine = machine
        self.alive = True
        self._rank = rank
        self._armed_s: float | None = None
        self._unhandled: list[Any] | None = None
        """While paused: what has come in the meantime."""

    def pause(self, pause_s: float) -> None:
        """The process stands still; what comes waits in its sockets."""
        if self._unhandled is not None or not self.alive:
            return
        self._unhandled = []

        def resume() -> None:
            waiting, self._unhandled = self._unhandled, None
            for event in waiting or ():
                self.handle(event)

        self.world.agenda.after(pause_s, resume)

    def handle(self, event: Any) -> None:
        if self._unhandled is not None:
            self._unhandled.append(event)
            return
        if not self.alive:
            return
        out = self.machine.handle(self.world.clock.now, event)
        self.machine.check_invariants()
        self._handled()
        for command in out:
            self.world.trace(self.who, command)
            self._do(command)
        self._arm()

    def _handled(self) -> None:
        """The machine is in its new state."""

    def _do(self, command: Any) -> None:
        raise NotImplementedError

    def _arm(self) -> None:
        deadline = self.machine.next_deadline()
        if not self.alive or deadline is None or (self._armed_s is not None and self._armed_s <= deadline):
            return
        self._armed_s = deadline

        def tick() -> None:
            if self._armed_s == deadline:  # else an earlier one took its place
                self._armed_s = None
                self.handle(Tick())

        self.world.agenda.at(deadline, tick, rank=self._rank)


class SimCoordinator(Shell):
    """A Coordinator on a host."""

    def __init__(
        self,
        world: World,
        host: str,
        number: int,
        machine: Coordinator | None = None,
        name: str = "coordinator",
    ) -> None:
        super().__init__(world, name, machine or world.coordinator_machine(), COORDINATOR_RANK)
        self.host = host
        self.number = number
        self._ends: dict[int, FakeEnd] = {}
        self._links = 0
        self._phase = self.machine.phase
        self._arm()

    def accept(self, end: FakeEnd, peer: str) -> int:
        """Returns the link's number."""
        self._links += 1
        link = self._links
        self._ends[link] = end
        end.on_message = lambda message: self.handle(cevents.Heard(link, message))  # type: ignore[arg-type]
        end.on_closed = lambda reason: self._closed(link, peer, reason)
        local = peer == self.host
        address, here = (LOOPBACK, LOOPBACK) if local else (self.world.address(peer), self.world.address(self.host))
        self.handle(cevents.LinkOpened(link, address, here, local=local))
        return link

    def _closed(self, link: int, peer: str, reason: str) -> None:
        self._ends.pop(link, None)
        self.world.link_lost(peer)
        self.handle(cevents.LinkClosed(link, reason))

    def die(self, *, silent: bool) -> None:
        self.alive = False
        for end in self._ends.values():
            if silent:
                end.vanish()
            else:
                end.close("connection reset")

    def _handled(self) -> None:
        if self.machine.phase is not self._phase:
            self._phase = self.machine.phase
            self.world.trace(self.who, self._phase)

    def _do(self, command: cdo.Command) -> None:
        match command:
            case cdo.Tell(link, message) if link in self._ends:
                self._ends[link].send(message)
            case cdo.DropLink(link) if link in self._ends:
                self._ends.pop(link).close()


class SimAgent(Shell):
    """An Agent on a host, with pretend workers."""

    def __init__(self, world: World, node: NodeSpec) -> None:
        super().__init__(world, node.host, world.agent_machine(node), world.next_rank())
        self.host = node.host
        self.nproc = node.nproc
        self.coordinator_number = 0
        self.assign: Assign | None = None
        self.workers: set[int] = set()
        """Local ranks of those that are alive."""
        self._end: FakeEnd | None = None

    def die(self, *, silent: bool) -> None:
        """The agent is gone; its supervisor kills the workers."""
        self.alive = False
        if self._end is not None:
            if silent:
                self._end.vanish()
            else:
                self._end.close()

    def _do(self, command: do.Command) -> None:
        match command:
            case do.Dial():
                self.world.agenda.after(self.world.network.delay(), self._dial)
            case do.Send(message):
                if self._end is not None:
                    self._end.send(message)
            case do.HangUp():
                if self._end is not None:
                    self._end.close()
                    self._end = None
            case do.Prepare(assign):
                self.assign = assign
                self.prepare(assign)
            case do.Exit(outcome):
                self.alive = False
                self.world.agent_ended(self.host, outcome)
            case _:
                self.do_with_workers(command)

    def _dial(self) -> None:
        world = self.world
        if not self.alive:
            return
        world.claim(self.host)
        coordinator = world.coordinator
        silent = not world.network.connected(self.host, world.hosts[0])
        if coordinator is None or not coordinator.alive or silent:
            error, reason = CoordinatorUnreachableError, "no answer" if silent else "connection refused"
            self.handle(ev.DialFailed(error.code, error.exit_code, reason, final=False))
            return
        link = world.network.connect(self.host, coordinator.host)
        self._end = link.a
        link.a.on_message = self._received
        link.a.on_closed = self._link_lost
        self.coordinator_number = coordinator.number
        coordinator.accept(link.b, self.host)
        self.handle(ev.Dialed())

    def _received(self, message: object) -> None:
        if isinstance(message, Answer):
            self.answered(message)
            return
        if isinstance(message, Extended):
            if message.extension == "hangs":
                look = msgspec.msgpack.decode(message.body, type=Look)
                self.world.trace(self.host, look)
                self.handle(look)
            else:
                self.extended(message)
            return
        self.world.trace(self.host, message)
        self.handle(ev.Received(message))  # type: ignore[arg-type]

    def _link_lost(self, reason: str) -> None:
        self._end = None
        self.world.link_lost(self.host)
        self.handle(ev.LinkLost(reason))

    def answered(self, answer: Answer) -> None:
        """The coordinator has answered a question of a command on this node."""

    def extended(self, message: Extended) -> None:
        """A message for the half of another extension than hangs on this node. None is here."""

    # ---------------------------------------------------------------- the extension for hangs

    def handle(self, event: Any) -> None:
        if self._unhandled is not None or not isinstance(event, Look | Looked):
            super().handle(event)
        elif not self.alive:
            pass
        elif isinstance(event, Looked):
            self._send_looked(event)
        elif self._has_workers_of(event.generation):
            self.look(event)
        else:
            self._send_looked(Looked(event.generation, event.number))

    def _has_workers_of(self, generation: int) -> bool:
        current = self.machine.current
        at_work = self.machine.work in (Work.RUNNING, Work.DRAINING, Work.REGROUPING)
        return at_work and current.generation == generation and not current.all_ended

    def look(self, look: Look) -> None:
        """Sample the pretend workers. Ends in a Looked that is handled."""
        raise NotImplementedError

    def _send_looked(self, looked: Looked) -> None:
        if self._end is not None:
            self.world.trace(self.host, looked)
            self._end.send(Extended("hangs", encode_extended(looked)))

    # ---------------------------------------------------------------- pretend workers

    def prepare(self, assign: Assign) -> None:
        """Phase one: ends with `prepared`."""
        raise NotImplementedError

    def prepared(self, assign: Assign) -> None:
        port = 40_000 + assign.generation if assign.hosts_store else None
        self.handle(ev.NodePrepared(assign.generation, port))

    def do_with_workers(self, command: do.Command) -> None:
        """Whatever else the machine wants: start, hold, regroup, replace, signal, look at and kill workers."""
        raise NotImplementedError

    def taking_part(self, assign: Assign) -> set[int]:
        """Local ranks of the workers that have a place there."""
        return set(range(self.nproc) if assign.local_ranks is None else assign.local_ranks)

    def failure(self, local_rank: int, exit_code: int) -> Failure:
        """The bare one."""
        assert self.assign is not None
        places = self.taking_part(self.assign)  # not if this node leaves
        return Failure(
            rank=self.assign.rank_base + (self.assign.place(local_rank) if local_rank in places else local_rank),
            local_rank=local_rank,
            host=self.host,
            pid=1000 + local_rank,
            exit_code=exit_code,
            after_stop=self.machine.work in (Work.STOPPING, Work.KILLING),
        )
