"""Samples the stacks of one generation's workers on this node, and keeps the evidence in the run folder.

A look is one sample of all workers. It ends within LOOK_S_MAX, whatever state they are in. It asks a worker for its
stacks only when the worker surely catches the signal and writes to our file; it changes nothing else about the worker.
Judges nothing: see diagnosis/hangs.py for the meaning of the samples.

    <run folder>/stacks/gen<G>_<n>_rank<R>.txt           one look at one worker: all its threads
    <run folder>/stacks/gen<G>_nccl_trace_rank<R>        NCCL's flight recorder, if it has dumped

Where py-spy is installed, its native stacks are appended between two looks. Functions that touch files block.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import itertools
import os
import re
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol

from msgspec import DecodeError, Meta, Struct, json, structs

from holdfast.detached import run_detached
from holdfast.linux import ProcessStat, process_stat
from holdfast.protocol.board_layout import (
    BOARD_VARIABLE,
    HANDLED,
    HANDLED_SIGNAL,
    LOOK_MAIN_SIGNAL,
    LOOK_SIGNAL,
    QUESTION_BYTES,
)
from holdfast.protocol.rank_progress import (
    COLLECTIVES_MAX,
    DUMP_BYTES_MAX,
    TORCH,
    Collective,
    Frame,
    KernelWait,
    Polling,
    RankSample,
    main_thread,
    program_frame,
    program_threads,
)
from holdfast.supervisor import processes
from holdfast.supervisor.attached import attached
from holdfast.supervisor.kernel_wait import is_connecting, wait_of, waits_of_others

FIRST_LOOKS_MAX = 10
"""Number of first looks of a generation whose evidence is kept for good."""
LATER_LOOKS_MAX = 30
"""Number of newest looks whose evidence is kept beside that of the first."""
TRACE_BYTES_MAX = 64 * 1024 * 1024
"""Length to which the copy of a flight recorder's trace is cut (bytes)."""
SPY_S_MAX = 20.0
"""Limit for py-spy to read the stacks of one worker (s)."""
SPY_AGAIN_S = 300.0
"""Shortest time between two attaches of py-spy to one worker (s)."""
SPY_BYTES_MAX = 1_000_000
"""Length to which the output of py-spy is cut (bytes)."""

TRACE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables that name the paths of the flight recorder's files; the second is the older name."""
OLDER_TRACES = "/tmp/nccl_trace_rank_"
"""Beginning of the paths of these files without a variable, in older versions of torch."""


def _traces(environ: Mapping[str, str]) -> list[str]:
    """Beginnings of the paths that the flight recorder's files may have; torch adds the rank. The first path that
    exists counts."""
    named = next((environ[name] for name in TRACE_VARIABLES if environ.get(name)), None)
    if named is not None:
        return [named]
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "/tmp", ".cache")
    return [os.path.join(cache, "torch", "comm_lib_trace_rank_"), OLDER_TRACES]


class StackFiles:
    """The evidence files of the workers that write to one board."""

    def __init__(self, generation: int, rank_of: Callable[[int], int], started_epoch_s: float) -> None:
        """`rank_of`: the present rank of a local rank. `started_epoch_s`: when the workers were started."""
        self.generation = generation
        self._rank_of = rank_of
        self._started_epoch_s = started_epoch_s
        self._looks = 0
        """Number of looks whose evidence was kept, or could not be written."""
        self._traces: dict[int, float] = {}
        """The time of change of the trace that was copied for each rank (epoch s), by rank."""
        self._spied_s: dict[int, float] = {}
        """The time at which py-spy last attached to each worker (monotonic s), by local rank."""
        self._spying: asyncio.Task[None] | None = None
        """It appends native stacks, or has ended; None: nothing was begun since the last pause."""

    def keep(self, folder: Path, samples: Sequence[RankSample], texts: Mapping[int, str]) -> tuple[RankSample, ...]:
        """Write the evidence of one look, and enter its path in each sample. `texts`: all threads of each local rank.
        Raises OSError."""
        at = folder / "stacks"
        at.mkdir(exist_ok=True)

        number = self._looks
        self._looks += 1
        if number >= FIRST_LOOKS_MAX:  # later looks overwrite each other in turn
            number = FIRST_LOOKS_MAX + (number - FIRST_LOOKS_MAX) % LATER_LOOKS_MAX

        written = []
        for sample in samples:
            rank = self._rank_of(sample.local_rank)
            path = at / f"gen{self.generation}_{number + 1}_rank{rank}.txt"
            path.write_text(self._describe(sample, texts.get(sample.local_rank, "")), errors="replace")
            written.append(structs.replace(sample, file=str(path).encode(errors="replace").decode()))  # printable
            with contextlib.suppress(OSError):
                self._copy_trace(at, rank)
        return tuple(written)

    def _describe(self, sample: RankSample, text: str) -> str:
        rank = self._rank_of(sample.local_rank)
        state = f"state {sample.state}" if sample.state else "gone"
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        lines = [
            f"rank {rank}, local rank {sample.local_rank}, process {sample.pid}, {state}",
            f"{sample.cpu_s:.2f} s of processor time at {now}",
            *([sample.note] if sample.note else []),
            *map(_collective_line, sample.collectives),
            "",
            text.rstrip() or "It did not write its stacks: it is stopped, or no Python under holdfast's bootstrap.",
            "",
            "Its threads, as the kernel has them:",
            *processes.describe_tasks(sample.pid),
        ]
        return "\n".join(lines) + "\n"

    def _copy_trace(self, at: Path, rank: int) -> None:
        """Copy what NCCL's flight recorder has written about this rank in this generation."""
        for beginning in _traces(os.environ):
            with contextlib.suppress(OSError):
                if self._copy(beginning + str(rank), at, rank):
                    return

    def _copy(self, path: str, at: Path, rank: int) -> bool:
        """Copy this trace. Returns False if it is no file of ours, or older than this generation."""
        # In /tmp any user may have put a pipe, a folder, or a link, under that name.
        with _opened(path, os.O_NOFOLLOW) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return False
            if found.st_mtime < self._started_epoch_s:
                return False
            if self._traces.get(rank) == found.st_mtime:  # copied already
                return True
            copy = at / f"gen{self.generation}_nccl_trace_rank{rank}"
            part = copy.with_name(f".{copy.name}")
            try:  # whole or not at all: a part of it cannot be read, and must not replace an earlier copy
                part.write_bytes(file.read(TRACE_BYTES_MAX))
                part.replace(copy)
            finally:
                part.unlink(missing_ok=True)
        self._traces[rank] = found.st_mtime
        return True

    # ---------------------------------------------------------------- py-spy

    def spy(self, samples: Sequence[RankSample]) -> None:
        """Append native stacks to the files of these samples, until pause() or the end."""
        now_s = time.monotonic()
        due = [
            sample
            for sample in samples
            if sample.file and now_s - self._spied_s.get(sample.local_rank, -SPY_AGAIN_S) >= SPY_AGAIN_S
        ]
        program = py_spy() if due else None
        if program is not None:
            self._spying = asyncio.create_task(self._spy(program, due))

    async def pause(self) -> None:
        """Stop py-spy. It stops the process that it traces, and a look would take that for the worker's own state."""
        task, self._spying = self._spying, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _spy(self, program: str, samples: Sequence[RankSample]) -> None:
        for sample in samples:
            text = await _native_stacks(program, sample.pid)
            self._spied_s[sample.local_rank] = time.monotonic()
            if text:
                with contextlib.suppress(OSError):
                    await run_detached(functools.partial(_append, sample.file, text))


def _opened(path: str, flags: int = 0) -> BinaryIO:
    """The file, open to read; a pipe is not waited for. OSError."""
    # By an opener: `open` of a descriptor that is a folder's fails, and leaves it open.
    return open(path, "rb", opener=lambda name, _: os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags))


def _collective_line(each: Collective) -> str:
    """`collective 812 of default_pg: all_reduce [4096] float32, not done`."""
    kind = "operation" if each.between_two else "collective"
    what = f"{each.operation} {each.tensors}".strip()
    return f"{kind} {each.number} of {each.group}: {what}, {'done' if each.done else 'not done'}"


def _append(path: str, text: bytes) -> None:
    with open(path, "ab") as file:
        file.write(b"\npy-spy dump --native:\n" + text)


async def _native_stacks(program: str, pid: int) -> bytes:
    """The native stacks; empty when py-spy could not attach, or did not end."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        command = attached([program, "dump", "--native", "--pid", str(pid)])
        process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=pipe, stderr=null)
    except OSError:
        return b""
    try:
        async with asyncio.timeout(SPY_S_MAX):
            text, _ = await process.communicate()
    except TimeoutError:
        return b""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    return text[:SPY_BYTES_MAX] if process.returncode == 0 else b""


def py_spy() -> str | None:
    """The path of py-spy: beside our Python, or in PATH."""
    for folder in (os.path.dirname(sys.executable), *os.environ.get("PATH", "").split(os.pathsep)):
        path = os.path.join(folder, "py-spy")
        if os.path.isabs(path) and os.access(path, os.X_OK):
            return path
    return None


ANSWER_S_MAX = 1.0
"""Limit for the workers to write their stacks (s); they do so in milliseconds."""
KEEP_S_MAX = 0.5
"""Limit for the evidence to reach the disk (s). After it, a thread continues to write, and samples name no file."""
LOOK_S_MAX = 3.5
"""Limit for a look (s): more than the sum of the limits of its steps."""
QUIET_S = 0.2
"""Time after which the main thread of a worker, if it slept all the while, is assumed to sleep on while its stacks are
written (s)."""
READ_S_MAX = 0.2
"""Limit for reading the program's source lines (s)."""
RECORDED_S_MAX = 0.6
"""Limit for the workers to write which collectives they are in (s). One that keeps the interpreter's lock does not
answer."""
HANDLED_S_MAX = 0.3
"""Limit for a worker to write which exception it handles (s)."""
PARSE_S_MAX = 0.5
"""Limit for parsing the programs (s). The result is kept: if it comes too late, the next look has it at once."""
SOURCE_CHARS_MAX = 80
SOURCE_BYTES_MAX = 4 * 1024 * 1024
PARSED_BYTES_MAX = 512 * 1024
"""Length of a program up to which it is parsed (bytes)."""
PARSED_NAME = "<program>"
"""The name of every program that is parsed, for the filter on warnings."""
PROGRAMS_MAX = 8
"""Number of programs whose syntax trees are kept."""
PLACES_MAX = 256
"""Number of lines of programs for which the result of the analysis is kept."""
CALLERS_MAX = 2
"""Number of frames in which a loop is sought: a small function that sleeps, and its caller."""
STILL_S = 0.01
"""Time without growth after which a dump is complete, if its worker handles no signal (s)."""

MEASURED_MAX = 256
"""Number of processes below one worker whose input and output are counted."""
NOTES_MAX = 4
"""Number of processes of one worker that are listed."""

PROCESS_FILES = ("/subprocess", "/multiprocessing/connection", "/multiprocessing/pool", "/concurrent/futures/process")
"""Ends of the paths, without `.py`, of those files of Python whose functions wait for a child."""

_STOPPED = ("T", "t")
"""States of a process that a signal or a tracer has stopped."""
_DEAD = ("Z", "X", "x")
"""States of a process that has ended."""


class Tally(Struct, frozen=True):
    """Counters of several processes or connections, some of which end and some of which are new: a plain sum may
    decrease."""

    total: float = 0
    of_each: dict[int, float] = {}
    """The count of each when it was last seen. It is kept for one that a look misses, so that the next look does not
    count it twice."""

    def and_now(self, of_each: dict[int, float]) -> Tally:
        """The tally after another look, which found these counts."""
        grown = sum(max(0, done - self.of_each.get(one, 0)) for one, done in of_each.items())
        return Tally(self.total + grown, self.of_each | of_each)


class _RankLook(Struct):
    """One worker during a look. Fields without a description are those of RankSample that have the same name."""

    local_rank: int
    pid: int
    fd: int
    """The file into which it writes; a duplicate of our descriptor. -1: it is closed."""
    variable: bytes
    """A variable in its environment, and in no other worker's."""
    stat: ProcessStat | None = None
    main_cpu_s: float = 0.0
    dumped_bytes: int = 0
    """Bytes that it wrote for earlier looks."""
    talked: Tally = Tally()
    """Bytes of its connections, by socket."""
    wanted: Tally = Tally()
    """Processor time that the processes below it used or waited for (s), by process."""
    moved_bytes: int = 0
    dumped_by_main_bytes: int = 0
    """The part of dumped_bytes that its main thread wrote."""
    main_moved_bytes: int = 0
    main_wrote_bytes: int = 0
    waits_for: KernelWait = KernelWait.UNKNOWN
    awaited: Tally = Tally()
    """Bytes of the connections for which the main thread waited."""
    awaited_by_threads: Tally = Tally()
    """The same for its other threads."""
    child_awaited: bool = False
    broken_child: bool = False
    children_cpu_s: float = 0.0
    children_bytes: int = 0
    wanted_s: float = 0.0
    disk_bytes: int = 0
    stolen_s: float = 0.0
    at_s: float = 0.0
    switches: int = 0
    """Number of switches of its main thread, when the look began."""
    asked: bool = False
    """It got the signal to write its stacks."""
    signum: int = LOOK_SIGNAL
    task: int = 0
    """The thread that got the signal."""
    size: int = 0
    """Length of its dump so far (bytes)."""
    still_since_s: float = 0.0
    """The time at which the dump last grew, or at which the worker last handled the signal (monotonic s)."""
    text: str = ""
    """The dump: the stacks of all its threads."""
    note: str = ""
    """Problems of its processes, in words."""


class BoardOfWorkers(Protocol):
    """The files into which the workers of one board write their stacks."""

    def stacks(self, local_rank: int) -> int:
        """Our descriptor of this worker's file."""

    def recorder(self, local_rank: int) -> tuple[int, int]:
        """This worker's descriptor of the pipe for questions about its collectives, and the pipe's inode; 0: none."""

    def address(self, local_rank: int) -> str:
        """The board's address in this worker's environment."""


class StackSampler:
    """Samples the workers that write to one board."""

    def __init__(
        self, board: BoardOfWorkers, generation: int, rank_of: Callable[[int], int], started_epoch_s: float
    ) -> None:
        """`rank_of`: the present rank of a local rank. `started_epoch_s`: when the workers were started."""
        self._board = board
        self._files = StackFiles(generation, rank_of, started_epoch_s)
        self._one_at_a_time = asyncio.Lock()
        self._dumped: dict[int, tuple[int, int]] = {}
        """Bytes that a worker wrote because we asked for its stacks, and those of its main thread, by process. They are
        no work of its own."""
        self._tallies: dict[int, tuple[Tally, Tally, Tally, Tally]] = {}
        """Counters of a worker from look to look, by process: talked, wanted, awaited, awaited_by_threads."""
        self._handled: dict[tuple[int, tuple[Frame, ...]], str] = {}
        """The exception that a worker handled at a place, by process and place."""
        self._questions = 0
        """Number of questions about collectives."""
        self._at_disk = False
        """Files are being read or written for a look, perhaps longer than the look waits."""

    def regrouped(self, generation: int) -> None:
        """The workers go on in another generation."""
        self._files.generation = generation

    async def look(self, pids: Mapping[int, int], folder: Path | None) -> tuple[RankSample, ...]:
        """A sample of each worker, given as local rank -> pid. `folder`: the run's; None: no evidence is kept.

        Takes at most LOOK_S_MAX once it starts: looks run one at a time.
        """
        async with self._one_at_a_time:
            await self._files.pause()

            # The stacks, and what the kernel counts.
            looks: list[_RankLook] = []
            try:
                looks.extend(self._begun(rank, pid) for rank, pid in sorted(pids.items()))
                samples = await run_detached(lambda: _collect(looks))
            except (OSError, RuntimeError):  # no descriptor, or no thread, is left: a look that comes again keeps none
                _close_files(looks)
                raise
            self._dumped = {look.pid: _dumped(look) for look in looks}
            self._tallies = {
                look.pid: (look.talked, look.wanted, look.awaited, look.awaited_by_threads) for look in looks
            }
            if self._at_disk:  # the thread of an earlier look still waits for the disk, and this one would too
                return samples

            # What the source shows. Each step may come too late: the samples are then without it.
            programs: dict[int, bytes] = {}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_S_MAX):
                    samples, programs = await run_detached(lambda: self._with_sources(samples))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PARSE_S_MAX):
                    samples = await run_detached(lambda: _with_explanations(samples, programs))
            if may := [sample for sample in samples if _may_handle(sample, programs)]:
                handled = await run_detached(lambda: self._handled_exceptions(may))
                samples = tuple(structs.replace(each, handles=handled.get(each.local_rank, "")) for each in samples)

            recorders = {sample.local_rank: self._board.recorder(sample.local_rank) for sample in samples}
            if any(pipe for pipe, _ in recorders.values()):
                samples = await run_detached(lambda: self._with_collectives(samples, recorders))

            if folder is None or not samples or self._at_disk:
                return samples
            texts = {look.local_rank: look.text for look in looks}
            try:
                async with asyncio.timeout(KEEP_S_MAX):
                    samples = await run_detached(lambda: self._keep(folder, samples, texts))
            except (OSError, TimeoutError):
                return samples
            self._files.spy(samples)
            return samples

    def _begun(self, local_rank: int, pid: int) -> _RankLook:
        talked, wanted, awaited, by_threads = self._tallies.get(pid, (Tally(), Tally(), Tally(), Tally()))
        dumped_bytes, by_main_bytes = self._dumped.get(pid, (0, 0))
        return _RankLook(
            local_rank,
            pid,
            # A duplicate: the board may be closed meanwhile, and its number reused.
            os.dup(self._board.stacks(local_rank)),
            f"{BOARD_VARIABLE}={self._board.address(local_rank)}".encode(),
            dumped_bytes=dumped_bytes,
            dumped_by_main_bytes=by_main_bytes,
            talked=talked,
            wanted=wanted,
            awaited=awaited,
            awaited_by_threads=by_threads,
        )

    def _handled_exceptions(self, samples: Sequence[RankSample]) -> dict[int, str]:
        """Ask these workers for the exceptions that they handle, all at once: one that handles none writes nothing.
        Returns the answers by local rank. Each is asked once at each place: the answer takes its main thread a moment,
        unlike its stack. Blocks."""
        places = {sample.local_rank: (sample.pid, sample.frames) for sample in samples}
        fds: dict[int, int] = {}
        try:
            for sample in samples:
                place = places[sample.local_rank]
                if place not in self._handled:
                    self._handled[place] = ""
                    fds[sample.local_rank] = fd = os.dup(self._board.stacks(sample.local_rank))
                    if not _ask_handled(sample.pid, fd):
                        os.close(fds.pop(sample.local_rank))
            texts: dict[int, str] = {}
            deadline = time.monotonic() + HANDLED_S_MAX
            while len(texts) < len(fds) and time.monotonic() < deadline:
                time.sleep(STILL_S)
                for rank, fd in fds.items():
                    if rank not in texts and (text := os.pread(fd, DUMP_BYTES_MAX, 0).decode(errors="replace")):
                        texts[rank] = text
        finally:
            for fd in fds.values():
                os.close(fd)
        for rank, text in texts.items():
            pid = places[rank][0]
            all_bytes, by_main_bytes = self._dumped.get(pid, (0, 0))
            written = len(text.encode())
            self._dumped[pid] = (all_bytes + written, by_main_bytes + written)
            self._handled[places[rank]] = _handled_words(text)
        return {rank: self._handled[place] for rank, place in places.items()}

    def _with_collectives(
        self, samples: tuple[RankSample, ...], recorders: Mapping[int, tuple[int, int]]
    ) -> tuple[RankSample, ...]:
        """Add the collectives that torch's flight recorder has. `recorders`: the pipe of each worker, by local rank.
        Blocks."""
        self._questions += 1
        fds: dict[int, int] = {}
        try:
            for sample in samples:
                fds[sample.local_rank] = os.dup(self._board.stacks(sample.local_rank))
            asked = [
                sample.local_rank
                for sample in samples
                if _ask_recorder(sample.pid, *recorders[sample.local_rank], fds[sample.local_rank], self._questions)
            ]
            answers: dict[int, _RecorderAnswer] = {}
            deadline = time.monotonic() + RECORDED_S_MAX
            while len(answers) < len(asked) and time.monotonic() < deadline:
                time.sleep(STILL_S)
                for local_rank in asked:
                    if (
                        local_rank not in answers
                        and (answer := _recorded(fds[local_rank], self._questions)) is not None
                    ):
                        answers[local_rank] = answer
        finally:
            for fd in fds.values():
                os.close(fd)
        found = []
        for sample in samples:
            answer = answers.get(sample.local_rank, _RecorderAnswer(0, ()))
            all_bytes, by_main_bytes = self._dumped.get(sample.pid, (0, 0))
            self._dumped[sample.pid] = (all_bytes + answer.length, by_main_bytes)
            handles = sample.handles or answer.handles
            found.append(structs.replace(sample, collectives=answer.collectives, handles=handles))
        return tuple(found)

    def _with_sources(self, samples: tuple[RankSample, ...]) -> tuple[tuple[RankSample, ...], dict[int, bytes]]:
        """The samples with their lines, and by local rank the text of the program."""
        with self._disk():
            found = [_with_source(sample) for sample in samples]
        return tuple(sample for sample, _ in found), {sample.local_rank: program for sample, program in found}

    def _keep(self, folder: Path, samples: tuple[RankSample, ...], texts: Mapping[int, str]) -> tuple[RankSample, ...]:
        with self._disk():
            return self._files.keep(folder, samples, texts)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """Guards disk access in a thread. While a disk stalls, only one thread waits for it and not one for each
        look."""
        self._at_disk = True
        try:
            yield
        finally:
            self._at_disk = False

    async def close(self) -> None:
        """End py-spy, which may still write evidence."""
        await self._files.pause()


def _dumped(look: _RankLook) -> tuple[int, int]:
    """Bytes that this worker has written for all looks up to this one, and those of its main thread among them."""
    by_main_bytes = look.size if look.task == look.pid else 0
    return look.dumped_bytes + look.size, look.dumped_by_main_bytes + by_main_bytes


def _collect(looks: list[_RankLook]) -> tuple[RankSample, ...]:
    """Read the stacks that workers write. Blocks; closes the looks' files."""
    try:
        # The pause between measuring and asking shows which main threads sleep.
        below = processes.families({look.pid: look.variable for look in looks})
        disk_bytes, moved_bytes = processes.disk_bytes(), processes.tcp_moved_bytes()
        for look in looks:
            _measure(look, below[look.pid], moved_bytes)
            look.disk_bytes = disk_bytes
        time.sleep(QUIET_S)
        for look in looks:
            _ask(look)

        deadline = time.monotonic() + ANSWER_S_MAX
        # Poll, because no event reports that a worker's signal handler has returned.
        while not all(_answered(look) for look in looks if look.asked) and time.monotonic() < deadline:
            time.sleep(STILL_S / 2)
        for look in looks:
            if look.asked:
                look.text = os.pread(look.fd, DUMP_BYTES_MAX, 0).decode(errors="replace")
        return tuple(_sample(look) for look in looks)
    finally:
        _close_files(looks)


def _close_files(looks: list[_RankLook]) -> None:
    """Close the looks' files, unless they are closed already."""
    for look in looks:
        if look.fd >= 0:
            os.close(look.fd)
            look.fd = -1


def _measure(look: _RankLook, below: Sequence[processes.Child], moved_bytes: Mapping[int, int]) -> None:
    """Measure the work that it and the processes below it have done so far."""
    # On a virtual machine that gets few of its processors, a child that worked a little looked idle without this
    # (test_what_other_machines_have_had_of_the_processors).
    look.at_s, look.stolen_s = time.monotonic(), processes.stolen_s()
    look.stat = process_stat(look.pid)
    main = process_stat(f"{look.pid}/task/{look.pid}")

    # What it has read and written, without the stacks that it wrote for us.
    look.moved_bytes = max(0, processes.moved_bytes(look.pid) - look.dumped_bytes)
    task = f"{look.pid}/task/{look.pid}"
    look.main_moved_bytes = max(0, processes.moved_bytes(task) - look.dumped_by_main_bytes)
    look.main_wrote_bytes = max(0, processes.wrote_bytes(task) - look.dumped_by_main_bytes)

    # What its threads wait for.
    look.waits_for, awaited = wait_of(look.pid, look.pid, moved_bytes)
    look.awaited = look.awaited.and_now({awaited: moved_bytes[awaited]} if awaited else {})
    others = waits_of_others(look.pid, moved_bytes)
    awaited_by_others = {wait.inode: float(moved_bytes[wait.inode]) for wait in others if wait.inode}
    look.awaited_by_threads = look.awaited_by_threads.and_now(awaited_by_others)
    waits = (look.waits_for, *(wait.waits_for for wait in others))
    look.child_awaited = KernelWait.CHILD in waits

    # Processor time, and what the processes below it do.
    look.main_cpu_s = main.cpu_s if main is not None else 0.0
    ended_cpu_s = look.stat.ended_cpu_s if look.stat is not None else 0.0
    look.children_cpu_s = ended_cpu_s + sum(child.cpu_s for child in below)
    pids = [child.pid for child in below[:MEASURED_MAX]]
    look.children_bytes = sum(map(processes.moved_bytes, pids))
    look.wanted_s = processes.wanted_s(look.pid, all_threads=True)
    look.wanted = look.wanted.and_now({pid: processes.wanted_s(pid, all_threads=False) for pid in pids})
    look.talked = look.talked.and_now(processes.of_connections([look.pid, *pids], moved_bytes))
    own = [child for child in below if child.parent == look.pid]
    look.note = "; ".join(_notes(own))
    look.broken_child = any(child.state in _STOPPED + _DEAD for child in own)

    # Last: the pause in which the thread may be seen to sleep begins here.
    look.switches = processes.switches(look.pid)


def _ask(look: _RankLook) -> None:
    """Send the signal to a worker that will answer it."""
    if look.stat is None or look.stat.state in _STOPPED + _DEAD:
        return  # it would answer when it continues, once for each signal
    signals = processes.signals(look.pid)

    # A main thread that sleeps is left alone if another thread can write for it: its system call might end early.
    look.signum, look.task = LOOK_MAIN_SIGNAL, look.pid
    # One that runs writes its own stack alone. Another thread would read frames that it changes: one look in forty
    # ended the worker by SIGSEGV (test_who_runs_is_asked_for_its_main_thread_alone_and_lives).
    if _sleeps(look):
        look.signum, look.task = LOOK_SIGNAL, processes.idle_thread(look.pid, LOOK_SIGNAL)
    elif signals.blocks(LOOK_MAIN_SIGNAL):
        return
    if look.task == look.pid and is_connecting(look.pid, look.pid):
        return  # the signal would end the attempt to connect
    if not signals.catches(look.signum) or signals.pending(look.signum) or not processes.has_open(look.pid, look.fd):
        return  # the signal would kill it, or its handler would write elsewhere
    os.truncate(look.fd, 0)
    with contextlib.suppress(OSError):  # it is gone, or its user's signal queue is full
        processes.signal_thread(look.pid, look.task, look.signum)
        look.asked = True


def _sleeps(look: _RankLook) -> bool:
    """Whether its main thread has slept since the look began, and is likely to sleep on."""
    stat = process_stat(f"{look.pid}/task/{look.pid}")
    return stat is not None and stat.state != "R" and processes.switches(look.pid) == look.switches


def _answered(look: _RankLook) -> bool:
    """Whether this worker has written everything that it will write."""
    now_s, size = time.monotonic(), os.fstat(look.fd).st_size
    signals = processes.signals(f"{look.pid}/task/{look.task}")
    # The dump grows, or the handler has not begun (pending) or has not returned (the kernel blocks its signal).
    if size != look.size or signals.pending(look.signum) or signals.blocks(look.signum):
        look.size, look.still_since_s = size, now_s
        return False
    if not processes.is_alive(look.pid):
        return True
    return size > 0 and now_s - look.still_since_s >= STILL_S


def _sample(look: _RankLook) -> RankSample:
    if look.stat is None:
        return RankSample(look.local_rank, look.pid, "", 0.0)
    return RankSample(
        look.local_rank,
        look.pid,
        look.stat.state,
        look.stat.cpu_s,
        main_thread(look.text),
        look.note,
        main_cpu_s=look.main_cpu_s,
        moved_bytes=look.moved_bytes,
        children_cpu_s=look.children_cpu_s,
        children_bytes=look.children_bytes,
        disk_bytes=look.disk_bytes,
        at_s=look.at_s,
        threads=program_threads(look.text),
        talked_bytes=round(look.talked.total),
        wanted_s=look.wanted_s,
        children_wanted_s=look.wanted.total,
        stolen_s=look.stolen_s,
        waits_for=look.waits_for,
        child_awaited=look.child_awaited or _reads_from_process(look.text),
        main_moved_bytes=look.main_moved_bytes,
        main_wrote_bytes=look.main_wrote_bytes,
        awaited_bytes=round(look.awaited.total),
        threads_awaited_bytes=round(look.awaited_by_threads.total),
        broken_child=look.broken_child,
    )


def _reads_from_process(text: str) -> bool:
    """Whether a thread is in a function that waits for another process, whatever its system call is."""
    return any(f'{place}.py", line' in text for place in PROCESS_FILES)


def _with_source(sample: RankSample) -> tuple[RankSample, bytes]:
    """Add the source line that the program executes. Also returns the program; empty: it cannot be read."""
    index = program_frame(sample.frames)
    if index is None:
        return sample, b""
    frame = sample.frames[index]
    try:
        with _opened(frame.file) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return sample, b""  # /dev/fd/63, a pipe
            program = file.read(SOURCE_BYTES_MAX)
        # Code without a line, as compilers make it, has line 0: it must not become the last line of the file.
        text = program.split(b"\n")[frame.line - 1].decode(errors="replace").strip() if frame.line > 0 else ""
    except (OSError, ValueError, IndexError):
        return sample, b""  # not a file, or on another machine
    return structs.replace(sample, source=text[:SOURCE_CHARS_MAX]), program


def _with_explanations(samples: Sequence[RankSample], programs: Mapping[int, bytes]) -> tuple[RankSample, ...]:
    """Add the thread that may hold the lock for which it waits, and what the loop around its line polls."""
    return tuple(_with_explanation(sample, programs.get(sample.local_rank, b"")) for sample in samples)


def _with_explanation(sample: RankSample, program: bytes) -> RankSample:
    index = program_frame(sample.frames)
    if index is None or not program or len(program) > PARSED_BYTES_MAX:
        return sample
    frame = sample.frames[index]
    holder = _holder(frame, sample, program) if "with " in sample.source or ".acquire(" in sample.source else ""
    callers = itertools.takewhile(lambda each: each.file == frame.file, sample.frames[index:])
    polled, polls = _polled(program, tuple(each.line for each in callers)[:CALLERS_MAX])
    note = "; ".join(each for each in (sample.note, holder) if each)
    return structs.replace(sample, note=note, polled=polled, polls=polls[:SOURCE_CHARS_MAX])


_PATIENT = (KernelWait.THREAD, KernelWait.SLEEP, KernelWait.CHILD)
"""Kinds of waits that Python resumes after a signal's handler has run."""


def _may_handle(sample: RankSample, programs: Mapping[int, bytes]) -> bool:
    """Whether its main thread may handle an exception, and can be asked for it."""
    program = programs.get(sample.local_rank, b"")
    index = program_frame(sample.frames)
    if index is None or not program or len(program) > PARSED_BYTES_MAX or sample.waits_for not in _PATIENT:
        return False
    if any(re.search(TORCH, frame.file) for frame in sample.frames[:index]):
        return False  # it waits in C++, and its handler would run when that returns
    file = sample.frames[index].file
    return _handles(program, tuple(frame.line for frame in sample.frames[index:] if frame.file == file))


@functools.lru_cache(maxsize=PLACES_MAX)
def _handles(program: bytes, lines: tuple[int, ...]) -> bool:
    """`may_handle`, kept for each place of a program."""
    # Here and below not at the start of the launcher: a job that does not hang needs none of its patterns.
    from holdfast.protocol.program_source import may_handle

    return may_handle(_parsed(program), lines)


def _ask_handled(pid: int, fd: int) -> bool:
    """Ask the worker for the exception that it handles, which it writes into this file. Returns False if it cannot be
    asked."""
    signals = processes.signals(pid)
    if not signals.catches(HANDLED_SIGNAL) or signals.blocks(HANDLED_SIGNAL) or not processes.has_open(pid, fd):
        return False
    os.truncate(fd, 0)
    with contextlib.suppress(OSError):
        processes.signal_thread(pid, pid, HANDLED_SIGNAL)
    return True


class _RecorderAnswer(Struct, frozen=True):
    """The line that a worker writes about its collectives."""

    number: int
    collectives: Annotated[tuple[Collective, ...], Meta(max_length=COLLECTIVES_MAX)]
    handles: str = ""
    length: int = 0
    """Its length (bytes), which the worker does not write."""


def _ask_recorder(pid: int, pipe: int, inode: int, fd: int, number: int) -> bool:
    """Ask a worker which collectives it is in. Returns whether an answer may come."""
    if not pipe or not processes.has_open(pid, fd):
        return False
    try:
        asks = os.open(f"/proc/{pid}/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(asks)
        if not stat.S_ISFIFO(found.st_mode) or found.st_ino != inode:
            return False  # the program has closed the descriptor and opened something else
        os.truncate(fd, 0)
        return os.write(asks, number.to_bytes(QUESTION_BYTES, sys.byteorder)) == QUESTION_BYTES
    except OSError:
        return False  # it has left many questions unanswered
    finally:
        os.close(asks)


def _recorded(fd: int, number: int) -> _RecorderAnswer | None:
    """The answer to this question; None: it is not there yet."""
    for line in os.pread(fd, DUMP_BYTES_MAX, 0).splitlines(keepends=True):
        if line.endswith(b"\n"):
            # An answer that does not fit: the worker's torch is another one. UnicodeDecodeError is no DecodeError.
            with contextlib.suppress(DecodeError, UnicodeDecodeError):
                answer = json.decode(line, type=_RecorderAnswer)
                if answer.number == number:
                    return structs.replace(answer, length=len(line))
    return None


def _handled_words(text: str) -> str:
    """The exception that a worker has written, as `ValueError: shard 17 is corrupt, raised at data.py:30`; empty: it
    handles none."""
    lines = text.splitlines()
    if len(lines) < 2 or not lines[0].startswith(HANDLED):
        return ""
    return f"{lines[0].removeprefix(HANDLED)}, raised at {lines[1].rpartition('/')[2]}"


@functools.lru_cache(maxsize=PROGRAMS_MAX)
def _parsed(program: bytes) -> ast.AST:
    """Its syntax tree; an empty one if it is no Python. All ranks usually run the same program."""
    # Python would show its warnings about the program (`"\\d"`) as the agent's own. Those of this name are ignored for
    # good: threads of two looks may be here, and one of them would restore the filters while the other one parses.
    warnings.filterwarnings("ignore", module=PARSED_NAME)
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # the last: it is nested too deeply
        return ast.parse(program, PARSED_NAME)
    return ast.Module([], [])


@functools.lru_cache(maxsize=PLACES_MAX)
def _polled(program: bytes, lines: tuple[int, ...]) -> tuple[Polling, str]:
    """`polled_at`, kept for each place of a program."""
    from holdfast.protocol.program_source import polled_at

    with contextlib.suppress(RecursionError):  # as of a sum of a thousand terms
        return polled_at(_parsed(program), lines)
    return Polling.NOTHING, ""


def _holder(waiting: Frame, sample: RankSample, program: bytes) -> str:
    """The other thread that is inside the lock that this line of the program takes, in words; empty: none found."""
    from holdfast.protocol.program_source import is_inside, wanted_at

    tree = _parsed(program)
    with contextlib.suppress(RecursionError):
        lock = wanted_at(tree, waiting.line)
        for frame in (frame for frames in sample.threads for frame in frames if lock and frame.file == waiting.file):
            if is_inside(tree, frame.line, lock):
                at = f"{frame.file.rpartition('/')[2]}:{frame.line}"
                return f"it takes {lock}, and another thread is inside {lock}: in {frame.function} at {at}"
    return ""


def _notes(children: Iterable[processes.Child]) -> list[str]:
    """Problems of the processes that a worker has started; those of a data loader even without problems."""
    notes = []
    idle = []
    for child in children:
        loader = "data loader's process" if child.name.startswith("pt_data_worker") else f"process ({child.name})"
        if child.state in _STOPPED:
            notes.append(f"its {loader} {child.pid} is stopped")
        elif child.state in _DEAD:
            notes.append(f"its {loader} {child.pid} is dead")
        elif child.name.startswith("pt_data_worker") and child.state == "S":
            idle.append(child.pid)
    if idle and not notes:
        some = ", ".join(map(str, idle[:NOTES_MAX])) + (" …" if len(idle) > NOTES_MAX else "")
        notes.append(f"its data loader's {'processes wait' if len(idle) > 1 else 'process waits'} too ({some})")
    return notes[:NOTES_MAX]
