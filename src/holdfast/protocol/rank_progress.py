"""What is seen of the workers, as plain data: how far they are, as their agents read it from the board, and the job as its
coordinator sees it; where they are (stacks, and what the kernel says); what was found when the job seemed to stand still.

The function that makes a finding is given to the coordinator, as the judge of failures is: see diagnosis/hangs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.bounds import Count, Line, LocalRank, Rank, Seconds


class Stage(Enum):
    """How far a worker has come in its generation."""

    STARTING = "starting"
    """It imports, and sets up what the script sets up first."""
    MEETING = "meeting"
    """It asks for its process group, and is not connected to the store yet."""
    GROUPING = "grouping"
    """It is connected to the store, and the group does not stand yet."""
    READY = "ready"
    """The group stands, or it was never asked for; no step yet."""
    STEPPING = "stepping"
    """It has made a step, or a beat."""
    DONE = "done"
    """It has ended with 0."""


class Standing(Enum):
    """What a rank does in a hang that was reported."""

    HUNG = "hung"
    """The others wait for it."""
    WAITING = "waiting"
    STILL = "still"
    """Neither: it stays where it is."""


class RankProgress(Struct, frozen=True, array_like=True):
    """One worker of a generation that runs."""

    local_rank: LocalRank
    stage: Stage
    steps: Count = 0
    """Of an optimizer; `beat()`s where there are none."""
    age_s: Seconds = 0.0
    """Since the newest step or beat (before the first: since the worker was started), by its node's clock."""
    own_s: Seconds = 0.0
    """Of all its steps together: from the end of the step before to the beginning of backward. What others make it wait
    for is not in it."""
    beats: Count = 0
    """`beat()`s, also where an optimizer makes steps: an evaluation may have nothing else to show."""


class RankView(Struct, frozen=True, kw_only=True):
    rank: int
    local_rank: int
    stage: Stage
    steps: int
    step_s: float
    """Median duration of a step over the last minute; 0 while unknown."""
    own_s: float
    """The same of its own part, before backward."""
    age_s: float
    standing: Standing | None = None
    """None: no hang was reported, or it is over."""
    place: str = ""
    """With `standing`, where it is, in words."""


class NodeView(Struct, frozen=True, kw_only=True):
    member: str
    host: str
    group_rank: int | None
    """None: not in the world (spare, on host back-off, arriving)."""
    state: str
    """In words: `running`, `spare`, `starting`, `stopping` …"""
    heard_s: float
    """Since its last message, by the coordinator's clock."""
    ranks: tuple[RankView, ...] = ()


class JobView(Struct, frozen=True, kw_only=True):
    """What the coordinator knows, for people."""

    run_id: str
    phase: str
    generation: int
    restarts: int
    restarts_max: int
    world_size: int
    since_s: float
    """The phase has lasted so long."""
    job_s: float
    """The coordinator has lived so long."""
    training_s: float
    """Of that, how long some generation was running with steps being made: effective training time."""
    why: str = ""
    """Of the last end of a generation."""
    nodes: tuple[NodeView, ...] = ()
    notices: tuple[str, ...] = ()
    """Hangs and stragglers that stand now, in words."""


FRAMES_MAX = 64
THREADS_MAX = 8
"""Of one worker, beside the main thread."""
THREAD_FRAMES_MAX = 16


class Frame(Struct, frozen=True, array_like=True):
    file: str
    line: Line
    function: str


Thread = Annotated[tuple[Frame, ...], Meta(max_length=THREAD_FRAMES_MAX)]
Threads = Annotated[tuple[Thread, ...], Meta(max_length=THREADS_MAX)]


class RankSample(Struct, frozen=True, array_like=True):
    """One look at one worker."""

    local_rank: LocalRank
    pid: Count
    state: str
    """Of its main thread, the kernel's letter: R runs, S sleeps, D in the kernel, T stopped, Z dead; empty: gone."""
    cpu_s: Seconds
    """Processor time that all its threads have used so far."""
    frames: tuple[Frame, ...] = ()
    """Of the main thread, innermost first, at most FRAMES_MAX; empty when it did not answer (stopped, no Python)."""
    note: str = ""
    """What else explains it, in words: `its data loader's process 4711 is stopped`."""
    file: str = ""
    """On its node: the whole text, all threads."""
    source: str = ""
    """The program's own line that it executes, as its file has it now; empty when that cannot be read."""
    main_cpu_s: Seconds = 0.0
    """Processor time that its main thread has used so far."""
    moved_bytes: Count = 0
    """Read and written so far, by all its threads and by children that have ended: files, pipes. Without its own stacks."""
    children_cpu_s: Seconds = 0.0
    """Processor time that the processes below it have used so far, those that have ended included."""
    children_bytes: Count = 0
    """Read and written so far by those that live."""
    disk_bytes: Count = 0
    """Read and written so far by all disks and network file systems of its machine."""
    at_s: Seconds = 0.0
    """When it was taken, by its machine's monotonic clock."""
    threads: Threads = ()
    """Its other threads in which the program's own code is at work, as far as it wrote them: innermost frame first."""
    talked_bytes: Count = 0
    """Sent and received over TCP so far, by it and by the processes below it, as far as connections were seen."""
    wanted_s: Seconds = 0.0
    """Processor time that all its threads have used so far, and time for which they waited for a processor."""
    children_wanted_s: Seconds = 0.0
    """The same of the main threads of the processes below it, as far as they were seen."""


class RankStack(Struct, frozen=True, kw_only=True):
    """Where one rank of the job is."""

    rank: int
    host: str
    local_rank: int
    pid: int
    state: str
    cpu_s: float
    stack: int
    """Its number in StacksView.stacks; -1: it did not answer."""
    note: str = ""
    file: str = ""
    source: str = ""
    threads: tuple[tuple[Frame, ...], ...] = ()


class StacksView(Struct, frozen=True, kw_only=True):
    """Where all ranks of a job are now. Equal stacks are told once."""

    run_id: str
    generation: int
    world_size: int
    ranks: tuple[RankStack, ...] = ()
    stacks: tuple[tuple[Frame, ...], ...] = ()
    silent: tuple[str, ...] = ()
    """Hosts that did not answer in time."""


class HangKind(Enum):
    HUNG = "hung"
    """Somebody does not come to what the others wait for."""
    STUCK = "stuck"
    """All wait in communication, at one place: nobody can be named."""
    PAUSED = "paused"
    """Nobody waits for anybody, or for somebody who may well work: evaluation, saving, a sleep. No alarm by itself."""
    MOVING = "moving"
    """Somebody for whom the others wait works: no hang while that lasts."""


class RankStory(Struct, frozen=True):
    """One rank as it was seen in a row of looks."""

    rank: int
    host: str
    local_rank: int
    age_s: float
    """Since its last step or beat, at the newest look."""
    samples: tuple[RankSample, ...] = ()
    """Oldest first."""


class RanksAtPlace(Struct, frozen=True, array_like=True):
    """Ranks that were found at one place, and the place in words."""

    ranks: tuple[Rank, ...]
    words: str


class Finding(Struct, frozen=True, kw_only=True):
    kind: HangKind
    code: str
    """HF240 …; empty where there is nothing to explain."""
    text: str
    """One or two lines."""
    culprits: tuple[Rank, ...] = ()
    """Ranks."""
    groups: tuple[RanksAtPlace, ...] = ()
    """The odd ones first, then by size."""
    signature: str = ""
    """Equal in two findings if and only if every rank stands where it stood."""
    busy: bool = False
    """Somebody who does not come computes, in what may be native code: reported late, not ended while that lasts."""
    slow: bool = False
    """What keeps the others waiting may only be slow: reported late."""


Examine = Callable[[Sequence[RankStory]], Finding]
