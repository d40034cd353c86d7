"""What the coordinator keeps of the job: its phase, the members, and the generation that they form (a World)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from holdfast.protocol.messages import Assign, StopReason
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import NodeSpec
from holdfast.protocol.rank_progress import Finding, RankStory
from holdfast.text import is_loopback, listed

LEFT_MAX = 8
"""Number of workers that ended with 0 whose details are kept: as many as a verdict names."""


class Phase(Enum):
    GATHERING = "gathering"
    PREPARING = "preparing"
    RUNNING = "running"
    DRAINING = "draining"
    """The workers continue to the safe point at which all of them stop."""
    REGROUPING = "regrouping"
    """Running workers leave their generation, and wait for the start of the next one."""
    STOPPING = "stopping"
    OVER = "over"


# State of the machines is neither compared nor printed. To generate the code for that took 7 ms of each start.
@dataclass(slots=True, eq=False, repr=False)
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
    """The time of its newest message, the Join included; not after the coordinator's present."""
    leaving: str = ""
    """The reason why it leaves; empty while it does not."""
    parked: str = ""
    """The reason why it takes no part, in words; empty: it may."""
    port: int = 0
    """The port on which the agent listens; 0: it does not."""
    suspend_s: float = 0.0
    """The time after which this agent suspends its workers without an answer (s), as in Joined; 0: it does not."""
    suspends: bool = False
    """It has reported on this link that its workers are able to go on: it goes by `suspend_s`."""
    busy_generation: int = 0
    """The generation whose worker processes may be alive on this node; 0: none. Changed through Membership."""
    first_started_s: float | None = None
    """The time at which its first workers were started."""

    @property
    def name(self) -> str:
        return self.node.member

    @property
    def began_s(self) -> float:
        """The begin of its part in the job: the start of its first workers, else the time at which it joined."""
        return self.joined_s if self.first_started_s is None else self.first_started_s


@dataclass(slots=True, eq=False, repr=False)
class PendingLink:
    """A link without a Join so far."""

    address: str
    reached_at: str
    local: bool
    """The agent runs in the coordinator's own process."""
    opened_s: float


@dataclass(slots=True, eq=False, repr=False)
class Draining:
    """State of a drain: the workers of a generation continue to a common safe point and stop there."""

    reason: StopReason
    text: str
    awaited: set[str]
    """Members that have not reported yet how far their workers are."""
    number: int = 0
    """Its number in this generation, counted from 0."""
    newest: int = 0
    """The newest safe point that any worker has reached; 0: none has asked for one."""
    safe_point: int | None = None
    """The safe point at which all workers stop; None: not decided yet."""
    regroups: bool = False
    """If they can, the workers do not end there: they form the next generation with new ones, or without a node that
    leaves."""
    saves: bool = False
    """The workers do not end there: they save and go on."""
    all_save: bool = True
    """All workers ask at their safe points whether to save."""

    def heard(self, member: str, reached: int, *, saves: bool = True) -> None:
        self.awaited.discard(member)
        self.newest = max(self.newest, reached)
        self.all_save &= saves


@dataclass(slots=True, eq=False, repr=False)
class World:
    """One generation: its members and its progress."""

    generation: int
    order: tuple[str, ...]
    """Member names by group rank."""
    places: dict[str, tuple[int, ...]]
    """The local ranks of each member that take part, sorted. None of them: its workers are being replaced."""
    leaving_workers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Workers without a place in it, by member that leaves: until it begins they do what the others still need."""
    size: int = field(init=False)
    """Number of all ranks."""
    prepared: set[str] = field(default_factory=set)
    """Members that have reported Prepared. Always a part of `order`."""
    store_port: int | None = None
    done: dict[str, set[int]] = field(default_factory=dict)
    """Local ranks that ended with 0, by member."""
    left: list[Failure] = field(default_factory=list)
    """The details of the first LEFT_MAX of these."""
    done_count: int = 0
    """The number of ranks in `done`."""
    started_s: float | None = None
    """None: Start was not sent."""
    undisturbed_s: float | None = None
    """The time since which no rank was lost, if that is longer ago: workers that join do not count as a disturbance."""
    stepped: bool = False
    """A rank has reported that it made a step."""
    can_go_on: dict[str, set[int]] = field(default_factory=dict)
    """Local ranks that can go on in another generation, by member. Changed by `set_can_go_on`."""
    can_go_on_count: int = 0
    """The number of ranks in `can_go_on`."""
    short_lease_s: float = 0.0
    """A member is lost after this silence, in seconds, if the others can go on without it: its workers are suspended
    by then. 0: not before its lease expires."""
    gone: dict[str, set[int]] = field(default_factory=dict)
    """Local ranks that failed, by member. Never empty sets: `all_can_go_on` asks whether there is one."""
    master: tuple[str, int] = ("", 0)
    """MASTER_ADDR and MASTER_PORT, as in Start; port 0: this coordinator has not sent them."""
    drain: Draining | None = None
    """Set by a drain, and not taken back unless the workers are let go."""
    drains: int = 0
    """The number of drains that began in it."""
    stop_reason: StopReason | None = None
    """The reason of its stop, with the text for users; None: it was not stopped."""
    stop_text: str = ""
    stop_began_s: float = 0.0
    hang: Finding | None = None
    """The reason why no rank made progress at its end, as far as extensions have found one."""
    hung: Failure | None = None
    """The worker for which it was ended."""
    devices: tuple[str, ...] = ()
    """Severe events of GPUs and network ports around its end, in words."""
    survivors: tuple[RankStory, ...] = ()
    """The places of the other ranks after a time-out, before they were stopped."""

    def __post_init__(self) -> None:
        self.size = sum(len(places) for places in self.places.values())

    def on_prepared(self, member: str, store_port: int | None) -> None:
        """A member is prepared. Only the first one's store counts."""
        if member in self.places:
            self.prepared.add(member)
        if store_port is not None and member == self.order[0]:
            self.store_port = store_port

    def mark_done(self, member: str, local_rank: int, left: Failure | None = None) -> None:
        ranks = self.done.setdefault(member, set())
        if local_rank in self.workers_of(member) and local_rank not in ranks:
            # `done_count` counts a rank once, however often its end is reported.
            ranks.add(local_rank)
            self.done_count += 1
            if left is not None and len(self.left) < LEFT_MAX:
                self.left.append(left)

    def set_can_go_on(self, member: str, local_ranks: Iterable[int]) -> None:
        before, after = self.can_go_on.get(member, set()), set(local_ranks).intersection(self.places[member])
        self.can_go_on[member] = after
        self.can_go_on_count += len(after) - len(before)

    def lose(self, member: str, local_ranks: Iterable[int]) -> None:
        """These ranks failed."""
        lost = set(local_ranks).intersection(self.workers_of(member))
        if lost:
            self.gone.setdefault(member, set()).update(lost)

    @property
    def all_can_go_on(self) -> bool:
        return self.can_go_on_count == self.size and not self.done_count and not self.gone

    @property
    def all_prepared(self) -> bool:
        return self.store_port is not None and len(self.prepared) == len(self.order)

    def drop(self, member: str) -> None:
        """Remove a member without a rank."""
        assert not self.places[member]
        del self.places[member]
        self.leaving_workers.pop(member, None)
        self.order = tuple(name for name in self.order if name != member)
        self.prepared.discard(member)

    def lived_s(self, until_s: float) -> float:
        """Time for which its workers ran, generations without a loss before it included (s)."""
        since_s = self.started_s if self.undisturbed_s is None else self.undisturbed_s
        return 0.0 if since_s is None else until_s - since_s

    def done_ranks(self) -> tuple[int, ...]:
        """All ranks that ended with 0."""
        ranks: list[int] = []
        base = 0
        for name in self.order:
            places, done = self.places[name], self.done.get(name, ())
            ranks += [base + place for place, local_rank in enumerate(places) if local_rank in done]
            base += len(places)
        return tuple(ranks)

    def ranks_of(self, member: str) -> range:
        """The ranks of this member."""
        base = sum(len(self.places[name]) for name in self.order[: self.order.index(member)])
        return range(base, base + len(self.places[member]))

    @property
    def drain_agreed(self) -> bool:
        """The workers know their last safe point: no exit status after that counts as a failure."""
        return self.drain is not None and self.drain.safe_point is not None

    @property
    def costs_no_restart(self) -> bool:
        """What its workers end with costs no restart: a node leaves, and the others may be stopped for that."""
        return self.drain_agreed or bool(self.leaving_workers)

    def workers_of(self, member: str) -> tuple[int, ...]:
        """Local ranks of the workers of this member that take part, or did until now."""
        return (*self.places[member], *self.leaving_workers.get(member, ()))

    def finished(self, member: str) -> bool:
        """Whether all these workers ended with 0."""
        return len(self.done.get(member, ())) == len(self.workers_of(member))


@dataclass(slots=True, eq=False, repr=False)
class Formation:
    """A generation as it is formed, or as it was announced with the stop of the one before."""

    world: World
    places: Mapping[str, Assign]
    """The place of each member."""


def is_local(address: str) -> bool:
    """Whether the address is loopback or empty: the member is on the coordinator's own machine."""
    return not address or is_loopback(address)


def master_address(world: Sequence[Member]) -> str:
    """Rank 0's address as the other nodes reach it; loopback only if all members are on one machine."""
    first = world[0]
    if first.node.local_addr:
        return first.node.local_addr
    # It came over loopback, and this address means another machine elsewhere: take the one at which others have
    # reached this machine.
    if is_local(first.address):
        for other in world[1:]:
            if not is_local(other.address):
                return other.reached_at
    return first.address


def names(members: Collection[Member], most: int = 8) -> str:
    """Host names for a message, at most `most` of them."""
    return listed([member.node.host for member in members], most)
