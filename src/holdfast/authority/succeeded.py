"""What a successor knows of the nodes that ran the old coordinator's generation, from its charter: which of them have
come, which have ended, and from when on the workers of the others are suspended. PURE.

Bookkeeping only: `voters.py` decides whether that generation continues, and without whom.
"""

from __future__ import annotations

from math import inf

from holdfast.coordinator.world import is_local
from holdfast.protocol.charter import Charter, LedFrom, Seat
from holdfast.protocol.policy import Limits, NodeSpec

PROVE_FIRST_S = 0.25
"""Time from a succession until nodes that have not joined are asked whether they have ended (s)."""
PROVE_MAX = 16
"""Number of missing nodes that are asked at most; while more are missing, none is."""


class SucceededNodes:
    """The agents of that generation. Of a coordinator that founded the job: none."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self.left: set[str] = set()
        """Agents whose workers took part, without that of the old coordinator; empty: unknown."""
        self._came: set[str] = set()
        self._ended: set[str] = set()
        """Agents whose process has ended, and with it their workers."""
        self._listeners: dict[str, Seat] = {}
        """The addresses at which they listen, and which other machines can reach too, by name."""
        self._began_s = now
        self._prove_at_s = now + PROVE_FIRST_S
        self.leader = ""
        """The agent in whose process the old coordinator was."""
        self.alone = False
        """It was proved that this process has ended, and with it the workers of its node."""
        self._parts: tuple[tuple[str, int], ...] = ()
        """Name and number of ranks, by group rank."""
        self._suspended_s = self._killed_s = inf
        """The time from which no worker runs that the old coordinator let run, and the time at which those die that no
        new one lets run; inf: not all are suspended before they are killed."""

    def take(self, charter: Charter, died_s: float) -> None:
        """Nobody has confirmed the old coordinator since `died_s`."""
        self.left, self.leader = set(charter.nodes), charter.leader
        if charter.led_from is not None:
            self.left.discard(charter.led_from.node.agent)
        one_machine = all(is_local(address) for address, _ in charter.listeners)
        for name, (address, port) in zip(charter.nodes, charter.listeners, strict=False):
            # A loopback address means another machine there: no answer proves anything
            # (test_an_address_that_means_another_machine_here_proves_nothing).
            if port and is_local(address) == one_machine:
                self._listeners[name] = Seat(name, "", address, port)
        self._parts = tuple(zip(charter.nodes, charter.sizes, strict=False))
        if charter.short_lease_s:
            self._suspended_s = max(died_s + charter.short_lease_s, self._began_s)
            # They count from a confirmation that may be as old as a renewal.
            self._killed_s = died_s + self._limits.lease_s - self._limits.renew_interval_s

    def came(self, agent: str) -> None:
        self._came.add(agent)

    def gone(self, agent: str) -> bool:
        """This process has ended. Returns whether its workers were missing until now."""
        if agent not in self.missing or agent not in self._listeners:
            return False
        self._ended.add(agent)
        return True

    def has_come(self, agent: str) -> bool:
        return agent in self._came

    @property
    def missing(self) -> set[str]:
        """Agents whose workers may be alive, as far as is known."""
        return self.left - self._came - self._ended

    @property
    def living(self) -> int:
        """The number of agents that may come."""
        return len(self.left - self._ended)

    @property
    def due_s(self) -> float:
        """The time at which `provable` has something to ask."""
        return self._prove_at_s if self._provable() else inf

    def provable(self, now: float) -> list[Seat]:
        """Those that are asked now whether they have ended."""
        if now < self._prove_at_s or not (seats := self._provable()):
            return []
        self._prove_at_s = now + self._limits.prove_s
        return seats

    def _provable(self) -> list[Seat]:
        missing = self.missing
        few = 0 < len(missing) <= PROVE_MAX
        return [self._listeners[name] for name in sorted(missing) if name in self._listeners] if few else []

    @property
    def goes_on_at_s(self) -> float:
        """The time at which those that have come may continue: the others' workers are suspended, and nobody lets them
        run again. If more than the old coordinator's node is missing, half of the time is waited that is left until the
        workers of those that have come are killed."""
        if self._suspended_s == inf:  # every event asks, and large jobs suspend nothing
            return inf
        return (self._suspended_s + self._killed_s) / 2 if self.missing else self._suspended_s

    def without(self) -> dict[int, LedFrom]:
        """The parts of those that have not come, by group rank. They are asked for once."""
        self._suspended_s = inf
        return {
            rank: LedFrom(NodeSpec(member=name, host=name.partition("#")[0], nproc=size), rank, tuple(range(size)))
            for rank, (name, size) in enumerate(self._parts)
            if name not in self._came
        }
