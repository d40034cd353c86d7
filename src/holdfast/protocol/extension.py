"""The doors between the coordinator and its extensions: the events that an extension gets, and its orders. PURE.

The core forms, starts, stops and re-forms generations. Everything else about a running job is an extension: a folder in
`holdfast.extensions` with a half at the coordinator, a half on each node, or both.

    a command ── control socket ── agent ── Ask ──► coordinator ──► CoordinatorExtension.asked
                                                                        │ ToNode       ▲ heard
                                                                        ▼              │
                                                               NodeExtension on each node, runtime/node_extension.py

An extension at the coordinator is a part of the machine: it has no clock, socket or randomness, and runs in the
simulator. It reads the job through `Job`, and changes it only by the orders that it returns. An extension that raises
ends no job: its fault goes to the journal, and its open questions are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

from msgspec import Struct

from holdfast.protocol.messages import StopReason
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import Limits, Note
from holdfast.protocol.rank_progress import Finding, JobView, RankStory, Standing
from holdfast.protocol.throughput import Throughput

# --- what an extension may read ---------------------------------------------------------------------------------------


class MemberSeen(Struct, frozen=True):
    """An agent that has joined, with or without a rank."""

    name: str
    host: str
    hosts_coordinator: bool


class NodeSeen(Struct, frozen=True):
    """A node of the generation, whose workers may be alive."""

    member: str
    host: str
    rank_base: int
    """The rank of the first of these workers; the others follow in this order."""
    local_ranks: tuple[int, ...]
    done: bool
    """All these workers have ended with 0."""


class Job(Protocol):
    """The job as its coordinator knows it now. Reading changes nothing."""

    @property
    def run_id(self) -> str: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def phase(self) -> str: ...

    @property
    def generation(self) -> int:
        """The newest generation; 0: none was formed."""

    @property
    def world_size(self) -> int:
        """Number of all ranks of the newest generation."""

    @property
    def throughput(self) -> Throughput | None:
        """The progress of all ranks of the newest generation that was started; None: none was."""

    def members(self) -> Sequence[MemberSeen]:
        """All members, in the order in which they joined."""

    def keeps_out(self, host: str, now: float) -> bool:
        """Whether an agent of this host that joins now has to wait: it is excluded, or was lost too often."""

    def address(self, member: str) -> str:
        """The address at which other nodes reach this one; empty: it is no member."""

    def nodes(self) -> Sequence[NodeSeen]:
        """The nodes of the newest generation whose workers may be alive, by group rank."""

    def view(self, now: float) -> JobView:
        """The whole view of the job, for users. Its cost grows with the number of ranks."""


# --- the events that it gets ------------------------------------------------------------------------------------------


class UserRequest(Struct, frozen=True):
    """A question of a user. It stays open until it is answered or refused, or until the link of the asking agent is
    lost."""

    number: int
    question: str
    by: str
    """The asking user, in words."""
    about: Any
    """A value of the type in `CoordinatorExtension.questions`."""


class StartFollows(Struct, frozen=True):
    """All nodes of a generation are prepared. A message to a node that is ordered now arrives before its workers start.
    It is not reported when running workers form a generation."""

    generation: int


class Started(Struct, frozen=True):
    """The workers of a generation run."""

    generation: int


class Ended(Struct, frozen=True):
    """The workers of a generation were ordered to stop, or leave it for another generation."""

    generation: int


class DrainBegan(Struct, frozen=True):
    """The workers go to a common safe point, and may be held there. Ends in DrainEnded or Ended."""

    generation: int


class DrainEnded(Struct, frozen=True):
    """The workers were let go: the generation runs on."""

    generation: int


class MemberLost(Struct, frozen=True):
    """A node was lost: it will answer nothing any more."""

    member: str


class SafePointAgreed(Struct, frozen=True):
    """Ends SaveAtSafePoint: all ranks save there and go on."""

    safe_point: int
    """The number of the safe point, counted from 1."""


class SafePointRefused(Struct, frozen=True):
    """Ends SaveAtSafePoint: no rank saves. The text says why."""

    text: str


class StopDelayed(Struct, frozen=True):
    """Workers have failed, perhaps because of others. The others are not stopped before this time, unless the cause
    becomes known. Reported at once, and not when the present event has been handled."""

    generation: int
    until_s: float
    seeks_places: bool = False
    """The failed workers have waited in vain: find out where the other ranks are. The stop waits while
    `CoordinatorExtension.observed` says that the answer is not complete."""


Happened = (
    StartFollows
    | Started
    | Ended
    | DrainBegan
    | DrainEnded
    | MemberLost
    | SafePointAgreed
    | SafePointRefused
    | StopDelayed
)

# --- what it may order ------------------------------------------------------------------------------------------------


class AnswerRequest(Struct, frozen=True):
    """Ends a request with this JSON."""

    number: int
    body: bytes


class RefuseRequest(Struct, frozen=True):
    """Ends a request: nothing was done. The text says why, and what would help."""

    number: int
    text: str


class ToNode(Struct, frozen=True):
    """A message to this extension's half on a node, of a type that it decodes (`NodeExtension.messages`)."""

    member: str
    message: Struct


class Announce(Struct, frozen=True):
    """A line for the consoles of all nodes of the generation."""

    text: str


class EndGeneration(Struct, frozen=True):
    """Stop the running generation. Whether another one follows is decided as after every stop."""

    reason: StopReason
    text: str
    culprit: Failure | None = None
    """The worker for which it is ended. Its node reports its end with its last output, although the stop ends it."""


class SaveAtSafePoint(Struct, frozen=True):
    """Hold the workers until a safe point is agreed at which they save; then they go on. Ends in SafePointAgreed or
    SafePointRefused, unless the generation ends first."""

    by: str


class EndJob(Struct, frozen=True):
    """Every agent acts as if it had received a signal."""

    drain: bool
    """False: the workers are killed at once."""
    by: str


class SendAway(Struct, frozen=True):
    """The agents of this host act as if they had received a signal: their workers save, and they leave."""

    host: str
    by: str


class Exclude(Struct, frozen=True):
    """A host takes no part for a time; its agents that run are not sent away by this."""

    host: str
    for_s: float
    text: str
    """The line for the consoles of all nodes."""


class Readmit(Struct, frozen=True):
    """The exclusion of a host is over."""

    host: str


class Park(Struct, frozen=True):
    """A node takes no part until Unpark; its agent stays a member. A generation that is being prepared with it is
    formed again, with a spare if there is one."""

    member: str
    text: str
    """The reason, for the consoles of all nodes."""


class Unpark(Struct, frozen=True):
    """A node may take part again."""

    member: str


ToCore = Announce | EndGeneration | SaveAtSafePoint | EndJob | SendAway | Exclude | Readmit | Park | Unpark
Order = AnswerRequest | RefuseRequest | ToNode | Note | ToCore
Orders = Iterable[Order]

# --- the extension ----------------------------------------------------------------------------------------------------


class RankPlace(Struct, frozen=True):
    """The place of a rank in a job in which no rank makes progress."""

    standing: Standing
    words: str


class Figures(Struct, frozen=True):
    """An extension's part of `status`, of its JSON, and of the page: whatever msgspec can encode."""

    job: object = None
    """Figures about the job as a whole; None: there are none."""
    nodes: Mapping[str, object] | None = None
    """Figures by member; a node that is missing is shown without figures. None: there are none about nodes."""
    notices: tuple[str, ...] = ()
    """Lines about what users should know now."""
    places: Mapping[int, RankPlace] = {}
    """Places by rank."""
    stands_still: bool = False
    """No rank makes progress: nobody knows how much time is left."""


class DeviceFault(Struct, frozen=True):
    """A severe event of a GPU or a network port."""

    text: str
    """`XID 79 (the GPU has fallen off the bus) on GPU 3 of node b`."""
    at_s: float
    """The time at which it happened (s of the coordinator's clock)."""


class Observed(Struct, frozen=True):
    """What an extension knows about the running generation that its verdict needs, if it ends now."""

    hang: Finding | None = None
    """The reason why no rank makes progress; None: ranks do, or nothing was found."""
    places: tuple[RankStory, ...] = ()
    """The places of the ranks, after StopDelayed."""
    complete: bool = True
    """False: more places will be known soon."""
    devices: tuple[DeviceFault, ...] = ()
    """The newest severe events of devices, in order."""


class CoordinatorExtension:
    """An extension's half at the coordinator. A subclass overrides the methods that it needs."""

    questions: Mapping[str, type] = {}
    """The questions that it answers, and the type of their `about`, with its bounds. Other values are refused."""
    messages: Any = None
    """The type of the messages of its halves on the nodes: a tagged Struct, or a union of them. A node that sends
    another value is at fault, as with every other message."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def asked(self, now: float, request: UserRequest) -> Orders:
        """Handle a question of a user. The answer may be among the orders, or come later."""
        raise NotImplementedError

    def heard(self, now: float, member: str, message: Any) -> Orders:  # noqa: ARG002
        """Handle a message of its half on this node."""
        return ()

    def happened(self, now: float, event: Happened) -> Orders:  # noqa: ARG002
        """Handle a change of the job. SafePointAgreed and SafePointRefused reach only the extension that ordered it."""
        return ()

    def progressed(self, now: float, member: str) -> Orders:  # noqa: ARG002
        """A worker of this node made a step, or reached a new stage: see `Job.throughput`. Called for most reports of
        all nodes, so it must be cheap."""
        return ()

    def observed(self, now: float) -> Observed:  # noqa: ARG002
        """What it knows about the running generation for the verdict."""
        return Observed()

    def due_s(self) -> float:
        """The time at which `due` must be called (s of the coordinator's clock); inf: never."""
        return inf

    def due(self, now: float) -> Orders:  # noqa: ARG002
        """Act, because the time of `due_s` has come."""
        return ()

    def view(self, now: float) -> Figures:  # noqa: ARG002
        """Its part of the job's view."""
        return Figures()


class CoordinatorHalf(Protocol):
    """An entry of the list of extensions, as the coordinator uses it."""

    @property
    def name(self) -> str: ...

    @property
    def questions(self) -> tuple[str, ...]: ...

    @property
    def follows(self) -> bool:
        """It is made with the coordinator. Other extensions are made, and imported, with their first question or
        message: they have missed what happened before."""

    def coordinator(self, job: Job) -> CoordinatorExtension: ...


class Sent(Struct, frozen=True):
    """The answer to a question that is passed on to nodes."""

    nodes: int
    """Number of these nodes."""
