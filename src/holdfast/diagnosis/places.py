"""Determines from the samples of one rank (stacks, CPU time, input and output) where it is and whether it moves.

Pure; hangs.py compares ranks. "Children" are all processes below the rank's. A function of samples without a subject
in its name is about the rank: `copies` is "the rank copies".

The library frames inside of the program's innermost frame show what a rank does: that line of the program called them.
C functions have no frames, so `time.sleep(9)`, `work.wait()` and `loss.item()` are recognised by the text of the
program's line.

What counts as work depends on what the main thread waits for:

| the main thread                                    | its own work | other threads    | processes below it |
|----------------------------------------------------|--------------|------------------|--------------------|
| has no Python stack, or waits for its data loader  | is work      | are work         | are work           |
| runs, or waits for something else                  | is work      | are work         | may be work        |
| waits for a child                                  | is work      | are noise        | are work           |
| waits for another thread                           | is work      | may be work      | may be work if a   |
|                                                    |              |                  | thread waits for   |
|                                                    |              |                  | one                |
| waits for a lock                                   | is work      | may be work      | are noise          |
| waits for one connection                           | is work      | are noise        | may be work        |
| sleeps in a loop that polls                        | may be work  | may be work      | may be work        |
| sleeps                                             | may be work  | are noise        | are noise          |

Of a data loader's processes only input and output are work: they may compute for ever without a batch. A thread that
sends metrics and a process that takes samples of the machine go on for ever, whatever the rank does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from msgspec import Struct, structs

from holdfast.diagnosis.collectives import advance
from holdfast.protocol.rank_progress import (
    RESUMES,
    Frame,
    KernelWait,
    Polling,
    RankSample,
    RankStory,
    Standing,
    is_library,
    program_frame,
)

GAP_S = 2.0
"""Time between two samples up to which the limits below apply as they are. For a longer gap they grow in proportion."""
BUSY_S = 0.15
"""CPU time between two samples up to which a rank may only wait: its idle threads need as much."""
MAIN_BUSY_S = 0.06
"""CPU time of the main thread between two samples up to which it may only wait. It has no idle work: an evaluation in
short steps needs 0.1 s, a loop that polls every 10 ms needs 0.01 s."""
WANTED_S = 0.8
"""CPU time, plus the time of waiting for a CPU, between two samples up to which a rank may only wait: more shows a
computing rank on an overloaded machine."""
LOST_SHARE_MAX = 0.9
"""Largest share of the time between two samples that counts as time without a CPU."""
STIRS_S = 0.025
"""CPU time of the main thread between two samples that a polling loop needs at most."""
COPIED_BYTES = 1 << 20
"""Bytes between two samples that logs, heartbeats and messages of loaders read and write at most."""
SAVED_BYTES = 64 << 10
"""Bytes between two samples above which a rank that does not wait for others works, its children included: a slow save,
a slow download."""
TALKED_BYTES = 4 << 10
"""Bytes sent and received between two samples above which a rank that does not wait for others works, its children
included: a slow download into memory. Keep-alive messages of clients are smaller."""
PRINTS = 1 << 20
"""Factor for bytes of the main thread's output, so large that one byte counts."""
LOOP_FUNCTIONS_MAX = 4
"""Number of functions in which samples can find a loop that repeats the same few calls for ever."""

_MAY_CALL = re.compile(r"[(@]")
"""Characters in a line of Python that may run native code."""

Samples = Sequence[RankSample]


def _grows(
    samples: Samples,
    value: Callable[[RankSample], float],
    limit: float,
    lost_s: Callable[[RankSample, RankSample], float] = lambda _earlier, _later: 0.0,
) -> bool:
    """Whether the value has grown by more than the limit between every two samples; False while there is only one.

    `lost_s` is the part of the time between two samples in which it could not grow. It counts as if it had grown then,
    too: a rank that computes and sleeps in turns runs less often on an overloaded machine.
    """
    pairs = list(itertools.pairwise(samples))
    return bool(pairs) and all(
        (value(later) - value(earlier)) / (1 - _share(lost_s(earlier, later), later.at_s - earlier.at_s))
        > limit * max(1.0, (later.at_s - earlier.at_s) / GAP_S)
        for earlier, later in pairs
    )


def is_busy(samples: Samples) -> bool:
    """Whether the rank uses the CPU, or would if the machine had a free one."""
    return (
        _grows(samples, lambda sample: sample.wanted_s, WANTED_S)
        or _grows(samples, lambda sample: sample.cpu_s, BUSY_S, _waited_s)
        or main_is_busy(samples)
    )


def main_is_busy(samples: Samples) -> bool:
    """Whether the main thread uses the CPU."""
    return _grows(samples, lambda sample: sample.main_cpu_s, MAIN_BUSY_S, _waited_s)


def _stolen_s(earlier: RankSample, later: RankSample) -> float:
    """Time in which other virtual machines had the CPUs of this one."""
    return later.stolen_s - earlier.stolen_s


def _waited_s(earlier: RankSample, later: RankSample) -> float:
    """Time in which the rank waited for a CPU of this machine, or this machine for its CPUs, whichever is longer."""
    return max(later.wanted_s - earlier.wanted_s - (later.cpu_s - earlier.cpu_s), _stolen_s(earlier, later))


def _share(part_s: float, whole_s: float) -> float:
    return min(max(part_s / max(whole_s, 1e-9), 0.0), LOST_SHARE_MAX)


def stirs(samples: Samples) -> bool:
    """Whether the main thread uses a little CPU time."""
    return _grows(samples, lambda sample: sample.main_cpu_s, STIRS_S)


def children_are_busy(samples: Samples) -> bool:
    return _grows(samples, lambda sample: sample.children_cpu_s, BUSY_S, _stolen_s) or _grows(
        samples, lambda sample: sample.children_wanted_s, WANTED_S
    )


def copies(samples: Samples) -> bool:
    """Whether the rank reads or writes a lot: a checkpoint, a download, a slow collective."""
    return _grows(samples, lambda sample: sample.moved_bytes, COPIED_BYTES)


def main_moves(samples: Samples) -> bool:
    """Whether the main thread reads or writes files, or the connection for which it waits, or waits for a busy disk, as
    when a file is flushed."""
    waits_for_disk = all(sample.state == "D" for sample in samples)
    return (
        _grows(samples, lambda sample: sample.main_moved_bytes, SAVED_BYTES)
        or _grows(samples, lambda sample: sample.awaited_bytes, TALKED_BYTES)
        or (waits_for_disk and _grows(samples, lambda sample: sample.disk_bytes, COPIED_BYTES))
    )


def threads_move(samples: Samples, talked_bytes: int) -> bool:
    """Whether other threads read or write, or connections of the rank and its children move more than these bytes."""
    return _grows(samples, lambda sample: sample.moved_bytes - sample.main_moved_bytes, SAVED_BYTES) or _grows(
        samples, lambda sample: sample.talked_bytes, talked_bytes
    )


def threads_are_busy(samples: Samples) -> bool:
    return _grows(samples, lambda sample: sample.cpu_s - sample.main_cpu_s, BUSY_S, _waited_s)


def children_work(samples: Samples) -> bool:
    """Whether the rank's children compute, or read or write."""
    return children_are_busy(samples) or _grows(samples, lambda sample: sample.children_bytes, SAVED_BYTES)


def prints(samples: Samples) -> bool:
    """Whether the main thread writes a little between every two samples: a progress bar."""
    return _grows(samples, lambda sample: sample.main_wrote_bytes * PRINTS, 1.0)


def changes_place(samples: Samples) -> bool:
    """Whether the samples show two places. Lines of the innermost function do not count: it may be an endless loop."""
    return len({_outline(sample) for sample in samples if sample.frames}) > 1


def polls(samples: Samples) -> tuple[Frame, ...]:
    """The frames of a polling loop over several functions; empty: there is none.

    All samples share these frames, only the calls inside of the innermost one change, and no CPU time is used.
    """
    # A rank that saves a checkpoint in many files is in state D in different calls too, without CPU time: no loop.
    if is_busy(samples) or stirs(samples) or any(sample.state == "D" for sample in samples):
        return ()
    return _in_common(samples) if _goes_around(samples) else ()


def _in_common(samples: Samples) -> tuple[Frame, ...]:
    """The outer frames that all samples share, innermost first, with the lines of the newest."""
    shared: list[Frame] = []  # the outermost first
    for frames in zip(*(sample.frames[::-1] for sample in samples if sample.frames), strict=False):
        if len({(frame.file, frame.function) for frame in frames}) > 1:
            break
        shared.append(frames[-1])
    return tuple(reversed(shared))


def _goes_around(samples: Samples) -> bool:
    """Whether the frames that all samples share may be those of a loop: no line outside of the innermost one has
    changed.

    If one has, the same function was called from another line, and the rank has moved.
    """
    stacks = [sample.frames[::-1] for sample in samples if sample.frames]
    for depth, frames in enumerate(zip(*stacks, strict=False), start=1):
        if len({(frame.file, frame.function) for frame in frames}) > 1:
            return True
        # Another line that calls another function is a loop's own: `look()` in one line, `sleep()` in the next.
        if len({frame.line for frame in frames}) > 1 and _called_alike(stacks, depth):
            return False
    return True


def _called_alike(stacks: Sequence[Sequence[Frame]], depth: int) -> bool:
    """Whether the next inner function is the same in all stacks."""
    inside = {(stack[depth].file, stack[depth].function) if len(stack) > depth else None for stack in stacks}
    return len(inside) == 1 and None not in inside


def may_be_outside_python(samples: Samples) -> bool:
    """Whether a rank that stays at one place may spend its CPU time in native code. It does not if all sampled lines
    are the program's own and call nothing: that is an endless loop."""
    return not all(
        program_frame(sample.frames) == 0 and sample.source and not _MAY_CALL.search(sample.source)
        for sample in samples
    )


def _outline(sample: RankSample) -> tuple[object, ...]:
    innermost, *others = sample.frames
    return ((innermost.file, innermost.function), *others)


FED_S = 0.1
"""CPU time of the main thread for each of which a rank that waits for its data loader counts as progressing."""


class RankActivity(Enum):
    """What a rank does."""

    COMMUNICATING = "communicating"
    """The rank waits for other ranks, or for a device that may wait for them."""
    LOADING = "loading"
    """The rank waits for data."""
    WORKING = "working"
    """The samples show progress."""
    STOPPED = "stopped"
    """A signal has stopped the rank."""
    HELD = "held"
    """A debugger has stopped the rank."""
    GONE = "gone"
    """The rank's process has ended."""
    STANDING = "standing"
    """The rank is at one place, and does none of the others."""


class Awaited(Enum):
    """What the main thread of a standing rank waits for: it decides whose work counts."""

    ANYTHING = "anything"
    """The thread has no Python stack, so it is unknown."""
    ITSELF = "itself"
    """The thread runs, or waits for something that is none of the others: a file, a device, native code."""
    CONNECTION = "connection"
    CHILD = "child"
    THREAD = "thread"
    LOCK = "lock"
    POLLING = "polling"
    NOTHING = "nothing"
    """The thread sleeps."""


class Where(Struct, frozen=True):
    """The place of a rank, and whether it may move from there."""

    story: RankStory
    doing: RankActivity
    place: str
    """Text after "is" or "waits": `in all_reduce at train.py:42`."""
    key: str
    """A text that stays equal as long as the rank does not move."""
    call: str = ""
    """The function of communication in which the rank waits; empty: it does not communicate."""
    busy: bool = False
    """Whether the rank uses the CPU."""
    may_work: bool = False
    """Whether the main thread uses a little CPU time or prints, or threads or processes for which it may wait do
    something."""
    computes: bool = False
    """Whether the rank or its data loader uses the CPU, perhaps in native code: it may make progress."""
    polls: bool = False
    """Whether the rank reads again and again something that others change: it may go on at any time."""
    loops: bool = False
    """Whether the rank repeats a few calls of its own, or the same attempt: that may end."""
    awaits_child: bool = False
    """Whether the rank waits for a process that lives: `srun`, `kubectl wait` and `ssh` use no processor here."""

    @property
    def waits(self) -> bool:
        return self.doing in (RankActivity.COMMUNICATING, RankActivity.LOADING)

    def described(self, count: int = 1) -> str:
        """The place of this many ranks, with its verb: `wait in all_reduce at train.py:42`, `is at data.py:17`."""
        one, several = ("waits", "wait") if self.waits else ("is", "are")
        return f"{one if count == 1 else several} {self.place}"

    @property
    def standing(self) -> Standing:
        """The rank's role in a hang, unless it is named as the culprit."""
        return Standing.WAITING if self.waits else Standing.STILL

    @property
    def handles(self) -> str:
        """The exception that the main thread handles, as text; empty: none."""
        return next((sample.handles for sample in reversed(self.story.samples) if sample.handles), "")

    @property
    def lacks_child(self) -> bool:
        """Whether a process that the rank has started is stopped or dead."""
        return bool(self.story.samples) and self.story.samples[-1].broken_child

    @property
    def line(self) -> str:
        """The program's innermost line in the newest sample: `train.py:42`; empty: it has no stack."""
        frames = self.story.samples[-1].frames if self.story.samples else ()
        return _at(frames).removeprefix("at ") if frames else ""

    @property
    def in_barrier(self) -> bool:
        return self.call in _BARRIERS

    @property
    def note(self) -> str:
        return self.story.samples[-1].note if self.story.samples else ""


_STATES = {
    "T": RankActivity.STOPPED,
    "t": RankActivity.HELD,
    "Z": RankActivity.GONE,
    "X": RankActivity.GONE,
    "": RankActivity.GONE,
}
_TRANSPARENT = re.compile(
    r"/(selectors|threading|queue|contextlib|socket|ssl)\.py$|/multiprocessing/(connection|resource_sharer"
    r"|synchronize|popen_\w+|process)\.py$"
    r"|/torch/(_ops|_tensor|_compile|utils/_contextlib|distributed/c10d_logger|multiprocessing/reductions)\.py$"
)
"""Functions that do not show what is waited for; their callers do."""
_LOADER = re.compile(r"/torch/utils/data/|/holdfast/train/data/")
_LOADS = re.compile(rf"/multiprocessing/(queues|pool)\.py$|{_LOADER.pattern}")
_COMMUNICATES = re.compile(
    r"/torch/(distributed/(?!checkpoint/|elastic/|launcher/)|futures/|nn/parallel/distributed\.py$)"
)
_WRAPPERS = ("wrapper", "inner", "_wrapper", "<lambda>", "wrapped", "__call__")

_BARRIERS = ("barrier", "monitored_barrier")
_DEBUGGER = re.compile(r"/(pdb|bdb)\.py$|/(pydevd|debugpy|ipdb|pudb)/")
_REGEX = re.compile(r"/re/__init__\.py$|/re\.py$")
"""A regular expression that takes seconds may take years."""
_THREAD = re.compile(r"/(threading|queue)\.py$|/concurrent/futures/_base\.py$")
"""Functions of Python that wait for another thread."""
_CHILD = re.compile(
    r"/subprocess\.py$|/multiprocessing/(connection|pool|queues|popen_\w+|process|managers)\.py$"
    r"|/concurrent/futures/process\.py$|/(pexpect|ptyprocess)/"
)
"""Functions that wait for another process."""

_SOURCE_SLEEPS = re.compile(r"\b((?:\w+\.)*sleep)\s*\(")
_SOURCE_LOCKS = re.compile(r"\bwith\s|\.acquire\s*\(")
_SOURCE_WAITS = re.compile(r"\b(\w+\.wait|\w*store(?:\(\))?\.(?:get|multi_get|check))\s*\(", re.IGNORECASE)
"""Calls of torch that wait in C. Functions that wait in Python have frames of their own."""
_SOURCE_COMMUNICATES = re.compile(
    r"\b(?:dist|distributed|c10d)\.((?:all|reduce|broadcast|barrier|gather|scatter|recv|send|monitored)\w*)\s*\("
)
_SOURCE_SYNCHRONIZES = re.compile(r"\.(item|tolist|cpu|synchronize)\s*\(")


def where_is(story: RankStory) -> Where:
    """Determine where a rank is, from its samples."""
    samples = story.samples
    if not samples:
        return Where(story, RankActivity.STANDING, "unknown (its node did not answer)", "silent")
    newest = samples[-1]
    if (state := _STATES.get(newest.state)) is not None:
        return Where(story, state, _STATE_TEXTS[state].format(pid=_pid(newest)), state.value)
    if any(_DEBUGGER.search(frame.file) for frame in newest.frames):
        return Where(story, RankActivity.HELD, f"held by a debugger {_at(newest.frames)}", "debugger")
    busy = is_busy(samples)
    # Without a stack it is unknown what the rank waits for, so that all work counts, as in the table's first row.
    if not newest.frames:
        works = children_work(samples) or main_moves(samples) or threads_move(samples, TALKED_BYTES)
        if changes_place(samples) or works:
            return Where(story, RankActivity.WORKING, "", "working")
        return _without_frames(story, newest, busy=busy)

    seen = _shared(samples)
    if seen is None or _computes_in_torch(seen, busy=busy):
        return Where(story, RankActivity.WORKING, _place(newest), "working")
    doing, place, call = _doing(seen, busy=busy)
    key = _key(seen)
    if doing is RankActivity.COMMUNICATING:
        # A collective of a large tensor over a slow network lasts for minutes. Its CPU time shows nothing, since gloo
        # and NCCL may poll while they wait; bytes do.
        # A loop of small collectives, as an evaluation makes them, moves few bytes.
        if copies(samples) or advance(samples):
            return Where(story, RankActivity.WORKING, place, "working")
        return Where(story, doing, place, key, call, busy)
    if doing is RankActivity.LOADING:
        return _loading(story, place, key)
    return _standing(story, seen, place, key)


def _loading(story: RankStory, place: str, key: str) -> Where:
    samples = story.samples
    # A loader's processes that only compute do not count as work: they may compute for ever, and the rank gets nothing.
    if main_moves(samples) or threads_move(samples, TALKED_BYTES) or _grows(samples, _children_bytes, SAVED_BYTES):
        return Where(story, RankActivity.WORKING, place, "working")
    # Data may come slowly: then the place is the same in all samples, although batches arrived in between.
    key += f"\n{samples[-1].main_cpu_s // FED_S:.0f}"
    computes = children_are_busy(samples)
    key += "\ncomputes" if computes else ""
    busy = is_busy(samples)
    return Where(
        story, RankActivity.LOADING, place, key, busy=busy, may_work=not busy and stirs(samples), computes=computes
    )


def _children_bytes(sample: RankSample) -> int:
    return sample.children_bytes


def _standing(story: RankStory, seen: RankSample, place: str, key: str) -> Where:
    """A rank that is in none of the known calls. `seen` is the sample that shows where it is."""
    samples, newest = story.samples, story.samples[-1]
    awaited = what_it_awaits(seen)
    if _works(samples, awaited):
        return Where(story, RankActivity.WORKING, place, "working")
    loops = (
        seen.polled in (Polling.RETRY, Polling.SPIN)
        or (changes_place(samples) and _repeats(samples))
        or _REGEX.search(seen.frames[0].file) is not None
    )
    # Threads of native code count while the main thread may wait for them. Else only the main thread does: a thread
    # that sends metrics would make the rank look busy for ever.
    busy = is_busy(samples) if awaited in (Awaited.ITSELF, Awaited.CONNECTION) else main_is_busy(samples)
    computes = busy and (loops or _may_be_native(samples, newest))
    may_work = _may_work(samples, awaited) or (not busy and not loops and (stirs(samples) or prints(samples)))
    polls_outside = seen.polled is Polling.OUTSIDE and not busy
    if computes:
        key += "\ncomputes"
    return Where(
        story,
        RankActivity.STANDING,
        f"polling {seen.polls} {_at(seen.frames)}" if polls_outside else place,
        key,
        busy=busy,
        may_work=may_work,
        computes=computes,
        polls=polls_outside,
        loops=loops,
        awaits_child=awaited is Awaited.CHILD and not newest.broken_child,
    )


def what_it_awaits(sample: RankSample) -> Awaited:
    """What the main thread waits for, by a sample with frames of a rank that is at one place."""
    if sample.polled in (Polling.OUTSIDE, Polling.RETRY):
        return Awaited.POLLING
    # The frames of subprocess and multiprocessing decide before the system call does: they wait in poll() or read() on
    # a pipe, which looks like a connection.
    if sample.polled is Polling.CHILD or sample.waits_for is KernelWait.CHILD or _CHILD.search(sample.frames[0].file):
        return Awaited.CHILD
    if any(_CHILD.search(frame.file) for frame in _called(sample.frames)):
        return Awaited.CHILD
    if sample.polled is Polling.THREADS or _THREAD.search(sample.frames[0].file):
        return Awaited.THREAD
    if sample.waits_for is KernelWait.SOCKET:
        return Awaited.CONNECTION
    own = program_frame(sample.frames) == 0
    if sample.waits_for is KernelWait.SLEEP or (own and _SOURCE_SLEEPS.search(sample.source)):
        return Awaited.NOTHING
    if sample.waits_for in (KernelWait.THREAD, KernelWait.UNKNOWN) and own and _SOURCE_LOCKS.search(sample.source):
        return Awaited.LOCK
    if sample.waits_for is KernelWait.THREAD and own:
        return Awaited.THREAD
    return Awaited.ITSELF


def _works(samples: Samples, awaited: Awaited) -> bool:
    """Whether something moves that shows work, whatever else the rank does."""
    if main_moves(samples):
        return True
    if awaited is Awaited.CHILD:
        # A download into memory is no input in /proc/PID/io: only the bytes of its connection show it.
        return children_work(samples) or _grows(samples, lambda sample: sample.talked_bytes, TALKED_BYTES)
    return awaited is Awaited.ITSELF and (copies(samples) or threads_move(samples, TALKED_BYTES))


def _may_work(samples: Samples, awaited: Awaited) -> bool:
    """Whether something moves that may be what the rank waits for, or noise."""
    children = awaited in (Awaited.ITSELF, Awaited.CONNECTION, Awaited.POLLING) or (
        awaited is Awaited.THREAD and samples[-1].child_awaited
    )
    threads = awaited in (Awaited.THREAD, Awaited.LOCK, Awaited.POLLING)
    return (children and children_work(samples)) or (threads and _threads_work(samples))


def _threads_work(samples: Samples) -> bool:
    return (
        threads_move(samples, SAVED_BYTES)
        or threads_are_busy(samples)
        or _grows(samples, lambda sample: sample.threads_awaited_bytes, TALKED_BYTES)
    )


def _repeats(samples: Samples) -> bool:
    """Whether all samples are in a few functions of the program, inside of one of them: a loop that calls the others
    again and again. Samples of an evaluation are in libraries, too."""
    if any(sample.state == "D" for sample in samples):
        return False
    inner = {(frame.file, frame.function) for sample in samples for frame in _until_shared(sample, samples)}
    return len(inner) <= LOOP_FUNCTIONS_MAX and not any(is_library(file) for file, _ in inner)


def _until_shared(sample: RankSample, samples: Samples) -> Sequence[Frame]:
    shared = len(_in_common(samples))
    return sample.frames[: len(sample.frames) - shared]


def _may_be_native(samples: Sequence[RankSample], newest: RankSample) -> bool:
    """Whether the CPU time may be native code's. A wait for a device does not count: it uses the CPU all the time."""
    on_device = program_frame(newest.frames) == 0 and _SOURCE_SYNCHRONIZES.search(newest.source)
    return not on_device and may_be_outside_python(samples)


def _shared(samples: Sequence[RankSample]) -> RankSample | None:
    """The sample that shows where the rank is; None: the samples show several places, so the rank moves. For a loop,
    the functions inside of the loop are removed."""
    newest = samples[-1]
    polling = next((sample for sample in reversed(samples) if sample.polled is not Polling.NOTHING), None)
    if polling is not None and all(sample.frames for sample in samples) and _goes_around(samples):
        return polling
    if not changes_place(samples):
        return newest
    frames = polls(samples) or (_in_common(samples) if _goes_around(samples) and _repeats(samples) else ())
    if not frames or not newest.frames:
        return None
    # `source` is the line of the program's innermost frame, which may be one of those that were removed.
    innermost, shown = program_frame(newest.frames), program_frame(frames)
    same_line = innermost is not None and shown is not None and newest.frames[innermost] == frames[shown]
    return structs.replace(newest, frames=frames, source=newest.source if same_line else "")


_STATE_TEXTS = {
    RankActivity.STOPPED: f"stopped by a signal{RESUMES}",
    RankActivity.HELD: "held by a debugger (process {pid})",
    RankActivity.GONE: "gone (process {pid})",
}


def _pid(sample: RankSample) -> str:
    """Its process; `PID` for several ranks at one place, whose processes are listed below it."""
    return str(sample.pid or "PID")


def _without_frames(story: RankStory, newest: RankSample, *, busy: bool) -> Where:
    if newest.state == "D":
        place = f"in the kernel (process {_pid(newest)}, state D: a disk or a device does not answer)"
    elif busy:
        place = f"busy without a Python stack (process {_pid(newest)})"
    else:
        place = f"asleep without a Python stack (process {_pid(newest)})"
    return Where(story, RankActivity.STANDING, place, f"{newest.state == 'D'} {busy}", computes=busy)


# --- does it move? ----------------------------------------------------------------------------------------------------


def _computes_in_torch(seen: RankSample, *, busy: bool) -> bool:
    """Whether all samples are in the same function of torch with CPU time in between, as in an evaluation."""
    decisive = _decisive(seen.frames) if busy else None
    return (
        decisive is not None
        and "/torch/" in decisive.file
        and _COMMUNICATES.search(decisive.file) is None
        and _LOADS.search(decisive.file) is None
    )


def _key(sample: RankSample) -> str:
    """The key of a place: all functions and the program's innermost line, unless that line itself runs (a loop)."""
    index = program_frame(sample.frames)
    line = sample.frames[index].line if index else 0
    return "\n".join([str(line), *(f"{frame.file} {frame.function}" for frame in sample.frames)])


# --- what does it do? -------------------------------------------------------------------------------------------------


def _called(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The library frames that the program's innermost line called, innermost first."""
    index = program_frame(frames)
    return frames[:index] if index is not None else frames


def _decisive(frames: Sequence[Frame]) -> Frame | None:
    """The innermost of the called frames that shows what the rank does."""
    return next((frame for frame in _called(frames) if not _TRANSPARENT.search(frame.file)), None)


class _Doing(NamedTuple):
    activity: RankActivity
    place: str
    call: str = ""


def _communicates(call: str, sample: RankSample) -> _Doing:
    return _Doing(RankActivity.COMMUNICATING, f"in {call} {_at(sample.frames)}", call)


def _doing(sample: RankSample, *, busy: bool) -> _Doing:
    decisive = _decisive(sample.frames)
    if sample.polled is Polling.RANKS:
        return _communicates(sample.polls, sample)
    if decisive is None:
        if _called(sample.frames):
            return _Doing(RankActivity.STANDING, _place(sample))
        return _doing_by_source(sample, busy=busy)
    if _LOADS.search(decisive.file):
        loader = any(_LOADER.search(frame.file) for frame in _called(sample.frames))
        what = "its data loader" if loader else "another process"
        return _Doing(RankActivity.LOADING, f"for {what} {_at(sample.frames)}")
    if _COMMUNICATES.search(decisive.file):
        return _communicates(_interface(sample.frames), sample)
    # DDP's all-reduce runs inside of the backward pass, in threads of C++ that have no frames.
    if decisive.function == "_engine_run_backward" and not busy:
        return _communicates("backward", sample)
    if decisive.function == "synchronize" and "/torch/" in decisive.file:
        return _communicates("synchronize", sample)
    return _Doing(RankActivity.STANDING, _place(sample))


def _doing_by_source(sample: RankSample, *, busy: bool) -> _Doing:
    """The activity of a rank whose innermost frame is the program's: that line, or a C function called there."""
    source = sample.source
    # A busy rank may be in another call of the same line.
    if not busy:
        for pattern in (_SOURCE_COMMUNICATES, _SOURCE_WAITS, _SOURCE_SYNCHRONIZES):
            if match := pattern.search(source):
                return _communicates(match[1], sample)
        if match := _SOURCE_SLEEPS.search(source):
            return _Doing(RankActivity.STANDING, f"in {match[1]} {_at(sample.frames)}")
    return _Doing(RankActivity.STANDING, _place(sample))


def _interface(frames: Sequence[Frame]) -> str:
    """The function of torch.distributed that other code called."""
    names = [
        frame.function
        for frame in _called(frames)
        if _COMMUNICATES.search(frame.file) and frame.function not in _WRAPPERS
    ]
    return names[-1] if names else "communication"


def _place(sample: RankSample) -> str:
    index = program_frame(sample.frames)
    names = [frame.function for frame in reversed(_called(sample.frames))] or [sample.frames[index or 0].function]
    function = next((name for name in names if not name.startswith("_")), names[0])
    at = _at(sample.frames)
    return at if function.startswith("<") else f"in {function} {at}"


def _at(frames: Sequence[Frame]) -> str:
    """The program's innermost line as text; for a program in an installed package (-m), the innermost line at all."""
    index = program_frame(frames)
    frame = frames[index or 0]
    return f"at {frame.file.rpartition('/')[2]}:{frame.line}"
