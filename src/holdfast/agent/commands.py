"""What the agent wants done. Every asynchronous command ends in exactly one event, named in its docstring."""

from __future__ import annotations

from msgspec import Struct

from holdfast.protocol.machines import Note
from holdfast.protocol.messages import Assign, FromAgent, Start
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import NodeSpec


class Dial(Struct, frozen=True):
    """Reach the coordinator once. Ends in Dialed or DialFailed."""

    node: NodeSpec


class Send(Struct, frozen=True):
    message: FromAgent


class HangUp(Struct, frozen=True):
    """Close the link. No LinkLost follows."""

    reason: str


class Prepare(Struct, frozen=True):
    """Phase one on this node: folders and, if asked, the store's listening socket. Ends in NodePrepared or PrepareFailed."""

    assign: Assign


class StartWorkers(Struct, frozen=True):
    """Start all local workers. Ends in one WorkerEnded for each."""

    assign: Assign
    start: Start


class SignalWorkers(Struct, frozen=True):
    """Signal the worker leaders, not their children."""

    signum: int
    to_end: bool = True
    """False: a signal that is only passed on. Whoever fails after it fails by itself."""


class HoldWorkers(Struct, frozen=True):
    """No worker passes its next safe point until ReleaseWorkers. Ends in WorkersHeld."""

    generation: int


class ReleaseWorkers(Struct, frozen=True):
    """The workers pass every safe point before this one, and stop there; 0: they pass all of them."""

    generation: int
    safe_point: int


class LookAtWorkers(Struct, frozen=True):
    """Take a sample of each worker; `store`: and try to reach the generation's store. Ends in WorkersSeen."""

    generation: int
    number: int
    store: bool


class KillTree(Struct, frozen=True):
    """SIGKILL whatever this generation left alive, leaders and all. Ends in TreeGone, after the last WorkerEnded."""

    generation: int


class Say(Struct, frozen=True):
    """A line for the person at the console."""

    text: str
    victims: tuple[int, ...] | None = None
    """How the workers ended is known: what these ranks ended with is in their logs, and need not be shown. None: it is not
    what the line is about."""


class Exit(Struct, frozen=True):
    """This node's part is over. Emitted exactly once; nothing is handled afterwards."""

    outcome: Outcome


Command = (
    Dial
    | Send
    | HangUp
    | Prepare
    | StartWorkers
    | SignalWorkers
    | HoldWorkers
    | ReleaseWorkers
    | LookAtWorkers
    | KillTree
    | Say
    | Note
    | Exit
)
