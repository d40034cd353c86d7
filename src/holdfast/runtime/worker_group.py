"""Serves all generations of workers on one node: owns their supervisor, store, log files and observers.

Executes the commands of the agent's machine and reports each answer as an event of the machine; decides nothing. The
workers of one generation are in supervisor/generation.py. All else that is done for workers, or with processes beside
them, is done by extensions: they get what happens here, and none is known by name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from holdfast.agent.events import (
    Event,
    NodePrepared,
    PrepareFailed,
    RegroupRefused,
    StoreDied,
    TreeGone,
    WorkersFenced,
    WorkersHeld,
    WorkersProgress,
)
from holdfast.agent.local_generation import Work
from holdfast.journal import Journal
from holdfast.protocol.errors import HoldfastError, LogDirError, PeerError, SupervisorLostError
from holdfast.protocol.messages import Assign, Start
from holdfast.protocol.options import RunOptions
from holdfast.protocol.rank_progress import RankProgress, RankSample
from holdfast.run_folder import RunFolder, WorkerSlot
from holdfast.runtime.node_extension import (
    GenerationPrepared,
    NodeExtensions,
    SupervisorReplaced,
    WorkersGone,
    WorkersRegrouped,
    WorkersStarted,
)
from holdfast.supervisor import client as supervisor_client
from holdfast.supervisor.board import HOLD_SETTLES_S, Observer, Phases, ProgressNotes
from holdfast.supervisor.client import (
    CONFIRM_S_MAX,
    Revivals,
    SupervisorClient,
    revive_supervisor,
)
from holdfast.supervisor.ends import Ends, OomWatch
from holdfast.supervisor.generation import RunningGeneration, taking_part
from holdfast.supervisor.log_router import LogRouter
from holdfast.supervisor.log_spool import WorkerStreams
from holdfast.supervisor.release import FIRST_LOOK
from holdfast.supervisor.store_host import StoreHost, free_port
from holdfast.supervisor.supervisor import SupervisorHandle
from holdfast.supervisor.worker_command import binding_for, order_for, script_argv

LIVING = (Work.RUNNING, Work.DRAINING, Work.REGROUPING)
"""States of work in which workers may be started."""
GUARD_S = 0.25
"""Time from the agent's own fence until the supervisor kills (s): an agent that runs kills the workers itself, and
reports why."""


class WorkerGroup:
    """The worker group of one agent. `emit` gets the agent machine's events, in order, on the loop."""

    def __init__(
        self,
        options: RunOptions,
        supervisor: SupervisorHandle,
        folder: RunFolder,
        router: LogRouter,
        journal: Journal,
        tasks: asyncio.TaskGroup,
        emit: Callable[[Event], None],
        extensions: NodeExtensions,
        *,
        host: str,
        work: Callable[[], Work],
        on_store: Callable[[int], None],
        on_notice: Callable[[str], None],
    ) -> None:
        """`work` returns the machine's state of work. `on_store` gets the port of each generation's store that is
        hosted here, `on_notice` messages for the user."""
        self._options = options
        self._folder = folder
        self._router = router
        self._journal = journal
        self._tasks = tasks
        self._emit = emit
        self._extensions = extensions
        self._host = host
        self._work = work
        self._on_store = on_store
        self._on_notice = on_notice
        self._environ = dict(os.environ)
        self._loop = asyncio.get_running_loop()
        self._at_once_s = options.limits.confirm_s
        self.supervisor = SupervisorClient(supervisor, self._on_supervisor, at_once_s=self._at_once_s)
        self._supervisor_ready = asyncio.Event()
        self._supervisor_ready.set()
        self._revivals = Revivals()
        self._fence_s: tuple[float | None, float | None] = (None, None)
        """The fence that was last sent to the supervisor: the times at which it kills and suspends the workers."""
        journal.write("preload", modules=options.preload.modules, later=options.preload.later, why=options.preload.why)
        self._phases = Phases(journal.write)
        self._progress_notes = ProgressNotes(journal.write)
        self._observer = Observer(tasks, emit, folder=folder.path, fault=journal.fault)
        self._oom: OomWatch | None = None
        self._store: StoreHost | None = None
        self._cpus: dict[int, list[int]] = {}
        """CPUs by local rank, with --numa-binding."""
        self._logs_lock = asyncio.Lock()
        """Held while a thread opens log files: the router is for one thread at a time."""
        self._prepared: dict[int, WorkerStreams] = {}
        """Streams of the prepared generation, by local rank."""
        self._running: RunningGeneration | None = None
        """The newest generation that was started; its workers may have ended."""
        self._hold_timer: asyncio.TimerHandle | None = None
        self._release_timer: asyncio.TimerHandle | None = None
        """The next look at workers that have not left their generation."""
        self._regrouping: Assign | None = None
        """The generation for which workers leave theirs, and wait; None: there is none."""

    # ---------------------------------------------------------------- commands of the machine

    def prepare(self, assign: Assign) -> None:
        self._tasks.create_task(self._prepare(assign))

    def start(self, assign: Assign, start: Start) -> None:
        """Start the workers, at once where possible: a stop order may follow directly and must find the workers."""
        running = self._begin(assign, start)
        self._extensions.happened(WorkersStarted(assign, start))
        if self._supervisor_ready.is_set():
            self._spawn(running)
        else:
            self._tasks.create_task(self._spawn_later(running))

    def regroup(self, assign: Assign, safe_point: int) -> None:
        """Release the workers for another generation, at this safe point; 0: at once. Answers with NodePrepared when
        all wait for it and the store's port is bound."""
        running = self._running
        if running is None:
            self._emit(RegroupRefused(assign.generation, "this node has no workers"))
            return
        self._cancel_release()
        self._phases.stop()
        self._journal.write(
            "regroup",
            generation=assign.generation,
            local_ranks=[*taking_part(assign, self._options.nproc)],
            world_size=assign.world_size,
            safe_point=safe_point,
        )
        self._regrouping = assign
        self._progress_notes.close()
        running.regroup(self.supervisor, assign, safe_point)
        if not safe_point:
            self._look_at_missing(running, FIRST_LOOK * running.release_s)
        self._on_waiting()  # if no worker of this node is expected, all are there already

    def _look_at_missing(self, running: RunningGeneration, in_s: float) -> None:
        def look() -> None:
            self._release_timer = None
            if (left_s := running.kill_missing(self.supervisor)) > 0:
                self._look_at_missing(running, left_s)

        self._release_timer = self._loop.call_later(in_s, look)

    def _cancel_release(self) -> None:
        """Stop waiting for workers that are released."""
        self._regrouping = None
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None

    def go_on(self, start: Start) -> None:
        """Give the waiting workers their places."""
        running = self._running
        assert running is not None
        self._open_store(running.assign)
        running.go_on(start)
        self._phases.start(start.generation, running.assign.restart_count, 0, None)
        self._router.moved({rank: running.rank_of(rank) for rank in running.pids()})
        self._write_begin(running, start)
        self._observer.regrouped(start, self._look_at_workers)
        self._extensions.happened(WorkersRegrouped(running.assign, start))

    def replace(self, generation: int, local_ranks: Sequence[int]) -> None:
        """Start replacements. Answers with ReplacementsReady or WorkerEnded for each."""
        running = self.workers(generation)
        if running is not None:
            self._tasks.create_task(self._replace(running, local_ranks))

    def signal(self, signum: int, *, to_end: bool) -> None:
        """Signal the workers. `to_end`: their failures from now on are consequences of the stop."""
        if to_end:
            self._cancel_release()
            self._phases.stop()
        if self._running is not None:
            self._running.signal(self.supervisor, signum, to_end=to_end)

    def hold(self, generation: int) -> None:
        """Stop the workers at their next safe point; answers with WorkersHeld."""
        running = self.workers(generation)
        if running is not None:
            running.board.hold()
        self._cancel_hold()
        self._hold_timer = self._loop.call_later(HOLD_SETTLES_S, self._held, generation)

    def _held(self, generation: int) -> None:
        running = self.workers(generation)
        reached, saves = (running.board.reached(), running.board.all_save(running.pids())) if running else (0, False)
        self._emit(WorkersHeld(generation, reached, saves))

    def release(self, generation: int, safe_point: int, *, save: bool = False) -> None:
        """Let the workers continue to this safe point, where they stop, or save and go on; 0: they only continue."""
        self._cancel_hold()  # its answer would be taken for that of the next one
        running = self.workers(generation)
        if running is not None:
            running.board.release(safe_point, save=save)

    def _cancel_hold(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None

    def workers(self, generation: int) -> RunningGeneration | None:
        """The workers of this generation; None: it does not run here."""
        running = self._running
        return running if running is not None and running.number == generation else None

    async def samples(self) -> tuple[RankSample, ...]:
        """Sample the workers' stacks."""
        running = self._running
        return await self._observer.samples(running.number, running.pids()) if running is not None else ()

    def progress(self) -> tuple[RankProgress, ...]:
        """The progress of this generation's workers."""
        return self._running.progress() if self._running is not None else ()

    def _look_at_workers(self, generation: int) -> WorkersProgress:
        running = self._running
        if running is None:
            return WorkersProgress(generation, ())
        running.look_at_processes(self.supervisor)
        return WorkersProgress(generation, running.progress(), *running.job_position())

    def fence(self, at_s: float | None, suspend_at_s: float | None) -> None:
        """Let the supervisor kill the workers at `at_s`, in case this process is stopped or starved, and suspend them
        at `suspend_at_s` (s of the loop's clock); None: never."""
        fence_s = None if at_s is None else at_s + GUARD_S, suspend_at_s
        if fence_s != self._fence_s:
            self._fence_s = fence_s
            self.supervisor.fence(*fence_s)

    def kill_tree(self) -> None:
        self._cancel_release()
        self._phases.stop()
        if self._supervisor_ready.is_set():
            # The kill has to be confirmed soon after the fence at the latest: then others go on without these workers.
            at_s, _ = self._fence_s
            left_s = CONFIRM_S_MAX if at_s is None else max(0.0, at_s - self._loop.time()) + self._at_once_s
            self.supervisor.kill_tree(confirm_s=min(left_s, CONFIRM_S_MAX))

    async def close(self) -> None:
        """End everything: no process below the supervisor is alive afterwards."""
        if self._store is not None:
            self._store.close()
        await self.supervisor.close()
        self._phases.close()
        self._progress_notes.close()
        await self._observer.close()
        self._cancel_hold()
        self._cancel_release()
        self._close_running()

    def _close_running(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    # ---------------------------------------------------------------- phase one

    async def _prepare(self, assign: Assign) -> None:
        generation = assign.generation
        try:
            async with self._logs_lock:
                self._prepared = await asyncio.to_thread(self._open_logs, assign)
            self._oom = self._oom or OomWatch()
            if self._options.numa_binding and not self._cpus:
                self._cpus = binding_for(self._options)
            port = await self._reserve_store(assign) if assign.hosts_store else None
        except HoldfastError as error:
            self._emit(PrepareFailed(generation, error.code, error.exit_code, str(error)))
        except OSError as error:
            text = f"cannot open the store's port: {error.strerror or error}"
            self._emit(PrepareFailed(generation, PeerError.code, PeerError.exit_code, text))
        else:
            # The coordinator forms again without a node that is not fit: it does not wait for this one.
            if await self._extensions.unfit(assign):
                return
            self._extensions.happened(GenerationPrepared(assign))
            self._emit(NodePrepared(generation, port))

    def _open_logs(self, assign: Assign) -> dict[int, WorkerStreams]:
        """Open the log files. Call it in a thread: a stalled disk must not keep this node from answering.

        If that is not possible, the generation goes on without files: the job is worth more than its logs.
        """
        slots = [WorkerSlot(rank, assign.rank_base + rank) for rank in taking_part(assign, self._options.nproc)]
        try:
            attempt = self._folder.attempt(assign.generation, assign.restart_count)
            streams = self._router.open(attempt, slots)
        except LogDirError as error:
            self._router.say(f"{error} Generation {assign.generation} goes on without log files.")
            return self._router.open(None, slots)
        return streams

    async def _reserve_store(self, assign: Assign) -> int:
        if not self._options.share_store:
            return free_port(assign.local_world)
        if self._store is None:
            python = self._options.command.python
            warm = script_argv(self._options) if "torch" in self._options.preload.modules else []
            eager = not warm and bool(self._options.preload.torch)  # otherwise it starts when a client connects
            await self._supervisor_ready.wait()
            self._store = StoreHost(lambda: self.supervisor, python, self._on_store_lost, eager=eager, warm_argv=warm)
        return self._store.reserve(loopback_only=assign.local_world)

    def _open_store(self, assign: Assign) -> None:
        if not (assign.hosts_store and self._options.share_store):
            return
        if self._store is None:  # it was lost with the supervisor after the port had been announced
            self._emit(StoreDied(assign.generation))
        else:
            self._on_store(self._store.open(assign.generation))

    def _on_store_lost(self, generation: int, why: str) -> None:
        self._journal.write("store_lost", generation=generation, why=why)
        self._emit(StoreDied(generation))

    # ---------------------------------------------------------------- another generation with the same workers

    def _on_waiting(self) -> None:
        """One more worker waits for the next generation, or will not."""
        running, assign = self._running, self._regrouping
        if running is not None and assign is not None and running.all_wait:
            self._cancel_release()
            self._phases.gone()
            self._journal.write("all_wait", generation=assign.generation)
            self._tasks.create_task(self._prepare_again(running, assign))

    async def _prepare_again(self, running: RunningGeneration, assign: Assign) -> None:
        try:
            port = await self._reserve_store(assign) if assign.hosts_store else None
        except OSError as error:
            self._emit(RegroupRefused(assign.generation, f"the store's port: {error.strerror or error}"))
        else:
            if running.all_wait and running.number == assign.generation:
                self._emit(NodePrepared(assign.generation, port))

    async def _replace(self, running: RunningGeneration, local_ranks: Sequence[int]) -> None:
        async with self._logs_lock:
            streams = await asyncio.to_thread(self._open_more_logs, running, local_ranks)
        await self._supervisor_ready.wait()
        if running is self._running and self._work() in LIVING:
            running.replace(self.supervisor, streams, self._cpus, started=self._router.started)

    def _open_more_logs(self, running: RunningGeneration, local_ranks: Sequence[int]) -> dict[int, WorkerStreams]:
        slots = [WorkerSlot(rank, running.rank_of(rank)) for rank in local_ranks]
        return {slot.local_rank: self._router.add(slot) for slot in slots}

    # ---------------------------------------------------------------- phase two

    async def _spawn_later(self, running: RunningGeneration) -> None:
        await self._supervisor_ready.wait()
        if running is self._running and self._work() in LIVING:
            self._spawn(running)

    def _spawn(self, running: RunningGeneration) -> None:
        running.spawn(self.supervisor, self._cpus, started=self._router.started)

    def _begin(self, assign: Assign, start: Start) -> RunningGeneration:
        self._close_running()
        assert self._oom is not None
        generation = assign.generation
        self._open_store(assign)
        self._router.begin_attempt()
        running = self._running = RunningGeneration(
            self._options,
            assign,
            start,
            self._prepared,
            host=self._host,
            work=self._work,
            emit=self._emit,
            journal=self._journal,
            phases=self._phases,
            ends=Ends(self._tasks, self._emit, self._journal, self._router, self._oom, generation),
            on_waiting=self._on_waiting,
            parent=self._environ,
            variables=self._extensions.environment,
        )
        self._phases.start(generation, assign.restart_count, self._options.nproc, running.board)
        self._write_begin(running, start)
        self._observer.start(start, running.board, running.rank_of, self._look_at_workers)
        return running

    def _write_begin(self, running: RunningGeneration, start: Start) -> None:
        assign = running.assign
        self._journal.write(
            "generation",
            generation=assign.generation,
            restart_count=assign.restart_count,
            group_rank=assign.group_rank,
            group_world_size=assign.group_world_size,
            rank_base=assign.rank_base,
            world_size=assign.world_size,
            nproc=len(taking_part(assign, self._options.nproc)),
            master=f"{start.master_addr}:{start.master_port}",
            **running.survivors(),
        )
        self._progress_notes.start(assign.generation, assign.rank_base, running.board, self.progress)

    # ---------------------------------------------------------------- events of the supervisor

    def _on_supervisor(self, event: supervisor_client.SupervisorEvent) -> None:
        self._extensions.supervisor(event)
        if self._store is not None:
            self._store.handle(event)
        match event:
            case supervisor_client.ProcessStarted() if self._running is not None:
                self._running.started(event)
            case supervisor_client.SpawnFailed() if self._running is not None:
                self._running.not_started(event)
            case supervisor_client.ProcessEnded() if self._running is not None:
                self._running.ended(event)
            case supervisor_client.Fenced():
                self._emit(WorkersFenced())
            case supervisor_client.TreeKilled(leftover):
                self._tree_gone(leftover)
            case supervisor_client.PreloadReported(text, trouble):
                self._journal.write("preload", text=text, trouble=trouble)
                self._phases.imported()
                if trouble:
                    self._on_notice(f"preload: {text}")
            case supervisor_client.StandbysReported(pids, own_bytes):
                self._journal.write("standby", pids=list(pids), own_bytes=own_bytes)
            case supervisor_client.SupervisorKilled(silent_s):
                self._journal.write("supervisor_killed", seconds=round(silent_s, 3))
                self._on_notice(
                    f"the parent of this node's workers (hf-supervisor) executed no order for {silent_s:.1f} s: it was "
                    "killed, and the workers with it"
                )
            case supervisor_client.SupervisorDied():
                self._tasks.create_task(self._revive())

    def _tree_gone(self, leftover: tuple[int, ...]) -> None:
        if leftover:
            self._journal.write("unkillable", pids=list(leftover))
        self._phases.gone()
        self._progress_notes.close()
        self._observer.stop()
        self._router.end_attempt()
        if self._running is not None:
            self._tasks.create_task(self._emit_tree_gone(self._running))

    async def _emit_tree_gone(self, running: RunningGeneration) -> None:
        """Emit TreeGone after the last WorkerEnded, which waits until the workers' files have been read."""
        await running.all_reported()
        self._extensions.happened(WorkersGone())
        self._emit(TreeGone(running.number))

    async def _revive(self) -> None:
        """Start another supervisor: the present one was killed, and the workers with it, by their parent-death signal.

        Raises SupervisorLostError when that does not help.
        """
        self._supervisor_ready.clear()
        self._journal.write("supervisor_died")
        self._revivals.count(self._loop.time())
        running = self._running
        # The workers are removed now, but their ends are reported last: the machine's answer needs a supervisor.
        report = running.lost() if running is not None else None
        if self._store is not None:
            self._store.close()
            self._store = None
            if running is not None and report is None:  # else the ends of the workers say more than that of the store
                self._emit(StoreDied(running.number))
        try:
            handle = await asyncio.to_thread(revive_supervisor, self.supervisor.handle)
        except OSError as error:
            why = error.strerror or str(error)
            raise SupervisorLostError(f"the parent process of this node's workers cannot be started: {why}") from error

        # The new one has none of the settings that were sent to the one that was killed.
        self.supervisor = SupervisorClient(handle, self._on_supervisor, at_once_s=self._at_once_s)
        self._extensions.supervisor(SupervisorReplaced())
        if self._options.preempt_signal is not None:
            self.supervisor.ignore(self._options.preempt_signal)
        self.supervisor.fence(*self._fence_s)
        order = order_for(self._options, self._environ)
        if order is not None:
            self.supervisor.start_fork_server(order)
        self._supervisor_ready.set()

        if self._work() is Work.KILLING:  # ordered meanwhile: its answer is still owed
            self.supervisor.kill_tree()
        if report is not None:
            report()
