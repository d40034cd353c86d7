"""Observations of workers, as plain data: their progress, as agents read it from the board; the view of the job;
samples of their stacks and of the kernel's counters; findings about hangs. Below: where threads are, from the text of a
stack dump and the source of the program. Pure: text in, frames out.

The coordinator gets the function that makes findings as a parameter, like the judge of failures (diagnosis/hangs.py).

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

Python does not report which thread holds a lock. What the source shows: one thread is at `with LOCK:` or
`LOCK.acquire()`, and another one is inside a `with` of the same text, or after an `acquire()` of it in the same
function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.policy import Count, Line, LocalRank, Rank, Seconds


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


class RankView(Struct, frozen=True, kw_only=True):
    rank: int
    local_rank: int
    stage: Stage
    steps: int
    step_s: float
    """Median duration of a step over the last minute; 0 while unknown."""
    own_s: float
    """The same for its own part, before backward."""
    age_s: float
    standing: Standing | None = None
    """None: no hang was reported, or it is over."""
    place: str = ""
    """If `standing` is set: its place, in words."""


class NodeView(Struct, frozen=True, kw_only=True):
    member: str
    host: str
    group_rank: int | None
    """None: not in the world (spare, on host back-off, joining)."""
    state: str
    """In words: `running`, `spare`, `starting`, `stopping` …"""
    heard_s: float
    """Time since its last message, by the coordinator's clock."""
    ranks: tuple[RankView, ...] = ()


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
    """Why the last generation ended."""
    nodes: tuple[NodeView, ...] = ()
    notices: tuple[str, ...] = ()
    """Current hangs and stragglers, in words."""


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


class RankStack(Struct, frozen=True, kw_only=True):
    """The place of one rank of the job."""

    rank: int
    host: str
    local_rank: int
    pid: int
    state: str
    cpu_s: float
    stack: int
    """Index in StacksView.stacks; -1: it did not answer."""
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


class Operation(Struct, frozen=True, array_like=True):
    """All calls of one operation during a profile."""

    name: str
    calls: Count
    self_s: Seconds
    """Without the operations that it calls; on the device if one was used, else on the CPU."""
    total_s: Seconds


class RankProfile(Struct, frozen=True, array_like=True):
    """What a profile of one worker gave."""

    local_rank: LocalRank
    files: tuple[str, ...] = ()
    """Their paths, on its node."""
    operations: tuple[Operation, ...] = ()
    """The most expensive ones, by self_s."""
    why: str = ""
    """Why there is no profile by torch; empty: there is."""
    note: str = ""
    """Why there is no flame graph although py-spy is installed."""


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


class Finding(Struct, frozen=True, kw_only=True):
    kind: HangKind
    code: str
    """HF240 …; empty: there is nothing to explain."""
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


Examine = Callable[[Sequence[RankStory]], Finding]


DUMP_BYTES_MAX = 1_000_000
"""Limit of one worker's dump; 100 threads of 100 frames need less."""

_THREAD = re.compile(r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+.*|Stack) \(most recent call first\):$")
_FRAME = re.compile(r'^ {2}File (?:"(.*)"|(\?\?\?)), line (\d{1,9}|\?\?\?) in (.*)$')
_OWN = "/holdfast/worker/"
"""Frames of the bootstrap and of its wrappers around torch's functions; they are not the program's."""
_MACHINERY = re.compile(
    r"""^<(?!stdin>|string>)                # <frozen runpy>
      | /lib(64)?/python\d[\d.]*/(?!(site|dist)-packages/)
      | /torch/
      | /holdfast/(train|worker|launching)/""",
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
    return tuple(frame for frame in frames if _OWN not in frame.file)


def _frame(line: str) -> Frame | None:
    match = _FRAME.match(line)
    if match is None:
        return None
    file, unknown, number, function = match.groups()
    return Frame(file or unknown or "", int(number) if number.isdigit() else 0, function)


def is_library(file: str) -> bool:
    """Whether the file belongs to Python, torch, holdfast or an installed package, and not to the program."""
    return _MACHINERY.search(file) is not None or _INSTALLED.search(file) is not None


def program_frame(frames: Sequence[Frame]) -> int | None:
    """The index of the innermost frame of the program; None: there is none.

    If the program itself is an installed package: of the innermost frame outside of Python and torch.
    """
    own = [index for index, frame in enumerate(frames) if not is_library(frame.file)]
    own = own or [index for index, frame in enumerate(frames) if not _MACHINERY.search(frame.file)]
    return own[0] if own else None


_NAMES = (ast.Name, ast.Attribute, ast.Subscript)
"""Expressions that usually name a lock; `with open(path)` does not."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def wanted_at(tree: ast.AST, line: int) -> str:
    """The lock that this line acquires, as the program writes it; empty: none."""
    for node in ast.walk(tree):
        taken = ""
        if isinstance(node, ast.With) and node.lineno <= line < max(node.lineno + 1, node.body[0].lineno):
            taken = next(_locks(node), "")
        elif isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno):
            taken = _called(node, "acquire")
        if taken:
            return taken
    return ""


def is_inside(tree: ast.AST, line: int, lock: str) -> bool:
    """Whether a thread at this line is inside a `with` of this lock, or after its `acquire()` and before its end."""
    held_since, released = 0, 0
    for node in _of_one_function(_function_at(tree, line)):
        if isinstance(node, ast.With) and node.body[0].lineno <= line <= (node.end_lineno or node.lineno):
            if lock in _locks(node):
                return True
        elif isinstance(node, ast.Call) and (node.end_lineno or node.lineno) < line:
            if _called(node, "acquire") == lock:
                held_since = max(held_since, node.lineno)
            elif _called(node, "release") == lock:
                released = max(released, node.lineno)
    return held_since > released


def _locks(node: ast.With) -> Iterator[str]:
    return (ast.unparse(item.context_expr) for item in node.items if isinstance(item.context_expr, _NAMES))


def _called(node: ast.Call, method: str) -> str:
    """`self.lock` for `self.lock.acquire()`; empty: another call."""
    called = node.func
    return ast.unparse(called.value) if isinstance(called, ast.Attribute) and called.attr == method else ""


def _function_at(tree: ast.AST, line: int) -> ast.AST:
    """The innermost function around a line; the module if there is none."""
    found = tree
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, _FUNCTIONS) and node.lineno <= line <= (node.end_lineno or node.lineno):
            found = node
    return found


def _of_one_function(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run in one frame: without the functions and classes defined inside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _FUNCTIONS):
            yield child
            yield from _of_one_function(child)
