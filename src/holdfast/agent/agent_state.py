"""State of the agent: the phases of its link and of its work, which are independent; its lease (when it sent the newest
message that the coordinator has confirmed, by the agent's own clock); its search for the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from holdfast.agent.events import DialFailed
from holdfast.protocol.errors import CoordinatorLostError, CoordinatorUnreachableError
from holdfast.protocol.machines import Pauses
from holdfast.protocol.messages import Assign
from holdfast.protocol.outcome import Outcome, OutcomeKind, Verdict
from holdfast.protocol.policy import Limits


@dataclass(slots=True)
class Seeking:
    limits: Limits
    since_s: float
    dial_at_s: float
    said: Pauses
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
        if not self.said.due(now):
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
    _number: int = 0
    _open: dict[int, float] = field(default_factory=dict)

    @property
    def fence_at_s(self) -> float:
        return self.confirmed_s + self.fence_s

    def granted(self, fence_s: float, ping_interval_s: float, *, asked_s: float, now: float) -> None:
        """The agent has joined: the coordinator received the request that was sent at `asked_s`."""
        self.fence_s, self.ping_interval_s = fence_s, ping_interval_s
        self.confirmed_s = asked_s
        self.ping_at_s = now + ping_interval_s
        self._open.clear()

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

    def answered(self, number: int) -> None:
        sent_s = self._open.pop(number, None)
        if sent_s is not None:
            self.confirm(sent_s)


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
    STOPPING = "stopping"
    """The first signal was sent; leaders may still be saving."""
    KILLING = "killing"
    """All remaining processes get SIGKILL; only TreeGone ends this state."""


@dataclass(slots=True)
class Term:
    """This node's part in one generation."""

    assign: Assign
    nproc: int
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
    following: Assign | None = None
    """This node's place in the next generation, which that order announced."""

    @property
    def generation(self) -> int:
        return self.assign.generation

    @property
    def all_ended(self) -> bool:
        return len(self.ended) == self.nproc

    @property
    def left_at_safe_point(self) -> bool:
        """All workers are done or have left at the safe point, and at least one has left there."""
        return bool(self.drained) and len(self.drained | self.done) == self.nproc

    @property
    def all_done(self) -> bool:
        return len(self.done) == self.nproc
