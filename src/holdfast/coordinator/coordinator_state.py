"""Events, commands and state of the coordinator's machine: phases, members and the current world.

The shell makes the events; the machine never asks. No command has an answer: its effects arrive as events.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from msgspec import Struct

from holdfast.protocol.machines import Note, Tick
from holdfast.protocol.messages import Assign, FromAgent, FromCoordinator, StopReason
from holdfast.protocol.outcome import Failure, Outcome
from holdfast.protocol.policy import NodeSpec
from holdfast.protocol.rank_progress import Finding, RankStory
from holdfast.text import is_loopback, listed


class LinkOpened(Struct, frozen=True):
    """An agent passed the handshake. `link` is a number that the shell never uses twice."""

    link: int
    address: str
    """The agent's address as seen from here."""
    reached_at: str
    """This coordinator's address to which the agent connected."""
    local: bool = False
    """The agent in the coordinator's own process."""


class LinkClosed(Struct, frozen=True):
    link: int
    reason: str


class Heard(Struct, frozen=True):
    link: int
    message: FromAgent


class QuitAsked(Struct, frozen=True):
    """A user on one of the nodes asked for the end of the job."""

    drain: bool
    by: str


Event = LinkOpened | LinkClosed | Heard | QuitAsked | Tick


class Tell(Struct, frozen=True):
    link: int
    message: FromCoordinator


class DropLink(Struct, frozen=True):
    """Close this link. The machine has already removed it; no LinkClosed must follow."""

    link: int
    reason: str


class Conclude(Struct, frozen=True):
    """The job is over and all agents were informed. Emitted exactly once."""

    outcome: Outcome


Command = Tell | DropLink | Conclude | Note


LEFT_MAX = 8
"""Of this many workers that ended with 0 the details are kept: as many as a verdict names."""


class Phase(Enum):
    GATHERING = "gathering"
    PREPARING = "preparing"
    RUNNING = "running"
    DRAINING = "draining"
    """The workers continue to the safe point at which all of them stop."""
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
    """Number in the order in which agents joined."""
    joined_s: float
    last_heard_s: float
    leaving: str = ""
    """Why it leaves; empty while it does not."""
    revision: int = 0
    """The REVISION of messages that the agent understands."""
    busy_generation: int = 0
    """The generation whose worker processes may be alive on this node; 0: none. Changed through Membership."""
    first_started_s: float | None = None
    """When its first workers were started."""

    @property
    def name(self) -> str:
        return self.node.member

    @property
    def began_s(self) -> float:
        """When its part in the job began: when its first workers were started, else when it joined."""
        return self.joined_s if self.first_started_s is None else self.first_started_s


@dataclass(slots=True)
class Pending:
    """A link without a Join so far."""

    address: str
    reached_at: str
    local: bool
    """The agent runs in the coordinator's own process."""
    opened_s: float


@dataclass(slots=True)
class Draining:
    """State of a drain: the workers of a generation continue to a common safe point and stop there."""

    reason: StopReason
    text: str
    awaited: set[str]
    """Members that have not reported yet how far their workers are."""
    newest: int = 0
    """The newest safe point that any worker has reached; 0: none has asked for one."""
    safe_point: int | None = None
    """Where all workers stop; None: not decided yet."""

    def heard(self, member: str, reached: int) -> None:
        self.awaited.discard(member)
        self.newest = max(self.newest, reached)


@dataclass(slots=True)
class World:
    """One generation: its members and its progress."""

    generation: int
    order: tuple[str, ...]
    """Member names by group rank."""
    nproc: dict[str, int]
    size: int = field(init=False)
    """Number of all ranks."""
    prepared: set[str] = field(default_factory=set)
    store_port: int | None = None
    done: dict[str, set[int]] = field(default_factory=dict)
    """Local ranks that ended with 0, by member. Kept when the member is lost."""
    left: list[Failure] = field(default_factory=list)
    """How the first LEFT_MAX of these ended."""
    done_count: int = 0
    started_s: float | None = None
    failures: list[Failure] = field(default_factory=list)
    """In the order in which they were reported."""
    unread: set[int] = field(default_factory=set)
    """Ranks whose failure was reported, but not its evidence yet."""
    lost_nodes: list[str] = field(default_factory=list)
    lost_hosts: list[str] = field(default_factory=list)
    lost_ranks: list[int] = field(default_factory=list)
    drain: Draining | None = None
    stop_reason: StopReason | None = None
    stop_text: str = ""
    stop_began_s: float = 0.0
    hang: Finding | None = None
    """The hang that was found, while nothing has moved since."""
    hung: Failure | None = None
    """The worker that caused the hang."""
    survivors: tuple[RankStory, ...] = ()
    """Where the other ranks were after a time-out, before they were stopped."""

    def __post_init__(self) -> None:
        self.size = sum(self.nproc.values())

    def on_prepared(self, member: str, store_port: int | None) -> None:
        """A member is prepared. Only the first one's store counts."""
        if member in self.nproc:
            self.prepared.add(member)
        if store_port is not None and member == self.order[0]:
            self.store_port = store_port

    def mark_done(self, member: str, local_rank: int, left: Failure | None = None) -> None:
        ranks = self.done.setdefault(member, set())
        if 0 <= local_rank < self.nproc[member] and local_rank not in ranks:
            ranks.add(local_rank)
            self.done_count += 1
            if left is not None and len(self.left) < LEFT_MAX:
                self.left.append(left)

    def failed(self, failures: Sequence[Failure], *, evidence_follows: bool) -> bool:
        """Add failures. True if any of them is new, and not the evidence of a failure that was reported before."""
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
        """The workers know their last safe point: no exit status after that counts as a failure."""
        return self.drain is not None and self.drain.safe_point is not None

    def finished(self, member: str) -> bool:
        """Whether all workers of this member ended with 0."""
        return len(self.done.get(member, ())) == self.nproc[member]


@dataclass(slots=True)
class Formation:
    """A generation as it is formed, or as it was announced with the stop of the one before."""

    world: World
    places: Mapping[str, Assign]
    """By member."""


def is_local(address: str) -> bool:
    """Whether the address is loopback or empty: the member is on the coordinator's own machine."""
    return not address or is_loopback(address)


def master_address(world: Sequence[Member]) -> str:
    """Rank 0's address as the other nodes reach it; loopback only if all members are on one machine."""
    first = world[0]
    if first.node.local_addr:
        return first.node.local_addr
    if is_local(first.address):
        for other in world[1:]:
            if not is_local(other.address):
                return other.reached_at
    return first.address


def names(members: Collection[Member], most: int = 8) -> str:
    """Host names for a message, at most `most` of them."""
    return listed([member.node.host for member in members], most)
