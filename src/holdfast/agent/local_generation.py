"""This node's part in one generation: its phase, which of its workers take part, and what has become of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from holdfast.agent.events import FailureRead, WorkerEnded, WorkerRaised
from holdfast.protocol.messages import Assign, Running
from holdfast.protocol.outcome import Failure


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


@dataclass(slots=True, eq=False, repr=False)
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
                # It did not raise, so this is the first that is known of its end, which is a failure with any exit
                # code (test_a_replacement_that_ends_with_0_has_failed).
                if local_rank not in self.failing:
                    text = "it ended before it had a place"
                    early = Failure(rank=0, local_rank=local_rank, host=host, pid=0, exit_code=0, message=text)
                    self.failing[local_rank] = None if event.evidence_follows else failure or early
        # Both are waited for: a process that has raised may live for seconds, and evidence is read beside.
        if local_rank in self.living or self.failing[local_rank] is None:
            return None
        return self.failing.pop(local_rank)


@dataclass(slots=True, eq=False, repr=False)
class LocalGeneration:
    """This node's part in one generation."""

    assign: Assign
    nproc: int
    active: frozenset[int] = field(init=False)
    """Local ranks that take part."""
    can_go_on: tuple[int, ...] = ()
    """The workers among these that can go on in another generation."""
    suspends: bool = False
    """All of them have been able to, and the coordinator may know it: they are suspended while it does not answer."""
    leaving_workers: frozenset[int] = frozenset()
    """Local ranks of running workers without a place in it, because this node leaves. They wait for it, too."""
    leaving_workers_wait: bool = False
    """They wait: all that the others needed of them is done."""
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
    """The coordinator's reason to drain, in words."""
    drain: int = 0
    """The number of the coordinator's newest Drain."""
    reached: int | None = None
    """The newest safe point that a worker had reached when they were held; None: not held."""
    safe_point: int | None = None
    """The safe point at which they stop; None: not decided."""
    drained: set[int] = field(default_factory=set)
    """Local ranks that have left at the safe point."""
    kill_at_s: float = 0.0
    """The time at which SIGKILL is due, while STOPPING."""
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
        current.leaving_workers = self._own - current.active - self.ended
        current.ended, current.done, current.raised = (
            known & current._own for known in (self.ended, self.done, self.raised)
        )
        # Replacements of a node without a worker wait for their place. They are suspended, too: the coordinator loses
        # such a node after the short lease (seed 4443).
        current.suspends = self.suspends or not self._own
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
        return self.active | self.leaving_workers

    @property
    def all_ended(self) -> bool:
        return self.ended >= self._own

    @property
    def left_at_safe_point(self) -> bool:
        """All workers are done or have left at the safe point, and at least one has left there; or the others go on
        without them."""
        return self.leaving_workers_wait or (bool(self.drained) and self.drained | self.done >= self.active)

    @property
    def all_done(self) -> bool:
        return bool(self._own) and self.done >= self._own

    def running(self) -> Running:
        """What a new coordinator must know of this generation."""
        place, done = self.assign, tuple(sorted(self.done))
        size = place.group_world_size
        return Running(
            self.generation, place.group_rank, size, place.restart_count, done, place.local_ranks, self.can_go_on
        )
