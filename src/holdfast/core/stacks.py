"""Where a worker is: stacks and what the kernel says of it, as its agent collected them. Plain data, sent between nodes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.core.bounds import Count, Line, LocalRank, Seconds

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
