"""The messages between agent and coordinator, as data. `wire.codec` turns them into bytes.

A formation costs every agent four messages whatever the size of the job:
Join (or Stopped) up, Assign down, Prepared up, Start down. No message carries the roster.

Structs are array-like on the wire: new fields go to the end and have defaults.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from holdfast.protocol.bounds import ITEMS_MAX, WORKERS_PER_NODE_MAX, Count, LocalRank, Period, Port, Rank, Seconds
from holdfast.protocol.outcome import Failure, Outcome
from holdfast.protocol.policy import NodeSpec
from holdfast.protocol.rank_progress import RankProgress, RankSample

OF_ONE_NODE = Meta(max_length=WORKERS_PER_NODE_MAX)
LocalRanks: TypeAlias = Annotated[tuple[LocalRank, ...], OF_ONE_NODE]


REVISION = 1
"""Of these messages. From 1 on, an agent reports a failure before its evidence is read, if the coordinator understands that
(`Joined.revision`)."""


class StopReason(Enum):
    """Why a generation is ended."""

    WORKER_FAILED = "worker_failed"
    MEMBER_LOST = "member_lost"
    MEMBER_LEFT = "member_left"
    MEMBER_JOINED = "member_joined"
    STORE_LOST = "store_lost"
    FENCED = "fenced"
    HUNG = "hung"


class AgentMessage(Struct, frozen=True, array_like=True, tag=True):
    """From an agent to the coordinator."""


class Question(Enum):
    """What somebody on a node may want of the whole job. A closed set."""

    STATUS = "status"
    STACKS = "stacks"
    STOP = "stop"
    """Not only asked: the workers drain, and every agent ends."""
    KILL = "kill"
    """The same at once: nothing is saved."""


class Running(Struct, frozen=True, array_like=True):
    """A generation that is at work on a node whose coordinator went away."""

    generation: Count
    group_rank: Rank
    group_world_size: Rank
    restart_count: Rank
    done: LocalRanks = ()
    """Local ranks that have ended with 0."""


class Join(AgentMessage, frozen=True, tag="join"):
    node: NodeSpec
    last_generation: Count = 0
    """The newest generation this agent ever took part in; numbers only grow, so the coordinator goes above it."""
    unlinked_s: Seconds = 0.0
    """How long ago, by the agent's clock, the link to the coordinator of last_generation broke. 0 also where it fell
    silent: that says nothing of when that coordinator ended."""
    running: Running | None = None
    """Its workers are alive. Resume lets them go on; without it they die at the agent's fence."""
    led_by: str = ""
    """Assign's, of last_generation: a coordinator that comes after it can say who was lost."""


class Prepared(AgentMessage, frozen=True, tag="prepared"):
    """Phase one is done on this node: nothing of an older generation lives, folders exist, the store is bound."""

    generation: Count
    store_port: Port | None = None
    """Only from the node that was asked to host the store."""


class WorkerDone(AgentMessage, frozen=True, tag="done"):
    generation: Count
    local_rank: LocalRank
    left: Failure | None = None
    """How it left, for the case that its peers still need it."""


class WorkersFailed(AgentMessage, frozen=True, tag="failed"):
    generation: Count
    failures: Annotated[tuple[Failure, ...], OF_ONE_NODE]
    evidence_follows: bool = False
    """These failures are bare: rank and exit status. The same ranks are reported again, with all that is known, before this
    node's Stopped."""


class Stopped(AgentMessage, frozen=True, tag="stopped"):
    """No process of this generation is alive on this node any more."""

    generation: Count


class StoreLost(AgentMessage, frozen=True, tag="store_lost"):
    """The store host of this generation died."""

    generation: Count


class Leave(AgentMessage, frozen=True, tag="leave"):
    """This node is about to go, on notice. Its Stopped follows when its workers are gone."""

    reason: str
    drain: bool = False
    """Its workers ask for safe points: everybody's are to stop at the next one, before it goes."""


class Held(AgentMessage, frozen=True, tag="held"):
    """Answer to Drain: no worker of this node passes another safe point until DrainTo or Stop comes."""

    generation: Count
    reached: Count
    """The newest safe point that any of them has reached, counted from 1; 0: none has asked for one yet."""


class Progress(AgentMessage, frozen=True, tag="progress"):
    """How far its workers are; once in Limits.progress_interval_s while they run."""

    generation: Count
    ranks: Annotated[tuple[RankProgress, ...], OF_ONE_NODE]


class Looked(AgentMessage, frozen=True, tag="looked"):
    """Answer to Look."""

    generation: Count
    number: Count
    """The Look's."""
    samples: Annotated[tuple[RankSample, ...], OF_ONE_NODE] = ()
    reach: Annotated[tuple[str, ...], Meta(max_length=ITEMS_MAX)] = ()
    """What became of the test connection, in words; empty: it stood, or was not asked for."""


class Ping(AgentMessage, frozen=True, tag="ping"):
    number: Count


class Ask(AgentMessage, frozen=True, tag="ask"):
    """A command on this node has a question. Ends in one Answer of the same number, or in the loss of the link."""

    number: Count
    question: Question
    by: str = ""
    """Who asks, in words."""


class CoordinatorMessage(Struct, frozen=True, array_like=True, tag=True):
    """From the coordinator to an agent."""


class Joined(CoordinatorMessage, frozen=True, tag="joined"):
    lease_s: Seconds
    fence_s: Period
    ping_interval_s: Period
    revision: Count = 0
    """What the coordinator understands: its REVISION."""


class Waiting(CoordinatorMessage, frozen=True, tag="waiting"):
    """What the job waits for, in words, for the console."""

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
    """All nodes of this world talk over loopback: the store need not listen anywhere else."""
    led_by: str = ""
    """The node that has the coordinator, and its ranks, in words: `a (ranks 0-7)`. Empty: it has no rank."""


class Start(CoordinatorMessage, frozen=True, tag="start"):
    """Phase two: every node is prepared; start the workers."""

    generation: Count
    master_addr: str
    master_port: Port


class Drain(CoordinatorMessage, frozen=True, tag="drain"):
    """Hold the workers at their next safe point, and tell which one they have reached."""

    generation: Count
    text: str = ""


class DrainTo(CoordinatorMessage, frozen=True, tag="drain_to"):
    """The workers pass all safe points before this one, and stop there."""

    generation: Count
    safe_point: Count


class Resume(CoordinatorMessage, frozen=True, tag="resume"):
    """The coordinator is new and its previous leader's generation is whole: it goes on."""

    generation: Count


class Abandon(CoordinatorMessage, frozen=True, tag="abandon"):
    """The generation this agent said to be running is not whole: kill its workers."""

    generation: Count


class Stop(CoordinatorMessage, frozen=True, tag="stop"):
    generation: Count
    reason: StopReason
    text: str = ""


class Look(CoordinatorMessage, frozen=True, tag="look"):
    """Where are your workers? Answered by one Looked."""

    generation: Count
    number: Count
    store: bool = False
    """Also try to connect to the generation's MASTER_ADDR:MASTER_PORT, as the workers do."""


class Notice(CoordinatorMessage, frozen=True, tag="notice"):
    """Something about the running job that people should know, for the console: a few lines."""

    text: str
    victims: tuple[int, ...] | None = None
    """How a generation ended: ranks that failed because of what the text tells. None: the text tells of something else."""


class Finish(CoordinatorMessage, frozen=True, tag="finish"):
    """The job is over."""

    outcome: Outcome


class Pong(CoordinatorMessage, frozen=True, tag="pong"):
    number: Count


class Answer(CoordinatorMessage, frozen=True, tag="answer"):
    number: Count
    body: bytes
    """JSON, for the command that asked: no agent reads it."""


class Quit(CoordinatorMessage, frozen=True, tag="quit"):
    """Somebody wants the job to end: every agent does as if it had got a signal."""

    drain: bool
    """False: kill the workers at once."""
    by: str


class Refuse(CoordinatorMessage, frozen=True, tag="refuse"):
    """This agent cannot be a member; the text names both sides of the contradiction."""

    code: str
    text: str


FromAgent = (
    Join | Prepared | WorkerDone | WorkersFailed | Stopped | StoreLost | Leave | Held | Progress | Looked | Ping | Ask
)
FromCoordinator = (
    Joined
    | Waiting
    | Assign
    | Start
    | Drain
    | DrainTo
    | Resume
    | Abandon
    | Stop
    | Look
    | Notice
    | Finish
    | Pong
    | Answer
    | Quit
    | Refuse
)
