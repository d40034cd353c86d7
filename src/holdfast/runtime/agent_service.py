"""The agent's shell: one node's part in a job, from the resolved options to the exit code.

    run_job ── AgentService ── Driver(Agent)
                  │  ├── WorkerGroup        workers, store, supervisor
                  │  └── RendezvousClient   link to the coordinator, or the coordinator if hosted here
                  └── Console, LogRouter, Journal, RunFolder

Executes what the machine asks for; decides nothing. At the end it writes verdict.json and the agent's own error file.
It does so in a thread, because a disk may stall. If the disk is full, these files are missing; the exit code stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct, json

from holdfast.agent.agent import Agent
from holdfast.agent.commands import (
    Command,
    ContinueWorkers,
    Dial,
    Exit,
    HangUp,
    HoldWorkers,
    KillTree,
    Prepare,
    RegroupWorkers,
    ReleaseWorkers,
    Say,
    Send,
    SignalWorkers,
    StartReplacements,
    StartWorkers,
)
from holdfast.agent.events import DialFailed, Event, LinkLost, PassSignal, Received, Signalled
from holdfast.coordinator.ending import Judge
from holdfast.detached import run_detached
from holdfast.journal import JOURNAL_NAME, Journal
from holdfast.protocol.errors import HoldfastError, ProtocolError
from holdfast.protocol.exit_codes import EXIT_FAILURE
from holdfast.protocol.messages import Answer, Extended, FromAgent, FromCoordinator, Waiting
from holdfast.protocol.options import RunOptions
from holdfast.protocol.outcome import Failure, Outcome, OutcomeKind, fault_outcome
from holdfast.protocol.policy import NodeSpec, Note, Tick
from holdfast.protocol.rank_progress import JobView
from holdfast.run_folder import RunFolder
from holdfast.runtime.ahead import Ahead
from holdfast.runtime.control import Control
from holdfast.runtime.control_requests import ControlRequests
from holdfast.runtime.coordinator_service import CoordinatorLink
from holdfast.runtime.driver import Driver, Troubles, as_error, fault_of
from holdfast.runtime.node_extension import CoordinatorHosted, Node, NodeExtensions, Registered
from holdfast.runtime.rendezvous_client import RendezvousClient
from holdfast.runtime.worker_group import WorkerGroup
from holdfast.supervisor.console import Console
from holdfast.supervisor.log_router import LogRouter
from holdfast.supervisor.supervisor import SupervisorHandle
from holdfast.supervisor.worker_command import node_versions
from holdfast.text import visible

SOUGHT_CHARACTERS = 200
"""Length of the beginning of a traceback's last line that is sought in the last screen."""
OWN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def write_reports(outcome: Outcome, folder: Path | None) -> None:
    """Write verdict.json into the run folder, and the culprit into the error file of this agent. Blocks; never raises
    for a disk."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: words that are no text
        if folder is not None:
            _write(folder / "verdict.json", json.format(json.encode(outcome), indent=2))
    culprit = outcome.verdict.shown if outcome.verdict is not None else None
    own = os.environ.get(OWN_ERROR_FILE, "")
    if culprit is not None and own:
        with contextlib.suppress(OSError, ValueError):
            _write(Path(own), json.encode(as_error_file(culprit)))


def as_error_file(culprit: Failure) -> dict[str, object]:
    """torchelastic's format, with the worker's exit code, for a program that started this agent under `record` or reads
    the file in its place (torchrun copies the first failure's file there)."""
    text = culprit.message or f"rank {culprit.rank} ended with exit code {culprit.exit_code}"
    extra = {"py_callstack": culprit.traceback, "timestamp": str(culprit.timestamp)}
    return {"message": {"message": text, "extraInfo": extra, "errorCode": culprit.exit_code or EXIT_FAILURE}}


def _write(path: Path, content: bytes) -> None:
    """Write the file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


CONSOLE_STALL_S_MAX = 30.0
"""Limit for a console that takes nothing at the end (s). Then it is abandoned; the files are complete."""
CONSOLE_LAST_CHANCE_S_MAX = 1.0
"""The same limit once it was abandoned, or when the user has pressed Ctrl-C while waiting for it."""
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the agent passes to the workers, unless --signals-to-handle names them."""
INCARNATION_BYTES = 4


class Finished(Struct, frozen=True):
    """The facts from which the end of the job is reported."""

    outcome: Outcome
    folder: str
    """The run folder; empty with --log-dir /dev/null."""


Render = Callable[[Finished], str]

LOAD_AFTER_S = 0.2
"""Time from the first start of the workers until the modules for the end of a generation are imported (s), if they were
not needed before. A job that ends at once does not pay for them, and a restart does not wait for them."""


def run_job(
    options: RunOptions,
    supervisor: SupervisorHandle,
    *,
    judge: Judge,
    render: Render,
    extensions: Sequence[Registered],
    load: Callable[[], None] = lambda: None,
    ahead: Mapping[str, Ahead] = MappingProxyType({}),
) -> int:
    """Run this node's part of a job and return its exit code. Raises HoldfastError, before any worker was started.

    `judge` separates the first failure from its consequences; `render` puts the end into words for the console. `load`
    imports the modules that `judge` and `render` need. It is called once, in a thread, while the workers run or are
    being stopped: a restart must not wait for it. `extensions` do everything else about a running job than forming,
    starting and stopping its generations; `ahead` has the children of some of them that work already.
    """
    try:
        return asyncio.run(_run_job(options, supervisor, judge, render, load, extensions, ahead))
    except Exception as error:  # noqa: BLE001 - every error gets a code
        raise as_error(error) from error.__cause__


async def _run_job(
    options: RunOptions,
    supervisor: SupervisorHandle,
    judge: Judge,
    render: Render,
    load: Callable[[], None],
    extensions: Sequence[Registered],
    ahead: Mapping[str, Ahead],
) -> int:
    folder = RunFolder.create(options.logs, options.job.run_id)
    console = Console()
    if folder.notice:
        console.say(folder.notice)
    journal = Journal(folder.path / JOURNAL_NAME if folder.path is not None else None)
    host = socket.gethostname().partition(".")[0]
    router = LogRouter(options.logs, folder, node=host, role=options.role, console=console)
    stall_s = CONSOLE_STALL_S_MAX
    try:
        service = AgentService(
            options, supervisor, judge, folder, console, router, journal, host, load, extensions, ahead
        )
        try:
            await service.begin()
            outcome = await _outcome(service, journal, folder)
            if signal.SIGINT not in supervisor.ignored and (task := asyncio.current_task()) is not None:
                # Python's own KeyboardInterrupt is lost where it meets an import or a finalizer.
                asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
            _write_end(journal, outcome)
            await asyncio.to_thread(write_reports, outcome, folder.path)
            text = _rendered(render, Finished(outcome, str(folder.path or "")), journal)
            router.hide_tracebacks(_explained_in(text, outcome))
            if not await run_detached(lambda: router.close(CONSOLE_STALL_S_MAX)):
                stall_s = CONSOLE_LAST_CHANCE_S_MAX
        finally:
            await service.extensions.reported()
        if text:
            console.say(text, prefix="")
    except asyncio.CancelledError:  # Ctrl-C while the last output is being shown
        stall_s = CONSOLE_LAST_CHANCE_S_MAX
        raise KeyboardInterrupt from None
    else:
        return outcome.exit_code
    finally:
        await run_detached(lambda: _close(router, console, journal, stall_s))


async def _outcome(service: AgentService, journal: Journal, folder: RunFolder) -> Outcome:
    """Run the service and return how the job ended. A fault of ours leaves a verdict like every other end, and is
    raised."""
    try:
        return await service.run()
    except Exception as error:  # noqa: BLE001 - raised again below
        fault = as_error(error)
        outcome = fault_outcome(fault)
        journal.write("fault", error=str(fault))
        _write_end(journal, outcome)
        await asyncio.to_thread(write_reports, outcome, folder.path)
        raise fault from fault.__cause__


def _write_end(journal: Journal, outcome: Outcome) -> None:
    verdict = outcome.verdict
    why = {"code": verdict.code, "cause": verdict.cause, "advice": verdict.advice} if verdict is not None else {}
    journal.write("ended", kind=outcome.kind.value, exit_code=outcome.exit_code, text=outcome.message, **why)


def _rendered(render: Render, finished: Finished, journal: Journal) -> str:
    """The end in words. `render` is the caller's: if it fails, simpler words are used, and the exit code stays."""
    try:
        return render(finished)
    except Exception as error:  # noqa: BLE001
        journal.fault("render", error)
        outcome = finished.outcome
        why = outcome.verdict.cause if outcome.verdict is not None else outcome.message
        return f"holdfast: {outcome.kind.value}, exit code {outcome.exit_code}{f': {why}' if why else ''}"


def _explained_in(text: str, outcome: Outcome) -> tuple[int, ...]:
    """Ranks whose traceback is in the last screen, or whose logs the last screen names for it."""
    verdict = outcome.verdict
    if not text or verdict is None:
        return ()
    culprit = verdict.shown
    last = culprit.traceback.rstrip().rpartition("\n")[2] if culprit is not None else ""
    # Its last line is sought, because the screen may leave out the middle.
    shown = bool(last) and visible(last)[:SOUGHT_CHARACTERS] in text
    return (*verdict.victims, *((culprit.rank,) if culprit is not None and shown else ()))


def _close(router: LogRouter, console: Console, journal: Journal, stall_s: float) -> None:
    router.close(stall_s)
    console.close(stall_s)
    journal.close()


class AgentService:
    """Runs one agent once."""

    def __init__(
        self,
        options: RunOptions,
        supervisor: SupervisorHandle,
        judge: Judge,
        folder: RunFolder,
        console: Console,
        router: LogRouter,
        journal: Journal,
        host: str,
        load: Callable[[], None],
        extensions: Sequence[Registered],
        ahead: Mapping[str, Ahead],
    ) -> None:
        self._options = options
        self._supervisor = supervisor
        self._folder = folder
        self._console = console
        self._router = router
        self._journal = journal
        self._host = host
        self._how_others_join = options.how_others_join
        """A line about other versions of the command, shown once."""
        self._load: Callable[[], None] | None = load
        """Imports the modules for the end of a generation; None: it was called already."""
        self._load_timer: asyncio.TimerHandle | None = None
        """Calls `_load` after the first start of workers; None: no worker has been started yet."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Outcome] = self._loop.create_future()
        self._rendezvous = RendezvousClient(options, judge, journal, console.say, extensions)
        self._node = NodeSpec(
            member=f"{host}#{os.urandom(INCARNATION_BYTES).hex()}",
            host=host,
            nproc=options.nproc,
            role=options.role,
            node_rank=options.node_rank,
            switches=options.switches,
            local_addr=options.local_addr,
            versions=node_versions(options.command),
        )
        self._machine = Agent(self._node, options.limits, self._loop.time())
        self.extensions = NodeExtensions(extensions, self._as_seen(ahead), self._send, journal.fault)
        self._link: CoordinatorLink | None = None
        self._driver: Driver[Event, Command] | None = None
        self._worker_group: WorkerGroup | None = None
        self._control_requests: ControlRequests | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._troubles = Troubles(console.say, self._loop.time)

    async def begin(self) -> None:
        """Begin the journal, and the extensions that are there from the start. Raises the HoldfastError of one that
        cannot do what the options ask for: nothing was started then."""
        options = self._options
        self._journal.write(
            "begins", member=self._node.member, run_id=options.job.run_id, endpoint=options.meeting_point
        )
        try:
            await self.extensions.begin(options)
        except HoldfastError as error:
            refused = Outcome(kind=OutcomeKind.REFUSED, exit_code=error.exit_code, code=error.code, message=str(error))
            _write_end(self._journal, refused)
            raise

    async def run(self) -> Outcome:
        machine, extensions = self._machine, self.extensions
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            worker_group = WorkerGroup(
                self._options,
                self._supervisor,
                self._folder,
                self._router,
                self._journal,
                tasks,
                self._feed,
                extensions,
                host=self._host,
                work=lambda: machine.work,
                on_store=self._rendezvous.store_opened,
                on_notice=self._console.say,
            )
            self._worker_group = worker_group
            self._driver = Driver(machine, Tick(), self._execute, after=lambda: self._after_event(machine))
            self._control_requests = ControlRequests(self._send, extensions.asked, self._host)
            control = Control(self._control_requests.ask, self._journal)
            self._loop.set_exception_handler(self._crashed)
            handled = self._install_signals()

            try:
                self._feed(Tick())
                await control.open(self._options, self._folder, self._host)
                outcome = await self._ended
            finally:
                # The job is over here. First nothing new may begin; then the coordinator waits for its members; only
                # then the workers' group and its supervisor end.
                for signum in handled:
                    self._loop.remove_signal_handler(signum)
                    if signum not in self._options.signals:
                        # For workers, who have ended (a preemption's notice, SIGUSR1): we must not end of it instead.
                        signal.signal(signum, signal.SIG_IGN)
                    elif signum != signal.SIGINT:
                        # The outcome is known, and a signal must not lose the verdict. The second one ends us.
                        self._loop.add_signal_handler(signum, self._loop.remove_signal_handler, signum)
                self._driver.stop()
                if self._load_timer is not None:
                    self._load_timer.cancel()
                if self._dialing is not None:
                    self._dialing.cancel()
                await self._rendezvous.close()
                await extensions.close(self._outcome())
                await worker_group.close()
                # Before `holdfast stop` and `holdfast logs -f` get their answer: the next command reads the files.
                await run_detached(self._router.finish_files)
                await control.close(self._outcome())
        return outcome

    def _as_seen(self, ahead: Mapping[str, Ahead]) -> Node:
        """This node, as its extensions see it."""
        return Node(
            self._machine,
            self._options,
            self._node,
            self._folder.path,
            self._journal,
            self._console.say,
            self._feed,
            lambda: self._worker_group,
            self.view,
            ahead,
        )

    def _outcome(self) -> Outcome | None:
        """The outcome; None: there is none yet, or a fault of ours in its place."""
        ended = self._ended
        return ended.result() if ended.done() and not ended.cancelled() and ended.exception() is None else None

    def view(self) -> JobView | None:
        """The coordinator's view of the job; None: it does not lead here."""
        coordinator = self._rendezvous.leading
        return coordinator.machine.view(self._loop.time()) if coordinator is not None else None

    # ---------------------------------------------------------------- events

    def _feed(self, event: Event) -> None:
        assert self._driver is not None
        self._driver.feed(event)

    def _after_event(self, machine: Agent) -> None:
        assert self._worker_group is not None
        self._worker_group.fence(machine.fence_at_s, machine.suspend_at_s)
        if machine.leaving is not None:
            self._rendezvous.leaves()

    def _install_signals(self) -> list[int]:
        """Handle our signals. A signal that was ignored when we were started (nohup's SIGHUP) stays ignored."""
        handled: list[int] = []
        own = {*self._options.signals, *([self._options.preempt_signal] if self._options.preempt_signal else [])}
        for signum in sorted(own):
            if signum not in self._supervisor.ignored:
                name = signal.Signals(signum).name
                event = Signalled(signum, name, preempt=signum == self._options.preempt_signal)
                self._loop.add_signal_handler(signum, self._feed, event)
                handled.append(signum)
        for passed in PASSED_SIGNALS:
            if passed not in own and passed not in self._supervisor.ignored:
                self._loop.add_signal_handler(passed, self._feed, PassSignal(passed))
                handled.append(passed)
        self._loop.add_signal_handler(signal.SIGWINCH, self._resized)
        handled.append(signal.SIGWINCH)
        return handled

    def _resized(self) -> None:
        self._router.resized()
        if self._worker_group is not None:
            self._worker_group.signal(signal.SIGWINCH, to_end=False)

    def _crashed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault of ours in a callback ends this agent loudly; asyncio would log it and leave the job hanging."""
        error = fault_of(context)
        if error is None:
            self._troubles.report(context)
        elif not self._ended.done():
            self._ended.set_exception(error)
        else:
            loop.default_exception_handler(context)

    def _received(self, message: FromCoordinator) -> None:
        if isinstance(message, Answer):
            assert self._control_requests is not None
            self._control_requests.answered(message)
            return
        if isinstance(message, Extended):
            self._extended(message)
            return
        self._feed(Received(message))
        if isinstance(message, Waiting) and self._how_others_join:
            text, self._how_others_join = self._how_others_join, ""
            self._console.say(text)

    def _extended(self, message: Extended) -> None:
        """Pass a message to an extension. If its half here does not know it, the coordinator is at fault, and the link
        is cut as for any other invalid message."""
        try:
            self.extensions.heard(message)
        except ProtocolError as error:
            link = self._link
            if link is not None:
                self._link_lost(link, str(error))
                link.close(str(error))

    def _send(self, message: FromAgent) -> bool:
        """Send a message to the coordinator. False: there is no link."""
        if self._link is None:
            return False
        self._link.send(message)
        return True

    def _link_lost(self, link: CoordinatorLink, reason: str) -> None:
        if self._link is link:
            self._link = None
            assert self._control_requests is not None
            self._control_requests.link_lost()
            self._feed(LinkLost(reason))

    # ---------------------------------------------------------------- commands

    def _execute(self, command: Command) -> None:
        assert self._worker_group is not None
        assert self._tasks is not None
        match command:
            case Dial(node):
                self._dialing = self._tasks.create_task(self._dial(node))
            case Send(message):
                self._send(message)
            case HangUp(reason):
                if self._link is not None:
                    link, self._link = self._link, None
                    assert self._control_requests is not None
                    self._control_requests.link_lost()
                    link.close(reason)
            case Say(text, victims):
                if victims is not None:
                    self._router.hide_tracebacks(victims)
                self._console.say(text)
            case Note(event, fields):
                self._journal.write(f"agent.{event}", **fields)
            case Exit(outcome):
                if not self._ended.done():
                    self._ended.set_result(outcome)
            case _:
                self._order_workers(self._worker_group, command)

    def _order_workers(self, group: WorkerGroup, command: Command) -> None:
        match command:
            case Prepare(assign):
                group.prepare(assign)
            case StartWorkers(assign, start):
                group.start(assign, start)
                if self._load is not None and self._load_timer is None:
                    self._load_timer = self._loop.call_later(LOAD_AFTER_S, self._load_end)
            case RegroupWorkers(assign, safe_point):
                group.regroup(assign, safe_point)
            case ContinueWorkers(_, start):
                group.go_on(start)
            case StartReplacements(generation, local_ranks):
                group.replace(generation, local_ranks)
            case SignalWorkers(signum, to_end):
                group.signal(signum, to_end=to_end)
                if to_end:
                    self._load_end()
            case HoldWorkers(generation):
                group.hold(generation)
            case ReleaseWorkers(generation, safe_point, save):
                group.release(generation, safe_point, save=save)
            case KillTree():
                group.kill_tree()

    def _load_end(self) -> None:
        """Import, once, the modules that the verdict and the last screen need."""
        assert self._tasks is not None
        if self._load is not None:
            load, self._load = self._load, None
            self._tasks.create_task(self._loaded(load))

    async def _loaded(self, load: Callable[[], None]) -> None:
        try:
            await run_detached(load)
        except Exception as error:  # noqa: BLE001 - the code that needs it imports it again, and reports the error
            self._journal.fault("load", error)

    async def _dial(self, node: NodeSpec) -> None:
        """Make one attempt to reach the coordinator. Ends in Dialed or DialFailed."""
        answer = await self._rendezvous.connect(node)
        if isinstance(answer, DialFailed):
            self._feed(answer)
            return
        self._link = answer
        answer.start(self._received, lambda reason: self._link_lost(answer, reason))
        if self._rendezvous.coordinator is not None and self._worker_group is not None:
            self.extensions.happened(CoordinatorHosted())
        self._feed(self._rendezvous.dialed())
