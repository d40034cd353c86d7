"""One torchrun agent as a member of a job: our agent's machine and link, with torchrun instead of our worker group.

    StartWorkers    ─►  what next_rendezvous returns
    SignalWorkers   ─►  `regroup` is True. torchrun reads it ten times a second and then stops its workers
    KillTree        ─►  the same; TreeGone is reported when torchrun has stopped them
    next_rendezvous ─►  torchrun has no living worker: WorkerEnded, a failure unless the machine had ordered the stop

The member runs on an event loop in its own thread. torchrun's thread blocks in `HandlerMembership.next` and reads
`regroup`; signals that torchrun handles still interrupt it. Imports no torch and decides nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from holdfast.agent import commands as do
from holdfast.agent.agent import Agent
from holdfast.agent.events import (
    DialFailed,
    Event,
    LinkLost,
    NodePrepared,
    PrepareFailed,
    Received,
    Signalled,
    TreeGone,
    WorkerEnded,
    WorkersHeld,
)
from holdfast.coordinator.ending import UNBOUNDED
from holdfast.diagnosis.causes import judge
from holdfast.inherited import read_token
from holdfast.journal import Journal
from holdfast.protocol.errors import HoldfastError, PeerError
from holdfast.protocol.exit_codes import EXIT_FAILURE, EXIT_REQUEUE
from holdfast.protocol.messages import Assign, FromCoordinator, Start, Stop
from holdfast.protocol.options import CommandKind, LogOptions, RunOptions, WorkerCommand
from holdfast.protocol.outcome import Failure, Outcome
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec, Tick
from holdfast.rendezvous.backends import default_port
from holdfast.rendezvous.conf import limits_from_conf, parse_endpoint, read_is_host, unknown_key_notices
from holdfast.runtime.coordinator_service import CoordinatorLink
from holdfast.runtime.driver import Driver, Troubles, fault_of
from holdfast.runtime.rendezvous_client import RendezvousClient

BACKEND = "holdfast"
CONF_BACKEND = "c10d"
"""The backend of `holdfast run` whose endpoint and --rdzv-conf keys are read."""
RESTARTS_MAX = UNBOUNDED
"""The coordinator's budget of restarts, which must not end the job: each torchrun agent counts its own restarts."""
INJECTED = frozenset({"timeout", "rank"})
"""Keys that torchrun adds to every configuration. As with its own c10d backend, `join_timeout` is used instead."""


class Parameters(Protocol):
    """The part of torch's RendezvousParameters that is read here."""

    endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    local_addr: str | None
    config: Mapping[str, Any]


def options_from(params: Parameters) -> RunOptions:
    """Our options for torchrun's parameters. Raises EndpointError, RendezvousConfigError or EnvironmentValueError."""
    conf = {str(key): str(value) for key, value in params.config.items() if key not in INJECTED}
    return RunOptions(
        job=JobSpec(
            run_id=params.run_id,
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            backend=BACKEND,
            max_restarts=RESTARTS_MAX,
        ),
        limits=limits_from_conf(CONF_BACKEND, conf, Limits(identical_failures_max=RESTARTS_MAX)),
        nproc=1,  # the coordinator sees a node as one worker: torchrun gives its workers their ranks itself
        command=WorkerCommand(kind=CommandKind.PROGRAM, target="torchrun"),
        logs=LogOptions(log_dir=None),
        endpoint=parse_endpoint(params.endpoint, default_port(CONF_BACKEND)),
        is_host=read_is_host(conf),
        token=read_token(conf.get("token_file"), os.environ),
        local_addr=params.local_addr,
        notices=tuple(unknown_key_notices(CONF_BACKEND, conf, name=BACKEND)),
    )


INCARNATION_BYTES = 4
BACKLOG = 4096
"""Number of workers that may connect to the store before torchrun serves it; the kernel has its own maximum."""
END_S_MAX = 5.0
"""Limit of the wait for the other nodes at the end when the coordinator is on another node."""
HOST_END_S_MAX = 300.0
"""Limit of that wait when the coordinator is on this node and would end with it. torchrun's exit barrier waits as
long."""


class FormedGeneration(NamedTuple):
    """This node's place in a new generation."""

    generation: int
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    listening: socket.socket | None
    """A socket that listens at master_port, on the node that hosts the store; None elsewhere. The receiver owns it."""


class OverError(HoldfastError):
    """This node gets no further generation. The text says how the job, or this node's part of it, ended."""

    code = "HF300"

    def __init__(self, outcome: Outcome, last_stop: str) -> None:
        super().__init__(outcome.message or outcome.kind.value)
        self.outcome = outcome
        self.last_stop = last_stop


class HandlerMember:
    """One torchrun agent as the agent's machine sees it. All but `regroup` and `over` belongs to the loop's thread."""

    def __init__(self, options: RunOptions, say: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._host = socket.gethostname().partition(".")[0]
        self._options = options
        self._say = say
        self._troubles = Troubles(say, self._loop.time)
        self._rendezvous = RendezvousClient(options, judge, Journal(None), say)
        self._link: CoordinatorLink | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[Outcome] = self._loop.create_future()
        """The end of this node's part in the job, or the error of ours that ended it."""
        self._listening: socket.socket | None = None
        """The store's socket from Prepare to StartWorkers, if this node hosts the store."""
        self._assign: Assign | None = None
        """The generation of which torchrun may have living workers; None: it has none."""
        self._kill_ordered = False
        """Whether the machine waits for TreeGone: torchrun has not stopped its workers yet."""
        self._waiter: Future[FormedGeneration] | None = None
        """The request of torchrun's thread for the next generation; None: it does not wait."""
        self._ending = False
        """Whether torchrun has asked for the end, or this node leaves."""
        self._last_stop = ""
        """The reason of the coordinator's newest Stop, for the message at the end."""
        self.regroup = False
        """Whether torchrun must stop its workers and ask for the next generation. Any thread may read it."""
        self._driver: Driver[Event, do.Command] = Driver(
            Agent(self._node(), options.limits, self._loop.time()), Tick(), self._execute
        )

    async def live(self) -> None:
        """Run until this node has finished."""
        self._loop.set_exception_handler(self._crashed)
        try:
            self._feed(Tick())
            await asyncio.wait([self._ended])
        finally:
            self._driver.stop()
            self.regroup = True
            if self._dialing is not None:
                self._dialing.cancel()
            self._refuse_waiter()
            self._close_listening()
            await self._rendezvous.close()

    @property
    def over(self) -> bool:
        return self._ended.done()

    def request_generation(self, waiter: Future[FormedGeneration]) -> None:
        """Wait for the next generation: torchrun has no living worker. The waiter gets OverError if there is none."""
        self._waiter = waiter
        if self._ended.done():
            self._refuse_waiter()
            return
        self._workers_gone(EXIT_FAILURE, "its torchrun starts its workers again")

    def end(self, failure: str) -> None:
        """End this node's part: torchrun's workers succeeded, or (`failure`) the job must end. None of them lives."""
        if self._ended.done() or self._ending:
            return
        self._ending = True
        if self._assign is None:
            self.leave()
            return
        # Exit code 75 ends the job on all nodes in any state, as closing a rendezvous of torchrun does.
        self._workers_gone(EXIT_REQUEUE if failure else 0, failure)
        here = self._rendezvous.coordinator is not None
        self._loop.call_later(HOST_END_S_MAX if here else END_S_MAX, self.leave)

    def leave(self) -> None:
        """Leave the job; the other nodes form a generation without this one."""
        if not self._ended.done():
            self._ending = True
            # The machine takes it as Ctrl-C, which stops at once: torchrun's workers have no safe points.
            self._feed(Signalled(signal.SIGINT, "its torchrun has ended", kills=""))
            self._workers_gone(EXIT_FAILURE, "its torchrun has ended")

    # ---------------------------------------------------------------- towards the machine

    def _feed(self, event: Event) -> None:
        try:
            self._driver.feed(event)
        except Exception as error:  # noqa: BLE001 - a fault of ours, which torchrun must get
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    def _crashed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = fault_of(context)
        if error is not None:
            self._fail(error)
        else:
            self._troubles.report(context)

    def _workers_gone(self, exit_code: int, text: str) -> None:
        """Report that torchrun has no living worker. `exit_code` 0: they succeeded."""
        assign, self._assign = self._assign, None
        if assign is None:
            return
        failure = None
        if exit_code:
            failure = Failure(
                rank=assign.group_rank,
                local_rank=0,
                host=self._host,
                pid=os.getpid(),
                exit_code=exit_code,
                message=text,
                after_stop=self.regroup and exit_code != EXIT_REQUEUE,
            )
        self._feed(WorkerEnded(assign.generation, 0, failure))
        if self._kill_ordered:
            self._kill_ordered = False
            self._feed(TreeGone(assign.generation))

    # ---------------------------------------------------------------- commands of the machine

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.Dial(node):
                self._dialing = self._loop.create_task(self._dial(node))
            case do.Send(message):
                if self._link is not None:
                    self._link.send(message)
            case do.HangUp(reason):
                if self._link is not None:
                    link, self._link = self._link, None
                    link.close(reason)
            case do.Prepare(assign):
                self._prepare(assign)
            case do.StartWorkers(assign, start):
                self._start(assign, start)
            case do.SignalWorkers(_, to_end):
                self.regroup = self.regroup or to_end
            case do.HoldWorkers(generation):  # torchrun's workers have no safe points: they stop where they are
                self._feed(WorkersHeld(generation, reached=0))
            case do.KillTree(generation):
                self.regroup = True
                self._kill_ordered = self._assign is not None
                if not self._kill_ordered:
                    self._loop.call_soon(self._feed, TreeGone(generation))
            case do.Say(text):
                self._say(text)
            case do.Exit(outcome):
                if not self._ended.done():
                    self._ended.set_result(outcome)
            case _:
                pass  # a journal's notes, and orders about what torchrun's workers do not have

    def _prepare(self, assign: Assign) -> None:
        self._close_listening()
        if self._ending:  # torchrun takes part in no further generation
            self._loop.call_soon(self.leave)
            return
        port = None
        if assign.hosts_store:
            try:
                self._listening = listen(loopback_only=assign.local_world)
            except OSError as error:
                text = f"cannot open the store's port: {error.strerror or error}"
                self._feed(PrepareFailed(assign.generation, PeerError.code, PeerError.exit_code, text))
                return
            port = self._listening.getsockname()[1]
        self._feed(NodePrepared(assign.generation, port))

    def _start(self, assign: Assign, start: Start) -> None:
        self._assign, self._kill_ordered, self.regroup = assign, False, False
        listening, self._listening = self._listening, None
        formed = FormedGeneration(
            assign.generation,
            assign.group_rank,
            assign.group_world_size,
            start.master_addr,
            start.master_port,
            listening,
        )

        waiter, self._waiter = self._waiter, None
        if waiter is None or not waiter.set_running_or_notify_cancel():
            # A signal interrupted the thread that asked, and torchrun is about to end.
            if listening is not None:
                listening.close()
            self._loop.call_soon(self.leave)
            return
        waiter.set_result(formed)

    async def _dial(self, node: NodeSpec) -> None:
        try:
            answer = await self._rendezvous.connect(node)
        except Exception as error:  # noqa: BLE001 - a fault of ours, which torchrun must get
            # No task awaits this one.
            self._fail(error)
            return
        if isinstance(answer, DialFailed):
            self._feed(answer)
            return
        self._link = answer
        answer.start(self._received, lambda reason: self._link_lost(answer, reason))
        self._feed(self._rendezvous.dialed())

    def _received(self, message: FromCoordinator) -> None:
        if isinstance(message, Stop):
            self._last_stop = message.text
        self._feed(Received(message))

    def _link_lost(self, link: CoordinatorLink, reason: str) -> None:
        if self._link is link:
            self._link = None
            self._feed(LinkLost(reason))

    # ---------------------------------------------------------------- parts of the above

    def _node(self) -> NodeSpec:
        return NodeSpec(
            member=f"{self._host}#{os.urandom(INCARNATION_BYTES).hex()}",
            host=self._host,
            nproc=1,
            local_addr=self._options.local_addr,
        )

    def _refuse_waiter(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            return
        error = self._ended.exception() if self._ended.done() else None
        with suppress(InvalidStateError):
            if error is not None:
                waiter.set_exception(error)
            elif self._ended.done():
                waiter.set_exception(OverError(self._ended.result(), self._last_stop))

    def _close_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None


def listen(*, loopback_only: bool) -> socket.socket:
    """Open a listening socket for the store, at a free port. Raises OSError."""
    if loopback_only or not socket.has_dualstack_ipv6():
        return socket.create_server(("127.0.0.1" if loopback_only else "", 0), backlog=BACKLOG)
    return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)


LEAVE_S_MAX = 2.0
"""Limit at the exit of the interpreter for the message to the other nodes."""
JOIN_S_MAX = HOST_END_S_MAX + 15.0
"""Limit for the end of the member's thread, longer than every wait in it."""


class HandlerMembership:
    """Runs a member in a thread beside torchrun's, from the first `next` on. Its methods belong to torchrun's
    thread."""

    def __init__(self, options: RunOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._member: HandlerMember | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._lock = threading.Lock()
        """Guards `_gone`: without it a call could be posted to a loop that has ended, and be lost."""
        self._gone = False
        """Whether the loop accepts no more calls: then torchrun's thread calls the member itself."""
        self._closed = False
        """Whether torchrun has called `end`."""

    @property
    def regroup(self) -> bool:
        """Whether torchrun must stop its workers and ask for the next generation."""
        return self._member is not None and self._member.regroup

    @property
    def over(self) -> bool:
        """Whether there will be no further generation."""
        return self._closed or (self._member is not None and self._member.over)

    def next(self) -> FormedGeneration:
        """Block until this node has its place in a new generation. The other nodes learn that it has no living worker.

        Raises OverError when there will be no new generation, or InternalError.
        """
        waiter: Future[FormedGeneration] = Future()
        if self._thread is None:
            self._begin(waiter)
        else:
            self._post(lambda member: member.request_generation(waiter), otherwise=waiter.cancel)
        try:
            return waiter.result()
        except BaseException:  # a signal: nothing will use the result
            waiter.cancel()
            raise

    def end(self, failure: str = "") -> bool:
        """End this node's part: torchrun's workers succeeded, or (`failure`) the job must end on all nodes.

        Blocks until the other nodes are informed. Returns False if this took too long and still goes on.
        """
        self._closed = True
        if self._thread is None:
            return True
        self._post(lambda member: member.end(failure))
        return self._join(JOIN_S_MAX)

    def _leave(self) -> None:
        """Leave the job at the exit of an interpreter that a signal ended before `end`."""
        self._post(lambda member: member.leave())
        self._join(LEAVE_S_MAX)

    def _begin(self, waiter: Future[FormedGeneration]) -> None:
        # A daemon thread: when torchrun ends without `end`, its exit waits at most LEAVE_S_MAX.
        self._thread = threading.Thread(target=self._run, args=(waiter,), name="holdfast-member", daemon=True)
        self._thread.start()
        self._ready.wait()
        atexit.register(self._leave)

    def _run(self, waiter: Future[FormedGeneration]) -> None:
        try:
            asyncio.run(self._live(waiter))
        except Exception as error:
            if not waiter.done():  # the member could not be created
                waiter.set_exception(error)
            raise
        finally:
            self._ready.set()

    async def _live(self, waiter: Future[FormedGeneration]) -> None:
        self._loop = asyncio.get_running_loop()
        self._member = HandlerMember(self._options, self._say)
        self._member.request_generation(waiter)  # before the first dial: a generation may be formed at once
        self._ready.set()
        try:
            await self._member.live()
        finally:
            with self._lock:
                self._gone = True
            await asyncio.sleep(0)  # run the calls that were posted until now

    def _post(self, action: Callable[[HandlerMember], None], otherwise: Callable[[], object] = lambda: None) -> None:
        member, loop = self._member, self._loop
        if member is None or loop is None:
            otherwise()
            return
        with self._lock:
            if not self._gone:
                loop.call_soon_threadsafe(action, member)
                return
        action(member)

    def _join(self, limit_s: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(limit_s)
        atexit.unregister(self._leave)
        return not self._thread.is_alive()
