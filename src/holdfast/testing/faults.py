"""Which faults a simulated cluster suffers, and when. Drawn from the cluster's own Random, so that a seed says all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.core.agent.events import Signalled

if TYPE_CHECKING:
    from holdfast.testing.cluster import SimCluster


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


def plan_faults(cluster: SimCluster, options: FaultOptions) -> None:
    random = cluster.random

    def plan(count: int, action: Callable[[], None]) -> None:
        for _ in range(count):
            when = random.uniform(0.0, options.span_s)
            cluster.last_fault_s = max(cluster.last_fault_s, when)
            cluster.agenda.at(when, action)

    def reboot_later(host: str) -> None:
        if options.reboots:
            when = cluster.clock.now + random.choice([0.01, 1.0, 5.0, 20.0])
            cluster.last_fault_s = max(cluster.last_fault_s, when)
            cluster.agenda.at(when, lambda: cluster.boot(host))

    def some_host() -> str:
        return random.choice(cluster.hosts)

    def fail_worker() -> None:
        agent = cluster.agents.get(some_host())
        if agent is not None:
            agent.fail_worker(random.choice([1, 3, -9, -11]))

    def kill(silent: bool) -> Callable[[], None]:
        def action() -> None:
            host = some_host()
            cluster.crash(host, silent=silent)
            reboot_later(host)

        return action

    def reset() -> None:
        host = some_host()
        cluster.log("network", f"resets {host}")
        cluster.network.reset(host, cluster.hosts[0])

    def partition() -> None:
        side = set(random.sample(cluster.hosts, random.randint(1, max(1, len(cluster.hosts) - 1))))
        cluster.log("network", f"cuts off {sorted(side)}")
        cluster.network.partition(side, set(cluster.hosts) - side)
        when = cluster.clock.now + random.choice([0.5, 3.0, 5.0, 8.0, 30.0])
        cluster.last_fault_s = max(cluster.last_fault_s, when)

        def heal() -> None:
            cluster.log("network", "heals")
            cluster.network.heal()

        cluster.agenda.at(when, heal)

    def leave() -> None:
        host = some_host()
        agent = cluster.agents.get(host)
        if agent is not None:
            cluster.log(host, "gets SIGTERM")
            agent.handle(Signalled(15, "SIGTERM"))
            reboot_later(host)

    plan(options.worker_failures, fail_worker)
    plan(options.agent_kills, kill(silent=False))
    plan(options.power_losses, kill(silent=True))
    plan(options.link_resets, reset)
    plan(options.partitions, partition)
    plan(options.signals, leave)
