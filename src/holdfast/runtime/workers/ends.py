"""Reports how workers ended, in the order of the ends, and what each of them left.

A failure is reported at once, bare; what it left is read while the others are being stopped. Files are read in a thread,
because a disk may stall. A worker whose program raised is reported while its process still
runs its exit functions, and once more when it is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

from msgspec import Struct

from holdfast.core.agent.events import Event, FailureRead, WorkerEnded, WorkerRaised
from holdfast.core.outcome import Failure
from holdfast.core.protocol import Assign
from holdfast.runtime.journal import Journal
from holdfast.runtime.workers.evidence import OomWatch, failure_of_exit, failure_of_spawn, left_with_zero, noted
from holdfast.runtime.workers.log_layout import WorkerStreams
from holdfast.runtime.workers.log_router import LogRouter

EXIT_AFTER_EXCEPTION = 1
"""Python's exit code after an exception that nobody caught."""


class Worker(Struct):
    """One worker of the present generation."""

    local_rank: int
    streams: WorkerStreams
    pid: int = 0
    began_s: float = 0.0
    raised: bool = False
    """Its program raised an exception, which is reported before the process ends."""


class WorkerExit(Struct, frozen=True):
    """What is known of a worker at the moment of its end, before its files are read."""

    pid: int
    exit_code: int
    lived_s: float
    step: int
    """The step that it was in; 0: unknown."""
    after_stop: bool
    """It was being stopped, or had been told to stop."""
    raised: bool = False
    """An exception has ended its program; the process is still there."""


class Ends:
    """Of one node, generation after generation. `emit` gets the machine's events on the loop."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        emit: Callable[[Event], None],
        journal: Journal,
        router: LogRouter,
        *,
        host: str,
    ) -> None:
        self._tasks = tasks
        self._emit = emit
        self._journal = journal
        self._router = router
        self._host = host
        self._assign: Assign | None = None
        self._oom: OomWatch | None = None
        self._reading: set[asyncio.Task[None]] = set()
        """Of failures that have been reported."""
        self._waiting: set[asyncio.Task[None]] = set()
        """Of ends with 0 that have not been reported, and of those that came after them."""

    def watch_memory(self) -> None:
        """Count from now on what the kernel kills for lack of memory."""
        if self._oom is None:
            self._oom = OomWatch()

    def start(self, assign: Assign) -> None:
        """The workers of this generation are ordered to start."""
        self._assign = assign
        if self._oom is not None:
            self._oom.renew()

    def unstarted(self, local_rank: int, error_number: int, text: str) -> None:
        """A worker whose program could not be executed."""
        assert self._assign is not None
        failure = failure_of_spawn(
            rank=self._assign.rank_base + local_rank,
            local_rank=local_rank,
            host=self._host,
            error_number=error_number,
            text=text,
            now_epoch_s=int(time.time()),
        )
        self._journal.write("worker_failed", generation=self._assign.generation, **noted(failure))
        self._emit(WorkerEnded(self._assign.generation, local_rank, failure))

    def report(self, worker: Worker, end: WorkerExit) -> None:
        """Of a failure at once that it has happened, and FailureRead when what it has left has been read. An end with 0 is
        reported when that has been read, and whatever comes after it waits its turn."""
        assert self._assign is not None
        earlier = tuple(self._waiting)
        if end.exit_code and not earlier:
            self._failed(worker, end, self._assign)
        else:
            self._begin(self._report_in_turn(worker, end, self._assign, earlier), self._waiting)

    async def all_reported(self) -> None:
        while self._waiting or self._reading:
            await asyncio.wait((*self._waiting, *self._reading))

    def _begin(self, work: Coroutine[None, None, None], those: set[asyncio.Task[None]]) -> None:
        task = self._tasks.create_task(work)
        those.add(task)
        task.add_done_callback(those.discard)

    async def _report_in_turn(
        self, worker: Worker, end: WorkerExit, assign: Assign, earlier: tuple[asyncio.Task[None], ...]
    ) -> None:
        left = await asyncio.to_thread(self._left, worker, end, assign) if end.exit_code == 0 else None
        if earlier:
            await asyncio.wait(earlier)
        if left is None:
            self._failed(worker, end, assign)
        else:
            self._emit(WorkerEnded(assign.generation, worker.local_rank, None, left=left))

    def _failed(self, worker: Worker, end: WorkerExit, assign: Assign) -> None:
        read = worker.raised and not end.raised  # since it raised
        kind = WorkerRaised if end.raised else WorkerEnded
        bare = self._bare(worker, end, assign)
        self._emit(kind(assign.generation, worker.local_rank, failure=bare, evidence_follows=not read))
        if not read:
            self._begin(self._read(worker, end, assign), self._reading)

    async def _read(self, worker: Worker, end: WorkerExit, assign: Assign) -> None:
        failure = await asyncio.to_thread(self._failure, worker, end, assign)
        self._journal.write("worker_failed", generation=assign.generation, **noted(failure))
        if self._assign is assign:
            self._router.failed(failure.rank, failure.traceback)
        self._emit(FailureRead(assign.generation, worker.local_rank, failure))

    def _bare(self, worker: Worker, end: WorkerExit, assign: Assign) -> Failure:
        return Failure(
            rank=assign.rank_base + worker.local_rank,
            local_rank=worker.local_rank,
            host=self._host,
            pid=end.pid,
            exit_code=end.exit_code,
            after_stop=end.after_stop,
            lived_s=end.lived_s,
            timestamp=int(time.time()),
            step=end.step,
        )

    def _left(self, worker: Worker, end: WorkerExit, assign: Assign) -> Failure:
        return left_with_zero(
            rank=assign.rank_base + worker.local_rank,
            local_rank=worker.local_rank,
            host=self._host,
            pid=end.pid,
            stderr_file=str(worker.streams.stderr_file or ""),
            stdout_file=str(worker.streams.stdout_file or ""),
            lived_s=end.lived_s,
            step=end.step,
        )

    def _failure(self, worker: Worker, end: WorkerExit, assign: Assign) -> Failure:
        return failure_of_exit(
            rank=assign.rank_base + worker.local_rank,
            local_rank=worker.local_rank,
            host=self._host,
            pid=end.pid,
            exit_code=end.exit_code,
            error_file=str(worker.streams.error_file or ""),
            stderr_file=str(worker.streams.stderr_file or ""),
            lived_s=end.lived_s,
            now_epoch_s=int(time.time()),
            out_of_memory=self._oom is not None and self._oom.struck(),
            after_stop=end.after_stop,
            step=end.step,
        )
