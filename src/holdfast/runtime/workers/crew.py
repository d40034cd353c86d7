"""The workers of one node, generation after generation: folders, store, processes and what became of them.

Executes what the agent's machine asks for and reports each answer through `CrewEvents`; decides nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from holdfast.core.agent.events import (
    Event,
    NodePrepared,
    PrepareFailed,
    StoreDied,
    TreeGone,
    WorkerEnded,
    WorkersFenced,
    WorkersHeld,
)
from holdfast.core.board import BOARD_VARIABLE
from holdfast.core.errors import HoldfastError, LogDirError, PeerError, SupervisorLostError
from holdfast.core.options import RunOptions
from holdfast.core.progress import RankProgress
from holdfast.core.protocol import Assign, Start
from holdfast.core.stacks import RankSample
from holdfast.core.worker_env import worker_environment
from holdfast.runtime.journal import Journal
from holdfast.runtime.workers import keeper_client as kept
from holdfast.runtime.workers.board import HOLD_SETTLES_S, Board
from holdfast.runtime.workers.ends import EXIT_AFTER_EXCEPTION, Ends, Worker, WorkerExit
from holdfast.runtime.workers.keeper import KeeperHandle
from holdfast.runtime.workers.keeper_client import KeeperClient, Revivals, revive_keeper
from holdfast.runtime.workers.log_layout import RunFolder, WorkerSlot, WorkerStreams
from holdfast.runtime.workers.log_router import LogRouter
from holdfast.runtime.workers.numa import binding_for
from holdfast.runtime.workers.observer import Observer, Phases, ProgressNotes
from holdfast.runtime.workers.preload import order_for, script_argv
from holdfast.runtime.workers.service_host import SaverHost, StoreHost, free_port
from holdfast.runtime.workers.sources import wants_store
from holdfast.runtime.workers.spawn import worker_argv, worker_fds

SIGKILL = 9
GUARD_S = 0.25
"""The keeper kills so long after the agent's own fence: an agent that is awake does it itself, and says why."""


class Crew:
    """One per agent. `emit` gets the agent machine's events, in order, on the loop."""

    def __init__(
        self,
        options: RunOptions,
        keeper: KeeperHandle,
        folder: RunFolder,
        router: LogRouter,
        journal: Journal,
        tasks: asyncio.TaskGroup,
        emit: Callable[[Event], None],
        *,
        host: str,
    ) -> None:
        self._options = options
        self._folder = folder
        self._router = router
        self._journal = journal
        self._tasks = tasks
        self._emit = emit
        self._environ = dict(os.environ)
        self._loop = asyncio.get_running_loop()
        self._keeper = KeeperClient(keeper, self._on_keeper)
        journal.write("preload", modules=options.preload.modules, later=options.preload.later, why=options.preload.why)
        self._phases = Phases(journal.write)
        self._progress_notes = ProgressNotes(journal.write)
        self._observer = Observer(
            tasks,
            emit,
            host=host,
            folder=folder.path,
            interval_s=options.limits.progress_interval_s,
            fault=journal.fault,
        )
        self._ends = Ends(tasks, emit, journal, router, host=host)
        self._guard_s: float | None = None
        self._revivals = Revivals()
        """When a keeper was last started in the place of a dead one."""
        self._keeper_ready = asyncio.Event()
        self._keeper_ready.set()
        self._store: StoreHost | None = None
        self._saver = SaverHost(self._keeper, options.job.run_id, lambda text: self.on_notice(text))  # noqa: PLW0108 - set later
        self._cpus: dict[int, list[int]] = {}
        """CPUs by local rank, with --numa-binding."""
        self._generation = 0
        self._assign: Assign | None = None
        self._workers: dict[str, Worker] = {}
        self._streams: dict[int, WorkerStreams] = {}
        """Of the generation that is prepared or runs, by local rank."""
        self._logs_in_hand = asyncio.Lock()
        self._board: Board | None = None
        self._hold_timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._killing = False
        self.on_notice: Callable[[str], None] = lambda _: None
        """Told what the user should know."""
        self.on_store: Callable[[int], None] = lambda _: None
        """Told the port of each generation's store that is hosted here."""

    # ---------------------------------------------------------------- commands of the machine

    def prepare(self, assign: Assign) -> None:
        self._tasks.create_task(self._prepare(assign))

    def start(self, assign: Assign, start: Start) -> None:
        """At once where that is possible: an order to stop may be next, and has to find somebody."""
        if self._keeper_ready.is_set():
            self._start(assign, start)
        else:
            self._tasks.create_task(self._start_later(assign, start))

    def signal(self, signum: int, *, to_end: bool) -> None:
        """To the leaders, not to their children. `to_end`: what they fail with from now on is a consequence."""
        if to_end:
            self._phases.stop()
        self._stopping = self._stopping or to_end
        for key, worker in self._workers.items():
            if not (to_end and worker.raised):  # it is ending: a signal would cut its exit functions short
                self._keeper.signal(key, signum)

    def hold(self, generation: int) -> None:
        """Stop the workers at their next safe point; answers with WorkersHeld."""
        if self._board is not None:
            self._board.hold()
        self._hold_timer = self._loop.call_later(HOLD_SETTLES_S, self._held, generation)

    def _held(self, generation: int) -> None:
        board = self._board if generation == self._generation else None
        self._emit(WorkersHeld(generation, board.reached() if board is not None else 0))

    def release(self, generation: int, safe_point: int) -> None:
        """Let them go on to this safe point, where they stop; 0: let them go on."""
        if self._board is not None and generation == self._generation:
            self._board.release(safe_point)

    def look(self, generation: int, number: int, *, store: bool) -> None:
        """See where the workers are, and whether the store can be reached; answers with WorkersSeen."""
        self._observer.look(generation, number, self._pids(), store=store)

    async def samples(self) -> tuple[RankSample, ...]:
        """Where the workers are now, for somebody on this node."""
        return await self._observer.samples(self._generation, self._pids())

    def _pids(self) -> dict[int, int]:
        return {worker.local_rank: worker.pid for worker in self._workers.values() if worker.pid}

    def fence(self, at_s: float | None) -> None:
        """The keeper kills the workers then, should this process be stopped or starved; None: it does not."""
        guard_s = None if at_s is None else at_s + GUARD_S
        if guard_s != self._guard_s:
            self._guard_s = guard_s
            self._keeper.fence(guard_s)

    def kill_tree(self) -> None:
        self._phases.stop()
        self._stopping = True
        self._killing = True
        if self._keeper_ready.is_set():
            self._keeper.kill_tree()

    async def close(self) -> None:
        """Nothing of ours is alive afterwards."""
        if self._store is not None:
            self._store.close()
        await self._saver.close()
        await self._keeper.close()
        self._phases.close()
        self._progress_notes.close()
        await self._observer.close()
        if self._hold_timer is not None:
            self._hold_timer.cancel()
        self._close_board()

    def _close_board(self) -> None:
        if self._board is not None:
            self._loop.remove_reader(self._board.raised_fd)
            self._board.close()
            self._board = None

    # ---------------------------------------------------------------- phase one

    async def _prepare(self, assign: Assign) -> None:
        generation = assign.generation
        try:
            async with self._logs_in_hand:
                self._streams = await asyncio.to_thread(self._open_logs, assign)
            self._ends.watch_memory()
            if self._options.numa_binding and not self._cpus:
                self._cpus = binding_for(self._options)
            port = await self._open_store(assign) if assign.hosts_store else None
        except HoldfastError as error:
            self._emit(PrepareFailed(generation, error.code, error.exit_code, str(error)))
        except OSError as error:
            text = f"cannot open the store's port: {error.strerror or error}"
            self._emit(PrepareFailed(generation, PeerError.code, PeerError.exit_code, text))
        else:
            self._emit(NodePrepared(generation, port))

    def _open_logs(self, assign: Assign) -> dict[int, WorkerStreams]:
        """In a thread, and before the workers are due: a disk that stalls must not silence this node.

        Raises LogDirError for the first generation; a later one goes on without files rather than end the job.
        """
        slots = [WorkerSlot(rank, assign.rank_base + rank) for rank in range(self._options.nproc)]
        try:
            attempt = self._folder.attempt(assign.generation, assign.restart_count)
            streams = self._router.open(attempt, slots)
        except LogDirError as error:
            if not self._generation:
                raise
            self._router.say(f"{error} Generation {assign.generation} goes on without log files.")
            return self._router.open(None, slots)
        return streams

    async def _open_store(self, assign: Assign) -> int:
        if not self._options.share_store:
            return free_port(assign.local_world)
        if self._store is None:
            python = self._options.command.python
            warm = script_argv(self._options) if "torch" in self._options.preload.modules else []
            eager = not warm and await asyncio.to_thread(wants_store, self._options.command)
            await self._keeper_ready.wait()
            self._store = StoreHost(self._keeper, python, self._on_store_lost, eager=eager, warm_argv=warm)
        port = self._store.open(assign.generation, loopback_only=assign.local_world)
        self.on_store(port)
        return port

    def _on_store_lost(self, generation: int, why: str) -> None:
        self._journal.write("store_lost", generation=generation, why=why)
        self._emit(StoreDied(generation))

    # ---------------------------------------------------------------- phase two

    async def _start_later(self, assign: Assign, start: Start) -> None:
        await self._keeper_ready.wait()
        if not self._killing:
            self._start(assign, start)

    def _start(self, assign: Assign, start: Start) -> None:
        self._generation, self._assign = assign.generation, assign
        self._stopping = self._killing = False
        self._ends.start(assign)
        self._close_board()
        self._board = Board(self._options.nproc)
        self._loop.add_reader(self._board.raised_fd, self._on_raised, self._board)
        self._phases.start(assign.generation, assign.restart_count, self._options.nproc, self._board)
        self._journal.write(
            "generation",
            generation=assign.generation,
            restart_count=assign.restart_count,
            group_rank=assign.group_rank,
            group_world_size=assign.group_world_size,
            rank_base=assign.rank_base,
            world_size=assign.world_size,
            nproc=self._options.nproc,
            master=f"{start.master_addr}:{start.master_port}",
        )
        self._progress_notes.start(assign.generation, assign.rank_base, self._board, self.progress)
        self._observer.start(assign, start, self._board, self.progress)
        self._workers = {self._key(rank): Worker(rank, streams) for rank, streams in self._streams.items()}
        for key, worker in self._workers.items():
            self._spawn(key, worker, assign, start)

    def _spawn(self, key: str, worker: Worker, assign: Assign, start: Start) -> None:
        streams = worker.streams
        error_file = str(streams.error_file) if streams.error_file is not None else ""
        environment = worker_environment(
            self._options, assign, start, worker.local_rank, error_file=error_file, parent=self._environ
        )
        assert self._board is not None
        environment[BOARD_VARIABLE] = self._board.address(worker.local_rank)
        environment.update(self._saver.environment(assign.generation, worker.local_rank))
        wanted = {
            1: streams.fds.stdout,
            2: streams.fds.stderr,
            **worker_fds(self._options, worker.local_rank),
        }
        self._keeper.spawn(
            key,
            worker_argv(self._options, worker.local_rank),
            env_set=environment,
            fds={number: fd for number, fd in wanted.items() if fd is not None},
            cpus=self._cpus.get(worker.local_rank),
            warm=bool(self._options.preload.modules),
        )
        worker.began_s = self._loop.time()
        self._router.started(worker.local_rank)

    def _place(self, local_rank: int) -> dict[str, int]:
        base = self._assign.rank_base if self._assign is not None else 0
        return {"generation": self._generation, "local_rank": local_rank, "rank": base + local_rank}

    def _key(self, local_rank: int) -> str:
        return f"worker#{self._generation}#{local_rank}"

    # ---------------------------------------------------------------- what is seen of the workers

    def progress(self) -> tuple[RankProgress, ...]:
        """How far the workers of this generation are, as they wrote on the board."""
        return self._board.progress(time.monotonic_ns()) if self._board is not None else ()

    # ---------------------------------------------------------------- what the keeper tells

    def _on_keeper(self, event: kept.KeeperEvent) -> None:
        self._saver.handle(event)
        if self._store is not None:
            self._store.handle(event)
        match event:
            case kept.ProcessStarted(key, pid):
                if key in self._workers:
                    worker = self._workers[key]
                    worker.pid = pid
                    self._phases.spawned()
                    self._journal.write("worker_started", **self._place(worker.local_rank), pid=pid)
            case kept.SpawnFailed(key, errno, text):
                worker_or_none = self._workers.pop(key, None)
                if worker_or_none is not None:
                    self._ends.unstarted(worker_or_none.local_rank, errno, text)
            case kept.ProcessEnded(key, pid, exit_code):
                ended = self._workers.pop(key, None)
                if ended is not None:
                    # Being stopped is SIGTERM: a SIGKILL that is not ours is a reason of its own, be it seen late.
                    others = exit_code == -SIGKILL and not self._killing
                    self._ended(ended, pid, exit_code, stopped=self._stopping and not others)
            case kept.Fenced():
                self._stopping = True
                self._emit(WorkersFenced())
            case kept.TreeKilled(leftover):
                self._tree_gone(leftover)
            case kept.PreloadTold(text, trouble):
                self._journal.write("preload", text=text, trouble=trouble)
                self._phases.imported()
                if trouble:
                    self.on_notice(f"preload: {text}")
            case kept.StandbyTold(pids, own_bytes):
                self._journal.write("standby", pids=list(pids), own_bytes=own_bytes)
            case kept.KeeperDied():
                self._tasks.create_task(self._revive())

    def _on_raised(self, board: Board) -> None:
        """Reported at once: what a process still does after its exception can take seconds."""
        for local_rank in board.raised():
            worker = self._workers.get(self._key(local_rank))
            if worker is not None and worker.pid and not worker.raised:
                worker.raised = True
                self._journal.write("worker_raised", **self._place(local_rank), pid=worker.pid)
                self._phases.trouble()
                end = self._end(worker, worker.pid, EXIT_AFTER_EXCEPTION, stopped=self._stopping, raised=True)
                self._ends.report(worker, end)

    def _ended(self, worker: Worker, pid: int, exit_code: int, *, stopped: bool) -> None:
        end = self._end(worker, pid, exit_code, stopped=stopped)
        place = self._place(worker.local_rank)
        self._journal.write("worker_ended", **place, pid=pid, exit_code=exit_code, stopped=end.after_stop)
        if exit_code == 0 and self._told(worker):
            self._emit(WorkerEnded(self._generation, worker.local_rank, None, drained=True))
            return
        if exit_code != 0:
            self._phases.trouble()
        self._ends.report(worker, end)

    def _end(self, worker: Worker, pid: int, exit_code: int, *, stopped: bool, raised: bool = False) -> WorkerExit:
        lived_s = round(self._loop.time() - worker.began_s, 3)
        step = self._board.step(worker.local_rank) if self._board is not None else 0
        return WorkerExit(pid, exit_code, lived_s, step, after_stop=stopped or self._told(worker), raised=raised)

    def _told(self, worker: Worker) -> bool:
        return self._board is not None and self._board.told(worker.local_rank)

    def _tree_gone(self, leftover: tuple[int, ...]) -> None:
        if leftover:
            self._journal.write("unkillable", pids=list(leftover))
        self._phases.gone()
        self._progress_notes.close()
        self._observer.stop()
        self._router.end_attempt()
        self._killing = False
        self._tasks.create_task(self._tell_gone(self._generation))

    async def _tell_gone(self, generation: int) -> None:
        """TreeGone comes after the last WorkerEnded, and those come after what was read for them."""
        await self._ends.all_reported()
        self._emit(TreeGone(generation))

    async def _revive(self) -> None:
        """The keeper was killed, and the workers with it (they carry a parent-death signal): start another one.

        Raises SupervisorLostError when that does not help.
        """
        self._keeper_ready.clear()
        self._journal.write("keeper_died")
        self._revivals.count(self._loop.time())
        lost, self._workers = self._workers, {}
        stopped = self._stopping  # what we are told to do from now on hastens nobody's end
        if self._store is not None:
            self._store.close()
            self._store = None
            if self._generation and not lost:  # else the workers' ends say it, and more
                self._emit(StoreDied(self._generation))
        try:
            handle = await asyncio.to_thread(revive_keeper, self._keeper.handle)
        except OSError as error:
            why = error.strerror or str(error)
            raise SupervisorLostError(f"the process that holds this node's workers cannot be started: {why}") from error
        self._keeper = KeeperClient(handle, self._on_keeper)
        self._saver.renew(self._keeper)
        if self._options.preempt_signal is not None:
            self._keeper.ignore(self._options.preempt_signal)
        self._keeper.fence(self._guard_s)
        order = order_for(self._options, self._environ)
        if order is not None:
            self._keeper.nurse(order)
        self._keeper_ready.set()
        for worker in lost.values():
            self._ended(worker, worker.pid, -SIGKILL, stopped=stopped)
        if self._killing:
            self._keeper.kill_tree()
