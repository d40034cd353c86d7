"""State of the agent: the phases of its link and of its work, which are independent; its lease (when it sent the newest
message that the coordinator has confirmed, by the agent's own clock); its search for the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from holdfast.agent.events import DialFailed, FailureRead, Signalled, WorkerEnded, WorkerRaised
from holdfast.protocol.errors import EXIT_REQUEUE, EXIT_SIGNAL_BASE, CoordinatorLostError, CoordinatorUnreachableError
from holdfast.protocol.messages import Assign, Running
from holdfast.protocol.outcome import Failure, Outcome, OutcomeKind, Verdict
from holdfast.protocol.policy import PINGS_PER_SUSPENSION, Limits, Pauses


@dataclass(slots=True)
class Seeking:
    limits: Limits
    since_s: float
    dial_at_s: float
    notices: Pauses
    pause_s: float
    error: DialFailed | None = None
    """Why the last attempt failed."""

    @classmethod
    def begin(cls, limits: Limits, now: float) -> Seeking:
        return cls(limits, now, now, Pauses.begin(now, limits.say_interval_s), limits.connect_retry_s)

    @property
    def deadline_s(self) -> float:
        return self.since_s + self.limits.join_s

    def failed(self, now: float, error: DialFailed) -> None:
        self.error = error
        self.dial_at_s = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, self.limits.connect_retry_max_s)

    def connected(self) -> None:
        self.error, self.pause_s = None, self.limits.connect_retry_s

    def progress(self, now: float) -> str:
        """What to show on the console now; empty: nothing yet."""
        if not self.notices.due(now):
            return ""
        why = self.error.reason if self.error is not None else "no answer yet"
        left_s = max(0.0, self.deadline_s - now)
        return f"waiting for the coordinator: {why} (giving up in {left_s:.0f} s)"

    def gave_up(self, *, knew_one: bool, led_by: str = "") -> Outcome:
        """The outcome after the join deadline. `knew_one`: this agent had a coordinator before. `led_by`: its node and
        ranks, in words."""
        code, exit_code = CoordinatorUnreachableError.code, CoordinatorUnreachableError.exit_code
        text = f"nobody answered within {self.limits.join_s:g} s"
        if knew_one:
            code = CoordinatorLostError.code
            text = f"the coordinator did not come back within {self.limits.join_s:g} s"
            if led_by:
                text = f"lost {led_by}, which had the coordinator: it did not come back within {self.limits.join_s:g} s"
                verdict = Verdict(code=code, cause=text, lost_nodes=(led_by,))
                return Outcome(
                    kind=OutcomeKind.NO_QUORUM, exit_code=exit_code, code=code, message=text, verdict=verdict
                )
        elif self.error is not None:
            code, exit_code = self.error.code, self.error.exit_code
            text = f"{self.error.reason} (tried for {self.limits.join_s:g} s)"
        return Outcome(kind=OutcomeKind.NO_QUORUM, exit_code=exit_code, code=code, message=text)


PINGS_OPEN_MAX = 64


@dataclass(slots=True)
class Lease:
    """The agent's side of its lease: counts pings and answers. The coordinator renewed the lease after the answered
    message was sent."""

    fence_s: float
    ping_interval_s: float
    confirmed_s: float
    """When the newest confirmed message was sent. The coordinator's lease was renewed at this time or later."""
    ping_at_s: float
    suspend_s: float = 0.0
    """As in Joined."""
    lease_s: float = 0.0
    """As in Joined: at this age suspended workers are killed."""
    _number: int = 0
    _open: dict[int, float] = field(default_factory=dict)

    @property
    def fence_at_s(self) -> float:
        return self.confirmed_s + self.fence_s

    def granted(
        self,
        lease_s: float,
        fence_s: float,
        ping_interval_s: float,
        suspend_s: float,
        *,
        confirmed_s: float,
        now: float,
    ) -> None:
        """The agent has joined."""
        self.fence_s, self.ping_interval_s, self.suspend_s = fence_s, ping_interval_s, suspend_s
        self.lease_s = lease_s
        self.confirmed_s = confirmed_s
        self.ping_at_s = now + ping_interval_s
        self._open.clear()

    def hurry(self, now: float) -> None:
        """From now on pings are frequent enough for workers that are suspended without an answer."""
        if self.suspend_s:
            self.ping_interval_s = min(self.ping_interval_s, self.suspend_s / PINGS_PER_SUSPENSION)
            self.ping_at_s = min(self.ping_at_s, now + self.ping_interval_s)

    def confirm(self, sent_s: float) -> None:
        """The coordinator has received a message that was sent at `sent_s`."""
        self.confirmed_s = max(self.confirmed_s, sent_s)

    def ping(self, now: float) -> int:
        """The number of the ping to send now."""
        self._number += 1
        self._open[self._number] = now
        while len(self._open) > PINGS_OPEN_MAX:
            self._open.pop(next(iter(self._open)))
        self.ping_at_s = now + self.ping_interval_s
        return self._number

    def answered(self, number: int, age_s: float) -> None:
        """`age_s`: how old the coordinator's authority was when it answered."""
        sent_s = self._open.pop(number, None)
        if sent_s is not None:
            self.confirm(sent_s - age_s)


class Link(Enum):
    DOWN = "down"
    """Not connected; the next attempt is due at a known time."""
    DIALING = "dialing"
    UP = "up"


class Work(Enum):
    IDLE = "idle"
    """No process of any generation is alive here."""
    PREPARING = "preparing"
    PREPARED = "prepared"
    RUNNING = "running"
    DRAINING = "draining"
    """The workers are held at their next safe point, or continue to the one at which they stop."""
    REGROUPING = "regrouping"
    """The workers leave their generation, and wait for their place in the next one."""
    STOPPING = "stopping"
    """The first signal was sent; leaders may still be saving."""
    KILLING = "killing"
    """All remaining processes get SIGKILL; only TreeGone ends this state."""


WORK_TRANSITIONS: dict[tuple[Work, Work], str] = {
    (Work.IDLE, Work.PREPARING): "Assign, or the last Stop announced the next generation",
    (Work.PREPARING, Work.PREPARING): "Assign of a newer generation: somebody died between the phases",
    (Work.PREPARED, Work.PREPARING): "the same",
    (Work.PREPARING, Work.PREPARED): "NodePrepared",
    (Work.PREPARED, Work.RUNNING): "Start",
    (Work.PREPARING, Work.IDLE): "the link was lost, or the node is leaving; nothing was started",
    (Work.PREPARED, Work.IDLE): "the same",
    (Work.RUNNING, Work.DRAINING): "Drain, or a signal to the agent: the workers are held at their next safe point",
    (Work.RUNNING, Work.REGROUPING): "Regroup: the workers form another generation with or without others",
    (Work.DRAINING, Work.REGROUPING): "the same",
    (Work.REGROUPING, Work.REGROUPING): "Regroup of a newer generation",
    (Work.REGROUPING, Work.RUNNING): "Start",
    (Work.REGROUPING, Work.STOPPING): "Stop, or a signal to the agent",
    (Work.REGROUPING, Work.KILLING): "the link was lost, fenced, Abandon, all ranks done, or the job is over",
    (Work.RUNNING, Work.STOPPING): "Stop, or a signal to the agent",
    (Work.RUNNING, Work.KILLING): "fenced, Abandon, all ranks done (what they left is cleaned), or the job is over",
    (
        Work.DRAINING,
        Work.RUNNING,
    ): "the drain is over, or the link was lost before it was agreed: the workers are let go",
    (Work.DRAINING, Work.STOPPING): "Stop, no worker asks for safe points, or patience is at its end",
    (Work.DRAINING, Work.KILLING): "all leaders are gone, fenced, or the job is over",
    (Work.STOPPING, Work.KILLING): "all leaders are gone, or the grace is over",
    (Work.KILLING, Work.RUNNING): "all ranks were done and are cleaned; the others are still at work",
    (Work.KILLING, Work.IDLE): "TreeGone",
}


@dataclass(slots=True)
class LocalReplacements:
    """Workers of this node that were started for lost ones, and take no part yet. All by local rank."""

    living: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    """Those that wait for their place."""
    failing: dict[int, Failure | None] = field(default_factory=dict)
    """Those that have ended, or have raised an exception and will end. None: the evidence is being read."""

    def concerns(self, event: WorkerEnded | WorkerRaised | FailureRead) -> bool:
        """Whether this event is about one of them, and not about the worker for which it was started."""
        return event.local_rank in (self.failing if isinstance(event, FailureRead) else self.living)

    def heard(self, event: WorkerEnded | WorkerRaised | FailureRead, host: str) -> Failure | None:
        """The failure of one of them, once its process has ended and the evidence was read."""
        local_rank = event.local_rank
        match event:
            case WorkerRaised():
                self.failing[local_rank] = None if event.evidence_follows else event.failure
                self.ready.discard(local_rank)
            case FailureRead(failure=failure):
                self.failing[local_rank] = failure
            case WorkerEnded(failure=failure):
                self.living.discard(local_rank)
                self.ready.discard(local_rank)
                if local_rank not in self.failing:
                    text = "it ended before it had a place"
                    early = Failure(rank=0, local_rank=local_rank, host=host, pid=0, exit_code=0, message=text)
                    self.failing[local_rank] = None if event.evidence_follows else failure or early
        if local_rank in self.living or self.failing[local_rank] is None:
            return None
        return self.failing.pop(local_rank)


@dataclass(slots=True)
class LocalGeneration:
    """This node's part in one generation."""

    assign: Assign
    nproc: int
    active: frozenset[int] = field(init=False)
    """Local ranks that take part."""
    able: tuple[int, ...] = ()
    """Of these, the ones that can go on in another generation."""
    suspends: bool = False
    """All of them have been able to, and the coordinator may know it: they are suspended while it does not answer."""
    parting: frozenset[int] = frozenset()
    """Local ranks of running workers without a place in it, because this node leaves. They come to the gate, too."""
    parted: bool = False
    """These wait there: all that the others needed of them is done."""
    asks: bool = False
    """Its workers are known to ask for safe points, though perhaps not in this generation yet."""
    replacements: LocalReplacements = field(default_factory=LocalReplacements)
    ended: set[int] = field(default_factory=set)
    """Local ranks whose leader process has ended."""
    done: set[int] = field(default_factory=set)
    """Local ranks that ended with 0."""
    raised: set[int] = field(default_factory=set)
    """Local ranks whose program raised an exception, which was reported before the process ended."""
    confirmed: bool = True
    """The present coordinator knows this generation; else it has to Resume it before this agent's fence."""
    asked: bool = False
    """The coordinator has ordered a drain."""
    drain_text: str = ""
    """Why the coordinator drains, in words."""
    reached: int | None = None
    """The newest safe point that a worker had reached when they were held; None: not held."""
    safe_point: int | None = None
    """Where they stop; None: not decided."""
    drained: set[int] = field(default_factory=set)
    """Local ranks that have left at the safe point."""
    kill_at_s: float = 0.0
    """While STOPPING: when SIGKILL is due."""
    cleaned: bool = False
    """All ranks were done, and their remaining processes are gone."""
    stopped: bool = False
    """The order to stop has arrived."""
    hung: int | None = None
    """The rank that caused the hang for which it is stopped."""
    following: Assign | None = None
    """This node's place in the next generation, which that order announced."""

    def __post_init__(self) -> None:
        local_ranks = self.assign.local_ranks
        self.active = frozenset(range(self.nproc) if local_ranks is None else local_ranks)

    def regrouped(self, assign: Assign, safe_point: int) -> LocalGeneration:
        """This node's part in the next generation, which its running workers form at this safe point; 0: at once."""
        current = LocalGeneration(assign, self.nproc)
        current.parting = self._own - current.active - self.ended
        current.ended, current.done, current.raised = (
            known & current._own for known in (self.ended, self.done, self.raised)
        )
        current.suspends = self.suspends or not self._own  # workers that took part in nothing wait for their place
        current.asks = self.asks or bool(self.reached) or safe_point > 0
        current.replacements = self.replacements
        current.replacements.living -= current.active
        current.replacements.ready -= current.active
        return current

    @property
    def generation(self) -> int:
        return self.assign.generation

    @property
    def _own(self) -> frozenset[int]:
        """Local ranks of the workers that were started for it, or for a generation before it."""
        return self.active | self.parting

    @property
    def all_ended(self) -> bool:
        return self.ended >= self._own

    @property
    def left_at_safe_point(self) -> bool:
        """All workers are done or have left at the safe point, and at least one has left there; or the others go on
        without them."""
        return self.parted or (bool(self.drained) and self.drained | self.done >= self.active)

    @property
    def all_done(self) -> bool:
        return bool(self._own) and self.done >= self._own

    def running(self) -> Running:
        """For a new coordinator."""
        place, done = self.assign, tuple(sorted(self.done))
        size = place.group_world_size
        return Running(self.generation, place.group_rank, size, place.restart_count, done, place.local_ranks, self.able)


def farewell(event: Signalled, *, drained: bool) -> Outcome:
    """The outcome of this node after a signal: requeue if it was a preemption or if everything is saved."""
    if drained or event.preempt:
        how = "its workers stopped at a safe point" if drained else "its workers were stopped"
        text = f"preempted by {event.name}: {how}"
        return Outcome(kind=OutcomeKind.PREEMPTED, exit_code=EXIT_REQUEUE, message=text)
    exit_code = EXIT_SIGNAL_BASE + event.signum
    return Outcome(kind=OutcomeKind.SIGNALLED, exit_code=exit_code, message=f"ended by {event.name}")
