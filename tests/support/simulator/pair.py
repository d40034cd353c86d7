"""The real coordinator and real agents joined directly: what one says the other hears at once, in order.

Nothing is drawn and nothing takes time but what a test advances. Workers are pretend: they end when told to. A slow or
broken world is what `SimCluster` is for. Every machine's invariants are checked after every event.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.agent.agent_machine import AgentMachine
from holdfast.agent.agent_state import Work
from holdfast.coordinator import coordinator_state as cstate
from holdfast.coordinator.coordinator_machine import CoordinatorMachine
from holdfast.protocol.errors import CoordinatorUnreachableError
from holdfast.protocol.messages import Assign, FromAgent, FromCoordinator
from holdfast.protocol.outcome import Failure, Outcome
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec, Tick
from holdfast.protocol.rank_progress import Frame, RankProgress, RankSample, Stage
from tests.support.simulator.cluster import simple_judge
from tests.support.simulator.stalls import WAITING, simple_examine

STEPS_MAX = 100_000
"""So many messages and ticks in one `advance`: somebody asks for a Tick again and again."""

Trace = Callable[[str, object], None]
"""Told (host or "coordinator", command, message or state) for all that is said and done."""


@dataclass
class PairAgent:
    """An AgentMachine, its link and its pretend workers."""

    host: str
    machine: AgentMachine
    nproc: int
    link: int | None = None
    alive: bool = True
    workers: set[int] = field(default_factory=set)
    assign: Assign | None = None
    holds_prepare: bool = False
    """Phase one takes until `prepared` is called."""
    stubborn: bool = False
    """Its workers ignore signals other than SIGKILL."""
    reached: int = 0
    """The newest safe point its workers have reached; 0: they ask for none."""
    safe_point: int = 0
    """Where they were told to stop; 0: nowhere."""
    places: dict[int, str] = field(default_factory=dict)
    """The function in which a worker is, by local rank; else where all wait for their peers."""
    reach: tuple[str, ...] = ()
    """What is wrong with the way to the store."""


class Pair:
    """Hosts by name; the endpoint is the first one's, so its agent hosts the coordinator."""

    def __init__(self, job: JobSpec, limits: Limits, trace: Trace | None = None) -> None:
        self.job = job
        self.limits = limits
        self.now = 0.0
        self.coordinator: CoordinatorMachine | None = None
        self.agents: dict[str, PairAgent] = {}
        self.outcomes: dict[str, Outcome] = {}
        self._trace = trace if trace is not None else _untold
        self._hosts: list[str] = []
        self._incarnations: dict[str, int] = {}
        self._links: dict[int, str] = {}
        self._link_number = 0
        self._silent: set[str] = set()
        self._held: list[tuple[str, Callable[[], None]]] = []
        self._queue: deque[Callable[[], None]] = deque()

    # ---------------------------------------------------------------- what a test does

    def boot(
        self,
        host: str,
        *,
        nproc: int = 1,
        node_rank: int | None = None,
        role: str = "default",
        holds_prepare: bool = False,
        stubborn: bool = False,
    ) -> PairAgent:
        """Start an agent on a host that has none."""
        assert host not in self.agents, f"{host} has an agent"
        if host not in self._hosts:
            self._hosts.append(host)
        self._incarnations[host] = self._incarnations.get(host, 0) + 1
        member = f"{host}#{self._incarnations[host]}"
        node = NodeSpec(member=member, host=host, nproc=nproc, role=role, node_rank=node_rank)
        agent = PairAgent(host, AgentMachine(node, self.limits, self.now), nproc)
        agent.holds_prepare, agent.stubborn = holds_prepare, stubborn
        self.agents[host] = agent
        self._to_agent(agent, Tick())
        self._settle()
        return agent

    def advance(self, seconds: float) -> None:
        """Let time pass; every machine gets its Ticks when it asked for them."""
        until = self.now + seconds
        for _ in range(STEPS_MAX):
            due = self._next_deadline()
            if due is None or due[0] > until:
                self.now = until
                return
            self.now = max(self.now, due[0])
            due[1]()
            self._settle()
        raise AssertionError(f"time stands still at {self.now} s")

    def worker_ends(self, host: str, local_rank: int, exit_code: int, error_type: str = "") -> None:
        agent = self.agents[host]
        assert local_rank in agent.workers, f"{host} has no worker {local_rank}"
        self._worker_gone(agent, local_rank, exit_code, error_type)
        self._settle()

    def progress(self, host: str, stage: Stage, steps: int = 0) -> None:
        """All workers of this host are so far."""
        agent = self.agents[host]
        assert agent.assign is not None
        ranks = tuple(RankProgress(rank, stage, steps) for rank in range(agent.nproc))
        self._to_agent(agent, ev.WorkersProgress(agent.assign.generation, ranks))
        self._settle()

    def prepared(self, host: str) -> None:
        """Phase one of an agent with holds_prepare is done."""
        agent = self.agents[host]
        assert agent.assign is not None
        self._prepared(agent, agent.assign)
        self._settle()

    def prepare_fails(self, host: str, reason: str) -> None:
        agent = self.agents[host]
        assert agent.assign is not None
        self._to_agent(agent, ev.PrepareFailed(agent.assign.generation, "HF108", 2, reason))
        self._settle()

    def drained(self, host: str) -> None:
        """All workers of a leave at the safe point they were told."""
        agent = self.agents[host]
        assert agent.safe_point, f"the workers of {host} were not told to stop anywhere"
        self._all_workers_gone(agent, 0, drained=True)
        self._settle()

    def send_signal(self, host: str, signum: int, *, preempt: bool = False) -> None:
        self._to_agent(self.agents[host], ev.Signalled(signum, signal.Signals(signum).name, preempt))
        self._settle()

    def quit(self, *, drain: bool) -> None:
        """A command on some node wants the whole job to end."""
        self._to_coordinator(cstate.QuitAsked(drain, "holdfast stop" if drain else "holdfast kill"))
        self._settle()

    def store_dies(self, host: str) -> None:
        agent = self.agents[host]
        assert agent.assign is not None
        self._to_agent(agent, ev.StoreDied(agent.assign.generation))
        self._settle()

    def kill(self, host: str, *, silent: bool = False) -> None:
        """The agent is gone and its workers with it; `silent`: power loss, nobody is told."""
        agent = self.agents.pop(host)
        agent.alive = False
        agent.workers.clear()
        if not silent:
            self._hang_up(agent)
        self._coordinator_goes_with(host)
        self._settle()

    def reset(self, host: str) -> None:
        """Both ends lose the link although both live."""
        link = self.agents[host].link
        assert link is not None, f"{host} has no link"
        self._carry(host, lambda: self._close(link, "connection reset"))
        self._lose_link(link, host, "connection reset")
        self._settle()

    def end_coordinator(self) -> None:
        """The coordinator ends and no agent does, as when it loses its lease in etcd."""
        self._coordinator_goes_with(self._hosts[0])
        self._settle()

    def silence(self, host: str) -> None:
        """Nothing passes between this host and the coordinator, and nobody is told."""
        self._silent.add(host)

    def heal(self) -> None:
        """What was held back arrives, in order."""
        self._silent.clear()
        held, self._held = self._held, []
        self._queue.extend(action for _, action in held)
        self._settle()

    # ---------------------------------------------------------------- the wire

    def _carry(self, host: str, action: Callable[[], None]) -> None:
        if host in self._silent:
            self._held.append((host, action))
        else:
            self._queue.append(action)

    def _settle(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def _next_deadline(self) -> tuple[float, Callable[[], None]] | None:
        due: list[tuple[float, int, Callable[[], None]]] = []
        if self.coordinator is not None and (when := self.coordinator.next_deadline()) is not None:
            due.append((when, 0, lambda: self._to_coordinator(Tick())))
        for number, agent in enumerate(self.agents.values(), 1):
            if (when := agent.machine.next_deadline()) is not None:
                due.append((when, number, lambda agent=agent: self._to_agent(agent, Tick())))  # type: ignore[misc]
        if not due:
            return None
        when, _, tick = min(due, key=lambda entry: entry[:2])
        return when, tick

    def _hang_up(self, agent: PairAgent) -> None:
        link, agent.link = agent.link, None
        if link is not None:
            self._carry(agent.host, lambda: self._close(link, "closed by the other side"))

    def _close(self, link: int, reason: str) -> None:
        if self._links.pop(link, None) is not None:
            self._to_coordinator(cstate.LinkClosed(link, reason))

    def _lose_link(self, link: int, host: str, reason: str) -> None:
        """The agent's end of this link closes, unless the agent has another by then."""

        def arrive() -> None:
            agent = self.agents.get(host)
            if agent is not None and agent.link == link:
                agent.link = None
                self._to_agent(agent, ev.LinkLost(reason))

        self._carry(host, arrive)

    # ---------------------------------------------------------------- the coordinator's shell

    def _to_coordinator(self, event: cstate.Event) -> None:
        machine = self.coordinator
        if machine is None:
            return
        before = machine.phase
        out = machine.handle(self.now, event)
        machine.check_invariants()
        if machine.phase is not before:
            self._trace("coordinator", machine.phase)
        for command in out:
            self._trace("coordinator", command)
            match command:
                case cstate.Tell(link, message) if link in self._links:
                    self._tell(link, message)
                case cstate.DropLink(link, _) if link in self._links:
                    self._lose_link(link, self._links.pop(link), "closed by the other side")

    def _tell(self, link: int, message: FromCoordinator) -> None:
        host = self._links[link]

        def arrive() -> None:
            agent = self.agents.get(host)
            if agent is not None and agent.link == link:
                self._trace(host, message)
                self._to_agent(agent, ev.Received(message))

        self._carry(host, arrive)

    def _coordinator_goes_with(self, host: str) -> None:
        if host != self._hosts[0] or self.coordinator is None:
            return
        self.coordinator = None
        links, self._links = self._links, {}
        for link, other in links.items():
            self._lose_link(link, other, "connection reset")

    # ---------------------------------------------------------------- the agents' shells

    def _to_agent(self, agent: PairAgent, event: ev.Event) -> None:
        if not agent.alive:
            return
        out = agent.machine.handle(self.now, event)
        agent.machine.check_invariants()
        for command in out:
            self._trace(agent.host, command)
            self._do(agent, command)

    def _do(self, agent: PairAgent, command: do.Command) -> None:
        match command:
            case do.Dial():
                self._queue.append(lambda: self._dial(agent))
            case do.Send(message):
                self._send(agent, message)
            case do.HangUp():
                self._hang_up(agent)
            case do.Prepare(assign):
                agent.assign = assign
                if not agent.holds_prepare:
                    self._queue.append(lambda: self._prepared(agent, assign))
            case do.StartWorkers(assign):
                agent.assign, agent.workers, agent.safe_point = assign, set(range(agent.nproc)), 0
            case do.HoldWorkers(generation):
                self._queue.append(lambda: self._to_agent(agent, ev.WorkersHeld(generation, agent.reached)))
            case do.ReleaseWorkers(_, safe_point):
                agent.safe_point = safe_point
            case do.LookAtWorkers(generation, number, store):
                seen = ev.WorkersSeen(generation, number, self._samples(agent), agent.reach if store else ())
                self._queue.append(lambda: self._to_agent(agent, seen))
            case do.SignalWorkers(signum):
                if not agent.stubborn:
                    self._queue.append(lambda: self._all_workers_gone(agent, -signum))
            case do.KillTree(generation):
                self._queue.append(lambda: self._kill_tree(agent, generation))
            case do.Exit(outcome):
                agent.alive = False
                self.outcomes[agent.host] = outcome
                del self.agents[agent.host]
                if self.coordinator is not None and self.coordinator.outcome is None:
                    self._coordinator_goes_with(agent.host)

    def _dial(self, agent: PairAgent) -> None:
        if not agent.alive:
            return
        own = agent.host == self._hosts[0]
        if own and self.coordinator is None:
            self.coordinator = CoordinatorMachine(self.job, self.limits, simple_judge, self.now, examine=simple_examine)
        if self.coordinator is None or agent.host in self._silent:
            error = CoordinatorUnreachableError
            reason = "no answer" if agent.host in self._silent else "connection refused"
            self._to_agent(agent, ev.DialFailed(error.code, error.exit_code, reason, final=False))
            return
        self._link_number += 1
        agent.link = self._link_number
        self._links[agent.link] = agent.host
        address = "127.0.0.1" if own else f"10.0.0.{self._hosts.index(agent.host) + 1}"
        self._to_coordinator(cstate.LinkOpened(agent.link, address, "127.0.0.1" if own else "10.0.0.1", local=own))
        self._to_agent(agent, ev.Dialed())

    def _send(self, agent: PairAgent, message: FromAgent) -> None:
        link = agent.link
        if link is None:
            return

        def arrive() -> None:
            if link in self._links:
                self._to_coordinator(cstate.Heard(link, message))

        self._carry(agent.host, arrive)

    def _prepared(self, agent: PairAgent, assign: Assign) -> None:
        port = 40_000 + assign.generation if assign.hosts_store else None
        self._to_agent(agent, ev.NodePrepared(assign.generation, port))

    def _worker_gone(
        self, agent: PairAgent, local_rank: int, exit_code: int, error_type: str = "", *, drained: bool = False
    ) -> None:
        assert agent.assign is not None
        agent.workers.discard(local_rank)
        if not exit_code:
            self._to_agent(agent, ev.WorkerEnded(agent.assign.generation, local_rank, None, drained))
            return
        bare = Failure(
            rank=agent.assign.rank_base + local_rank,
            local_rank=local_rank,
            host=agent.host,
            pid=1000 + local_rank,
            exit_code=exit_code,
            after_stop=agent.machine.work in (Work.STOPPING, Work.KILLING),
        )
        read = ev.FailureRead(agent.assign.generation, local_rank, structs.replace(bare, error_type=error_type))
        self._queue.append(lambda: self._to_agent(agent, read))
        self._to_agent(agent, ev.WorkerEnded(agent.assign.generation, local_rank, bare, evidence_follows=True))

    def _samples(self, agent: PairAgent) -> tuple[RankSample, ...]:
        frames = {rank: Frame("train.py", 7, agent.places.get(rank, WAITING)) for rank in sorted(agent.workers)}
        return tuple(RankSample(rank, 1000 + rank, "S", 0.0, (frame,)) for rank, frame in frames.items())

    def _all_workers_gone(self, agent: PairAgent, exit_code: int, *, drained: bool = False) -> None:
        for local_rank in sorted(agent.workers):
            self._worker_gone(agent, local_rank, exit_code, drained=drained)

    def _kill_tree(self, agent: PairAgent, generation: int) -> None:
        if agent.workers:  # what they left is read first
            self._all_workers_gone(agent, -signal.SIGKILL)
            self._queue.append(lambda: self._to_agent(agent, ev.TreeGone(generation)))
        else:
            self._to_agent(agent, ev.TreeGone(generation))


def _untold(who: str, what: object) -> None:
    """For whoever wants no trace."""
