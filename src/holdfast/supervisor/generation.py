"""The workers of one generation on one node, from the order to start until no process of it is alive.

Executes; decides nothing. Only the agent's machine knows the phase of the generation: `work` returns it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from holdfast.agent.agent_state import Work
from holdfast.agent.events import Event, WorkerEnded
from holdfast.protocol.board_layout import BOARD_VARIABLE
from holdfast.protocol.messages import Assign, Start
from holdfast.protocol.options import RunOptions, worker_environment
from holdfast.protocol.outcome import Failure
from holdfast.protocol.rank_progress import RankProgress
from holdfast.runtime.journal import Journal
from holdfast.supervisor.board import Board
from holdfast.supervisor.client import ProcessEnded, ProcessStarted, SpawnFailed, SupervisorClient
from holdfast.supervisor.ends import EXIT_AFTER_EXCEPTION, Ends, Worker
from holdfast.supervisor.log_layout import WorkerStreams
from holdfast.supervisor.observer import Phases
from holdfast.supervisor.preload import worker_argv, worker_fds

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
                after_stop = self._work() in ENDING or self.board.told(local_rank)
                self._ends.report(worker, self._bare(worker, EXIT_AFTER_EXCEPTION, after_stop=after_stop), raised=True)

    def _report(self, worker: Worker, exit_code: int, *, stopped: bool) -> None:
        told = self.board.told(worker.local_rank)
        after_stop = stopped or told
        self._journal.write(
            "worker_ended", **self._place(worker), pid=worker.pid, exit_code=exit_code, stopped=after_stop
        )
        if exit_code == 0 and told:
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
