"""Events of the agent's machine. The shell makes them; the machine never asks."""

from __future__ import annotations

from msgspec import Struct

from holdfast.protocol.messages import FromCoordinator
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import Tick
from holdfast.protocol.rank_progress import RankProgress


class Dialed(Struct, frozen=True):
    """The link to the coordinator is up; the handshake is done."""

    local: bool = False
    """The coordinator runs in this process, and nobody can take its place."""
    port: int = 0
    """The port on which this agent listens; 0: it does not."""
    term: int = 0
    """The newest term that this node knows."""


class DialFailed(Struct, frozen=True):
    """One attempt to reach the coordinator failed."""

    code: str
    exit_code: int
    reason: str
    final: bool
    """No further attempt can help (refused, or the endpoint belongs to another service)."""


class LinkLost(Struct, frozen=True):
    reason: str


class Received(Struct, frozen=True):
    message: FromCoordinator


class NodePrepared(Struct, frozen=True):
    """Answer to Prepare, and to RegroupWorkers once the workers that take part wait."""

    generation: int
    store_port: int | None


class PrepareFailed(Struct, frozen=True):
    """Answer to Prepare: this node cannot take part (disk full, no port …)."""

    generation: int
    code: str
    exit_code: int
    reason: str


class WorkerEnded(Struct, frozen=True):
    """One worker of the generation is gone. failure is None when it ended with 0."""

    generation: int
    local_rank: int
    failure: Failure | None
    drained: bool = False
    """It had the order to stop at a safe point, so its work need not be done."""
    left: Failure | None = None
    """Details of an end with 0. Needed if the peers fail because this worker left."""
    evidence_follows: bool = False
    """`failure` is bare: rank and exit status. FailureRead follows."""


class WorkerRaised(Struct, frozen=True):
    """The program of one worker raised an exception. Its process still runs its exit functions; WorkerEnded follows."""

    generation: int
    local_rank: int
    failure: Failure
    evidence_follows: bool = False
    """The evidence is reported later, as in WorkerEnded."""


class FailureRead(Struct, frozen=True):
    """The evidence of a failed worker was read: its error file, its stderr, facts of its machine. Before TreeGone."""

    generation: int
    local_rank: int
    failure: Failure


class WorkersCanGoOn(Struct, frozen=True):
    """These workers can go on in another generation. The whole set of this node; sent when it changes."""

    generation: int
    local_ranks: tuple[int, ...]


class ReplacementsReady(Struct, frozen=True):
    """These replacements wait for their place. The whole set of this node."""

    generation: int
    """The one named in StartReplacements."""
    local_ranks: tuple[int, ...]


class RegroupRefused(Struct, frozen=True):
    """Answer to RegroupWorkers: a worker cannot go on. Also sent later, if a worker finds out after Start."""

    generation: int
    text: str


class WorkersHeld(Struct, frozen=True):
    """Answer to HoldWorkers."""

    generation: int
    reached: int
    """The newest safe point that any of them has reached, counted from 1; 0: none has asked for one."""
    saves: bool = False
    """All of them ask at their safe points whether to save, as in Held."""


class WorkersProgress(Struct, frozen=True):
    """The progress of a generation's workers. The shell reports it periodically while they run, without a command."""

    generation: int
    ranks: tuple[RankProgress, ...]
    job_step: int = 0
    job_steps: int = 0
    """These as in Progress."""


class WorkersFenced(Struct, frozen=True):
    """The supervisor has killed the workers at the fence, because the agent's process was stopped or stalled."""


class TreeGone(Struct, frozen=True):
    """Answer to KillTree: no process of the generation is alive."""

    generation: int


class StoreDied(Struct, frozen=True):
    """The store host of this generation ended unexpectedly."""

    generation: int


class Signalled(Struct, frozen=True):
    """The agent got a signal that ends this node's part in the job."""

    signum: int
    name: str
    preempt: bool = False
    """The one that announces a preemption (--preempt-signal)."""
    kills: str = "again"
    """What ends the workers at once, as the console shows it; empty: no user waits at a console."""


class PassSignal(Struct, frozen=True):
    """The agent got a signal that is meant for the workers (USR1, USR2)."""

    signum: int


Event = (
    Dialed
    | DialFailed
    | LinkLost
    | Received
    | NodePrepared
    | PrepareFailed
    | WorkerEnded
    | WorkerRaised
    | FailureRead
    | WorkersCanGoOn
    | ReplacementsReady
    | RegroupRefused
    | WorkersHeld
    | WorkersProgress
    | WorkersFenced
    | TreeGone
    | StoreDied
    | Signalled
    | PassSignal
    | Tick
)
