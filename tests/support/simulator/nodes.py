"""The agent's shell in the simulation: what runtime/ does with asyncio and processes, done with the agenda and pretend
workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.agent import commands as do
from holdfast.agent import events as ev
from holdfast.protocol.errors import CoordinatorUnreachableError
from holdfast.protocol.machines import Note, Tick
from holdfast.protocol.messages import Assign, Stop, StopReason
from tests.support.simulator.network import FakeEnd
from tests.support.simulator.workers import SIGKILL, SimWorkers

if TYPE_CHECKING:
    from tests.support.simulator.cluster import SimCluster


class SimAgent(SimWorkers):
    """An AgentMachine on a host, with pretend workers."""

    def __init__(self, cluster: SimCluster, host: str) -> None:
        super().__init__(cluster, host)
        self.machine = cluster.machine_for(host, self.incarnation, hosts_coordinator=host == cluster.hosts[0])
        self._end: FakeEnd | None = None
        self._armed_s: float | None = None

    def begin(self) -> None:
        self.handle(Tick())

    # ---------------------------------------------------------------- commands

    def handle(self, event: ev.Event) -> None:
        if not self.alive:
            return
        out = self.machine.handle(self.cluster.clock.now, event)
        self.machine.check_invariants()
        for command in out:
            self._do(command)
        self._arm()

    def _do(self, command: do.Command) -> None:
        match command:
            case do.Dial(_):
                self.cluster.agenda.after(self.cluster.network.delay(), self._dial)
            case do.Send(message):
                if self._end is not None:
                    self._end.send(message)
            case do.HangUp(_):
                if self._end is not None:
                    self._end.close()
                    self._end = None
            case do.Prepare(assign):
                self._prepare(assign)
            case do.StartWorkers(assign, _):
                self._start_workers(assign)
            case do.RegroupWorkers(assign, safe_point):
                self._regroup(assign, safe_point)
            case do.ContinueWorkers(assign, _):
                self._continue_workers(assign)
            case do.StartReplacements(generation, local_ranks):
                self._start_replacements(generation, local_ranks)
            case do.SignalWorkers(signum):
                for local_rank in sorted(self.workers - self._raised):
                    self._worker_ends_soon(local_rank, -signum, self.cluster.random.choice([0.002, 0.05, 2.0, 60.0]))
            case do.HoldWorkers(generation):
                self._hold(generation)
            case do.ReleaseWorkers(generation, safe_point):
                self._release(generation, safe_point)
            case do.LookAtWorkers(generation, number):
                delay_s = self.cluster.random.choice([0.01, 0.01, 0.01, 0.5, 0.5, 1.5, 1.5, 7.0])
                self.cluster.agenda.after(delay_s, lambda: self._looked(generation, number))
            case do.KillTree(generation):
                self.cluster.agenda.after(0.01, lambda: self._kill_tree(generation))
            case do.Say(text):
                self.cluster.log(self.host, f"says: {text}")
            case Note(event, fields):
                self.cluster.log(self.host, f"{event} {fields}")
            case do.Exit(outcome):
                self.alive = False
                self.cluster.agent_ended(self.host, outcome)

    def _dial(self) -> None:
        cluster = self.cluster
        if not self.alive:
            return
        cluster.claim(self.host)
        coordinator = cluster.coordinator
        if coordinator is None or not coordinator.alive or cluster.network.silent(self.host, coordinator.host):
            error = CoordinatorUnreachableError
            self.handle(ev.DialFailed(error.code, error.exit_code, "connection refused", final=False))
            return
        link = cluster.network.connect(self.host, coordinator.host)
        self._end = link.a
        link.a.on_message = self._received
        link.a.on_closed = self._link_lost
        self.coordinator_number = coordinator.number
        coordinator.accept(link.b, self.host)
        self.handle(ev.Dialed())

    def _received(self, message: object) -> None:
        if isinstance(message, Stop) and message.reason is StopReason.HUNG and message.generation == self.generation:
            still_s = (
                self.cluster.clock.now - self._stall.since_s if self._stall is not None and self.stands_still else 0.0
            )
            self.cluster.checker.ended_as_hung(self.generation, still_s, self.cluster.options.limits.hang_timeout_s)
        self.handle(ev.Received(message))  # type: ignore[arg-type]

    def _link_lost(self, reason: str) -> None:
        self._end = None
        self.cluster.lost_links[self.host] = self.cluster.clock.now
        self.handle(ev.LinkLost(reason))

    def _prepare(self, assign: Assign) -> None:
        self.cluster.checker.assigned(self.coordinator_number, self.host, self._count(assign), assign)
        port = 40_000 + assign.generation if assign.hosts_store else None
        self.cluster.agenda.after(
            self.cluster.random.uniform(0.0, 0.02), lambda: self.handle(ev.NodePrepared(assign.generation, port))
        )

    def die(self, *, silent: bool) -> None:
        """The agent is gone; its supervisor needs a moment to kill the workers (none if the machine lost power)."""
        self.alive = False
        if self._end is not None:
            if silent:
                self._end.vanish()
            else:
                self._end.close()

        def gone() -> None:
            for local_rank in sorted(self.workers):
                self.worker_ends(self.generation, local_rank, -SIGKILL)
            self.replacements.clear()

        if silent:
            gone()
        else:
            self.cluster.lost_links[self.host] = self.cluster.clock.now
            self.cluster.agenda.after(0.01, gone)

    def _arm(self) -> None:
        deadline = self.machine.next_deadline()
        if not self.alive or deadline is None or (self._armed_s is not None and self._armed_s <= deadline):
            return
        self._armed_s = deadline

        def tick() -> None:
            if self._armed_s == deadline:  # else an earlier one took its place
                self._armed_s = None
                self.handle(Tick())

        self.cluster.agenda.at(deadline, tick)
