"""The coordinator's shell in the simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.coordinator import coordinator_state as cstate
from holdfast.protocol.machines import Note, Tick
from tests.support.simulator.network import FakeEnd

if TYPE_CHECKING:
    from tests.support.simulator.cluster import SimCluster


class SimCoordinator:
    """A CoordinatorMachine on a host."""

    def __init__(self, cluster: SimCluster, host: str, number: int) -> None:
        self.cluster = cluster
        self.host = host
        self.number = number
        self.machine = cluster.coordinator_machine()
        self.alive = True
        self._ends: dict[int, FakeEnd] = {}
        self._links = 0
        self._armed_s: float | None = None
        self._unhandled: list[cstate.Event] | None = None
        """While paused: what has come in the meantime."""
        self._arm()

    def accept(self, end: FakeEnd, peer: str) -> None:
        self._links += 1
        link = self._links
        self._ends[link] = end
        end.on_message = lambda message: self._heard(link, message)
        end.on_closed = lambda reason: self._closed(link, peer, reason)
        address = "127.0.0.1" if peer == self.host else f"10.0.0.{peer[1:]}"
        self._handle(cstate.LinkOpened(link, address, "10.0.0.0", local=peer == self.host))

    def _heard(self, link: int, message: object) -> None:
        self._handle(cstate.Heard(link, message))  # type: ignore[arg-type]

    def _closed(self, link: int, peer: str, reason: str) -> None:
        self._ends.pop(link, None)
        self.cluster.lost_links[peer] = self.cluster.clock.now
        self._handle(cstate.LinkClosed(link, reason))

    def die(self, *, silent: bool) -> None:
        self.alive = False
        for end in self._ends.values():
            if silent:
                end.vanish()
            else:
                end.close()

    def pause(self, pause_s: float) -> None:
        """The process stands still; what comes waits in its sockets."""
        if self._unhandled is not None or not self.alive:
            return
        self.cluster.log("coordinator", f"stands still for {pause_s:g} s")
        self._unhandled = []

        def resume() -> None:
            waiting, self._unhandled = self._unhandled, None
            self.cluster.log("coordinator", "goes on")
            for event in waiting or ():
                self._handle(event)

        self.cluster.agenda.after(pause_s, resume)

    def retire(self) -> None:
        """The host's agent has ended: as in production, linger for the others, then go."""

        def go() -> None:
            if self.alive:
                self.die(silent=False)
                self.cluster.coordinator_retired(self)

        self.cluster.agenda.after(2.0 if self.machine.outcome is not None else 0.0, go)

    def _handle(self, event: cstate.Event) -> None:
        if not self.alive:
            return
        if self._unhandled is not None:
            self._unhandled.append(event)
            return
        out = self.machine.handle(self.cluster.clock.now, event)
        self.machine.check_invariants()
        for command in out:
            match command:
                case cstate.Tell(link, message):
                    end = self._ends.get(link)
                    if end is not None:
                        end.send(message)
                case cstate.DropLink(link, reason):
                    self.cluster.log("coordinator", f"drops link {link}: {reason}")
                    end = self._ends.pop(link, None)
                    if end is not None:
                        end.close()
                case cstate.Conclude(outcome):
                    self.cluster.log("coordinator", f"concludes {outcome.kind.value}: {outcome.message}")
                case Note("hang", fields):
                    self.cluster.log("coordinator", f"hang {fields}")
                    self.cluster.checker.found_hung(self.machine.generation, hangs=self._world_stalls())
                case Note(event_name, fields):
                    self.cluster.log("coordinator", f"{event_name} {fields}")
        self._arm()

    def _world_stalls(self) -> bool:
        """A worker of the world does not go on by itself, or did not before it was stopped: a coordinator that stood still
        finds the hang later."""
        agents = [a for a in self.cluster.agents.values() if a.generation == self.machine.generation]
        return any(agent.stands_still for agent in agents)

    def _arm(self) -> None:
        deadline = self.machine.next_deadline()
        if deadline is None or (self._armed_s is not None and self._armed_s <= deadline):
            return
        self._armed_s = deadline

        def tick() -> None:
            if self._armed_s == deadline:  # else an earlier one took its place
                self._armed_s = None
                self._handle(Tick())

        self.cluster.agenda.at(deadline, tick)
