"""Reports how workers ended, in the order of the ends, with the evidence that each of them left.

A failure is reported at once with rank and exit status. The evidence is read while the other workers are being stopped:
an error file, the end of its stderr and perhaps an out-of-memory count. All of it is untrusted: reads are bounded, and
torn files are tolerated. Files are read in a thread, because a disk may stall. A worker whose program raised is
reported while its process still runs its exit functions, and again when the process has ended.

Judges nothing: see protocol and diagnosis for verdicts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from holdfast.agent.events import Event, FailureRead, WorkerEnded, WorkerRaised
from holdfast.linux import own_groups
from holdfast.protocol.errors import EXIT_FAILURE
from holdfast.protocol.outcome import TEXT_BYTES_MAX, Failure
from holdfast.protocol.policy import COUNT_MAX
from holdfast.runtime.journal import Journal
from holdfast.supervisor.log_layout import WorkerStreams
from holdfast.supervisor.log_router import LogRouter

ERROR_FILE_BYTES_MAX = 4 * 1024 * 1024
MESSAGE_BYTES_MAX = 4096
TAIL_LINES_MAX = 30
LEFT_LINES_MAX, LEFT_CHARACTERS_MAX = 5, 1024
"""Limits for the output of a worker that ended with 0: it is sent with every such end."""

_NOT_EXECUTABLE = 126
_NOT_FOUND = 127


class Recorded(Struct, frozen=True, kw_only=True):
    """The content of an error file; fields are empty where the file lacks them."""

    error_type: str = ""
    message: str = ""
    traceback: str = ""
    timestamp: int = 0


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


def read_error_file(path: str) -> Recorded:
    """Read torchelastic's error file in either of its forms. Of a missing, torn, huge or odd file, returns what is
    readable."""
    if not path:
        return Recorded()
    try:
        with open(path, "rb") as file:
            raw = file.read(ERROR_FILE_BYTES_MAX)
        data: Any = json.loads(raw)
        message = data["message"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Recorded()
    extra: Any = {}
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        extra = extra if isinstance(extra, dict) else {}
        text = str(message.get("message", ""))
        timestamp = extra.get("timestamp", 0)
    else:
        text = str(message)
        timestamp = data.get("timestamp", 0)
    return Recorded(
        error_type=_error_type(text),
        message=_shorten(text, MESSAGE_BYTES_MAX),
        traceback=_shorten(str(extra.get("py_callstack", "")), TEXT_BYTES_MAX),
        timestamp=_as_int(timestamp),
    )


def _error_type(message: str) -> str:
    """`ValueError` of `ValueError: text`; empty when the message does not begin with a class name."""
    name = message.partition(":")[0]
    return name if name.replace(".", "").isidentifier() else ""


def _as_int(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
    return number if 0 <= number <= COUNT_MAX else 0


def _shorten(text: str, bytes_max: int) -> str:
    """Cut the middle out: of a traceback, the end says most and the beginning some."""
    raw = text.encode(errors="replace")
    if len(raw) <= bytes_max:
        return raw.decode()
    mark = b"\n[...]\n"
    head = (bytes_max - len(mark)) // 4
    tail = bytes_max - len(mark) - head
    return raw[:head].decode(errors="ignore") + mark.decode() + raw[-tail:].decode(errors="ignore")


def _as_text(path: str) -> str:
    """A printable form for people and for messages: file names need not be valid text."""
    return path.encode(errors="replace").decode()


def read_tail(path: str) -> str:
    """The last lines of a log, as a terminal would show them: of a line that `\\r` rewrote, only the last text."""
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TEXT_BYTES_MAX))
            raw = file.read(TEXT_BYTES_MAX)
    except OSError:
        return ""
    if size > TEXT_BYTES_MAX:
        raw = raw[raw.find(b"\n") + 1 :]  # the first line is torn
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in raw.decode(errors="replace").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines[-TAIL_LINES_MAX:])


def with_evidence(bare: Failure, *, error_file: str, stderr_file: str, out_of_memory: bool = False) -> Failure:
    """The failure of a worker that ended with a nonzero code, with the evidence from its files.

    `out_of_memory`: `OomWatch.struck()`; counts only for a worker that SIGKILL ended before the agent stopped it.
    """
    recorded = read_error_file(error_file)
    stderr_tail = read_tail(stderr_file)
    facts: dict[str, str] = {}
    if not bare.after_stop:
        from holdfast.supervisor.machine_facts import facts_for  # lazily: a job that does not fail never needs it

        facts = facts_for(f"{recorded.message}\n{recorded.traceback}\n{stderr_tail}", bare.exit_code, stderr_file)
    return structs.replace(
        bare,
        error_type=recorded.error_type,
        message=recorded.message,
        traceback=recorded.traceback,
        stderr_tail=stderr_tail,
        error_file=_as_text(error_file) if os.path.isfile(error_file) else "",
        stderr_file=_as_text(stderr_file),
        out_of_memory=out_of_memory and bare.exit_code == -signal.SIGKILL and not bare.after_stop,
        timestamp=recorded.timestamp or bare.timestamp,
        facts=facts,
    )


def left_with_zero(bare: Failure, streams: WorkerStreams) -> Failure:
    """The end of a worker that exited with 0, with its last output, in case its peers still need it."""
    stderr_file = str(streams.stderr_file or "")
    tail = read_tail(stderr_file) or read_tail(str(streams.stdout_file or ""))
    last = "\n".join(tail.splitlines()[-LEFT_LINES_MAX:])[-LEFT_CHARACTERS_MAX:]
    return structs.replace(bare, stderr_tail=last, stderr_file=_as_text(stderr_file))


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
        failure = await asyncio.to_thread(self._with_evidence, bare, worker.streams)
        self._journal.write("worker_failed", generation=self._generation, **noted(failure))
        self._router.failed(failure.rank, failure.traceback)
        self._emit(FailureRead(self._generation, worker.local_rank, failure))

    def _with_evidence(self, bare: Failure, streams: WorkerStreams) -> Failure:
        return with_evidence(
            bare,
            error_file=str(streams.error_file or ""),
            stderr_file=str(streams.stderr_file or ""),
            out_of_memory=self._oom.struck(),
        )
