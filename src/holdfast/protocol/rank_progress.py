"""Observations of workers, as plain data: their progress, as agents read it from the board; the view of the job;
samples of their stacks and of the kernel's counters; findings about hangs.

The coordinator gets the function that makes findings as a parameter, like the judge of failures (diagnosis/hangs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Age of the coordinator."""
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
