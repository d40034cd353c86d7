"""Observations of workers, as plain data: their progress, as agents read it from the board; the view of the job;
samples of their stacks and of the kernel's counters; findings about hangs. Below: where threads are, from the text of a
stack dump. Pure: text in, frames out.

Python's faulthandler writes for all threads:

    Thread 0x00007f41168b56c0 (most recent call first):
      File "/srv/train.py", line 42 in step
      …
    Current thread 0x00007f4117435b80 (most recent call first):
      …

Threads are listed newest first, so the main thread is last. At most 100 threads are written, then `...`; the main
thread may be missing then. "Current" is the thread in which the signal's handler ran; the kernel prefers the main
thread. At most 100 frames of a thread are written, the innermost ones. Python 3.13 adds the thread's name after its
number.

A dump of a single thread begins with `Stack (most recent call first):`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta, Struct

from holdfast.protocol.policy import RANKS_MAX, Count, Line, LocalRank, Rank, Seconds


class Stage(Enum):
    """Stage that a worker has reached in its generation."""

    STARTING = "starting"
    """It imports modules and runs the script's set-up."""
    MEETING = "meeting"
    """It has asked for its process group and is not connected to the store yet."""
    GROUPING = "grouping"
    """It is connected to the store, and the group is not ready yet."""
    READY = "ready"
    """The group is ready, or was never asked for; no step yet."""
    STEPPING = "stepping"
    """It has made a step or a beat."""
    DONE = "done"
    """It has ended with 0."""
    SPARE = "spare"
    """It waits, and makes no steps: `ht.survive(ranks=…)` uses fewer ranks than there are."""


class Standing(Enum):
    """Role of a rank in a hang that was reported."""

    HUNG = "hung"
    """The other ranks wait for it."""
    WAITING = "waiting"
    STILL = "still"
    """Neither: it does not move."""


class RankProgress(Struct, frozen=True, array_like=True):
    """Progress of one worker of a running generation."""

    local_rank: LocalRank
    stage: Stage
    steps: Count = 0
    """Number of optimizer steps; if there are none, of `beat()`s."""
    age_s: Seconds = 0.0
    """Time since the newest step or beat (before the first: since the worker's start), by its node's clock."""
    own_s: Seconds = 0.0
    """Own part of all its steps together: from the end of the previous step to the start of backward. Does not contain
    waits for other ranks."""
    beats: Count = 0
    """Number of `beat()`s, also if there are optimizer steps: an evaluation may make beats only."""
    job_step: Count = 0
    """The step of the whole job, over all restarts, plus 1; 0: the script does not report it."""
    pid: Count = 0
    """Its process; 0: unknown."""


class RankView(Struct, frozen=True, kw_only=True):
    rank: int
    local_rank: int
    stage: Stage
    steps: int
    """Steps of the whole job, over all restarts, if its script reports them (`counts_job`); else since the worker's
    start."""
    step_s: float
    """Median duration of a step over the last minute; 0 while unknown."""
    own_s: float
    """The same for its own part, before backward."""
    age_s: float
    standing: Standing | None = None
    """None: no hang was reported, or it is over."""
    place: str = ""
    """Its place in words, if `standing` is set."""
    pid: int = 0
    """Its process on its node; 0: unknown."""
    counts_job: bool = False


class NodeView(Struct, frozen=True, kw_only=True):
    member: str
    host: str
    group_rank: int | None
    """Its rank among the nodes; None: it is not in the world (spare, on host back-off, joining)."""
    state: str
    """Its state in words: `running`, `spare`, `starting`, `stopping` …"""
    heard_s: float
    """Time since its last message, by the coordinator's clock."""
    ranks: tuple[RankView, ...] = ()
    more: dict[str, Any] = {}
    """Figures of extensions about this node, by the extension's name: `load`."""


class JobView(Struct, frozen=True, kw_only=True):
    """The coordinator's knowledge about the job, for users."""

    run_id: str
    phase: str
    generation: int
    restarts: int
    restarts_max: int
    world_size: int
    since_s: float
    """Duration of the present phase."""
    job_s: float
    """Age of the job; with etcd or another storage: of the coordinator."""
    training_s: float
    """Effective training time: the part of job_s in which a generation was making steps."""
    why: str = ""
    """The reason for the end of the last generation; empty: unknown, or there was none."""
    nodes: tuple[NodeView, ...] = ()
    nodes_min: int = 0
    """Number of nodes with which the job runs at least; 0: unknown."""
    nodes_max: int = 0
    """Number of nodes that the job can use at most; 0: unknown."""
    nodes_wanted: int = 0
    """Number of nodes that should exist now: those that it can use, and those that are there but take no part; 0:
    unknown."""
    notices: tuple[str, ...] = ()
    """Current hangs and stragglers, in words."""
    job_step: int = 0
    """The step of the whole job, over all restarts, if job_steps is set."""
    job_steps: int = 0
    """Number of steps of the whole job; 0: the script does not report it."""
    left_s: float = 0.0
    """Time for the steps that are left, at the present rate; 0: unknown."""
    spares: tuple[int, ...] = ()
    """The ranks that wait as spares."""
    spares_why: str = ""
    """The reason for that, in words."""
    more: dict[str, Any] = {}
    """Figures of extensions about the job, by the extension's name."""


FRAMES_MAX = 64
THREADS_MAX = 8
"""Limit of threads of one worker, without the main thread."""
THREAD_FRAMES_MAX = 16


class Frame(Struct, frozen=True, array_like=True):
    file: str
    line: Line
    function: str


Thread = Annotated[tuple[Frame, ...], Meta(max_length=THREAD_FRAMES_MAX)]
Threads = Annotated[tuple[Thread, ...], Meta(max_length=THREADS_MAX)]


class KernelWait(Enum):
    """The kind of thing that a thread waits for, by its system call."""

    UNKNOWN = "unknown"
    """It runs, or the system call cannot be read."""
    SLEEP = "sleep"
    THREAD = "thread"
    """It waits for another thread of its process: a lock, a condition, an event."""
    CHILD = "child"
    """It waits for the end of a child, or for data from a pipe."""
    SOCKET = "socket"
    """It waits for one connection."""
    OTHER = "other"


class Polling(Enum):
    """The kind of thing that a loop polls that sleeps in between, by the source of the program."""

    NOTHING = "nothing"
    """There is no such loop, or nothing shows that it polls anything."""
    OUTSIDE = "outside"
    """A file, a service, a command: things that others change."""
    RANKS = "ranks"
    """Communication: an operation that is under way, a key in the store."""
    CHILD = "child"
    THREADS = "threads"
    RETRY = "retry"
    """An attempt that fails: it sleeps in an `except`."""
    SPIN = "spin"
    """It does not sleep, and does nothing between two polls."""


COLLECTIVES_MAX = 16
"""Limit of the collectives of one worker: two of each process group."""
COLLECTIVE_CHARACTERS_MAX = 80
SPANS_MAX = 8
"""Limit of the spans by which the ranks of a group are described."""
Step = Annotated[int, Meta(ge=1, le=RANKS_MAX)]
CollectiveText = Annotated[str, Meta(max_length=COLLECTIVE_CHARACTERS_MAX)]


class Collective(Struct, frozen=True, array_like=True):
    """One operation of a process group, as torch's flight recorder has it."""

    group: CollectiveText
    """The group's name, which is the same on all its ranks; `default_pg`: the default group."""
    number: Count
    """Its number among the group's collectives (or among its sends and receives), counted from 1."""
    operation: CollectiveText
    """`all_reduce`; `recv 0<-1` for an operation between two ranks."""
    tensors: CollectiveText = ""
    """The sizes and types that this rank gives: `[4096] float32`."""
    done: bool = False
    between_two: bool = False
    """It is a send or a receive."""
    members: Annotated[tuple[tuple[Rank, Rank, Step], ...], Meta(max_length=SPANS_MAX)] = ()
    """The ranks of its group, as spans of first rank, last rank and step; empty: all ranks, or unknown."""

    def involves(self, rank: int) -> bool:
        """Whether this rank belongs to its group, as far as that is known."""
        return not self.members or any(rank in range(first, last + 1, step) for first, last, step in self.members)

    @property
    def size(self) -> int:
        """The number of ranks of its group; 0: all, or unknown."""
        return sum(len(range(first, last + 1, step)) for first, last, step in self.members)


class RankSample(Struct, frozen=True, array_like=True):
    """One sample of one worker."""

    local_rank: LocalRank
    pid: Count
    state: str
    """The kernel's letter for its main thread: R runs, S sleeps, D in the kernel, T stopped, Z dead; empty: gone."""
    cpu_s: Seconds
    """CPU time of all its threads so far."""
    frames: tuple[Frame, ...] = ()
    """Frames of the main thread, innermost first, at most FRAMES_MAX; empty: no answer (stopped, no Python)."""
    note: str = ""
    """Another explanation, in words: `its data loader's process 4711 is stopped`."""
    file: str = ""
    """The file with the stacks of all threads, on its node."""
    source: str = ""
    """The line of the program that it executes, as the file has it now; empty: unreadable."""
    main_cpu_s: Seconds = 0.0
    """CPU time of its main thread so far."""
    moved_bytes: Count = 0
    """Bytes of files and pipes read and written so far, by it and its ended children. Without the stacks it wrote."""
    children_cpu_s: Seconds = 0.0
    """CPU time of its descendants so far, ended ones included."""
    children_bytes: Count = 0
    """Bytes read and written so far by its living descendants."""
    disk_bytes: Count = 0
    """Bytes read and written so far by all disks and network file systems of its machine."""
    at_s: Seconds = 0.0
    """Time of the sample, by its machine's monotonic clock."""
    threads: Threads = ()
    """Other threads that run code of the program, as far as the dump has them: innermost frame first."""
    talked_bytes: Count = 0
    """Bytes sent and received over TCP so far, by it and its descendants, as far as their connections were seen."""
    wanted_s: Seconds = 0.0
    """CPU time of all its threads so far, plus the time for which they waited for a CPU."""
    children_wanted_s: Seconds = 0.0
    """The same for the main threads of its descendants, as far as they were seen."""
    stolen_s: Seconds = 0.0
    """Time so far for which its machine, a virtual one, had no processor while it needed one: the mean over its
    processors."""
    waits_for: KernelWait = KernelWait.UNKNOWN
    child_awaited: bool = False
    """One of its threads waits for a child."""
    main_moved_bytes: Count = 0
    """The part of moved_bytes that its main thread has read and written."""
    main_wrote_bytes: Count = 0
    """The part of main_moved_bytes that was written; its output counts."""
    awaited_bytes: Count = 0
    """The part of talked_bytes of the connections for which the main thread has waited."""
    threads_awaited_bytes: Count = 0
    """The same for its other threads: a thread that sends something now and then sleeps in between."""
    broken_child: bool = False
    """A process that it has started is stopped or dead."""
    handles: str = ""
    """The exception that its main thread handles, and where it was raised; empty: none, or unknown."""
    polled: Polling = Polling.NOTHING
    polls: str = ""
    """The call with which it polls, as the program writes it: `os.path.exists`."""
    collectives: Annotated[tuple[Collective, ...], Meta(max_length=COLLECTIVES_MAX)] = ()
    """The oldest collective that is not done, and the newest that is, of each process group; the newest group comes
    first. Empty: it did not answer, or its torch is older than 2.15."""


class RankStack(Struct, frozen=True, kw_only=True):
    """The place of one rank of the job."""

    rank: int
    host: str
    local_rank: int
    pid: int
    state: str
    cpu_s: float
    stack: int
    """Index of its stack in StacksView.stacks; -1: it did not answer."""
    note: str = ""
    file: str = ""
    source: str = ""
    threads: tuple[tuple[Frame, ...], ...] = ()


class StacksView(Struct, frozen=True, kw_only=True):
    """The places of all ranks of a job. Equal stacks are stored once."""

    run_id: str
    generation: int
    world_size: int
    ranks: tuple[RankStack, ...] = ()
    stacks: tuple[tuple[Frame, ...], ...] = ()
    silent: tuple[str, ...] = ()
    """Hosts that did not answer in time."""


class HangKind(Enum):
    HUNG = "hung"
    """Some ranks do not join the call in which the others wait."""
    STUCK = "stuck"
    """All ranks wait in communication at one place: no culprit can be named."""
    PAUSED = "paused"
    """No rank waits for another, or the awaited rank may be working: evaluation, saving, a sleep. No hang by itself."""
    MOVING = "moving"
    """A rank for which the others wait is working: no hang while that lasts."""


class RankStory(Struct, frozen=True):
    """One rank and its samples during an examination."""

    rank: int
    host: str
    local_rank: int
    age_s: float
    """Time since its last step or beat, at the newest sample."""
    samples: tuple[RankSample, ...] = ()
    """Oldest first."""


class RanksAtPlace(Struct, frozen=True, array_like=True):
    """Ranks at one place, and the place in words."""

    ranks: tuple[Rank, ...]
    words: str
    standing: Standing = Standing.STILL


class Finding(Struct, frozen=True, kw_only=True):
    kind: HangKind
    code: str
    """The code of the verdict, such as HF240; empty: there is nothing to explain."""
    text: str
    """One or two lines."""
    culprits: tuple[Rank, ...] = ()
    """The ranks that caused it."""
    groups: tuple[RanksAtPlace, ...] = ()
    """The culprits first, then by size."""
    signature: str = ""
    """Equal in two findings if and only if no rank has moved in between."""
    busy: bool = False
    """A missing rank computes, perhaps in native code: reported late, and not ended while that lasts."""
    slow: bool = False
    """The awaited rank may only be slow: reported late."""
    lively: bool = False
    """Something shows that the awaited rank may go on by itself: it polls, its data are only late, a thread is at work.
    It is ended late."""
    collectives: str = ""
    """One line: the collectives in which the ranks are, as torch's flight recorder has them; empty: not known."""


Examine = Callable[[Sequence[RankStory]], Finding]

RESUMES = " (kill -CONT {pid} lets it go on)"
"""Part of a finding's text about a rank that a signal has stopped."""
_RESUMES = re.compile(re.escape(RESUMES).replace(re.escape("{pid}"), r"\w+"))


def when_over(text: str) -> str:
    """The text of a finding without what to do while the hang lasts: a generation that ends takes its processes along.

    >>> when_over("rank 1 on a is stopped by a signal (kill -CONT 77 lets it go on) for 71 s")
    'rank 1 on a is stopped by a signal for 71 s'
    """
    return _RESUMES.sub("", text)


DUMP_BYTES_MAX = 1_000_000
"""Limit of one worker's dump; 100 threads of 100 frames need less."""

_THREAD = re.compile(r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+.*|Stack) \(most recent call first\):$")
_FRAME = re.compile(r'^ {2}File (?:"(.*)"|(\?\?\?)), line (\d{1,9}|\?\?\?) in (.*)$')
_OWN = ("/holdfast/worker/", "/holdfast/extensions/")
"""Frames of the bootstrap and of its wrappers around torch's functions; they are not the program's."""
TORCH = (
    r"-packages/torch/|/torch/(?:_|(?:accelerator|amp|ao|autograd|backends|compiler|cpu|cuda|distributed|distributions"
    r"|export|fft|func|futures|fx|jit|linalg|masked|monitor|mps|mtia|multiprocessing|nested|nn|onnx|optim|package|profiler"
    r"|quantization|signal|sparse|special|testing|utils|xpu)/|(?:functional|hub|library|overrides|random|serialization"
    r"|storage)\.py$)"
)
"""Pattern of torch's files, installed or in a checkout. A program or its environment may be in a folder `torch` too:
~/torch/train.py, /opt/conda/envs/torch/lib/python3.11/threading.py."""
_MACHINERY = re.compile(
    rf"""^<(?!stdin>|string>)                # <frozen runpy>
      | /lib(64)?/python\d[\d.]*/(?!(site|dist)-packages/)
      | {TORCH}
      | /holdfast/(train|worker|extensions|launching)/""",
    re.VERBOSE,
)
_INSTALLED = re.compile(r"/(site|dist)-packages/")


def main_thread(text: str) -> tuple[Frame, ...]:
    """The main thread's frames, innermost first, at most FRAMES_MAX; empty if it has none or the text is no dump."""
    threads, main = _threads(text)
    return _own(threads[main])[:FRAMES_MAX] if main is not None else ()


def program_threads(text: str) -> tuple[tuple[Frame, ...], ...]:
    """The other threads with a frame of the program, newest first: at most THREADS_MAX, each cut to its innermost
    THREAD_FRAMES_MAX frames."""
    threads, main = _threads(text)
    others = [_own(frames) for number, frames in enumerate(threads) if number != main]
    own = [frames for frames in others if any(not is_library(frame.file) for frame in frames)]
    return tuple(frames[:THREAD_FRAMES_MAX] for frames in own[:THREADS_MAX])


def _threads(text: str) -> tuple[list[list[Frame]], int | None]:
    """All threads in the order of the text, and the index of the main thread."""
    threads: list[list[Frame]] = []
    current, cut = None, False
    for line in text.splitlines():
        if _THREAD.match(line):
            current = len(threads) if line.startswith("Current") and current is None else current
            threads.append([])
        elif threads and (frame := _frame(line)) is not None:
            threads[-1].append(frame)
        elif line == "...":  # threads were left out; for frames that were left out it is indented
            cut = True
    if not threads:
        return threads, None
    return threads, current if cut else len(threads) - 1


def _own(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    return tuple(frame for frame in frames if not any(each in frame.file for each in _OWN))


def _frame(line: str) -> Frame | None:
    match = _FRAME.match(line)
    if match is None:
        return None
    file, unknown, number, function = match.groups()
    return Frame(file or unknown or "", int(number) if number.isdigit() else 0, function)


def stack_text(frames: Sequence[Frame], source: str) -> str:
    """The frames as Python writes them, the most recent call last. `source`: the line of the program's innermost
    frame."""
    own = program_frame(frames)
    lines = []
    for index, frame in reversed(list(enumerate(frames))):
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        lines += [f"    {source.strip()}"] if index == own and source else []
    return "\n".join(["Stack (most recent call last):", *lines]) if lines else ""


def is_library(file: str) -> bool:
    """Whether the file belongs to Python, torch, holdfast or an installed package, and not to the program."""
    return _MACHINERY.search(file) is not None or _INSTALLED.search(file) is not None


def program_frame(frames: Sequence[Frame]) -> int | None:
    """The index of the innermost frame of the program; None: there is none.

    If the program itself is an installed package, it is the innermost frame outside of Python, torch and holdfast.
    """
    own = [index for index, frame in enumerate(frames) if not is_library(frame.file)]
    own = own or [index for index, frame in enumerate(frames) if not _MACHINERY.search(frame.file)]
    return own[0] if own else None
