"""The charter: what a successor of the coordinator must know, and who elects it. PURE.

The coordinator replicates the charter to its voters. Every change has a position; the change counts once a majority of
the voters holds it. While the set of voters changes, a majority of the set before is needed too (`before`), so any two
majorities share a voter.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import Count, NodeSpec, Port, PortOrNone, Rank, Seconds, Workers

VOTERS_MAX = 7
"""More voters would survive more losses at one time, and cost the coordinator messages."""
VOTERS_MIN = 3
"""With fewer, no loss leaves a majority: the coordinator is its only voter."""
NODES_MAX = 1024
"""Agents in a charter. The successor in a larger job waits for the fence."""
HOSTS_MAX = 1024
"""Hosts with a back-off in a charter."""


class CharterPosition(NamedTuple):
    """Where a charter stands among all charters of the job. The larger one is the newer one."""

    term: Count
    number: Count


NO_CHARTER = CharterPosition(0, 0)
"""Before every charter."""


class Seat(Struct, frozen=True, array_like=True):
    """A voter: an agent, or a witness."""

    name: str
    """The agent without its joins (`NodeSpec.agent`), or the witness: an identity that is used once."""
    host: str
    """For users."""
    address: str
    port: Port
    witness: bool = False
    """It votes and keeps the charter, and never becomes the coordinator."""


class LedFrom(Struct, frozen=True, array_like=True):
    """The part of the coordinator's own node in the running generation. It ends with the coordinator."""

    node: NodeSpec
    group_rank: Rank
    local_ranks: tuple[int, ...]


class HostRecord(Struct, frozen=True, array_like=True):
    """A host's back-off (`membership.HostBackoff`)."""

    host: str
    strikes: Count
    blames: Count
    exclusions: Count
    stay_s: Seconds
    excluded_s: Seconds
    """For how long it is still excluded."""


class Charter(Struct, frozen=True, array_like=True):
    """The job's state that outlives a coordinator."""

    position: CharterPosition
    voters: Annotated[tuple[Seat, ...], Meta(max_length=VOTERS_MAX)]
    """In the order in which they stand for election."""
    before: Annotated[tuple[Seat, ...], Meta(max_length=VOTERS_MAX)] = ()
    """The voters before, until this charter counts; empty: they are the same."""
    generation: Count = 0
    """The newest generation that may have been started."""
    nodes: Annotated[tuple[str, ...], Meta(max_length=NODES_MAX)] = ()
    """The agents whose workers take part in it; empty: unknown, or too many."""
    led_from: LedFrom | None = None
    """None: the coordinator's node has no part in it."""
    restarts: Rank = 0
    """Restarts used."""
    streak: Count = 0
    identical: Count = 0
    signature: str = ""
    """As in the coordinator's Budget."""
    hosts: Annotated[tuple[HostRecord, ...], Meta(max_length=HOSTS_MAX)] = ()
    outcome: Outcome | None = None
    """Set when the job is over."""
    leader: str = ""
    """The agent in whose process the coordinator is."""
    listeners: Annotated[tuple[tuple[str, PortOrNone], ...], Meta(max_length=NODES_MAX)] = ()
    """Address and port at which each of `nodes` listens, in the same order; port 0: unknown."""
    job_uid: str = ""
    """As in Start."""
    sizes: Annotated[tuple[Workers, ...], Meta(max_length=NODES_MAX)] = ()
    """How many ranks each of `nodes` has, in the same order."""
    short_lease_s: Seconds = 0.0
    """This long after the last answer of a coordinator all workers of that generation are suspended; 0: not all are."""

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Everyone that may vote, each once."""
        return tuple({seat.name: seat for seat in (*self.voters, *self.before)}.values())

    def carried_by(self, names: Collection[str], gone: Collection[str] = ()) -> bool:
        """Whether these voters are a majority. `gone`: voters whose process is proved to have ended. Only the present
        coordinator may leave them out: a candidate needs a majority of all."""
        return all(majority(voters, names, gone) for voters in (self.voters, self.before) if voters)

    def carried_without(self, names: Collection[str]) -> bool:
        """Whether the other voters are a majority of all."""
        return self.carried_by({seat.name for seat in self.seats}.difference(names))


def majority(voters: Collection[Seat], names: Collection[str], gone: Collection[str] = ()) -> bool:
    """Whether these names are more than half of the voters that are not gone."""
    living = [seat.name for seat in voters if seat.name not in gone]
    return 2 * sum(name in names for name in living) > len(living)


class Renew(Struct, frozen=True, array_like=True, tag="renew"):
    """The coordinator renews its authority with a voter, and replicates its charter. Answered by Renewed."""

    term: Count
    probe: Count
    """Number of this message. The answer confirms the coordinator from the time at which it was sent."""
    charter: Charter | None = None
    """Present when the voter may not have the newest one."""
    job_s: Seconds = 0.0
    """Age of the job."""
    training_s: Seconds = 0.0
    """As in JobView."""
    founded: bool = False
    """The coordinator has taken this term without a vote."""


class Renewed(Struct, frozen=True, array_like=True, tag="renewed"):
    """A voter acknowledges a Renew."""

    term: Count
    """The newest term that the voter knows. Larger than that of the Renew: a refusal, since it has voted for another
    coordinator."""
    probe: Count
    held: CharterPosition
    """The position of the charter that the voter holds now."""
    rival: bool = False
    """Since its last Renewed, the voter has denied its vote to another one whose charter is as new, only because it
    follows this coordinator."""


class Poll(Struct, frozen=True, array_like=True, tag="poll"):
    """A candidate asks for a vote. Answered by Polled."""

    term: Count
    """The term in which it would be the coordinator."""
    candidate: Seat
    held: CharterPosition
    """The position of its charter. A voter with a newer one denies its vote."""
    final: bool = False
    """False: would you vote for me? Nothing changes. True: the vote itself, given once per term."""
    charter: Charter | None = None
    """A newer one in which the candidate has no seat: the voter that is asked has one, and may not know of it."""


class Polled(Struct, frozen=True, array_like=True, tag="polled"):
    """A voter's answer to a Poll."""

    term: Count
    """The newest term that the voter knows."""
    granted: bool
    silent_s: Seconds = 0.0
    """How long ago, by the voter's clock, it last acknowledged a Renew, or gave a final vote to another candidate."""
    closed: bool = False
    """Its link to the old coordinator was closed by that side, so that process has ended; False: it became silent."""
    voter: str = ""
    """The name of its seat. Another process may listen where a voter was."""
    follows: Count = 0
    """The term of the coordinator to which it is linked; 0: none."""
    charter: Charter | None = None
    """The voter's own, if that one is newer: the candidate takes it and asks again. A witness never stands, so what
    only witnesses have must reach a candidate, or a coordinator that founds the job again."""


class Succession(Struct, frozen=True):
    """By what right a coordinator begins: it founds the job, or it was elected."""

    term: Count = 1
    charter: Charter | None = None
    """The newest one; None: it founds the job."""
    asked_s: Seconds = 0.0
    """How long ago it asked for the votes that it got."""
    silent_s: Seconds = 0.0
    """For at least this long no voter of its majority has confirmed another coordinator."""
    closed: bool = False
    """The old coordinator's process has ended: it closed its links to all of them."""
    job_s: Seconds = 0.0
    """Age of the job."""
    training_s: Seconds = 0.0
    """As in JobView, as far as this voter knows."""


class Electorate(NamedTuple):
    """How many of a job's agents and witnesses are voters."""

    agents: int
    witnesses: int

    @property
    def majority(self) -> int:
        return sum(self) // 2 + 1

    @property
    def losses(self) -> int:
        """How many nodes may be lost at one time, whichever they are, while the witnesses are there. A witness never
        stands, so an agent must be left."""
        return min(sum(self) - self.majority, self.agents - 1)


def electorate(agents: int, witnesses: int) -> Electorate:
    """The voters that a coordinator chooses from so many. One agent and no witness: nobody is elected."""
    witnesses = min(witnesses, VOTERS_MAX // 2)
    agents = min(agents, VOTERS_MAX - witnesses)
    if (agents + witnesses) % 2 == 0:  # an even number of voters survives no more losses than one voter less
        if agents > witnesses:
            agents -= 1
        else:
            witnesses -= 1
    return Electorate(agents, witnesses) if agents >= 2 and agents + witnesses >= VOTERS_MIN else Electorate(1, 0)
