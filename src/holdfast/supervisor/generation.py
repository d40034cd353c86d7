"""The workers of one generation on one node, from the order to start until no process of it is alive.

`RunningGeneration` holds them. Only the agent's machine knows the phase of the generation: `work` returns it.

`Ends` reports how they ended, in the order of the ends. A failure is reported at once with rank and exit status. Its
evidence is read while the other workers are being stopped, in a thread (evidence.py). A worker whose program raised is
reported while its process still runs its exit functions, and again when the process has ended.

Executes; decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, structs

from holdfast.agent.agent_state import Work
from holdfast.agent.events import Event, FailureRead, WorkerEnded, WorkerRaised
from holdfast.linux import own_groups
from holdfast.protocol.board_layout import BOARD_VARIABLE
from holdfast.protocol.errors import EXIT_FAILURE
from holdfast.protocol.messages import Assign, Start
from holdfast.protocol.options import RunOptions, worker_environment
from holdfast.protocol.outcome import Failure
from holdfast.protocol.rank_progress import RankProgress
from holdfast.runtime.run_folder import Journal, WorkerStreams
from holdfast.supervisor.board import Board, Phases
from holdfast.supervisor.client import ProcessEnded, ProcessStarted, SpawnFailed, SupervisorClient
from holdfast.supervisor.evidence import left_with_zero, with_evidence
from holdfast.supervisor.log_router import LogRouter
from holdfast.supervisor.worker_command import worker_argv, worker_fds

ENDING = (Work.STOPPING, Work.KILLING)
"""A worker that ends in one of these states was stopped."""


class RunningGeneration:
    """Holds the generation's board and workers, and reports the end of each worker."""

    def __init__(
        self,
        options: RunOptions,
        assign: Assign,
        streams: Mapping[int, WorkerStreams],
        *,
        host: str,
        work: Callable[[], Work],
        emit: Callable[[Event], None],
        journal: Journal,
        phases: Phases,
        ends: Ends,
    ) -> None:
        """`streams`: by local rank."""
        self.number = assign.generation
        self.board = Board(options.nproc)
        self._options = options
        self._assign = assign
        self._host = host
        self._work = work
        self._emit = emit
        self._journal = journal
        self._phases = phases
        self._ends = ends
        self._loop = asyncio.get_running_loop()
        self._workers = {
            self._key(rank): Worker(rank, its_streams, began_s=self._loop.time())
            for rank, its_streams in streams.items()
        }
        self._loop.add_reader(self.board.raised_fd, self._on_raised)

    def _key(self, local_rank: int) -> str:
        return f"worker#{self.number}#{local_rank}"

    # ---------------------------------------------------------------- commands

    def spawn(
        self,
        supervisor: SupervisorClient,
        start: Start,
        parent: Mapping[str, str],
        saver_environment: Callable[[int, int], Mapping[str, str]],
        cpus: Mapping[int, Sequence[int]],
        started: Callable[[int], None],
    ) -> None:
        """Order all workers to start. `parent`: the environment that they inherit. `cpus`: by local rank, with
        --numa-binding. `started` is called with each local rank."""
        for key, worker in self._workers.items():
            rank, streams = worker.local_rank, worker.streams
            error_file = str(streams.error_file) if streams.error_file is not None else ""
            environment = worker_environment(
                self._options, self._assign, start, rank, error_file=error_file, parent=parent
            )
            environment[BOARD_VARIABLE] = self.board.address(rank)
            environment.update(saver_environment(self.number, rank))
            wanted = {1: streams.fds.stdout, 2: streams.fds.stderr, **worker_fds(self._options, rank)}
            supervisor.spawn(
                key,
                worker_argv(self._options, rank),
                env_set=environment,
                fds={number: fd for number, fd in wanted.items() if fd is not None},
                cpus=cpus.get(rank),
                warm=bool(self._options.preload.modules),
            )
            worker.began_s = self._loop.time()
            started(rank)

    def signal(self, supervisor: SupervisorClient, signum: int, *, to_end: bool) -> None:
        """Signal the worker processes, not their children. A worker that has raised is already ending: a signal to end
        would interrupt its exit functions."""
        for key, worker in self._workers.items():
            if not (to_end and worker.raised):
                supervisor.signal(key, signum)

    # ---------------------------------------------------------------- observing workers

    def pids(self) -> dict[int, int]:
        return {worker.local_rank: worker.pid for worker in self._workers.values() if worker.pid}

    def progress(self) -> tuple[RankProgress, ...]:
        """The workers' progress, as they wrote it on the board."""
        return self.board.progress(time.monotonic_ns())

    # ---------------------------------------------------------------- ends of workers

    def started(self, event: ProcessStarted) -> None:
        worker = self._workers.get(event.key)
        if worker is not None:
            worker.pid = event.pid
            self._phases.spawned()
            self._journal.write("worker_started", **self._place(worker), pid=event.pid)

    def not_started(self, event: SpawnFailed) -> None:
        worker = self._workers.pop(event.key, None)
        if worker is not None:
            self._ends.unstarted(self._bare(worker, 0), event.errno, event.text)

    def ended(self, event: ProcessEnded) -> None:
        worker = self._workers.pop(event.key, None)
        if worker is not None:
            worker.pid = event.pid
            work = self._work()
            # A stop sends SIGTERM: a SIGKILL that we did not send is a cause of its own, even when it is seen late.
            others = event.exit_code == -signal.SIGKILL and work is not Work.KILLING
            self._report(worker, event.exit_code, stopped=work in ENDING and not others)

    def lost(self) -> Callable[[], None] | None:
        """Call this when the supervisor was killed, and the workers with it. Returns a function that reports their
        ends; None: there were no workers."""
        lost, self._workers = list(self._workers.values()), {}
        stopped = self._work() in ENDING  # orders given from now on must not affect how these ends are recorded

        def report() -> None:
            for worker in lost:
                self._report(worker, -signal.SIGKILL, stopped=stopped)

        return report if lost else None

    def _on_raised(self) -> None:
        """Report at once: exit functions after an exception can take seconds."""
        for local_rank in self.board.raised():
            worker = self._workers.get(self._key(local_rank))
            if worker is not None and worker.pid and not worker.raised:
                worker.raised = True
                self._journal.write("worker_raised", **self._place(worker), pid=worker.pid)
                self._phases.trouble()
                after_stop = self._work() in ENDING or self.board.stop_seen(local_rank)
                self._ends.report(worker, self._bare(worker, EXIT_AFTER_EXCEPTION, after_stop=after_stop), raised=True)

    def _report(self, worker: Worker, exit_code: int, *, stopped: bool) -> None:
        stop_seen = self.board.stop_seen(worker.local_rank)
        after_stop = stopped or stop_seen
        self._journal.write(
            "worker_ended", **self._place(worker), pid=worker.pid, exit_code=exit_code, stopped=after_stop
        )
        if exit_code == 0 and stop_seen:
            self._emit(WorkerEnded(self.number, worker.local_rank, None, drained=True))
            return
        if exit_code != 0:
            self._phases.trouble()
        self._ends.report(worker, self._bare(worker, exit_code, after_stop=after_stop and exit_code != 0))

    def _bare(self, worker: Worker, exit_code: int, *, after_stop: bool = False) -> Failure:
        """What is known at the moment of the end, before any file is read."""
        return Failure(
            rank=self._assign.rank_base + worker.local_rank,
            local_rank=worker.local_rank,
            host=self._host,
            pid=worker.pid,
            exit_code=exit_code,
            after_stop=after_stop,
            lived_s=round(self._loop.time() - worker.began_s, 3),
            timestamp=int(time.time()),
            step=self.board.step(worker.local_rank),
        )

    def _place(self, worker: Worker) -> dict[str, int]:
        rank = self._assign.rank_base + worker.local_rank
        return {"generation": self.number, "local_rank": worker.local_rank, "rank": rank}

    async def all_reported(self) -> None:
        """Wait until the last WorkerEnded was emitted."""
        await self._ends.all_reported()

    def close(self) -> None:
        """Close the board: another generation starts, or the job is over."""
        self._loop.remove_reader(self.board.raised_fd)
        self.board.close()


_NOT_EXECUTABLE = 126
_NOT_FOUND = 127


class OomWatch:
    """Detects whether the kernel's out-of-memory killer struck in this process's cgroup since the watch began.

    Workers run in their agent's cgroup, so one watch serves them all.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._counters = tuple(_counter_files(root))
        self._before = self._count()

    def renew(self) -> None:
        """Restart the watch, with a new generation."""
        self._before = self._count()

    def struck(self) -> bool:
        """Whether the killer struck since the last `renew`; also False where no counter can be read."""
        return self._count() > self._before

    def _count(self) -> int:
        for file in self._counters:
            with contextlib.suppress(OSError, ValueError):
                for line in file.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
        return 0


def _counter_files(root: Path) -> list[Path]:
    """Where the counter may be: cgroup version 2, version 1, and as seen from inside a container (the cgroup is the
    root)."""
    files: list[Path] = []
    for group in own_groups(root):
        is_memory = "memory" in group.controllers.split(",")
        if is_memory or not group.controllers:
            name = "memory.oom_control" if is_memory else "memory.events"
            files += [Path(group.top, path, name) for path in (group.path, "")]
    # Without a memory cgroup, the whole machine's counter is the best available.
    return [file for file in files if file.is_file()] or [root / "proc/vmstat"]


def failure_of_spawn(bare: Failure, *, error_number: int, text: str) -> Failure:
    """The failure of a worker whose program could not be executed. Exit codes are a shell's: 127 not found, else 126; 1
    where the machine had no room for a process, which does not concern the program."""
    code = _spawn_code(error_number)
    return structs.replace(bare, exit_code=code, message=text, started=False, lived_s=0.0)


def _spawn_code(error_number: int) -> int:
    if error_number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return EXIT_FAILURE
    return _NOT_FOUND if error_number == errno.ENOENT else _NOT_EXECUTABLE


def noted(failure: Failure) -> dict[str, object]:
    """The fields of the journal's event `worker_failed`."""
    return {
        "local_rank": failure.local_rank,
        "rank": failure.rank,
        "pid": failure.pid,
        "exit_code": failure.exit_code,
        "error_type": failure.error_type,
        "message": failure.message.partition("\n")[0],
        "error_file": failure.error_file,
        "after_stop": failure.after_stop,
    }


EXIT_AFTER_EXCEPTION = 1
"""Python's exit code after an uncaught exception."""


class Worker(Struct):
    """One worker of the present generation."""

    local_rank: int
    streams: WorkerStreams
    pid: int = 0
    began_s: float = 0.0
    raised: bool = False
    """Its program raised an exception, which is reported before the process ends."""


class Ends:
    """Reports the ends of one generation's workers on one node. `emit` gets the machine's events on the loop."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        emit: Callable[[Event], None],
        journal: Journal,
        router: LogRouter,
        oom: OomWatch,
        generation: int,
    ) -> None:
        self._tasks = tasks
        self._emit = emit
        self._journal = journal
        self._router = router
        self._oom = oom
        self._generation = generation
        self._reading: set[asyncio.Task[None]] = set()
        """Readers for failures that have been reported."""
        self._waiting: set[asyncio.Task[None]] = set()
        """Readers for ends with 0 that have not been reported, and for later ends."""
        oom.renew()

    def unstarted(self, bare: Failure, error_number: int, text: str) -> None:
        """Report a worker whose program could not be executed."""
        failure = failure_of_spawn(bare, error_number=error_number, text=text)
        self._journal.write("worker_failed", generation=self._generation, **noted(failure))
        self._emit(WorkerEnded(self._generation, failure.local_rank, failure))

    def report(self, worker: Worker, bare: Failure, *, raised: bool = False) -> None:
        """Report a failure at once; FailureRead follows when the worker's files have been read. An end with 0 is
        reported after its files have been read, and later ends wait for it.

        `bare`: what is known at the moment of the end. `raised`: an exception has ended the program; its process still
        runs.
        """
        earlier = tuple(self._waiting)
        if bare.exit_code and not earlier:
            self._failed(worker, bare, raised=raised)
        else:
            self._begin(self._report_in_turn(worker, bare, earlier, raised=raised), self._waiting)

    async def all_reported(self) -> None:
        while self._waiting or self._reading:
            await asyncio.wait((*self._waiting, *self._reading))

    def _begin(self, work: Coroutine[None, None, None], those: set[asyncio.Task[None]]) -> None:
        task = self._tasks.create_task(work)
        those.add(task)
        task.add_done_callback(those.discard)

    async def _report_in_turn(
        self, worker: Worker, bare: Failure, earlier: tuple[asyncio.Task[None], ...], *, raised: bool
    ) -> None:
        left = await asyncio.to_thread(left_with_zero, bare, worker.streams) if bare.exit_code == 0 else None
        if earlier:
            await asyncio.wait(earlier)
        if left is None:
            self._failed(worker, bare, raised=raised)
        else:
            self._emit(WorkerEnded(self._generation, worker.local_rank, None, left=left))

    def _failed(self, worker: Worker, bare: Failure, *, raised: bool) -> None:
        read = worker.raised and not raised  # read already when it raised
        kind = WorkerRaised if raised else WorkerEnded
        self._emit(kind(self._generation, worker.local_rank, failure=bare, evidence_follows=not read))
        if not read:
            self._begin(self._read(worker, bare), self._reading)

    async def _read(self, worker: Worker, bare: Failure) -> None:
        failure = await asyncio.to_thread(with_evidence, bare, worker.streams, out_of_memory=self._oom.struck)
        self._journal.write("worker_failed", generation=self._generation, **noted(failure))
        self._router.failed(failure.rank, failure.traceback)
        self._emit(FailureRead(self._generation, worker.local_rank, failure))
