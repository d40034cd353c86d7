"""Commands of the agent's machine. Every asynchronous command ends in exactly one event, named in its docstring."""

from __future__ import annotations

from msgspec import Struct

from holdfast.protocol.messages import Assign, FromAgent, Start
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import NodeSpec, Note


class Dial(Struct, frozen=True):
    """Try once to connect to the coordinator. Ends in Dialed or DialFailed."""

    node: NodeSpec


class Send(Struct, frozen=True):
    message: FromAgent


class HangUp(Struct, frozen=True):
    """Close the link. No LinkLost follows."""

    reason: str


class Prepare(Struct, frozen=True):
    """Phase one on this node: folders and, if asked, the store's socket. Ends in NodePrepared or PrepareFailed."""

    assign: Assign


class StartWorkers(Struct, frozen=True):
    """Start the local workers that take part. Ends in one WorkerEnded for each."""

    assign: Assign
    start: Start


class RegroupWorkers(Struct, frozen=True):
    """Phase one of a generation of running workers: release those that take part, let them wait, and bind the store's
    socket if asked. Ends in NodePrepared or RegroupRefused, or in WorkerEnded of a worker that did not come."""

    assign: Assign
    safe_point: int
    """The safe point at which they stop; 0: at once."""


class ContinueWorkers(Struct, frozen=True):
    """Phase two for running workers: give each that takes part its new environment."""

    assign: Assign
    start: Start


class StartReplacements(Struct, frozen=True):
    """Start workers that have no place yet. Ends in ReplacementsReady or WorkerEnded for each."""

    generation: int
    local_ranks: tuple[int, ...]


class SignalWorkers(Struct, frozen=True):
    """Signal the worker leaders, not their children."""

    signum: int
    to_end: bool = True
    """False: the signal is only passed on, and a worker that fails after it counts as failed."""


class HoldWorkers(Struct, frozen=True):
    """No worker passes its next safe point until ReleaseWorkers. Ends in WorkersHeld."""

    generation: int


class ReleaseWorkers(Struct, frozen=True):
    """Let the workers pass every safe point before this one, and stop there; 0: they pass all of them."""

    generation: int
    safe_point: int
    save: bool = False
    """They save there, and go on."""


class KillTree(Struct, frozen=True):
    """SIGKILL to all living processes of this generation and to replacements. Ends in TreeGone, after
    the last WorkerEnded."""

    generation: int


class Say(Struct, frozen=True):
    """A line for the console."""

    text: str
    victims: tuple[int, ...] | None = None
    """If the line says how the workers ended: ranks whose failure is a consequence, so that the console need not show
    their output. None: the line is about something else."""


class Exit(Struct, frozen=True):
    """This node's part is over. Emitted exactly once; nothing is handled afterwards."""

    outcome: Outcome


Command = (
    Dial
    | Send
    | HangUp
    | Prepare
    | StartWorkers
    | RegroupWorkers
    | ContinueWorkers
    | StartReplacements
    | SignalWorkers
    | HoldWorkers
    | ReleaseWorkers
    | KillTree
    | Say
    | Note
    | Exit
)
