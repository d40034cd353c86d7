"""The doors between a node's agent and its extensions: the events that an extension's half on a node gets, and the
things that it may do.

Unlike the half at the coordinator (protocol/extension.py) it may do I/O. It decides nothing about the job. Where the
coordinator does not answer, it answers for this node alone those questions that it can. An extension that raises ends
no job: its fault goes to the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from holdfast.agent.agent import Agent
from holdfast.agent.events import Event, Received
from holdfast.journal import Journal
from holdfast.protocol import codec
from holdfast.protocol.errors import HoldfastError
from holdfast.protocol.extension import CoordinatorHalf
from holdfast.protocol.messages import Assign, Extended, FromAgent, Quit, Start
from holdfast.protocol.options import RunOptions
from holdfast.protocol.outcome import Outcome
from holdfast.protocol.policy import NodeSpec
from holdfast.protocol.rank_progress import JobView, NodeView, RankProgress, RankSample, RankView
from holdfast.runtime.ahead import Ahead
from holdfast.supervisor.client import SupervisorClient, SupervisorEvent
from holdfast.supervisor.generation import RunningGeneration

Send = Callable[[msgspec.Struct], None]
"""Sends a message to this extension's half at the coordinator; nothing happens while there is no link. Raises
ProtocolError if the message is too large."""


class Question(msgspec.Struct, frozen=True):
    """A question of a command on this node."""

    name: str
    by: str
    """The asking user, in words."""
    about: bytes
    """The subject of the question, as JSON."""
    within_s: float
    """Time for which the command waits (s)."""


# --- the events that it gets ------------------------------------------------------------------------------------------


class GenerationPrepared(msgspec.Struct, frozen=True):
    """Phase one of a generation is done here. What is sent now arrives before the node's Prepared, and so before the
    coordinator starts that generation. Running workers that regroup are not prepared: WorkersRegrouped follows."""

    assign: Assign


class WorkersStarted(msgspec.Struct, frozen=True):
    """The workers of a generation are to start: they are ordered next."""

    assign: Assign
    start: Start


class WorkersRegrouped(msgspec.Struct, frozen=True):
    """The running workers were ordered to go on in this generation."""

    assign: Assign
    start: Start


class WorkersGone(msgspec.Struct, frozen=True):
    """No worker is alive any more."""


class CoordinatorHosted(msgspec.Struct, frozen=True):
    """The coordinator runs in this process. Reported with every link to it."""


NodeHappened = GenerationPrepared | WorkersStarted | WorkersRegrouped | WorkersGone | CoordinatorHosted


class SupervisorReplaced(msgspec.Struct, frozen=True):
    """`Node.supervisor` is another one: the one before was killed, and all its processes with it."""


# --- what it may do ---------------------------------------------------------------------------------------------------


class NodeWorkers(Protocol):
    """The workers of this node, as its extensions see them (runtime/worker_group.py)."""

    @property
    def supervisor(self) -> SupervisorClient: ...

    def workers(self, generation: int) -> RunningGeneration | None: ...

    def progress(self) -> tuple[RankProgress, ...]: ...

    async def samples(self) -> tuple[RankSample, ...]: ...


class Node:
    """This node, as its extensions see it."""

    def __init__(
        self,
        machine: Agent,
        options: RunOptions,
        node: NodeSpec,
        folder: Path | None,
        journal: Journal,
        say: Callable[..., None],
        feed: Callable[[Event], None],
        workers: Callable[[], NodeWorkers | None],
        job_view: Callable[[], JobView | None],
        ahead: Mapping[str, Ahead],
    ) -> None:
        """`feed` hands an event to the agent's machine. `workers` returns those of this node; None: the job has
        not begun."""
        self._machine = machine
        self._node = node
        self._feed = feed
        self._workers = workers
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._open: set[asyncio.Task[None]] = set()
        self.options = options
        """The options of the job on this node."""
        self.folder = folder
        """The run folder; None: there are no files."""
        self.write = journal.write
        """Writes an event to the journal: `write("profile", rank=3)`."""
        self.fault = journal.fault
        """Writes an exception to the journal that ends nothing, with the name of what has failed."""
        self.listen = journal.listen
        """Calls a function with the name and the fields of each event of the journal from now on, until its end."""
        self.say = say
        """Shows users a line on the console."""
        self.job_view = job_view
        """The coordinator's view of the job; None: the coordinator does not run in this process."""
        self.ahead = ahead
        """The children that work ahead of this agent, by the name of the extension."""

    @property
    def host(self) -> str:
        return self._node.host

    @property
    def run_id(self) -> str:
        return self.options.job.run_id

    @property
    def place(self) -> Assign | None:
        """This node's place in its generation; None: it has none."""
        current = self._machine.current
        return current.assign if current is not None else None

    @property
    def supervisor(self) -> SupervisorClient:
        """The parent of the workers, and of the processes that an extension starts (supervisor/service_process.py).
        Another one takes its place when it is killed: SupervisorReplaced."""
        return self._group.supervisor

    def workers(self, generation: int) -> RunningGeneration | None:
        """The workers of this generation; None: it does not run here."""
        return self._group.workers(generation)

    def progress(self) -> tuple[RankProgress, ...]:
        """The progress of this node's workers; empty while there are none."""
        workers = self._workers()
        return workers.progress() if workers is not None else ()

    async def samples(self) -> tuple[RankSample, ...]:
        """Sample the stacks of all workers."""
        return await self._group.samples()

    @property
    def _group(self) -> NodeWorkers:
        workers = self._workers()
        assert workers is not None
        return workers

    def start(self, extension: str, work: Coroutine[Any, Any, None]) -> None:
        """Run this beside the agent. It is cancelled when the agent ends; its error goes to the journal, as a fault of
        this extension."""
        task = self._loop.create_task(self._guarded(extension, work))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _guarded(self, extension: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - what an extension does ends no job
            self.fault(extension, error)

    def quit(self, *, drain: bool, by: str) -> None:
        """End this node's part of the job, as a signal would."""
        # From the loop, and not from here: a fault of the machine must not be taken for one of the extension.
        self._loop.call_soon(self._feed, Received(Quit(drain=drain, by=by)))

    def view(self) -> JobView:
        """The view of the job as far as this node knows it without its coordinator."""
        machine, place = self._machine, self.place
        own = NodeView(
            member=machine.identity,
            host=self._node.host,
            group_rank=place.group_rank if place is not None else None,
            state=machine.work.value,
            heard_s=0.0,
            ranks=self._ranks(place) if place is not None else (),
        )
        return JobView(
            run_id=self.run_id,
            phase=machine.work.value,
            generation=place.generation if place is not None else 0,
            restarts=place.restart_count if place is not None else 0,
            restarts_max=self.options.job.max_restarts,
            world_size=place.world_size if place is not None else 0,
            since_s=0.0,
            job_s=self._loop.time() - self._began_s,
            training_s=0.0,
            nodes=(own,),
            notices=("the coordinator does not answer: this is what this node knows",),
        )

    def _ranks(self, place: Assign) -> tuple[RankView, ...]:
        return tuple(
            RankView(
                rank=rank_in(place, each.local_rank),
                local_rank=each.local_rank,
                stage=each.stage,
                steps=each.job_step - 1 if each.job_step else each.steps,
                step_s=0.0,
                own_s=0.0,
                age_s=each.age_s,
                pid=each.pid,
                counts_job=each.job_step > 0,
            )
            for each in self.progress()
            if takes_part(place, each.local_rank)
        )

    async def close(self) -> None:
        """Cancel what `start` has started and has not ended."""
        for task in self._open:
            task.cancel()
        while self._open:
            await asyncio.wait(self._open)


def takes_part(place: Assign, local_rank: int) -> bool:
    """Whether this worker has a place in a node's generation. Data that were read before a regroup may be about workers
    that have none any more."""
    return place.local_ranks is None or local_rank in place.local_ranks


def rank_in(place: Assign, local_rank: int) -> int:
    return place.rank_base + place.place(local_rank)


# --- the extension ----------------------------------------------------------------------------------------------------


class NodeExtension:
    """An extension's half on one node. A subclass overrides the methods that it needs."""

    messages: Any = None
    """The type of the messages of its half at the coordinator: a tagged Struct, or a union of them."""

    def __init__(self, node: Node, send: Send) -> None:
        self.node = node
        self.send = send

    async def begin(self) -> None:
        """Do what may wait, of that which an agent needs before it starts: a constructor must not, since it runs in the
        agent's event loop. Called once for an extension that is there from the start. Raises the HoldfastError of one
        that cannot do what the options ask for."""

    def heard(self, message: Any) -> None:
        """Handle a message of its half at the coordinator."""

    async def asked(self, question: Question) -> bytes | None:  # noqa: ARG002
        """This node's own answer, as JSON, when the coordinator does not answer. None: it cannot answer alone."""
        return None

    def happened(self, event: NodeHappened) -> None:
        """Handle what has become of the workers here."""

    async def unfit(self, assign: Assign) -> str:  # noqa: ARG002
        """The reason why this node must not take part in this generation; empty: it may. Asked before its workers are
        started, but not when running workers regroup. The extension's half at the coordinator has to be told what this
        answers: it orders Park. Needs a limit of time that is shorter than Limits.prepare_s."""
        return ""

    def environment(self, generation: int, local_rank: int) -> Mapping[str, str]:  # noqa: ARG002
        """Variables for the environment of this worker, which is about to start, or to go on in this generation."""
        return {}

    def supervisor(self, event: SupervisorEvent | SupervisorReplaced) -> None:
        """Handle an event of the supervisor: of any process below it, also of workers and of other extensions."""

    async def close(self, outcome: Outcome | None) -> None:
        """End the processes of this extension: the job is over here, and the supervisor ends next. The tasks that were
        started by `Node.start` are cancelled before. `outcome` None: a fault of ours ends this agent."""

    async def reported(self) -> None:
        """Let go of the rest: the end of the job is in the journal and in verdict.json. The last screen waits for this,
        so it needs a limit of time."""


class NodeHalf(Protocol):
    """An entry of the list of extensions, as an agent uses it."""

    @property
    def name(self) -> str: ...

    @property
    def questions(self) -> tuple[str, ...]: ...

    def begins(self, options: RunOptions) -> bool:
        """Whether it is made with the agent of a job with these options. Others are made, and imported, with their
        first message or question."""

    def ahead(self, options: RunOptions) -> Callable[[], bytes] | None:
        """What a child finds out while the agent imports its modules; None: nothing in a job with these options."""

    def node(self, node: Node, send: Send) -> NodeExtension | None: ...


class Registered(CoordinatorHalf, NodeHalf, Protocol):
    """An entry of the list of extensions."""


class NodeExtensions:
    """The extensions of one agent. `send` puts a message on the link to the coordinator."""

    def __init__(
        self,
        registered: Sequence[NodeHalf],
        node: Node,
        send: Callable[[FromAgent], object],
        fault: Callable[[str, Exception], None],
    ) -> None:
        """`fault` gets the name of an extension and the exception that it has raised."""
        self._registered = {each.name: each for each in registered}
        self._extension_of = {question: each.name for each in registered for question in each.questions}
        self._node = node
        self._send = send
        self._fault = fault
        self._made: dict[str, NodeExtension | None] = {}
        """The halves on this node that were made, by name; None: the extension has none, or its making failed."""
        self._decoders: dict[str, msgspec.msgpack.Decoder[object]] = {}

    async def begin(self, options: RunOptions) -> None:
        """Make those that have something to do from the start. Raises the HoldfastError of one that cannot do what the
        options ask for: this agent must not start then. Call `reported` in any case."""
        for name, each in self._registered.items():
            if each.begins(options) and name not in self._made:
                self._made[name] = None
                try:
                    if (made := self._make(name)) is not None:
                        await made.begin()
                except HoldfastError:
                    raise
                except Exception as error:  # noqa: BLE001 - as in _guarded
                    self._made[name] = None
                    self._fault(name, error)

    def heard(self, message: Extended) -> None:
        """Pass a message to its extension; ignore it if this agent does not have the extension. Raises ProtocolError if
        the message is none of those that the extension knows."""
        name = message.extension
        extension = self._one(name) if name in self._registered else None
        if extension is None or extension.messages is None:
            return
        if name not in self._decoders:
            self._decoders[name] = msgspec.msgpack.Decoder(extension.messages)
        body = codec.decode(self._decoders[name], message.body, f"a coordinator's extension {name}")
        self._guarded(name, lambda: extension.heard(body))

    async def asked(self, question: Question) -> bytes | None:
        """This node's own answer; None: there is none."""
        name = self._extension_of.get(question.name, "")
        extension = self._one(name) if name else None
        try:
            return await extension.asked(question) if extension is not None else None
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self._fault(name, error)
            return None

    def happened(self, event: NodeHappened) -> None:
        for name, each in self._there():
            self._guarded(name, partial(each.happened, event))

    async def unfit(self, assign: Assign) -> bool:
        """Whether an extension keeps this node from taking part in this generation. A fault in one does not."""
        found = False
        for name, each in self._there():
            try:
                found = bool(await each.unfit(assign)) or found
            except Exception as error:  # noqa: BLE001 - as in _guarded
                self._fault(name, error)
        return found

    def environment(self, generation: int, local_rank: int) -> dict[str, str]:
        """The variables that all extensions have for this worker."""
        variables: dict[str, str] = {}
        for name, each in self._there():
            self._guarded(name, lambda each=each: variables.update(each.environment(generation, local_rank)))  # type: ignore[misc]
        return variables

    def supervisor(self, event: SupervisorEvent | SupervisorReplaced) -> None:
        for name, each in self._there():
            self._guarded(name, partial(each.supervisor, event))

    async def close(self, outcome: Outcome | None) -> None:
        await self._node.close()
        for name, each in self._there():
            await self._awaited(name, each.close(outcome))

    async def reported(self) -> None:
        for name, each in self._there():
            await self._awaited(name, each.reported())

    def _there(self) -> list[tuple[str, NodeExtension]]:
        return [(name, each) for name, each in self._made.items() if each is not None]

    def _one(self, name: str) -> NodeExtension | None:
        """The extension of this name, which is made if needed; None: it has no half on a node, or its making failed."""
        if name not in self._made:
            self._made[name] = None
            self._guarded(name, lambda: self._make(name))
        return self._made[name]

    def _make(self, name: str) -> NodeExtension | None:
        def send(message: msgspec.Struct) -> None:
            self._send(Extended(name, codec.encode_extended(message)))

        made = self._registered[name].node(self._node, send)
        self._made[name] = made
        return made

    def _guarded(self, name: str, call: Callable[[], object]) -> None:
        """Call an extension. A fault in it goes to the journal and ends no job."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - an extension may be anybody's
            self._fault(name, error)

    async def _awaited(self, name: str, call: Awaitable[None]) -> None:
        try:
            await call
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self._fault(name, error)
