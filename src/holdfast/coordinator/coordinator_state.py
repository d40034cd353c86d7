"""What goes into the coordinator's machine, what comes out of it, and what it remembers: events, commands, members, the
current world, phases.

The shell makes the events; the machine never asks. No command has an answer: what follows comes as an event of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from msgspec import Struct

from holdfast.protocol.machines import Note, Tick
from holdfast.protocol.messages import FromAgent, FromCoordinator, StopReason
from holdfast.protocol.outcome import Failure, Outcome
from holdfast.protocol.policy import NodeSpec
from holdfast.protocol.rank_progress import Finding, RankStory
from holdfast.text import is_loopback, listed


class LinkOpened(Struct, frozen=True):
    """An agent passed the handshake. A link is a number the shell never uses twice."""

    link: int
    address: str
    """The agent's address as seen from here."""
    reached_at: str
    """The address of ours at which it reached us."""
    local: bool = False
    """The agent that hosts us."""


class LinkClosed(Struct, frozen=True):
    link: int
    reason: str


class Heard(Struct, frozen=True):
    link: int
    message: FromAgent


class QuitAsked(Struct, frozen=True):
    """Somebody on one of the nodes wants the job to end."""

    drain: bool
    by: str


Event = LinkOpened | LinkClosed | Heard | QuitAsked | Tick


class Tell(Struct, frozen=True):
    link: int
    message: FromCoordinator


class DropLink(Struct, frozen=True):
    """Close this link. The machine has already forgotten it; no LinkClosed is owed."""

    link: int
    reason: str


class Conclude(Struct, frozen=True):
    """The job is over; everybody has been told. Emitted exactly once."""

    outcome: Outcome


Command = Tell | DropLink | Conclude | Note


LEFT_MAX = 8
"""Workers that ended with 0 of which is kept how: those that a verdict names."""


class Phase(Enum):
    GATHERING = "gathering"
    PREPARING = "preparing"
    RUNNING = "running"
    DRAINING = "draining"
    """The workers are on their way to the safe point at which all of them stop."""
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
    joined_s: float
    last_heard_s: float
    leaving: str = ""
    """Why it is about to go; empty while it stays."""
    busy_generation: int = 0
    """The generation whose worker processes may be alive on this node; 0: none. Changed through Membership."""
    first_started_s: float | None = None
    """When its first workers were started."""

    @property
    def name(self) -> str:
        return self.node.member

    @property
    def began_s(self) -> float:
        """When its part in the job began: with its first workers, or else when it joined."""
        return self.joined_s if self.first_started_s is None else self.first_started_s


@dataclass(slots=True)
class Pending:
    """A link whose Join has not come yet."""

    address: str
    reached_at: str
    local: bool
    """Of the coordinator's own process."""
    opened_s: float


@dataclass(slots=True)
class Draining:
    """The way of a generation to the safe point at which all its workers stop."""

    reason: StopReason
    text: str
    awaited: set[str]
    """Members that have not said yet how far their workers are."""
    newest: int = 0
    """The newest safe point that any worker has reached; 0: none has asked for one."""
    safe_point: int | None = None
    """Where they stop; None: not agreed yet."""

    def heard(self, member: str, reached: int) -> None:
        self.awaited.discard(member)
        self.newest = max(self.newest, reached)


@dataclass(slots=True)
class World:
    """One generation: who is in it, and how far it has come."""

    generation: int
    order: tuple[str, ...]
    """Member names by group rank."""
    nproc: dict[str, int]
    size: int = field(init=False)
    """Of all ranks."""
    prepared: set[str] = field(default_factory=set)
    store_port: int | None = None
    done: dict[str, set[int]] = field(default_factory=dict)
    """Local ranks that ended with 0, per member. Outlives the member."""
    left: list[Failure] = field(default_factory=list)
    """How the first of these ended."""
    done_count: int = 0
    started_s: float | None = None
    failures: list[Failure] = field(default_factory=list)
    """In the order in which they were reported."""
    unread: set[int] = field(default_factory=set)
    """Ranks whose failure was reported, and not yet what they left."""
    lost_nodes: list[str] = field(default_factory=list)
    lost_hosts: list[str] = field(default_factory=list)
    lost_ranks: list[int] = field(default_factory=list)
    drain: Draining | None = None
    stop_reason: StopReason | None = None
    stop_text: str = ""
    stop_began_s: float = 0.0
    hang: Finding | None = None
    """It was found standing still, and has not moved since."""
    hung: Failure | None = None
    """The worker to blame for that."""
    survivors: tuple[RankStory, ...] = ()
    """Where the others were after a wait in vain, before they were stopped."""

    def __post_init__(self) -> None:
        self.size = sum(self.nproc.values())

    def mark_done(self, member: str, local_rank: int, left: Failure | None = None) -> None:
        ranks = self.done.setdefault(member, set())
        if 0 <= local_rank < self.nproc[member] and local_rank not in ranks:
            ranks.add(local_rank)
            self.done_count += 1
            if left is not None and len(self.left) < LEFT_MAX:
                self.left.append(left)

    def failed(self, failures: Sequence[Failure], *, evidence_follows: bool) -> bool:
        """Whether any of these is new, and not the evidence of a failure that was reported before."""
        new = False
        for failure in failures:
            if failure.rank in self.unread and not evidence_follows:
                self.unread.discard(failure.rank)
                place = next(n for n, each in enumerate(self.failures) if each.rank == failure.rank)
                self.failures[place] = failure
                continue
            new = True
            self.failures.append(failure)
            if evidence_follows:
                self.unread.add(failure.rank)
        return new

    def done_ranks(self) -> tuple[int, ...]:
        """All ranks that ended with 0."""
        ranks: list[int] = []
        base = 0
        for name in self.order:
            ranks += [base + local_rank for local_rank in sorted(self.done.get(name, ()))]
            base += self.nproc[name]
        return tuple(ranks)

    def rank_base(self, member: str) -> int:
        """The first rank of this member."""
        return sum(self.nproc[name] for name in self.order[: self.order.index(member)])

    def lost(self, member: str, host: str, reason: str) -> None:
        self.lost_nodes.append(f"{host} ({reason})")
        self.lost_hosts.append(host)
        base = self.rank_base(member)
        self.lost_ranks += range(base, base + self.nproc[member])

    @property
    def drain_agreed(self) -> bool:
        """Its workers were told where to stop: whatever they ended with after that is no fault of theirs."""
        return self.drain is not None and self.drain.safe_point is not None

    def finished(self, member: str) -> bool:
        """All workers of this member have ended with 0."""
        return len(self.done.get(member, ())) == self.nproc[member]


def is_local(address: str) -> bool:
    """Loopback, or none: a member on the coordinator's own machine."""
    return not address or is_loopback(address)


def master_address(world: Sequence[Member]) -> str:
    """Rank 0's address as the others can reach it: loopback only if nobody is anywhere else."""
    first = world[0]
    if first.node.local_addr:
        return first.node.local_addr
    if is_local(first.address):
        for other in world[1:]:
            if not is_local(other.address):
                return other.reached_at
    return first.address


def names(members: Collection[Member], most: int = 8) -> str:
    """Host names for a message, cut short."""
    return listed([member.node.host for member in members], most)
