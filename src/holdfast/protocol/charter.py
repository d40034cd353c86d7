"""The charter: the knowledge that a successor of the coordinator needs, and the voters that elect it. PURE.

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
"""Largest number of voters. More would survive more losses at one time, and cost the coordinator messages."""
VOTERS_MIN = 3
"""Smallest number of voters. With fewer, no loss leaves a majority: the coordinator is its only voter."""
NODES_MAX = 1024
"""Number of agents in a charter. The successor in a larger job waits for the fence."""
HOSTS_MAX = 1024
"""Number of hosts with a back-off in a charter."""


class CharterPosition(NamedTuple):
    """The position of a charter among all charters of the job. The larger one is the newer one."""

    term: Count
    number: Count


NO_CHARTER = CharterPosition(0, 0)
"""The position before every charter."""


class Seat(Struct, frozen=True, array_like=True):
    """A voter: an agent, or a witness."""

    name: str
    """The agent without its joins (`NodeSpec.agent`), or the witness: an identity that is used once."""
    host: str
    """Short host name, for users."""
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
    """Time for which it is still excluded (s), at the time of `Charter.hosts_job_s`."""


class Charter(Struct, frozen=True, array_like=True):
    """The job's state that outlives a coordinator."""

    position: CharterPosition
    voters: Annotated[tuple[Seat, ...], Meta(max_length=VOTERS_MAX)]
    """The voters, in the order in which they stand for election."""
    before: Annotated[tuple[Seat, ...], Meta(max_length=VOTERS_MAX)] = ()
    """The voters before, until this charter counts; empty: they are the same."""
    generation: Count = 0
    """The newest generation that may have been started."""
    nodes: Annotated[tuple[str, ...], Meta(max_length=NODES_MAX)] = ()
    """The agents whose workers take part in it; empty: unknown, or too many."""
    led_from: LedFrom | None = None
    """None: the coordinator's node has no part in it."""
    restarts: Rank = 0
    """Number of restarts that were used."""
    streak: Count = 0
    identical: Count = 0
    signature: str = ""
    """These three are those of the coordinator's Budget."""
    hosts: Annotated[tuple[HostRecord, ...], Meta(max_length=HOSTS_MAX)] = ()
    outcome: Outcome | None = None
    """The outcome of the job; None: it is not over."""
    leader: str = ""
    """The agent in whose process the coordinator is."""
    listeners: Annotated[tuple[tuple[str, PortOrNone], ...], Meta(max_length=NODES_MAX)] = ()
    """Address and port at which each of `nodes` listens, in the same order; port 0: unknown."""
    job_uid: str = ""
    """The job's identity: see Start."""
    sizes: Annotated[tuple[Workers, ...], Meta(max_length=NODES_MAX)] = ()
    """Number of ranks of each of `nodes`, in the same order."""
    short_lease_s: Seconds = 0.0
    """Time after the last answer of a coordinator from which all workers of that generation are suspended (s); 0: not
    all of them are."""
    hosts_job_s: Seconds = 0.0
    """Age of the job (s) when `hosts` were written: what is left of an exclusion is less when they are read."""

    @property
    def seats(self) -> tuple[Seat, ...]:
        """All that may vote, each once."""
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
    """The newest charter, if the voter may not have it; else None."""
    job_s: Seconds = 0.0
    """Age of the job (s)."""
    training_s: Seconds = 0.0
    """Effective training time: see JobView."""
    founded: bool = False
    """The coordinator has taken this term without a vote."""


class Renewed(Struct, frozen=True, array_like=True, tag="renewed"):
    """A voter acknowledges a Renew."""

    term: Count
    """The newest term that the voter knows. If it is larger than that of the Renew, this is a refusal: the voter has
    voted for another coordinator."""
    probe: Count
    held: CharterPosition
    """The position of the charter that the voter holds now."""
    rival: bool = False
    """The voter has denied its vote to another candidate whose charter is as new, only because it follows this
    coordinator, or it has met a process that starts the job again; since its last Renewed."""


class Poll(Struct, frozen=True, array_like=True, tag="poll"):
    """A candidate asks for a vote. Answered by Polled."""

    term: Count
    """The term in which it would be the coordinator."""
    candidate: Seat
    held: CharterPosition
    """The position of its charter. A voter with a newer one denies its vote."""
    final: bool = False
    """False: the candidate only asks whether it would get the vote, and nothing changes. True: the vote itself, which a
    voter gives once per term."""
    charter: Charter | None = None
    """A newer charter in which the candidate has no seat: the voter that is asked has one, and may not know of it."""


class Polled(Struct, frozen=True, array_like=True, tag="polled"):
    """A voter's answer to a Poll."""

    term: Count
    """The newest term that the voter knows."""
    granted: bool
    silent_s: Seconds = 0.0
    """Time since the voter last acknowledged a Renew, or gave a final vote to another candidate, by its clock (s)."""
    closed: bool = False
    """Its link to the old coordinator was closed by that side, so that process has ended; False: it became silent."""
    voter: str = ""
    """The name of its seat. Another process may listen where a voter was."""
    follows: Count = 0
    """The term of the coordinator to which it is linked; 0: none."""
    charter: Charter | None = None
    """The voter's own charter, if that one is newer: the candidate takes it and asks a second time. A witness never
    stands, so a charter that only witnesses have must reach a candidate, or a coordinator that founds the job again."""


class Succession(Struct, frozen=True):
    """The right by which a coordinator begins: it founds the job, or it was elected."""

    term: Count = 1
    charter: Charter | None = None
    """The newest charter; None: it founds the job."""
    asked_s: Seconds = 0.0
    """Time since it asked for the votes that it got (s)."""
    silent_s: Seconds = 0.0
    """Time for which at least no voter of its majority has confirmed another coordinator (s)."""
    closed: bool = False
    """The old coordinator's process has ended: it closed its links to all of them."""
    job_s: Seconds = 0.0
    """Age of the job, as far as this voter knows (s)."""
    training_s: Seconds = 0.0
    """Effective training time, as far as this voter knows: see JobView."""


class Electorate(NamedTuple):
    """The numbers of a job's agents and witnesses that are voters."""

    agents: int
    witnesses: int

    @property
    def majority(self) -> int:
        return sum(self) // 2 + 1

    @property
    def losses(self) -> int:
        """Number of nodes, whichever they are, that may be lost at one time while the witnesses are there. A witness
        never stands, so an agent must be left."""
        return min(sum(self) - self.majority, self.agents - 1)


def electorate(agents: int, witnesses: int) -> Electorate:
    """The numbers of voters that a coordinator chooses from these numbers of agents and witnesses. One agent and no
    witness: no successor is elected."""
    witnesses = min(witnesses, VOTERS_MAX // 2)
    agents = min(agents, VOTERS_MAX - witnesses)
    if (agents + witnesses) % 2 == 0:  # an even number of voters survives no more losses than one voter less
        if agents > witnesses:
            agents -= 1
        else:
            witnesses -= 1
    return Electorate(agents, witnesses) if agents >= 2 and agents + witnesses >= VOTERS_MIN else Electorate(1, 0)
