"""The messages between agent and coordinator, as data. `protocol.codec` encodes them.

A formation costs every agent four messages whatever the size of the job:
Join (or Stopped) up, Assign down, Prepared up, Start down. No message carries the roster. After a failure Stop carries
the Assign, and Prepared follows Stopped: one message and one round trip fewer.

All nodes of a job have the same version of these messages (`codec.PROTOCOL_VERSION`): the handshake refuses others.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from holdfast.protocol.charter import Charter, Poll, Polled, Renew, Renewed
from holdfast.protocol.outcome import Failure, Outcome
from holdfast.protocol.policy import (
    WORKERS_PER_NODE_MAX,
    Count,
    LocalRank,
    NodeSpec,
    Period,
    Port,
    PortOrNone,
    Rank,
    Seconds,
)
from holdfast.protocol.rank_progress import RankProgress

OF_ONE_NODE = Meta(max_length=WORKERS_PER_NODE_MAX)
LocalRanks: TypeAlias = Annotated[tuple[LocalRank, ...], OF_ONE_NODE]

QUESTION_CHARS_MAX = 64
"""Limit of the name of a question or an extension (characters)."""
ABOUT_BYTES_MAX = 4096
EXTENDED_BYTES_MAX = 4 * 1024 * 1024 - 4096
"""Limit of an extension's message (bytes). It leaves room in a frame."""


class StopReason(Enum):
    """The reason for the end of a generation."""

    WORKER_FAILED = "worker_failed"
    MEMBER_LOST = "member_lost"
    MEMBER_LEFT = "member_left"
    MEMBER_JOINED = "member_joined"
    STORE_LOST = "store_lost"
    FENCED = "fenced"
    HUNG = "hung"


class AgentMessage(Struct, frozen=True, array_like=True, tag=True):
    """A message from an agent to the coordinator."""


class Running(Struct, frozen=True, array_like=True):
    """A generation that still runs on a node that has lost its coordinator."""

    generation: Count
    group_rank: Rank
    group_world_size: Rank
    restart_count: Rank
    done: LocalRanks = ()
    """Local ranks that have ended with 0."""
    local_ranks: LocalRanks | None = None
    """The local ranks that take part: see Assign."""
    can_go_on: LocalRanks = ()
    """The local ranks that can go on in another generation: see CanGoOn."""


class Join(AgentMessage, frozen=True, tag="join"):
    node: NodeSpec
    last_generation: Count = 0
    """The newest generation in which this agent took part. The coordinator uses larger numbers."""
    unlinked_s: Seconds = 0.0
    """Time since the link to the coordinator of last_generation broke, by the agent's clock (s). 0 also if that
    coordinator became silent, because then the agent does not know when it ended."""
    running: Running | None = None
    """The generation whose workers are alive. Resume lets them continue; else the agent kills them at its fence."""
    led_by: str = ""
    """`led_by` of the Assign of last_generation, so that a new coordinator can report which node was lost."""
    suspends: bool = True
    """It suspends its workers as `Joined.suspend_s` says. False: answers came so late that it does not any more."""
    port: PortOrNone = 0
    """Port at which the agent listens for candidates and newcomers; 0: it does not listen, and has no vote."""
    term: Count = 0
    """The newest term that the agent knows. A coordinator of an older term steps down."""


class Prepared(AgentMessage, frozen=True, tag="prepared"):
    """Phase one is done on this node: no process of an older generation lives, folders exist, the store is bound."""

    generation: Count
    store_port: Port | None = None
    """Set only by the node that hosts the store."""


class WorkerDone(AgentMessage, frozen=True, tag="done"):
    generation: Count
    local_rank: LocalRank
    left: Failure | None = None
    """Details of the end. Needed if the peers fail because this worker left."""


class WorkersFailed(AgentMessage, frozen=True, tag="failed"):
    generation: Count
    failures: Annotated[tuple[Failure, ...], OF_ONE_NODE]
    evidence_follows: bool = False
    """These failures have only rank and exit status. The same ranks are reported again, with their evidence, before
    this node's Stopped."""


class Stopped(AgentMessage, frozen=True, tag="stopped"):
    """No process of this generation is alive on this node any more."""

    generation: Count


class StoreLost(AgentMessage, frozen=True, tag="store_lost"):
    """The store host of this generation died."""

    generation: Count


class Leave(AgentMessage, frozen=True, tag="leave"):
    """This node got notice and will leave. Its Stopped follows when its workers are gone."""

    reason: str
    drain: bool = False
    """Its workers ask for safe points: all workers of the job stop at the next one before this node leaves."""


class Held(AgentMessage, frozen=True, tag="held"):
    """Answer to Drain: no worker of this node passes another safe point until DrainTo or Stop comes."""

    generation: Count
    reached: Count
    """The newest safe point that any of them has reached, counted from 1; 0: none has asked for a safe point yet."""
    saves: bool = False
    """All of them ask at their safe points whether to save."""
    drain: Count = 0
    """The number of the Drain that this answers: an earlier one's answer may come after it was let go."""


class Progress(AgentMessage, frozen=True, tag="progress"):
    """The progress of this node's workers; sent every Start.progress_interval_s while they run."""

    generation: Count
    ranks: Annotated[tuple[RankProgress, ...], OF_ONE_NODE]
    job_step: Count = 0
    """The step of the whole job, as the script counts over all restarts. It is valid if job_steps is not 0."""
    job_steps: Count = 0
    """Number of steps of the whole job; 0: the script does not report it."""
    ping: Count = 0
    """The number of the ping that this message replaces (`Ping.number`), and that is answered; 0: it replaces none."""


class CanGoOn(AgentMessage, frozen=True, tag="can_go_on"):
    """These workers can go on in another generation: their training function runs in `ht.survive`. The message has the
    whole set of this node, and is sent when the set changes."""

    generation: Count
    local_ranks: LocalRanks


class ReplacementReady(AgentMessage, frozen=True, tag="replacement_ready"):
    """These replacements have started and wait for their place. The message has the whole set of this node, and is sent
    when the set grows."""

    generation: Count
    """The generation that was running when they were ordered."""
    local_ranks: LocalRanks


class ReplacementFailed(AgentMessage, frozen=True, tag="replacement_failed"):
    """Replacements ended before they had a place."""

    generation: Count
    """The generation that was running when they were ordered."""
    failures: Annotated[tuple[Failure, ...], OF_ONE_NODE]


class CannotRegroup(AgentMessage, frozen=True, tag="cannot_regroup"):
    """A worker cannot go on in another generation: the coordinator orders a restart."""

    generation: Count
    text: str


class Ping(AgentMessage, frozen=True, tag="ping"):
    number: Count


class ContestEndpoint(AgentMessage, frozen=True, tag="contest_endpoint"):
    """A coordinator calls the job's endpoint, where a node that returned may have started another one: one of the two
    steps down (`authority.voters`). Answered by CoordinatorAt if it is the caller."""

    term: Count
    address: str
    port: Port
    name: str = ""
    """The agent of the caller."""
    elected: bool = False
    """The caller was elected by voters; False: it founded the job."""
    forms: bool = False
    """It has formed no generation yet."""


class ReportCharter(AgentMessage, frozen=True, tag="report_charter"):
    """An agent that has taken part in the job reports the charter to a coordinator that founded the job again. That one
    continues the charter, or steps down. It is sent before a Join, or without one while the job's voters may still
    elect another coordinator."""

    charter: Charter
    term: Count
    """The newest term that the agent knows."""
    lost_s: Seconds
    """Time since it lost its coordinator (s)."""
    patience_s: Seconds = 0.0
    """The time for which the receiver is to form nothing (s): the sender joins after it, or reports again before."""
    follows: bool = False
    """The sender follows a coordinator: the job lives."""


class Ask(AgentMessage, frozen=True, tag="ask"):
    """A question of a command on this node. Ends in one Answer of the same number, or in the loss of the link."""

    number: Count
    question: Annotated[str, Meta(max_length=QUESTION_CHARS_MAX)]
    """An extension at the coordinator answers it: see `protocol.extension`."""
    by: str = ""
    """The asking user, in words."""
    about: Annotated[bytes, Meta(max_length=ABOUT_BYTES_MAX)] = b"{}"
    """JSON of the command that asks. Agents pass it on unread; the extension refuses a value that it does not know."""


class CoordinatorMessage(Struct, frozen=True, array_like=True, tag=True):
    """A message from the coordinator to an agent."""


class Joined(CoordinatorMessage, frozen=True, tag="joined"):
    lease_s: Seconds
    fence_s: Period
    ping_interval_s: Period
    term: Count = 0
    """The coordinator's term. An agent that knows a newer one hangs up."""
    age_s: Seconds = 0.0
    """Age of the coordinator's authority: see Pong. The agent's fence counts from that time before its Join."""
    suspend_s: Seconds = 0.0
    """See `Limits.suspend_of`."""


class Waiting(CoordinatorMessage, frozen=True, tag="waiting"):
    """The reason for which the job waits, in words, for the console."""

    text: str


class Assign(CoordinatorMessage, frozen=True, tag="assign"):
    """Phase one: this node's place in the world of a generation."""

    generation: Count
    restart_count: Rank
    group_rank: Rank
    group_world_size: Rank
    rank_base: Rank
    world_size: Rank
    role_rank_base: Rank
    role_world_size: Rank
    hosts_store: bool
    local_world: bool = False
    """All nodes of this world use loopback: the store need not listen on other addresses."""
    led_by: str = ""
    """The node that hosts the coordinator, and its ranks, in words: `a (ranks 0-7)`. Empty: it has no rank."""
    local_ranks: LocalRanks | None = None
    """The local ranks of this node that take part, sorted; None: all. None of them: the node waits for replacements."""

    def place(self, local_rank: int) -> int:
        """The position of this local rank among those of the node that take part: what is added to a rank base."""
        return local_rank if self.local_ranks is None else self.local_ranks.index(local_rank)


class Start(CoordinatorMessage, frozen=True, tag="start"):
    """Phase two: every node is prepared; start the workers."""

    generation: Count
    master_addr: str
    master_port: Port
    progress_interval_s: Period = 1.0
    """Time between two Progress of this node (s). It grows with the job, so that the coordinator's load stays
    bounded."""
    before: str = ""
    """The end of the generation before it, in words: see `coordinator.ending.previous_end`. Empty: unknown, or it is
    the first."""
    job_uid: str = ""
    """Identifies the job, through all its generations; unlike the run id it is never used twice."""
    age_s: Seconds = 0.0
    """Age of the coordinator's authority: see Pong. The agent's fence counts from that time before its Prepared."""


class Regroup(CoordinatorMessage, frozen=True, tag="regroup"):
    """Phase one of a generation of workers that are already running. Answered by Prepared, which here also says that
    all workers of the node that take part wait for Start. At a node that leaves, no worker takes part: they wait for
    Stop."""

    assign: Assign
    safe_point: Count = 0
    """The safe point at which the workers stop for it; 0: they stop at once, whatever they do."""
    text: str = ""
    """The loss or the addition that is the reason, in words, for the console."""


class Replace(CoordinatorMessage, frozen=True, tag="replace"):
    """Start replacements for these local ranks. Each ends in ReplacementReady or in ReplacementFailed."""

    generation: Count
    local_ranks: LocalRanks


class Drain(CoordinatorMessage, frozen=True, tag="drain"):
    """Hold the workers at their next safe point, and report which one they have reached."""

    generation: Count
    text: str = ""
    drain: Count = 0
    """Its number in this generation, counted from 0."""


class DrainTo(CoordinatorMessage, frozen=True, tag="drain_to"):
    """Let the workers pass all safe points before this one, and stop there. 0: they pass all, the drain is over."""

    generation: Count
    safe_point: Count
    save: bool = False
    """They save there and go on: the drain is over."""


class Resume(CoordinatorMessage, frozen=True, tag="resume"):
    """The running generation continues under a new coordinator: all its nodes have joined."""

    generation: Count


class Abandon(CoordinatorMessage, frozen=True, tag="abandon"):
    """The generation that this agent runs has lost a node: kill its workers."""

    generation: Count


class Stop(CoordinatorMessage, frozen=True, tag="stop"):
    generation: Count
    reason: StopReason
    text: str = ""
    following: Assign | None = None
    """This node's place in the next generation, unless members change before that is formed. The node prepares it when
    its workers are gone, without another Assign. An Assign of a newer generation replaces it."""
    hung: Rank | None = None
    """The rank that caused a hang: its node reports its end with its last output, although the stop ends it."""


class Notice(CoordinatorMessage, frozen=True, tag="notice"):
    """A few lines about the running job for the console."""

    text: str
    victims: tuple[int, ...] | None = None
    """If the text reports the end of a generation: ranks that failed as a consequence. None: another text."""


class Finish(CoordinatorMessage, frozen=True, tag="finish"):
    """The job is over."""

    outcome: Outcome


class Pong(CoordinatorMessage, frozen=True, tag="pong"):
    number: Count
    age_s: Seconds = 0.0
    """Age of the coordinator's authority: the time since it sent the Renews with which a majority of the voters has
    confirmed it (s). The agent's fence counts from that time before its ping."""


class CoordinatorAt(CoordinatorMessage, frozen=True, tag="coordinator_at"):
    """The coordinator of this job is elsewhere."""

    term: Count
    address: str
    port: Port
    name: str = ""
    """The agent of the coordinator, if the coordinator itself answers; empty: another one answers."""
    elected: bool = False
    """The coordinator was elected by voters, if it answers itself: see ContestEndpoint."""


class Answer(CoordinatorMessage, frozen=True, tag="answer"):
    number: Count
    body: bytes = b""
    """JSON for the command that asked. Agents pass it on unread. Empty without a refusal: the agent has to answer."""
    refused: str = ""
    """The reason why nothing was done; empty: the question was not refused."""


class Quit(CoordinatorMessage, frozen=True, tag="quit"):
    """A user asked for the end of the job: every agent acts as if it had received a signal."""

    drain: bool
    """False: kill the workers at once."""
    by: str


class Refuse(CoordinatorMessage, frozen=True, tag="refuse"):
    """This agent cannot be a member; the text names both sides of the contradiction."""

    code: str
    text: str


class Extended(Struct, frozen=True, array_like=True, tag="extended"):
    """A message between an extension's half on a node and its half at the coordinator, in either direction. Only the
    half that gets it decodes it."""

    extension: Annotated[str, Meta(max_length=QUESTION_CHARS_MAX)]
    body: Annotated[bytes, Meta(max_length=EXTENDED_BYTES_MAX)]


BetweenVoters = Renew | Renewed | Poll | Polled
"""Messages that go in both directions: the coordinator connects to a witness as an agent connects to it."""
FromAgent = (
    Join
    | Prepared
    | WorkerDone
    | WorkersFailed
    | Stopped
    | StoreLost
    | Leave
    | Held
    | Progress
    | CanGoOn
    | ReplacementReady
    | ReplacementFailed
    | CannotRegroup
    | Ping
    | Ask
    | Extended
    | BetweenVoters
    | ContestEndpoint
    | ReportCharter
)
FromCoordinator = (
    Joined
    | Waiting
    | Assign
    | Start
    | Regroup
    | Replace
    | Drain
    | DrainTo
    | Resume
    | Abandon
    | Stop
    | Notice
    | Finish
    | Pong
    | Answer
    | Extended
    | Quit
    | Refuse
    | BetweenVoters
    | CoordinatorAt
)
