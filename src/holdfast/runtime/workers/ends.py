"""Reports how workers ended: reads what each of them left, and emits the machine's events in the order of the ends.

Files are read in a thread, because a disk may stall. A worker whose program raised is reported while its process still
runs its exit functions, and once more when it is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from msgspec import Struct

from holdfast.core.agent.events import Event, WorkerEnded, WorkerRaised
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
    failure: Failure | None = None
    """What was reported of that exception; None: nothing yet."""


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
        """Read what this worker left, then report: WorkerRaised or WorkerEnded, after those of earlier calls."""
        assert self._assign is not None
        reading = self._tasks.create_task(self._report(worker, end, self._assign, tuple(self._reading)))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)

    async def all_reported(self) -> None:
        if self._reading:
            await asyncio.wait(tuple(self._reading))

    async def _report(
        self, worker: Worker, end: WorkerExit, assign: Assign, earlier: tuple[asyncio.Task[None], ...]
    ) -> None:
        known = (
            worker.raised and not end.raised
        )  # what it left was read when it raised; that is one of the earlier calls
        event = None if known else await self._event(worker, end, assign)
        if earlier:
            await asyncio.wait(earlier)
        self._emit(event or WorkerEnded(assign.generation, worker.local_rank, worker.failure))

    async def _event(self, worker: Worker, end: WorkerExit, assign: Assign) -> Event:
        if end.exit_code == 0:
            left = await asyncio.to_thread(self._left, worker, end, assign)
            return WorkerEnded(assign.generation, worker.local_rank, None, left=left)
        failure = await asyncio.to_thread(self._failure, worker, end, assign)
        self._journal.write("worker_failed", generation=assign.generation, **noted(failure))
        if self._assign is assign:
            self._router.failed(failure.rank, failure.traceback)
        if end.raised:
            worker.failure = failure
            return WorkerRaised(assign.generation, worker.local_rank, failure)
        return WorkerEnded(assign.generation, worker.local_rank, failure)

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
