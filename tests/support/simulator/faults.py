"""Which faults a simulated cluster suffers, and when. Drawn from the cluster's own Random, so that a seed says all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from holdfast.agent.events import Signalled
from holdfast.protocol.exit_codes import EXIT_REQUEUE

if TYPE_CHECKING:
    from tests.support.simulator.cluster import SimCluster
    from tests.support.simulator.drawn import DrawnAgent


@dataclass(frozen=True)
class FaultOptions:
    """How many of each fault, spread over the first `span_s` seconds."""

    span_s: float = 60.0
    worker_failures: int = 0
    agent_kills: int = 0
    power_losses: int = 0
    reboots: bool = True
    """Killed hosts come back a while later."""
    link_resets: int = 0
    partitions: int = 0
    signals: int = 0
    """SIGTERM to an agent: a graceful leave."""
    near_leaves: bool = False
    """Something else happens within moments of a signal: there, or elsewhere."""
    store_deaths: int = 0
    requeues: int = 0
    """A worker exits with 75."""
    coordinator_pauses: int = 0
    """The coordinator's process is stopped for a while, as by a debugger or a starved machine, and comes back."""
    coordinator_deaths: int = 0
    """The coordinator ends, no agent does, and another one begins, as when it loses its lease in etcd."""
    worker_kills: int = 0
    """A worker is killed, and the others wait for news."""
    regroup_faults: bool = False
    """Workers die, refuse or raise on their way into another generation; replacements fail."""
    hangs: int = 0
    """A worker does not come to where the others wait for it."""
    leader_crashes: int = 0
    """The host of the newest coordinator loses power, or its agent is killed; sometimes one more host at the same time."""
    leader_moments: int = 0
    """As leader_crashes, within moments of something that a coordinator decides."""
    moment_tears: bool = False
    """At these moments the network is sometimes torn instead: it is cut, and connections across the cut break at once."""
    leader_cuts: int = 0
    """That host is cut off, perhaps in one direction only."""
    cuts: int = 0
    """As partitions, perhaps in one direction only, and perhaps for long."""
    freezes: int = 0
    """A host's processes stand still, but not its workers: often those of the coordinator."""
    lags: int = 0
    """A host's messages take long for a while."""
    pauses: int = 0
    """There are no steps for a while: all do something else, or all wait for one that sleeps."""
    questions: int = 0
    """Of users on the nodes."""
    harmless: bool = True
    """None of them ends the job, or sends a node away."""


def plan_faults(cluster: SimCluster, options: FaultOptions) -> Faults:
    """Put every fault on the cluster's agenda."""
    faults = Faults(cluster, options)
    faults.plan(options.worker_failures, faults.fail_worker)
    faults.plan(options.worker_kills, faults.kill_worker)
    faults.plan(options.agent_kills, lambda: faults.crash(silent=False))
    faults.plan(options.power_losses, lambda: faults.crash(silent=True))
    faults.plan(options.link_resets, faults.reset)
    faults.plan(options.partitions, faults.partition)
    faults.plan(options.signals, faults.leave)
    faults.plan(options.store_deaths, faults.kill_store)
    faults.plan(options.requeues, faults.requeue)
    faults.plan(options.coordinator_pauses, faults.pause_coordinator)
    faults.plan(options.coordinator_deaths, faults.end_coordinator)
    faults.plan(options.leader_crashes, faults.crash_leader)
    faults.plan(options.leader_cuts, lambda: faults.cut({cluster.leader_host()}))
    faults.plan(options.cuts, lambda: faults.cut(faults.some_side()))
    faults.plan(options.freezes, faults.freeze)
    faults.plan(options.lags, faults.lag)
    faults.plan(options.hangs, lambda: faults.stall(hangs=True))
    faults.plan(options.pauses, lambda: faults.stall(hangs=False))
    faults.plan(options.questions, faults.ask)
    return faults


@dataclass(frozen=True)
class Faults:
    cluster: SimCluster
    options: FaultOptions

    def plan(self, count: int, action: Callable[[], None]) -> None:
        for _ in range(count):
            self._at(self.cluster.random.uniform(0.0, self.options.span_s), action)

    def fail_worker(self) -> None:
        agent = self._some_agent()
        if agent is not None:
            agent.fail_worker(self.cluster.random.choice([1, 3, -9, -11]))

    def kill_worker(self) -> None:
        agent = self._some_agent()
        if agent is not None:
            agent.fail_worker(-9)

    def requeue(self) -> None:
        agent = self._some_agent()
        if agent is not None:
            agent.fail_worker(EXIT_REQUEUE)

    def ask(self) -> None:
        agent = self._some_agent()
        if agent is not None:
            agent.ask(harmless=self.options.harmless)
            agent.report_load()

    def kill_store(self) -> None:
        for agent in list(self.cluster.agents.values()):
            agent.lose_store()

    def pause_coordinator(self) -> None:
        coordinator = self.cluster.coordinator
        if coordinator is not None:
            self.cluster.log("coordinator", "stands still")
            coordinator.pause(self._later([0.5, 3.0, 5.0, 8.0, 20.0]))

    def stall(self, *, hangs: bool) -> None:
        agent = self._some_agent()
        if agent is not None:
            still = hangs or self.cluster.random.random() < 0.5
            agent.stall(inf if hangs else self._later([5.0, 20.0, 90.0]), still=still)

    def end_coordinator(self) -> None:
        self.cluster.end_coordinator()

    def crash(self, *, silent: bool) -> None:
        host = self._some_host()
        self.cluster.crash(host, silent=silent)
        self._reboot_later(host)

    def leave(self) -> None:
        host = self._some_host()
        agent = self.cluster.agents.get(host)
        if agent is not None:
            self.cluster.log(host, "gets SIGTERM")
            agent.handle(Signalled(15, "SIGTERM"))
            self._reboot_later(host)
        random = self.cluster.random
        if self.options.near_leaves and random.random() < 0.6:
            other = random.choice([host, self._some_host()])
            acts: list[Callable[[], None]] = [self.kill_worker, self.kill_store, self.leave]
            acts += [partial(each, other) for each in (self._crash, self._reset, self._fail)]
            act = random.choice(acts)
            self._at(self.cluster.clock.now + random.choice([0.01, 0.03, 0.1, 0.5, 1.5]), act)

    def _crash(self, host: str) -> None:
        self.cluster.crash(host, silent=self.cluster.random.random() < 0.3)
        self._reboot_later(host)

    def _reset(self, host: str) -> None:
        self.cluster.log("network", f"resets {host}")
        self.cluster.reset(host)

    def _fail(self, host: str) -> None:
        if host in self.cluster.agents:
            self.cluster.agents[host].fail_worker(self.cluster.random.choice([-9, -9, -15, 1]))

    def reset(self) -> None:
        self._reset(self._some_host())

    def partition(self) -> None:
        cluster = self.cluster
        side = self.some_side()
        cluster.log("network", f"cuts off {sorted(side)}")
        cluster.network.partition(side, set(cluster.hosts) - side)
        self._heal_after(self._later([0.5, 3.0, 5.0, 8.0, 30.0]))

    def cut(self, side: set[str]) -> None:
        cluster = self.cluster
        others = set(cluster.hosts) - side
        how = cluster.random.choice(["", "", " from sending", " from hearing"])
        cluster.log("network", f"cuts off {sorted(side)}{how}")
        sides = (others, side) if how == " from hearing" else (side, others)
        cluster.network.partition(*sides, one_way=bool(how))
        self._heal_after(self._later([0.5, 3.0, 5.0, 8.0, 30.0, 70.0]))

    def some_side(self) -> set[str]:
        hosts, random = self.cluster.hosts, self.cluster.random
        return set(random.sample(hosts, random.randint(1, max(1, len(hosts) - 1))))

    def _heal_after(self, delay_s: float) -> None:
        def heal() -> None:
            self.cluster.log("network", "heals")
            self.cluster.disturbed()
            self.cluster.network.heal()

        self.cluster.agenda.after(delay_s, heal)

    def crash_leader(self) -> None:
        host, random = self.cluster.leader_host(), self.cluster.random
        hosts = {host, self._some_host()} if random.random() < 0.3 else {host}
        for each in sorted(hosts):
            self.cluster.crash(each, silent=random.random() < 0.4)
            self._reboot_later(each)
        if random.random() < 0.3:  # while another one is elected, or begins
            self._at(self.cluster.clock.now + random.choice([0.05, 0.3, 1.0, 5.0]), self.crash_leader)

    def strike(self) -> None:
        """A coordinator has just decided something."""
        random = self.cluster.random
        if random.random() < 0.15:
            tears = self.options.moment_tears and random.random() < 0.5
            action = self.tear if tears else self.crash_leader
            self._at(self.cluster.clock.now + random.choice([0.0, 0.002, 0.01, 0.05]), action)

    def tear(self) -> None:
        side, leader = self.some_side(), self.cluster.leader_host()
        self.cut(side)
        for host in self.cluster.hosts:
            if (host in side) != (leader in side):
                self.cluster.reset(host)

    def freeze(self) -> None:
        host = self.cluster.random.choice([self.cluster.leader_host(), self._some_host()])
        self.cluster.freeze(host, self._later([0.5, 3.0, 5.0, 8.0, 20.0]))

    def lag(self) -> None:
        host, lags = self._some_host(), self.cluster.network.lags
        lags[host] = self.cluster.random.choice([0.1, 0.4, 1.5])
        self.cluster.log("network", f"is slow at {host}: {lags[host]} s")

        def end() -> None:
            self.cluster.disturbed()
            lags.pop(host, None)

        self.cluster.agenda.after(self._later([1.0, 5.0, 20.0]), end)

    def _some_host(self) -> str:
        return self.cluster.random.choice(self.cluster.hosts)

    def _some_agent(self) -> DrawnAgent | None:
        return self.cluster.agents.get(self._some_host())

    def _reboot_later(self, host: str) -> None:
        if self.options.reboots:
            self._at(self.cluster.clock.now + self._later([0.01, 1.0, 5.0, 20.0]), lambda: self._reboot(host))

    def _reboot(self, host: str) -> None:
        """An agent that is still on its way out is waited for, as by whoever restarts agents."""
        if host in self.cluster.agents:
            self._at(self.cluster.clock.now + 1.0, lambda: self._reboot(host))
        else:
            self.cluster.boot(host)

    def _later(self, delays_s: list[float]) -> float:
        """One of these delays; the faults are not over before it is."""
        delay_s = self.cluster.random.choice(delays_s)
        self.cluster.last_fault_s = max(self.cluster.last_fault_s, self.cluster.clock.now + delay_s)
        return delay_s

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self.cluster.last_fault_s = max(self.cluster.last_fault_s, when)

        def act() -> None:
            self.cluster.disturbed()
            action()

        self.cluster.agenda.at(when, act)
