"""Which fault comes when: drawn from a seed, before anything starts, so that every launcher suffers the same. PURE.

Kinds are dealt from a shuffled deck, so that each comes about equally often; the gaps between them are exponential.
What would make no sense together is not drawn: two faults of the network at once, a fault of a node that is down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, NamedTuple

MEAN_GAP_S = 15.0
LEASE_S = 6.0
"""holdfast's default: an agent is stopped for longer than this."""
QUIET_S = 2.0
"""A node that is back is left alone for this long."""
DRAWS_MAX = 40
"""So many times a place is looked for before a fault is let go."""

NETWORK, DISK, NODE, COORDINATOR, HALVES = "network", "disk", "node", "coordinator", "halves"


class Kind(NamedTuple):
    name: str
    where: str
    """NODE: one of them; COORDINATOR: the node with the endpoint; NETWORK: the cable of one; HALVES: two against two."""
    lasts_s: tuple[float, float] = (0.0, 0.0)
    """From what begins the fault to what ends it."""
    restarts: bool = False
    """The agent is gone and is started again, after a pause, as a scheduler would."""


KINDS = (
    Kind("worker killed", NODE),
    Kind("worker exits with 3", NODE),
    Kind("worker raises", NODE),
    Kind("worker stopped", NODE, (1.0, 3.0)),
    Kind("agent killed", NODE, restarts=True),
    Kind("agent told to leave", NODE, restarts=True),
    Kind("agent stopped", NODE, (LEASE_S + 2.0, LEASE_S + 6.0)),
    Kind("supervisor killed", NODE),
    Kind("store host killed", NODE),
    Kind("node killed", NODE, (2.0, 8.0), restarts=True),
    Kind("node crashed", NODE, (2.0, 10.0), restarts=True),
    Kind("coordinator's node killed", COORDINATOR, (2.0, 8.0), restarts=True),
    Kind("link down", NETWORK, (2.0, 12.0)),
    Kind("partition 2|2", HALVES, (8.0, 14.0)),
    Kind("delay and loss", NETWORK, (5.0, 15.0)),
    Kind("disk full", DISK, (4.0, 8.0)),
    Kind("disk stalls", DISK, (3.0, 6.0)),
)
PAUSE_S = (1.0, 4.0)
"""How long the pretended scheduler takes to start an agent again."""


@dataclass(frozen=True)
class Fault:
    at_s: float
    """After the first step was trained."""
    kind: str
    node: int
    """0: no node in particular."""
    others: tuple[int, ...] = ()
    """With HALVES: the side of the coordinator."""
    lasts_s: float = 0.0
    pause_s: float = 0.0
    """Before the agent is started again."""

    @property
    def over_s(self) -> float:
        return self.at_s + self.lasts_s + self.pause_s

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def schedule(seed: int, seconds: float, nodes: int = 4, mean_gap_s: float = MEAN_GAP_S) -> list[Fault]:
    """The faults of a run of `seconds`, in order; all are over by then."""
    rng = Random(f"soak {seed}")
    deck = _deck(rng)
    busy_until_s: dict[str, float] = {}
    faults: list[Fault] = []
    now = 0.0
    while (now := now + rng.expovariate(1.0 / mean_gap_s)) < seconds:
        kind = next(deck)
        for _ in range(DRAWS_MAX):
            fault = _draw(rng, kind, now, nodes)
            takes = _takes(kind, fault)
            if fault.over_s <= seconds and all(busy_until_s.get(each, 0.0) <= now for each in takes):
                faults.append(fault)
                busy_until_s.update(dict.fromkeys(takes, fault.over_s + QUIET_S))
                break
            kind = next(deck)
    return faults


def _deck(rng: Random) -> Iterator[Kind]:
    while True:
        yield from rng.sample(KINDS, len(KINDS))


def _draw(rng: Random, kind: Kind, at_s: float, nodes: int) -> Fault:
    node = 1 if kind.where == COORDINATOR else rng.randint(1, nodes)
    others: tuple[int, ...] = ()
    if kind.where == HALVES:
        others = tuple(sorted((1, *rng.sample(range(2, nodes + 1), nodes // 2 - 1))))
    return Fault(
        at_s=round(at_s, 3),
        kind=kind.name,
        node=0 if kind.where in {DISK, HALVES} else node,
        others=others,
        lasts_s=round(rng.uniform(*kind.lasts_s), 3),
        pause_s=round(rng.uniform(*PAUSE_S), 3) if kind.restarts else 0.0,
    )


def _takes(kind: Kind, fault: Fault) -> list[str]:
    """What a fault needs for itself while it lasts."""
    if kind.where == DISK:
        return [DISK]
    network = [NETWORK] if kind.where in {NETWORK, HALVES} or kind.name == "node crashed" else []
    return [*network, *([f"node {fault.node}"] if fault.node else [])]
