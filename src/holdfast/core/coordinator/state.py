"""The coordinator's memory: members, the current world, phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from holdfast.core.outcome import Failure
from holdfast.core.policy import NodeSpec
from holdfast.core.protocol import StopReason


class Phase(Enum):
    GATHERING = "gathering"
    PREPARING = "preparing"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(slots=True)
class Member:
    """An agent that has joined."""

    node: NodeSpec
    link: int
    address: str
    reached_at: str
    arrival: int
    """Position in the order of all arrivals."""
    last_heard_s: float
    leaving: str = ""
    """Why it is about to go; empty while it stays."""
    busy_generation: int = 0
    """The generation whose worker processes may be alive on this node; 0: none."""

    @property
    def name(self) -> str:
        return self.node.member


@dataclass(slots=True)
class Pending:
    """A link whose Join has not come yet."""

    address: str
    reached_at: str
    local: bool


@dataclass(slots=True)
class World:
    """One generation: who is in it, and how far it has come."""

    generation: int
    order: tuple[str, ...]
    """Member names by group rank."""
    nproc: dict[str, int]
    prepared: set[str] = field(default_factory=set)
    store_port: int | None = None
    done: dict[str, set[int]] = field(default_factory=dict)
    """Local ranks that ended with 0, per member. Outlives the member."""
    started_s: float | None = None
    failures: list[Failure] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_text: str = ""
    stop_began_s: float = 0.0

    @property
    def size(self) -> int:
        return sum(self.nproc.values())

    @property
    def done_count(self) -> int:
        return sum(len(ranks) for ranks in self.done.values())

    def finished(self, member: str) -> bool:
        """All workers of this member have ended with 0."""
        return len(self.done.get(member, ())) == self.nproc[member]


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "")


def master_address(world: Sequence[Member]) -> str:
    """Rank 0's address as the others can reach it: loopback only if nobody is anywhere else."""
    first = world[0]
    if first.node.local_addr:
        return first.node.local_addr
    if is_loopback(first.address):
        for other in world[1:]:
            if not is_loopback(other.address):
                return other.reached_at
    return first.address


def names(members: Sequence[Member], most: int = 8) -> str:
    """Host names for a message, cut short."""
    hosts = [member.node.host for member in members]
    return ", ".join(hosts[:most]) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")
