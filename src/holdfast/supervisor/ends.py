"""Reports how workers ended, in the order of the ends.

A failure is reported at once with rank and exit status. Its evidence is read while the other workers are being stopped
or go on, in a thread (evidence.py). A worker whose program raised is reported while its process still runs its exit
functions, and again when the process has ended.

Executes; decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Coroutine
from math import inf
from pathlib import Path

from msgspec import Struct, structs

from holdfast.agent.events import Event, FailureRead, WorkerEnded, WorkerRaised
from holdfast.journal import Journal
from holdfast.linux import own_groups
from holdfast.protocol.exit_codes import EXIT_FAILURE
from holdfast.protocol.outcome import Failure
from holdfast.supervisor.evidence import left_with_zero, with_evidence
from holdfast.supervisor.log_router import LogRouter
from holdfast.supervisor.log_spool import WorkerStreams

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
        # The first file that has the counter is the closest one.
        for file in self._counters:
            with contextlib.suppress(OSError, ValueError):
                for line in file.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
        return 0


def _counter_files(root: Path) -> list[Path]:
    """Files that may have the counter: of cgroup version 2 or 1, and as seen from inside a container, where the cgroup
    is the root."""
    files: list[Path] = []
    for group in own_groups(root):
        is_memory = "memory" in group.controllers.split(",")
        if is_memory or not group.controllers:
            name = "memory.oom_control" if is_memory else "memory.events"
            files += [Path(group.top, path, name) for path in (group.path, "")]
    # Without a memory cgroup, the whole machine's counter is the best available.
    return [file for file in files if file.is_file()] or [root / "proc/vmstat"]


def failure_of_spawn(bare: Failure, *, error_number: int, text: str) -> Failure:
    """The failure of a worker whose program could not be executed.

    Exit codes are a shell's: 127 if it was not found, else 126. The code is 1 if the machine had no room for a process:
    that is no fault of the program.
    """
    code = _spawn_code(error_number)
    return structs.replace(bare, exit_code=code, message=text, started=False, lived_s=0.0)


def _spawn_code(error_number: int) -> int:
    # EAGAIN is the limit of processes, the last two that of open files.
    if error_number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return EXIT_FAILURE
    return _NOT_FOUND if error_number == errno.ENOENT else _NOT_EXECUTABLE


def fields_of(failure: Failure) -> dict[str, object]:
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
    """One living worker."""

    local_rank: int
    streams: WorkerStreams
    key: str
    """The supervisor's name for it."""
    generation: int
    """The newest generation in which it has a place; 0: it is a replacement that has none yet."""
    rank: int = -1
    """Its rank in that generation, if it has joined it from another one; -1: it has not."""
    pid: int = 0
    """Its process; 0: its start is not reported yet."""
    began_s: float = 0.0
    """The time of the order to start it (s of the loop's clock)."""
    raised: bool = False
    """Its program raised an exception, which is reported before the process ends."""
    able: bool = False
    """It can go on in another generation."""
    ready: bool = False
    """It is a replacement and waits for its first place."""
    stepped: int = 0
    """The newest generation that it has joined from another one and in which it has done a step."""
    gate: int = 0
    """The generation for which it waits at the gate; 0: it does not wait."""
    suspended_at_s: float = inf
    """The time at which it was first seen suspended while others run (s of the loop's clock); inf: it is not."""
    facts: dict[str, str] = {}
    """Facts about its end that no file shows: why this agent has killed it."""


class Ends:
    """Reports the ends of a node's workers. `emit` gets the machine's events on the loop."""

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
        self.generation = generation
        """The present generation; it changes when workers go on in another."""
        self._reading: set[asyncio.Task[None]] = set()
        """Tasks that read the evidence of failures that have been reported."""
        self._waiting: set[asyncio.Task[None]] = set()
        """Tasks for ends that are not reported yet: each end with 0, and all ends after it."""
        oom.renew()

    def not_started(self, bare: Failure, error_number: int, text: str) -> None:
        """Report a worker whose program could not be executed."""
        failure = failure_of_spawn(bare, error_number=error_number, text=text)
        self._journal.write("worker_failed", generation=self.generation, **fields_of(failure))
        self._emit(WorkerEnded(self.generation, failure.local_rank, failure))

    def report(self, worker: Worker, bare: Failure, *, raised: bool = False) -> None:
        """Report a failure at once; FailureRead follows when the worker's files have been read. An end with 0 is
        reported after its files have been read, and later ends wait for it: the order of the ends shows the cause.

        `bare`: what is known at the moment of the end. `raised`: an exception has ended the program; its process still
        runs.
        """
        # A worker that ended with 0 and whose files are still being read was earlier. A worker that fails because of
        # that end must be reported after it.
        earlier = tuple(self._waiting)
        if bare.exit_code and not earlier:
            self._failed(worker, bare, self.generation, raised=raised)
        else:
            work = self._report_in_turn(worker, bare, self.generation, earlier, raised=raised)
            self._begin(work, self._waiting)

    async def all_reported(self) -> None:
        """Wait until every end is reported and its evidence is read."""
        while self._waiting or self._reading:
            await asyncio.wait((*self._waiting, *self._reading))

    def _begin(self, work: Coroutine[None, None, None], those: set[asyncio.Task[None]]) -> None:
        task = self._tasks.create_task(work)
        those.add(task)
        task.add_done_callback(those.discard)

    async def _report_in_turn(
        self, worker: Worker, bare: Failure, died_in: int, earlier: tuple[asyncio.Task[None], ...], *, raised: bool
    ) -> None:
        left = await asyncio.to_thread(left_with_zero, bare, worker.streams) if bare.exit_code == 0 else None
        if earlier:
            await asyncio.wait(earlier)
        if left is None:
            self._failed(worker, bare, died_in, raised=raised)
        else:
            self._emit(WorkerEnded(self.generation, worker.local_rank, None, left=left))

    def _failed(self, worker: Worker, bare: Failure, died_in: int, *, raised: bool) -> None:
        read = worker.raised and not raised  # read already when it raised
        kind = WorkerRaised if raised else WorkerEnded
        self._emit(kind(self.generation, worker.local_rank, failure=bare, evidence_follows=not read))
        if not read:
            self._begin(self._read(worker, bare, died_in), self._reading)

    async def _read(self, worker: Worker, bare: Failure, died_in: int) -> None:
        """Read the evidence of a failure and report it. It belongs to the generation `died_in`, also if the others go
        on in another one meanwhile."""
        failure = await asyncio.to_thread(with_evidence, bare, worker.streams, out_of_memory=self._oom.struck)
        self._journal.write("worker_failed", generation=died_in, **fields_of(failure))
        # The console holds the traceback back until it knows whether the last screen shows it.
        self._router.failed(failure.rank, failure.traceback)
        self._emit(FailureRead(died_in, worker.local_rank, failure))
