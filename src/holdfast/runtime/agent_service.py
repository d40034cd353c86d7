"""The agent's shell: one node's part in a job, from the resolved options to the exit code.

    run_job ── AgentService ── Driver(AgentMachine)
                  │  ├── Crew               workers, store, keeper
                  │  ├── link               LocalLink or Connection to the coordinator
                  │  └── CoordinatorService if this process got the endpoint's address
                  └── Console, LogRouter, Journal, RunFolder

Executes what the machine asks for; decides nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from holdfast.core.agent.commands import (
    Command,
    Dial,
    Exit,
    HangUp,
    KillTree,
    Note,
    Prepare,
    Say,
    Send,
    SignalWorkers,
    StartWorkers,
)
from holdfast.core.agent.events import Dialed, DialFailed, Event, LinkLost, PassSignal, Received, Signalled, Tick
from holdfast.core.agent.machine import AgentMachine
from holdfast.core.coordinator.ending import Judge
from holdfast.core.coordinator.machine import CoordinatorMachine
from holdfast.core.errors import HoldfastError, NoAnswerError, PortInUseError, RefusedError
from holdfast.core.options import RunOptions
from holdfast.core.outcome import Outcome
from holdfast.core.policy import NodeSpec
from holdfast.core.protocol import FromAgent, FromCoordinator
from holdfast.runtime.coordinator_service import CoordinatorService
from holdfast.runtime.driver import Driver
from holdfast.runtime.journal import Journal
from holdfast.runtime.report import write_reports
from holdfast.runtime.workers.console import Console
from holdfast.runtime.workers.crew import Crew
from holdfast.runtime.workers.keeper import KeeperHandle
from holdfast.runtime.workers.log_layout import RunFolder
from holdfast.runtime.workers.log_router import LogRouter

if TYPE_CHECKING:
    from holdfast.rendezvous.claim import Claim

CONSOLE_STALL_S_MAX = 30.0
"""At the end: a console that takes nothing for this long is given up; the files are complete."""
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Not ours: they go on to the workers, unless --signals-to-handle names them."""
INCARNATION_BYTES = 4


class Finished(Struct, frozen=True):
    """What the end of the job is told from."""

    outcome: Outcome
    folder: str
    """The run folder; empty with --log-dir /dev/null."""


Render = Callable[[Finished], str]


class Link(Protocol):
    """An agent's way to the coordinator."""

    def send(self, message: FromAgent) -> None: ...

    def close(self, reason: str = ...) -> None: ...


def run_job(options: RunOptions, keeper: KeeperHandle, *, judge: Judge, render: Render) -> int:
    """Run this node's part of a job and return its exit code. Raises HoldfastError, before any worker was started.

    `judge` tells the first failure from its victims; `render` puts the end into words for the console.
    """
    return asyncio.run(_run_job(options, keeper, judge, render))


async def _run_job(options: RunOptions, keeper: KeeperHandle, judge: Judge, render: Render) -> int:
    folder = RunFolder.create(options.logs, options.job.run_id)
    console = Console()
    journal = Journal(folder.path / "events.jsonl" if folder.path is not None else None)
    host = socket.gethostname().partition(".")[0]
    router = LogRouter(options.logs, folder, node=host, role=options.role, console=console)
    try:
        outcome = await AgentService(options, keeper, judge, folder, console, router, journal, host).run()
        finished = Finished(outcome, str(folder.path or ""))
        journal.write("ended", kind=outcome.kind.value, exit_code=outcome.exit_code)
        await asyncio.to_thread(write_reports, outcome, folder.path)
        await asyncio.to_thread(router.close, CONSOLE_STALL_S_MAX)
        text = render(finished)
        if text:
            console.say(text, prefix="")
        return outcome.exit_code
    finally:
        await asyncio.to_thread(_close, router, console, journal)


def _close(router: LogRouter, console: Console, journal: Journal) -> None:
    router.close(CONSOLE_STALL_S_MAX)
    console.close(CONSOLE_STALL_S_MAX)
    journal.close()


class AgentService:
    """One run of one agent."""

    def __init__(
        self,
        options: RunOptions,
        keeper: KeeperHandle,
        judge: Judge,
        folder: RunFolder,
        console: Console,
        router: LogRouter,
        journal: Journal,
        host: str,
    ) -> None:
        self._options = options
        self._keeper = keeper
        self._judge = judge
        self._folder = folder
        self._console = console
        self._router = router
        self._journal = journal
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Outcome] = self._loop.create_future()
        self._coordinator: CoordinatorService | None = None
        self._link: Link | None = None
        self._driver: Driver[Event, Command] | None = None
        self._crew: Crew | None = None
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> Outcome:
        node = NodeSpec(
            member=f"{self._host}#{os.urandom(INCARNATION_BYTES).hex()}",
            host=self._host,
            nproc=self._options.nproc,
            role=self._options.role,
            node_rank=self._options.node_rank,
            local_addr=self._options.local_addr,
        )
        self._journal.write(
            "begins", member=node.member, run_id=self._options.job.run_id, endpoint=str(self._options.endpoint)
        )
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            crew = Crew(
                self._options,
                self._keeper,
                self._folder,
                self._router,
                self._journal,
                tasks,
                self._feed,
                host=self._host,
            )
            self._crew = crew
            crew.on_store = self._store_opened
            self._driver = Driver(AgentMachine(node, self._options.limits, self._loop.time()), Tick(), self._execute)
            handled = self._install_signals()
            try:
                self._feed(Tick())
                outcome = await self._ended
            finally:
                for signum in handled:
                    self._loop.remove_signal_handler(signum)
                self._driver.stop()
                if self._coordinator is not None:
                    await self._coordinator.close()
                await crew.close()
        return outcome

    # ---------------------------------------------------------------- events

    def _feed(self, event: Event) -> None:
        assert self._driver is not None
        self._driver.feed(event)

    def _install_signals(self) -> list[int]:
        """What was ignored when we were started (nohup's SIGHUP) stays ignored."""
        handled: list[int] = []
        for signum in self._options.signals:
            if signum not in self._keeper.ignored:
                name = signal.Signals(signum).name
                self._loop.add_signal_handler(signum, self._feed, Signalled(signum, name))
                handled.append(signum)
        for passed in PASSED_SIGNALS:
            if passed not in self._options.signals and passed not in self._keeper.ignored:
                self._loop.add_signal_handler(passed, self._feed, PassSignal(passed))
                handled.append(passed)
        self._loop.add_signal_handler(signal.SIGWINCH, self._resized)
        handled.append(signal.SIGWINCH)
        return handled

    def _resized(self) -> None:
        self._router.resized()
        if self._crew is not None:
            self._crew.pass_signal(signal.SIGWINCH)

    def _received(self, message: FromCoordinator) -> None:
        self._feed(Received(message))

    def _link_lost(self, link: Link, reason: str) -> None:
        if self._link is link:
            self._link = None
            self._feed(LinkLost(reason))

    def _store_opened(self, port: int) -> None:
        if self._coordinator is not None and self._coordinator.proxy is not None:
            self._coordinator.proxy.set_target("127.0.0.1", port)

    # ---------------------------------------------------------------- commands

    def _execute(self, command: Command) -> None:
        assert self._crew is not None
        assert self._tasks is not None
        match command:
            case Dial(node):
                self._tasks.create_task(self._dial(node))
            case Send(message):
                if self._link is not None:
                    self._link.send(message)
            case HangUp(reason):
                if self._link is not None:
                    link, self._link = self._link, None
                    link.close(reason)
            case Prepare(assign):
                self._crew.prepare(assign)
            case StartWorkers(assign, start):
                self._crew.start(assign, start)
            case SignalWorkers(signum):
                self._crew.signal(signum)
            case KillTree():
                self._crew.kill_tree()
            case Say(text):
                self._console.say(text)
            case Note(event, fields):
                self._journal.write(f"agent.{event}", **fields)
            case Exit(outcome):
                if not self._ended.done():
                    self._ended.set_result(outcome)

    # ---------------------------------------------------------------- reaching the coordinator

    async def _dial(self, node: NodeSpec) -> None:
        """Host the coordinator if the endpoint is ours to bind, else connect to whoever does."""
        options = self._options
        try:
            link = await self._reach(node)
        except HoldfastError as error:
            final = isinstance(error, PortInUseError | RefusedError) and not isinstance(error, NoAnswerError)
            self._feed(DialFailed(error.code, error.exit_code, str(error), final))
        except OSError as error:
            text = f"cannot bind the endpoint {options.endpoint}: {error.strerror or error}"
            self._feed(DialFailed(PortInUseError.code, PortInUseError.exit_code, text, final=True))
        else:
            self._link = link
            self._feed(Dialed())

    async def _reach(self, node: NodeSpec) -> Link:
        options = self._options
        if self._coordinator is None:
            if options.standalone and options.job.max_nodes == 1:
                await self._host_coordinator(None)  # nobody can join: no socket at all
            elif (place := await self._claim()) is not None:
                await self._host_coordinator(place)
        if self._coordinator is not None:
            local = self._coordinator.connect_locally()
            local.start(self._received, lambda reason: self._link_lost(local, reason))
            return local
        from holdfast.runtime.connection import dial

        connection = await dial(options.endpoint, options.job, node, options.token)
        connection.start(self._received, lambda reason: self._link_lost(connection, reason))
        return connection

    async def _claim(self) -> Claim | None:
        """The endpoint, if it is ours; None: connect."""
        from holdfast.rendezvous.claim import claim

        options = self._options
        wanted = options.is_host
        if options.job.fixed_ranks and wanted is None:
            wanted = None if not options.node_rank else False
        if _is_numeric_or_local(options.endpoint.host):
            place = claim(options.endpoint, standalone=options.standalone, is_host=wanted)
        else:
            place = await asyncio.to_thread(claim, options.endpoint, standalone=options.standalone, is_host=wanted)
        self._journal.write("claim", endpoint=str(place.endpoint), host=place.is_host, reason=place.reason)
        return place if place.is_host else None

    async def _host_coordinator(self, place: Claim | None) -> None:
        options = self._options
        static = options.job.fixed_ranks and options.share_store
        machine = CoordinatorMachine(
            options.job,
            options.limits,
            self._judge,
            self._loop.time(),
            fixed_master=(options.endpoint.host, place.port) if static and place is not None else None,
        )
        service = CoordinatorService(machine, self._journal, self._console.say)
        if place is not None:
            await service.listen(place, options.token, static=static)
        self._coordinator = service


def _is_numeric_or_local(host: str) -> bool:
    """Needs no resolver, hence no thread."""
    return host == "localhost" or ":" in host or host.replace(".", "").isdecimal()
