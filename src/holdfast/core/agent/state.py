"""The agent's memory. Its link and its work are two independent dimensions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from holdfast.core.protocol import Assign


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
    """The workers are held at their next safe point, or on their way to the one at which they stop."""
    STOPPING = "stopping"
    """The ladder is on: first signal sent, leaders may still be saving."""
    KILLING = "killing"
    """SIGKILL is on its way to whatever is left; nothing but TreeGone ends this."""


@dataclass(slots=True)
class Term:
    """This node's part in one generation."""

    assign: Assign
    nproc: int
    ended: set[int] = field(default_factory=set)
    """Local ranks whose leader is gone."""
    done: set[int] = field(default_factory=set)
    """Local ranks that ended with 0."""
    raised: set[int] = field(default_factory=set)
    """Local ranks whose program raised an exception, which was reported before the process ended."""
    vouched: bool = True
    """The coordinator we are linked to knows this generation; else it has to Resume it before our fence."""
    asked: bool = False
    """The coordinator has ordered a drain."""
    drain_text: str = ""
    """Why, in words."""
    reached: int | None = None
    """The newest safe point that a worker had reached when they were held; None: not held."""
    safe_point: int | None = None
    """Where they stop; None: not agreed."""
    drained: set[int] = field(default_factory=set)
    """Local ranks that have left at the safe point."""
    kill_at_s: float = 0.0
    """While STOPPING: when SIGKILL is due."""
    swept: bool = False
    """All ranks were done and what they left behind is gone."""
    stopped: bool = False
    """The order to stop has come."""

    @property
    def generation(self) -> int:
        return self.assign.generation

    @property
    def all_ended(self) -> bool:
        return len(self.ended) == self.nproc

    @property
    def left_at_safe_point(self) -> bool:
        """None of the workers has ended in any other way than asked for, and some did because they were asked."""
        return bool(self.drained) and len(self.drained | self.done) == self.nproc

    @property
    def all_done(self) -> bool:
        return len(self.done) == self.nproc
