"""Reports how workers ended, in the order of the ends, with what explains each end: its error file, its last output,
and facts of this machine.

A failure is reported at once with rank and exit status. Its evidence is read while the other workers are being stopped
or go on, in a thread, because a disk may stall. A worker whose program raised is reported while its process still runs
its exit functions, and again when the process has ended.

All evidence is untrusted: reads are bounded, and torn files are tolerated. Facts of the machine (interfaces, room in
/dev/shm and on disks, limits, a port's owner) are collected only when a worker has failed, and only for what its output
mentions; they never raise.

Executes; judges nothing: see diagnosis for verdicts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, ValidationError, convert, structs

from holdfast import own_folders
from holdfast.agent.events import Event, FailureRead, WorkerEnded, WorkerRaised
from holdfast.journal import Journal
from holdfast.linux import VIRTUAL, GroupLimits, addresses, default_interface, own_groups
from holdfast.protocol.exit_codes import EXIT_FAILURE
from holdfast.protocol.outcome import TEXT_BYTES_MAX, Failure
from holdfast.protocol.policy import COUNT_MAX, ITEMS_MAX
from holdfast.protocol.rank_progress import Collective
from holdfast.supervisor.log_router import LogRouter
from holdfast.supervisor.log_spool import Spool, WorkerStreams
from holdfast.traceback_text import cut_middle, shortened

Result = TypeVar("Result")
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
    can_go_on: bool = False
    """It can go on in another generation."""
    ready: bool = False
    """It is a replacement and waits for its first place."""
    stepped: int = 0
    """The newest generation that it has joined from another one and in which it has done a step."""
    waits_for: int = 0
    """The generation in which it waits for its place; 0: it does not wait."""
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
        left = await in_thread(lambda: left_with_zero(bare, worker.streams)) if bare.exit_code == 0 else None
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
        failure = await in_thread(lambda: with_evidence(bare, worker.streams, out_of_memory=self._oom.struck))
        self._journal.write("worker_failed", generation=died_in, **fields_of(failure))
        # The console holds the traceback back until it knows whether the last screen shows it.
        self._router.failed(failure.rank, failure.traceback)
        self._emit(FailureRead(died_in, worker.local_rank, failure))


async def in_thread(read: Callable[[], Result]) -> Result:
    """What this returns, which reads a disk. Where no thread can be started, perhaps the reason why workers failed, it
    reads here: files of some lines."""
    try:
        return await asyncio.to_thread(read)
    except RuntimeError:
        return read()


# --- what is known at once --------------------------------------------------------------------------------------------

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


# --- what a worker has left: its error file and its last output -------------------------------------------------------

ERROR_FILE_BYTES_MAX = 4 * 1024 * 1024
MESSAGE_BYTES_MAX = 4096
CALL_CHARACTERS_MAX, TENSORS_MAX = 200, 16
TAIL_LINES_MAX = 100
LEFT_LINES_MAX, LEFT_CHARACTERS_MAX = 5, 1024
"""Limits for the output of a worker that ended with 0, which is sent with every such end, and for the stdout of one
that ended without an exception."""


class Recorded(Struct, frozen=True, kw_only=True):
    """The content of an error file; fields are empty where the file lacks them."""

    error_type: str = ""
    message: str = ""
    traceback: str = ""
    timestamp: int = 0
    collective: str = ""
    tensors: dict[str, str] = {}
    collectives: tuple[Collective, ...] = ()


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
    # A worker may have been killed while it wrote the file, and a program may write anything there.
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
        message=cut_middle(text, MESSAGE_BYTES_MAX),
        traceback=shortened(_text(extra.get("py_callstack", "")), bytes_max=TEXT_BYTES_MAX),
        timestamp=_as_int(timestamp),
        collective=_text(extra.get("collective", ""))[:CALL_CHARACTERS_MAX],
        tensors=_tensors(extra.get("tensors")),
        collectives=_collectives(extra.get("recorded_collectives")),
    )


def _tensors(value: Any) -> dict[str, str]:
    pairs = list(value.items())[:TENSORS_MAX] if isinstance(value, dict) else []
    return {_text(name)[:CALL_CHARACTERS_MAX]: _text(shape)[:CALL_CHARACTERS_MAX] for name, shape in pairs}


def _collectives(value: Any) -> tuple[Collective, ...]:
    try:
        return convert(value, tuple[Collective, ...])[:ITEMS_MAX]
    except ValidationError:  # the program has written something else there, or nothing
        return ()


def _text(value: Any) -> str:
    """The value as text that can be sent. A lone surrogate cannot: it is written as Python's own stderr does."""
    return str(value).encode(errors="backslashreplace").decode()


def _error_type(message: str) -> str:
    """`ValueError` of `ValueError: text`; empty when the message does not begin with a class name."""
    name = message.partition(":")[0]
    return name if name.replace(".", "").isidentifier() else ""


def _as_int(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
    # Larger numbers do not fit into a message.
    return number if 0 <= number <= COUNT_MAX else 0


def _as_text(path: str) -> str:
    """A printable form for people and for messages: file names need not be valid text."""
    return path.encode(errors="replace").decode()


def read_tail(spool: Spool | None) -> str:
    """The last lines of a stream, as a terminal would show them: of a line that `\\r` rewrote, only the last text."""
    if spool is None:
        return ""
    try:
        raw, size = spool.last(TEXT_BYTES_MAX)
    except OSError:
        return ""
    if size > TEXT_BYTES_MAX:
        raw = raw[raw.find(b"\n") + 1 :]  # the first line is torn
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in raw.decode(errors="replace").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines[-TAIL_LINES_MAX:])


def with_evidence(bare: Failure, streams: WorkerStreams, *, out_of_memory: Callable[[], bool]) -> Failure:
    """The failure of a worker that ended with a nonzero code, with the evidence from its files.

    `out_of_memory`: `OomWatch.struck`. It counts only for a worker that SIGKILL ended before the agent stopped it.
    """
    error_file, stderr_file = str(streams.error_file or ""), str(streams.stderr_file or "")
    recorded = read_error_file(error_file)
    stderr_tail = read_tail(streams.stderr)
    facts = bare.facts
    if not bare.after_stop:  # the words of a worker that we stopped are a consequence, and point to no cause
        facts = facts | facts_for(
            f"{recorded.message}\n{recorded.traceback}\n{stderr_tail}", bare.exit_code, stderr_file
        )
    return structs.replace(
        bare,
        error_type=recorded.error_type,
        message=recorded.message,
        traceback=recorded.traceback,
        stderr_tail=stderr_tail,
        # Programs without Python often write their error to stdout; an exception explains more.
        stdout_tail="" if recorded.message else _last_lines(read_tail(streams.stdout)),
        collective=recorded.collective,
        tensors=recorded.tensors,
        collectives=recorded.collectives,
        error_file=_as_text(error_file) if os.path.isfile(error_file) else "",
        stderr_file=_as_text(stderr_file),
        # A SIGKILL of ours must not be taken for the kernel's, whose counter is that of the whole cgroup
        # (test_out_of_memory_is_a_sigkill_that_nobody_sent).
        out_of_memory=bare.exit_code == -signal.SIGKILL and not bare.after_stop and out_of_memory(),
        timestamp=recorded.timestamp or bare.timestamp,
        facts=facts,
    )


def left_with_zero(bare: Failure, streams: WorkerStreams) -> Failure:
    """The end of a worker that exited with 0, with its last output, in case its peers still need it."""
    stderr_file = str(streams.stderr_file or "")
    # Such a worker may be the one for which the others wait (test_whoever_closed_a_connection_may_end_with_0).
    return structs.replace(
        bare,
        stderr_tail=_last_lines(read_tail(streams.stderr)),
        stdout_tail=_last_lines(read_tail(streams.stdout)),
        stderr_file=_as_text(stderr_file),
    )


def _last_lines(tail: str) -> str:
    return "\n".join(tail.splitlines()[-LEFT_LINES_MAX:])[-LEFT_CHARACTERS_MAX:]


# --- facts of this machine --------------------------------------------------------------------------------------------

SHM = "/dev/shm"
"""The file system behind the shared memory of torch's data loaders."""
MIB = 2**20
GIB = 2**30
FACT_CHARACTERS_MAX = 240
INTERFACES_SHOWN_MAX = 8
PATH = r"(?<![\w/:.])/[\w.~+=@-]+(?:/[\w.~+=@-]+)+"
"""An absolute path in the words of a failure."""
ERROR_PATHS = r"\[Errno \d+\] [^'\n]*: '([^'\n]+)'(?: -> '([^'\n]+)')?"
"""The files of an OSError, which may be relative."""
PATHS_MAX = 16
SLOW_MOUNTS = r"^(?:nfs|cifs|smb|fuse|9p|ceph|autofs|afs|glusterfs)"
"""File systems that may never answer. They are examined only if the words name a path on them."""
NO_DISKS = (
    r"^(?:proc|sysfs|cgroup2?|devpts|mqueue|securityfs|debugfs|tracefs|bpf|pstore|configfs|squashfs|iso9660|nsfs"
    r"|efivarfs)$"
)
"""File systems that keep no data of a job."""
FULL = 0.99
"""Used share of a disk from which it counts as full."""
MODULE = (
    r"\bmodule '([\w.]+)' has no|from (?:partially initialized module )?'([\w.]+)'(?! \([^)]*/(?:site|dist)-packages/)"
    r"|No module named '([\w.]+)'"
)
FILE = r'(?m)^\s*File "([^"\n]+)", line'
LIBRARY = r"/(?:site|dist)-packages\b|/lib/python3|<frozen "
PORT = r"(?i)port[:= ]{1,3}(\d{2,5})|[\]\w.]:(\d{4,5})\b"

_WORDS = {
    "interfaces": (
        "system error",
        "nccl internal error",
        "ncclinternalerror",
        "socket interface",
        "unable to find address",
        "unable to resolve",
        "no route to host",
        "unreachable",
        "client socket",
        "clients joined",
        "connectfullmesh",
        "wait timeout",
        "socketstartconnect",
    ),
    "shm": ("shared memory", "/dev/shm", "(shm)", "bus error", "dataloader worker", "</torch_"),
    "disks": (
        "no space left",
        "quota",
        "enospc",
        "file too large",
        "pytorchstreamwriter",
        "unexpected pos",
        "file write failed",
        "iostream error",
        "disk is full",
        "os error 28",
    ),
    "nofile": ("too many open files", "ancdata"),
    "pids": ("can't start new thread", "temporarily unavailable", "pthread_create", "cannot fork"),
    "memory": ("allocate", "memoryerror", "bad_alloc", "killed by signal: killed", "exited unexpectedly"),
    "port": ("address already in use", "eaddrinuse"),
    "hides": ("error: module '", "initialized module '", "cannot import name ", "no module named "),
}
"""Words, in lower case, for which a fact is collected. Not every lost connection is among them: collecting facts delays
the report of a failure."""


def facts_for(words: str, exit_code: int, log_file: str = "") -> dict[str, str]:
    """Facts by name, each a few words; empty where the words need none. `log_file`: names the disk that logs go to."""
    readers: dict[str, Callable[[], str]] = {
        "interfaces": interfaces,
        "shm": shm,
        "disks": partial(disks, os.path.dirname(log_file), words),
        "nofile": nofile,
        "pids": pids,
        "memory": memory,
        "port": partial(port, words),
        "hides": partial(hides, words),
    }
    small = words.lower()
    wanted = {name for name, signs in _WORDS.items() if any(sign in small for sign in signs)}
    if exit_code in (-signal.SIGBUS, 128 + signal.SIGBUS):  # a full /dev/shm ends a process without any word
        wanted.add("shm")
    found = {name: _fact_text(readers[name]) for name in readers if name in wanted}
    return {name: text[:FACT_CHARACTERS_MAX] for name, text in found.items() if text}


def _fact_text(fact: Callable[[], str]) -> str:
    with contextlib.suppress(Exception):  # on any error here, the failure itself must still be reported
        return fact()
    return ""


def interfaces() -> str:
    """`eth0 10.0.0.5, docker0 172.17.0.1; try NCCL_SOCKET_IFNAME=eth0`."""
    up = addresses()
    if not up:
        return "no network interface is up"
    shown = ", ".join(f"{name} {address}" for name, address in list(up.items())[:INTERFACES_SHOWN_MAX])
    # NCCL and gloo often choose a virtual interface of a container runtime, which reaches no other node.
    real = [name for name in up if name != "lo" and not name.startswith(VIRTUAL)]
    default = default_interface()
    best = default if default in real else (real[0] if real else "")
    return f"interfaces {shown}" + (
        f"; try NCCL_SOCKET_IFNAME={best}" if best else "; none but loopback and virtual ones"
    )


def shm() -> str:
    room = os.statvfs(SHM)
    return f"{SHM} has {_size(room.f_bavail * room.f_frsize)} free of {_size(room.f_blocks * room.f_frsize)}"


def disks(log_folder: str, words: str = "", mounts: str = "/proc/self/mounts") -> str:
    """The disks that the failure may concern: first of the files that the error names, then the fullest first: of other
    paths that the words name, of our own folders, and any full disk."""
    first: dict[int, str] = {}
    for place in _unwritten(words):
        with contextlib.suppress(OSError):
            # What a failed save had written is removed by now: only the size shows that there was no room.
            disk = os.statvfs(place)
            size = disk.f_blocks * disk.f_frsize
            first.setdefault(os.stat(place).st_dev, _fullness(place)[1] + (f" of {_size(size)}" if size else ""))
    named = [os.path.dirname(path) for path in re.findall(PATH, words)[-PATHS_MAX:]]
    places = [os.getcwd(), log_folder or os.getcwd(), own_folders.temporary(os.environ), os.path.expanduser("~"), SHM]
    found: dict[int, tuple[float, str]] = {}
    for place in (*places, *named):
        with contextlib.suppress(OSError):
            # One line for each disk, however many paths are on it.
            found.setdefault(os.stat(place).st_dev, _fullness(place))
    for place in mounted(mounts):
        with contextlib.suppress(OSError):
            used, text = _fullness(place)
            if used >= FULL:
                found.setdefault(os.stat(place).st_dev, (used, text))
    others = sorted((each for device, each in found.items() if device not in first), reverse=True)
    return ", ".join([*first.values(), *(text for _, text in others)])


def _unwritten(words: str) -> list[str]:
    """The folders of the files that the lines about a full disk name. If a folder is gone, the nearest one above it
    counts."""
    places: dict[str, None] = {}
    for line in words.splitlines():
        if not any(sign in line.lower() for sign in _WORDS["disks"]):
            continue
        files = [file for pair in re.findall(ERROR_PATHS, line) for file in pair if file] or re.findall(PATH, line)
        for file in files:
            folder = os.path.dirname(os.path.abspath(file))
            while not os.path.isdir(folder):
                folder = os.path.dirname(folder)
            if folder != "/":  # a path of another node leads there, too
                places.setdefault(folder)
    return list(places)[:PATHS_MAX]


def _fullness(place: str) -> tuple[float, str]:
    """The used share of a disk, and a text such as `/data 98% full`."""
    room = os.statvfs(place)
    used = 1 - room.f_bavail / room.f_blocks if room.f_blocks else 0.0
    inodes = 1 - room.f_favail / room.f_files if room.f_files else 0.0
    return max(used, inodes), f"{place} {used:.0%} full" + (f" ({inodes:.0%} of its inodes)" if inodes > used else "")


def mounted(mounts: str) -> list[str]:
    """Writable mounts that can be queried without blocking."""
    places = []
    with contextlib.suppress(OSError), open(mounts, errors="replace") as file:
        for line in file:
            _, place, kind, options, *_ = line.split()
            if not re.match(NO_DISKS, kind) and not re.match(SLOW_MOUNTS, kind) and "ro" not in options.split(","):
                places.append(place.replace("\\040", " "))
    return places


def nofile() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"at most {soft} open files (ulimit -n; up to {hard} may be asked for)"


def pids() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    group = GroupLimits()
    own = "no limit for the user" if soft == resource.RLIM_INFINITY else f"at most {soft} for the user (ulimit -u)"
    return f"{own}, {group.pids_used} of {group.pids} in the cgroup" if group.pids else own


def memory() -> str:
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    left, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    limit = GroupLimits().memory_bytes
    return f"{_size(left)} of {_size(total)} memory free" + (f", the cgroup's limit is {_size(limit)}" if limit else "")


def port(words: str) -> str:
    """The process that holds the port that the words name, if there still is one."""
    from holdfast.rendezvous.bind import who_holds

    for found in re.finditer(PORT, words):
        number = int(found[1] or found[2])
        holder = who_holds(number) if 0 < number < 65_536 else None
        if holder:
            return f"port {number} is held by {holder}"
    return ""


def hides(words: str) -> str:
    """A script file that has the name of a library, among the modules and files that the words name."""
    found = re.findall(MODULE, words)
    names = dict.fromkeys((one or other or third).partition(".")[0] for one, other, third in found)
    folders = dict.fromkeys(os.path.dirname(file) for file in re.findall(FILE, words) if not re.search(LIBRARY, file))
    for name in names:
        for own in (os.path.join(folder, name) for folder in folders):
            file = next((each for each in (f"{own}.py", f"{own}/__init__.py") if os.path.isfile(each)), "")
            if file and _is_library(name, os.path.dirname(own)):
                return f"{file} hides the library {name}"
    return ""


def _is_library(name: str, own_folder: str) -> bool:
    places = [place for place in sys.path if re.search(LIBRARY, place) and place != own_folder]
    return name in sys.stdlib_module_names or any(
        os.path.exists(os.path.join(place, each)) for place in places for each in (name, f"{name}.py")
    )


def _size(number: float) -> str:
    if number < MIB:
        return f"{number / 1024:.0f} KiB"
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"
