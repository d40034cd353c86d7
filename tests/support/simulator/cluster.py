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

from holdfast.agent.agent_machine import AgentMachine
from holdfast.coordinator.coordinator_machine import CoordinatorMachine
from holdfast.protocol.outcome import Evidence, Outcome, OutcomeKind, Verdict
from holdfast.protocol.policy import Grow, JobSpec, Limits, NodeSpec, Survive
from tests.support.simulator.checkers import BrokenPromiseError, WorldChecker
from tests.support.simulator.clock import Agenda, ManualClock
from tests.support.simulator.coordinator_node import SimCoordinator
from tests.support.simulator.faults import FaultOptions, plan_faults
from tests.support.simulator.network import FakeNetwork
from tests.support.simulator.nodes import SimAgent
from tests.support.simulator.stalls import Stall, simple_examine

STORY_LINES_MAX = 60
STANDSTILL_EVENTS_MAX = 10_000
"""So many events at one instant of virtual time: somebody asks for a Tick again and again."""


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
    asks: bool = False
    """The workers ask for safe points."""
    grow: Grow = Grow.DRAIN
    delay_s_max: float = 0.005
    """The slowest message on a network that works."""
    limits: Limits = field(default_factory=lambda: Limits(join_s=120.0, stop_grace_s=5.0, drain_s=20.0))
    faults: FaultOptions = field(default_factory=FaultOptions)
    settle_s_max: float = 600.0
    """After the last fault every agent must have ended within this."""


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


class SimCluster:
    """Nodes `n0` (where the endpoint is) to `n<k-1>`, a network between them, and a plan of faults."""

    def __init__(
        self, seed: int, nodes: int, options: SimOptions, *, story_lines_max: int | None = STORY_LINES_MAX
    ) -> None:
        """`story_lines_max`: how much of the story a broken promise carries; None: all of it."""
        self.seed = seed
        self.options = options
        self.random = Random(seed)
        self.clock = ManualClock()
        self.agenda = Agenda(self.clock)
        self.network = FakeNetwork(self.agenda, self.random, delay_s_max=options.delay_s_max)
        self.checker = WorldChecker()
        self.job = JobSpec(
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
        self.asks = options.asks
        self.stalls: dict[tuple[int, int], Stall] = {}
        """By (coordinator that assigned it, generation)."""
        self.hosts = [f"n{i}" for i in range(nodes)]
        self.nproc = {host: self.random.randint(1, options.nproc_max) for host in self.hosts}
        self.agents: dict[str, SimAgent] = {}
        self.coordinator: SimCoordinator | None = None
        self.coordinators = 0
        self.outcomes: dict[str, Outcome] = {}
        """The newest outcome of each host's agent."""
        self.kinds: Counter[OutcomeKind] = Counter()
        """How all agents ended, those of hosts that came back included."""
        self.lost_links: dict[str, float] = {}
        self.coordinator_died_s = 0.0
        self.story: deque[str] = deque(maxlen=story_lines_max)
        self.events = 0
        self.regroups = 0
        """How often workers of a node went on in another generation."""
        self._instant_s = 0.0
        self._instant_events = 0
        self.last_fault_s = 0.0
        for host in self.hosts:
            self.agenda.at(self.random.uniform(0.0, 1.0), lambda host=host: self.boot(host))  # type: ignore[misc]
        plan_faults(self, options.faults)

    # ---------------------------------------------------------------- running

    def run(self) -> dict[str, Outcome]:
        """Until nothing is left to happen. Raises BrokenPromiseError."""
        try:
            while self.agenda.step():
                self.events += 1
                self._check_that_time_passes()
                if self.clock.now > self.last_fault_s + self.options.settle_s_max and self.agents:
                    raise BrokenPromiseError(f"still running: {', '.join(self.agents)}")
        except AssertionError as error:
            raise BrokenPromiseError(self.tell(str(error) or repr(error))) from error
        if self.agents:
            raise BrokenPromiseError(self.tell(f"nothing left to happen, yet {', '.join(self.agents)} did not end"))
        return self.outcomes

    def _check_that_time_passes(self) -> None:
        if self.clock.now > self._instant_s:
            self._instant_s, self._instant_events = self.clock.now, 0
        self._instant_events += 1
        if self._instant_events > STANDSTILL_EVENTS_MAX:
            raise BrokenPromiseError(f"time stands still: {STANDSTILL_EVENTS_MAX} events at one instant")

    def tell(self, problem: str) -> str:
        lines = "\n  ".join(self.story)
        return f"seed {self.seed} at {self.clock.now:.3f} s: {problem}\n  {lines}"

    def log(self, who: str, text: str) -> None:
        self.story.append(f"{self.clock.now:9.3f} {who}: {text}")

    # ---------------------------------------------------------------- life of hosts

    def boot(self, host: str) -> None:
        """Start an agent on this host."""
        if host in self.agents:
            return
        self.log(host, "boots")
        self.agents[host] = SimAgent(self, host)
        self.agents[host].begin()

    def claim(self, host: str) -> None:
        """As before every attempt to reach the coordinator: whoever can bind the endpoint hosts it."""
        if host == self.hosts[0] and self.coordinator is None:
            self.coordinators += 1
            self.coordinator = SimCoordinator(self, host, self.coordinators)

    def crash(self, host: str, *, silent: bool) -> None:
        """Kill the agent (its supervisor kills the workers); `silent`: the whole machine, nobody is told."""
        agent = self.agents.pop(host, None)
        if agent is None:
            return
        self.log(host, "loses power" if silent else "its agent is killed")
        agent.die(silent=silent)
        if self.coordinator is not None and self.coordinator.host == host:
            self.coordinator.die(silent=silent)
            self.coordinator_died_s = self.clock.now
            self.coordinator = None

    def end_coordinator(self) -> None:
        """The coordinator is gone, its agent is not."""
        if self.coordinator is not None:
            self.log("coordinator", "ends")
            self.coordinator.die(silent=False)
            self.coordinator_died_s = self.clock.now
            self.coordinator = None

    def agent_ended(self, host: str, outcome: Outcome) -> None:
        self.log(host, f"ends: {outcome.kind.value} {outcome.exit_code}")
        self.outcomes[host] = outcome
        self.kinds[outcome.kind] += 1
        self.agents.pop(host, None)
        if self.coordinator is not None and self.coordinator.host == host:
            self.coordinator.retire()

    def coordinator_retired(self, coordinator: SimCoordinator) -> None:
        if self.coordinator is coordinator:
            self.coordinator_died_s = self.clock.now
            self.coordinator = None

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

    def machine_for(self, host: str, incarnation: int, *, hosts_coordinator: bool) -> AgentMachine:
        node = NodeSpec(
            member=f"{host}#{incarnation}",
            host=host,
            nproc=self.nproc[host],
            node_rank=self.hosts.index(host) if self.options.fixed_ranks else None,
            hosts_coordinator=hosts_coordinator,
        )
        return AgentMachine(node, self.options.limits, self.clock.now)

    def coordinator_machine(self) -> CoordinatorMachine:
        return CoordinatorMachine(self.job, self.options.limits, simple_judge, self.clock.now, examine=simple_examine)

    def succeeded(self) -> bool:
        return OutcomeKind.SUCCEEDED in self.kinds
