"""The door between the coordinator and what makes sure that it alone decides. PURE.

At most one coordinator of a job may decide at a time, and how that is known differs: nobody else could (`Sole`), it
holds a lease (`Leased`), or a majority of voters confirms it (`Voters`; all three in `holdfast.authority`). The
coordinator is the same class with each of them. It asks its authority before every event whether it may decide, passes
it the events and members that concern it, and gives it each order to release. The authority reads the coordinator's
state through `Facts` and changes none of it: it returns what it learned, and the coordinator acts on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from holdfast.coordinator.coordinator_commands import Command, StepDown
from holdfast.coordinator.coordinator_events import Event
from holdfast.coordinator.ending import Budget
from holdfast.coordinator.formation import Gathering
from holdfast.coordinator.membership import HostBackoff
from holdfast.coordinator.previous_generation import LostPart, PreviousGeneration
from holdfast.coordinator.world import Member, Phase, World
from holdfast.protocol.charter import Charter
from holdfast.protocol.messages import Join
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import JobSpec


class PreviousLeader(Struct, frozen=True):
    """What is known of the coordinator before, when this one begins."""

    generation: int
    """The newest one that it may have started; 0: it started none."""
    fenced_at_s: float
    """No worker of it is alive from then on, by this coordinator's clock."""
    charter: Charter | None = None
    """What it has left to its successor; None: nothing but that number."""
    job_s: float = 0.0
    """Age of the job."""
    training_s: float = 0.0
    """Time in which the job has trained (s), as in JobView."""


class Handled(Struct, frozen=True):
    """An event concerned the authority alone. These commands answer it; the coordinator does not see it."""

    commands: tuple[Command, ...] = ()


class Inherited(Struct, frozen=True):
    """There was an earlier start of this job, and this coordinator continues its counts."""

    charter: Charter
    term: int


class NodeEnded(Struct, frozen=True):
    """A node of the previous generation has ended, so that one cannot continue."""


class GoesOnWithout(Struct, frozen=True):
    """The previous generation can continue without these parts of it, by group rank."""

    parts: Mapping[int, LostPart]


Learned = StepDown | Handled | Inherited | NodeEnded | GoesOnWithout


class Facts(Protocol):
    """What an authority reads of its coordinator."""

    job: JobSpec
    phase: Phase
    world: World | None
    outcome: Outcome | None
    budget: Budget
    host_backoff: HostBackoff
    job_uid: str
    gathering: Gathering
    previous: PreviousGeneration

    @property
    def members(self) -> Mapping[str, Member]: ...

    @property
    def newest_generation(self) -> int: ...

    @property
    def training_s(self) -> float: ...

    def job_s(self, now: float) -> float: ...


class Authority(Protocol):
    """The right of one coordinator to decide."""

    def begin(self, facts: Facts) -> PreviousLeader | None:
        """The coordinator begins. Called once. None: it follows nobody, as far as is known."""
        ...

    # ---------------------------------------------------------------- whether it decides

    @property
    def term(self) -> int:
        """The number of this authority, as in Joined; 0: there are no numbers."""
        ...

    def decides(self, now: float) -> bool:
        """Whether the coordinator may decide at this moment. If not, it handles no event."""
        ...

    def resign(self) -> StepDown | None:
        """The order to step down for good, when `decides` says no. None: the shell sees by itself that it is over."""
        ...

    def age_s(self, now: float) -> float:
        """Time since this coordinator was confirmed by those that could give its place to another one (s); 0: nobody
        could. The fences of its agents count from there."""
        ...

    def succeeds_without(self, agents: Collection[str]) -> bool:
        """Whether another coordinator would continue the job without these agents, of which one has the coordinator."""
        ...

    def is_quiet(self, now: float) -> bool:
        """Whether it decides, has nothing to do by itself, and holds no order: a frequent event then concerns the
        coordinator alone. Asked for every message."""
        ...

    def due_s(self, now: float) -> float:
        """The time at which it has something to do by itself; inf: nothing."""
        ...

    def check_invariants(self) -> None: ...

    # ---------------------------------------------------------------- what it learns

    def hears(self, now: float, event: Event) -> Learned | None:
        """An event, before the coordinator handles it. None: nothing follows from it but what the coordinator does."""
        ...

    def joined(self, member: Member, join: Join) -> None:
        """A member has joined."""
        ...

    def came_too_late(self, agent: str, link: int) -> None:
        """An agent wants to join after the end of the job. It will not be a member."""
        ...

    def leaves(self) -> None:
        """A member has announced that it leaves."""
        ...

    def lost(self, now: float, member: Member) -> None:
        """This member is about to be removed."""
        ...

    # ---------------------------------------------------------------- the coordinator before

    def reported(self, now: float, join: Join) -> float:
        """This agent took part in a generation of an earlier coordinator. Returns when no worker of that one is
        alive any more on other nodes; -inf: this authority knows better."""
        ...

    def gathers(self, now: float, gathering: Gathering) -> Mapping[int, LostPart]:
        """Members are waited for. Brings up to date what an earlier coordinator of the job makes that wait for. Returns
        the parts of the previous generation, by group rank, without which it may continue from now on."""
        ...

    @property
    def continued_uid(self) -> str | None:
        """The uid of the earlier start that this coordinator continues; empty: it is not known to be over. None: there
        was no earlier start, or the job has a uid."""
        ...

    # ---------------------------------------------------------------- orders

    def release(self, now: float, commands: Sequence[Command]) -> list[Command]:
        """Record what the coordinator's state asks for. Returns the orders that may be carried out now, of these and of
        those that it has held until now, and its own."""
        ...
