"""A whole job in virtual time: the product's own machines between a fake network and pretend workers.

    cluster = SimCluster(seed=7, nodes=4, options=SimOptions(faults=FaultOptions(agent_kills=2)))
    cluster.run()
    assert cluster.outcomes

One seed gives one history. After every event the machines' invariants and the WorldChecker run; a broken promise
carries the seed and the last lines of the story.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

from holdfast.agent import commands as do
from holdfast.coordinator import coordinator_commands as cdo
from holdfast.protocol.messages import Stop, StopReason
from holdfast.protocol.outcome import Outcome, OutcomeKind
from holdfast.protocol.policy import Grow, JobSpec, Limits, NodeSpec, Note, Tick
from holdfast.protocol.train_contract import Survive
from tests.support.simulator.checkers import BrokenPromiseError, WorldChecker
from tests.support.simulator.clock import Agenda, ManualClock
from tests.support.simulator.drawn import DrawnAgent
from tests.support.simulator.faults import FaultOptions, plan_faults
from tests.support.simulator.network import FakeNetwork
from tests.support.simulator.nodes import World
from tests.support.simulator.stalls import Stall

STORY_LINES_MAX = 60


@dataclass(frozen=True)
class SimOptions:
    min_nodes: int = 1
    max_nodes: int = 4
    nproc_max: int = 3
    max_restarts: int = 3
    work_s: float = 20.0
    """How long undisturbed workers need to finish the job."""
    fixed_ranks: bool = False
    steps: bool = False
    """The agents tell how far their workers are."""
    survives: bool = False
    """The workers run in `ht.survive`."""
    survive: Survive = Survive.SHRINK
    min_ranks: int = 1
    multiple: int = 1
    """A generation trains on a multiple of so many ranks, and the others are spares. Each node has a multiple."""
    asks: bool = False
    """The workers ask for safe points."""
    grow: Grow = Grow.DRAIN
    delay_s_max: float = 0.005
    """The slowest message on a network that works."""
    limits: Limits = field(default_factory=lambda: Limits(join_s=120.0, stop_grace_s=5.0, drain_s=20.0))
    faults: FaultOptions = field(default_factory=FaultOptions)
    settle_s_max: float = 600.0
    """After the last fault every agent must have ended within this."""


class SimCluster(World):
    """Nodes `n0` (where the endpoint is) to `n<k-1>`, a network between them, and a plan of faults."""

    def __init__(
        self, seed: int, nodes: int, options: SimOptions, *, story_lines_max: int | None = STORY_LINES_MAX
    ) -> None:
        """`story_lines_max`: how much of the story a broken promise carries; None: all of it."""
        job = JobSpec(
            run_id=f"sim{seed}",
            min_nodes=options.min_nodes,
            max_nodes=options.max_nodes,
            backend="static" if options.fixed_ranks else "c10d",
            max_restarts=options.max_restarts,
            fixed_ranks=options.fixed_ranks,
            grow=options.grow,
            survive=options.survive,
            min_ranks=options.min_ranks,
        )
        self.random = Random(seed)
        network = FakeNetwork(Agenda(ManualClock()), self.random, delay_s_max=options.delay_s_max)
        super().__init__(job, options.limits, network)
        self.seed = seed
        self.options = options
        self.checker = WorldChecker()
        self.asks = options.asks
        self.stalls: dict[tuple[int, int], Stall] = {}
        """By (coordinator that assigned it, generation)."""
        self.hosts += [f"n{i}" for i in range(nodes)]
        self.nproc = {host: options.multiple * self.random.randint(1, options.nproc_max) for host in self.hosts}
        self.agents: dict[str, DrawnAgent] = {}
        self.kinds: Counter[OutcomeKind] = Counter()
        """How all agents ended, those of hosts that came back included."""
        self.lost_links: dict[str, float] = {}
        self.coordinator_died_s = 0.0
        self.story: deque[str] = deque(maxlen=story_lines_max)
        self.asked: Counter[str] = Counter()
        """Questions of users."""
        self.regroups = 0
        """How often workers of a node went on in another generation."""
        self.last_fault_s = 0.0
        for host in self.hosts:
            self.agenda.at(self.random.uniform(0.0, 1.0), lambda host=host: self.boot(host))  # type: ignore[misc]
        self.faults = plan_faults(self, options.faults)

    # ---------------------------------------------------------------- running

    def run(self) -> dict[str, Outcome]:
        """Until nothing is left to happen. Raises BrokenPromiseError."""
        try:
            while self.step():
                if self.clock.now > self.last_fault_s + self.options.settle_s_max and self.agents:
                    raise BrokenPromiseError(f"still running: {', '.join(self.agents)}")
        except AssertionError as error:
            raise BrokenPromiseError(self.tell(str(error) or repr(error))) from error
        if self.agents:
            raise BrokenPromiseError(self.tell(f"nothing left to happen, yet {', '.join(self.agents)} did not end"))
        return self.outcomes

    def tell(self, problem: str) -> str:
        lines = "\n  ".join(self.story)
        return f"seed {self.seed} at {self.clock.now:.3f} s: {problem}\n  {lines}"

    def log(self, who: str, text: str) -> None:
        self.story.append(f"{self.clock.now:9.3f} {who}: {text}")

    def trace(self, who: str, what: object) -> None:
        match what:
            case Note(event, fields):
                self.log(who, f"{event} {fields}")
                if event == "hang" and self.coordinator is not None:
                    self._found_hung(self.coordinator.machine.generation)
            case do.Say(text):
                self.log(who, f"says: {text}")
            case cdo.DropLink(link, reason):
                self.log(who, f"drops link {link}: {reason}")
            case cdo.Conclude(outcome):
                self.log(who, f"concludes {outcome.kind.value}: {outcome.message}")
            case Stop(generation, StopReason.HUNG):
                agent = self.agents.get(who)
                if agent is not None and agent.generation == generation:
                    self.checker.ended_as_hung(generation, agent.still_s, self.limits.hang_timeout_s)

    def _found_hung(self, generation: int) -> None:
        """A worker of the world must not go on by itself, or must not have before it was stopped: a coordinator that stood
        still finds the hang later."""
        agents = [agent for agent in self.agents.values() if agent.generation == generation]
        self.checker.found_hung(generation, hangs=any(agent.stands_still for agent in agents))

    # ---------------------------------------------------------------- life of hosts

    def boot(self, host: str) -> None:
        """Start an agent on this host."""
        if host in self.agents:
            return
        self.log(host, "boots")
        node = NodeSpec(
            member=f"{host}#{self.events + 1}",
            host=host,
            nproc=self.nproc[host],
            node_rank=self.hosts.index(host) if self.options.fixed_ranks else None,
            hosts_coordinator=host == self.hosts[0],
        )
        self.agents[host] = self.new_agent(node)
        self.agents[host].handle(Tick())

    def new_agent(self, node: NodeSpec) -> DrawnAgent:
        return DrawnAgent(self, node)

    def crash(self, host: str, *, silent: bool) -> None:
        if host in self.agents:
            self.log(host, "loses power" if silent else "its agent is killed")
            super().crash(host, silent=silent)

    def end_coordinator(self, *, silent: bool = False) -> None:
        if self.coordinator is not None:
            self.log("coordinator", "ends")
            self.coordinator_died_s = self.clock.now
        super().end_coordinator(silent=silent)

    def agent_ended(self, host: str, outcome: Outcome) -> None:
        self.log(host, f"ends: {outcome.kind.value} {outcome.exit_code}")
        self.kinds[outcome.kind] += 1
        super().agent_ended(host, outcome)

    def leader_host(self) -> str:
        return self.hosts[0]

    def reset(self, host: str) -> None:
        """The connection of this host's agent breaks."""
        self.network.reset(host, self.leader_host())

    def freeze(self, host: str, for_s: float) -> None:
        """The agent's process stands still, and all that is in it."""
        raise NotImplementedError

    def disturbed(self) -> None:
        """A fault begins or ends."""

    def link_lost(self, host: str) -> None:
        self.lost_links[host] = self.clock.now

    def cut_off(self, coordinator: int) -> set[str]:
        """Hosts whose link broke so recently that their workers may lawfully still be dying.

        A coordinator that nobody told of its previous leader cannot wait for that one's members: theirs count as well.
        """
        fence = self.options.limits.fence_s + self.options.limits.kill_s
        cut = {host for host, when in self.lost_links.items() if self.clock.now - when <= fence}
        if self.coordinator is not None and not self.coordinator.machine.knows_previous_leader:
            strangers = {host for host, agent in self.agents.items() if agent.coordinator_number != coordinator}
            if self.clock.now - self.coordinator_died_s <= fence:
                cut |= strangers
        return cut

    def succeeded(self) -> bool:
        return OutcomeKind.SUCCEEDED in self.kinds
