"""Determines from the samples of one rank (stacks, CPU time, input and output) where it is and whether it moves. Pure;
hangs.py compares ranks.

The library frames inside of the program's innermost frame show what a rank does: that line of the program called them.
C functions have no frames, so `time.sleep(9)`, `work.wait()` and `loss.item()` are recognised by the text of the
program's line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from enum import Enum

from msgspec import Struct, structs

from holdfast.protocol.rank_progress import Frame, RankSample, RankStory, program_frame

GAP_S = 2.0
"""The limits below apply to two samples at most this far apart. For a longer gap they grow in proportion."""
BUSY_S = 0.15
"""More CPU time than this between two samples is more than the idle threads of a waiting rank need."""
MAIN_BUSY_S = 0.06
"""The same for the main thread, which has no idle work: an evaluation in short steps needs 0.1 s, a loop that polls
every 10 ms needs 0.01 s."""
WANTED_S = 0.8
"""The same for CPU time plus the time of waiting for a CPU: it shows a computing rank on an overloaded machine."""
LOST_SHARE_MAX = 0.9
"""At most this share of the time between two samples counts as time without a CPU."""
STIRS_S = 0.025
"""More CPU time of the main thread than this between two samples is more than a polling loop needs."""
COPIED_BYTES = 1 << 20
"""More bytes read or written than this between two samples are more than logs, heartbeats and messages of loaders."""
SAVED_BYTES = 64 << 10
"""The same for a rank that does not wait for others, its children included: a slow save, a slow download."""
TALKED_BYTES = 4 << 10
"""Bytes sent and received by a rank that does not wait for others, its children included: a slow download into memory.
Keep-alive messages of clients are smaller."""

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

    `lost_s`: of the time between two samples, for how long it could not grow; it counts as if it had grown then, too.
    A rank that computes and sleeps in turns runs less often on an overloaded machine."""
    pairs = list(itertools.pairwise(samples))
    return bool(pairs) and all(
        (value(later) - value(earlier)) / (1 - _share(lost_s(earlier, later), later.at_s - earlier.at_s))
        > limit * max(1.0, (later.at_s - earlier.at_s) / GAP_S)
        for earlier, later in pairs
    )


def is_busy(samples: Samples) -> bool:
    """Whether it uses the CPU, or would if the machine had a free one."""
    return (
        _grows(samples, lambda sample: sample.wanted_s, WANTED_S)
        or _grows(samples, lambda sample: sample.cpu_s, BUSY_S, _waited_s)
        or _grows(samples, lambda sample: sample.main_cpu_s, MAIN_BUSY_S, _waited_s)
    )


def _stolen_s(earlier: RankSample, later: RankSample) -> float:
    """For how long other machines had the CPUs of this one."""
    return later.stolen_s - earlier.stolen_s


def _waited_s(earlier: RankSample, later: RankSample) -> float:
    """For how long it waited for a CPU, of this machine or, if that was longer, with this machine."""
    return max(later.wanted_s - earlier.wanted_s - (later.cpu_s - earlier.cpu_s), _stolen_s(earlier, later))


def _share(part_s: float, whole_s: float) -> float:
    return min(max(part_s / max(whole_s, 1e-9), 0.0), LOST_SHARE_MAX)


def stirs(samples: Samples) -> bool:
    """Whether its main thread uses a little CPU time."""
    return _grows(samples, lambda sample: sample.main_cpu_s, STIRS_S)


def children_are_busy(samples: Samples) -> bool:
    return _grows(samples, lambda sample: sample.children_cpu_s, BUSY_S, _stolen_s) or _grows(
        samples, lambda sample: sample.children_wanted_s, WANTED_S
    )


def copies(samples: Samples) -> bool:
    """Whether it reads or writes a lot: a checkpoint, a download, a slow collective."""
    return _grows(samples, lambda sample: sample.moved_bytes, COPIED_BYTES)


def saves(samples: Samples) -> bool:
    """Whether it or its children read or write files or the network, or it waits for a busy disk, as when a file is
    flushed."""
    waits_for_disk = all(sample.state == "D" for sample in samples)
    return (
        _grows(samples, lambda sample: sample.moved_bytes + sample.children_bytes, SAVED_BYTES)
        or _grows(samples, lambda sample: sample.talked_bytes, TALKED_BYTES)
        or (waits_for_disk and _grows(samples, lambda sample: sample.disk_bytes, COPIED_BYTES))
    )


def changes_place(samples: Samples) -> bool:
    """Whether its samples show two places. Lines of the innermost function do not count: it may be an endless loop."""
    return len({_outline(sample) for sample in samples if sample.frames}) > 1


def polls(samples: Samples) -> tuple[Frame, ...]:
    """The frames that all samples share, if only the calls inside of the innermost one changed, without CPU time: a
    polling loop over several functions. Empty: it is something else."""
    if is_busy(samples) or stirs(samples) or any(sample.state == "D" for sample in samples):
        return ()
    shared: list[Frame] = []  # the outermost first
    stacks = [sample.frames[::-1] for sample in samples if sample.frames]
    for frames in zip(*stacks, strict=False):
        if len({(frame.file, frame.function) for frame in frames}) > 1:
            break
        shared.append(frames[-1])
        if len({frame.line for frame in frames}) > 1 and _called_alike(stacks, len(shared)):
            return ()  # the same function, called from another line: the rank has moved
    return tuple(reversed(shared))


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
"""A rank that waits for its data loader counts as progressing each time its main thread has used this much CPU time."""


class RankActivity(Enum):
    COMMUNICATING = "communicating"
    """It waits for other ranks, or for a device that may wait for them."""
    LOADING = "loading"
    """It waits for data."""
    WORKING = "working"
    """The samples show progress."""
    STOPPED = "stopped"
    """It was stopped by a signal."""
    HELD = "held"
    """It is stopped by a debugger."""
    GONE = "gone"
    STANDING = "standing"
    """None of the others."""


class Where(Struct, frozen=True):
    story: RankStory
    doing: RankActivity
    place: str
    """Text after "is" or "waits": `in all_reduce at train.py:42`."""
    key: str
    """Stays equal as long as the rank does not move."""
    busy: bool = False
    """It uses the CPU."""
    stirs: bool = False
    """Its main thread uses a little CPU time: it may work and sleep in turns."""
    computes: bool = False
    """It or its data loader uses the CPU, perhaps in native code: it may make progress."""

    @property
    def waits(self) -> bool:
        return self.doing in (RankActivity.COMMUNICATING, RankActivity.LOADING)

    def told(self, count: int = 1) -> str:
        """The place of this many ranks, with its verb: `wait in all_reduce at train.py:42`, `is at data.py:17`."""
        one, several = ("waits", "wait") if self.waits else ("is", "are")
        return f"{one if count == 1 else several} {self.place}"

    @property
    def in_barrier(self) -> bool:
        return self.doing is RankActivity.COMMUNICATING and _BARRIER.match(self.place) is not None

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

_BARRIER = re.compile(r"in (monitored_)?barrier ")

_SOURCE_SLEEPS = re.compile(r"\b((?:\w+\.)*sleep)\s*\(")
_SOURCE_WAITS = re.compile(r"\b(\w+\.wait|\w*store(?:\(\))?\.(?:get|multi_get|check))\s*\(", re.IGNORECASE)
"""Calls of torch that wait in C. Functions that wait in Python have frames of their own."""
_SOURCE_COMMUNICATES = re.compile(
    r"\b(?:dist|distributed|c10d)\.((?:all|reduce|broadcast|barrier|gather|scatter|recv|send|monitored)\w*)\s*\("
)
_SOURCE_SYNCHRONIZES = re.compile(r"\.(item|tolist|cpu|synchronize)\s*\(")


def where_is(story: RankStory) -> Where:
    samples = story.samples
    if not samples:
        return Where(story, RankActivity.STANDING, "unknown (its node did not answer)", "silent")
    newest = samples[-1]
    if (state := _STATES.get(newest.state)) is not None:
        return Where(story, state, _STATE_WORDS[state].format(pid=newest.pid), state.value)
    busy = is_busy(samples)
    seen = _shared(samples)
    if seen is None or copies(samples) or _computes_in_torch(seen, busy=busy):
        return Where(story, RankActivity.WORKING, _place(newest), "working")
    if not newest.frames:
        works = children_are_busy(samples) or saves(samples)
        return Where(story, RankActivity.WORKING, "", "working") if works else _without_frames(story, newest, busy=busy)
    doing, place = _doing(seen, busy=busy)
    if doing is not RankActivity.COMMUNICATING and saves(samples):
        return Where(story, RankActivity.WORKING, place, "working")
    children = children_are_busy(samples)
    if doing is RankActivity.STANDING and children:
        return Where(story, RankActivity.WORKING, place, "working")
    key = _key(seen)
    if doing is RankActivity.LOADING:  # slow data: the place stays the same, even if some batches arrived in between
        key += f"\n{newest.main_cpu_s // FED_S:.0f}"
    computes = children if doing is RankActivity.LOADING else busy and _may_be_native(samples, newest, doing)
    if computes:
        key += "\ncomputes"
    return Where(story, doing, place, key, busy, not busy and stirs(samples), computes)


def _may_be_native(samples: Sequence[RankSample], newest: RankSample, doing: RankActivity) -> bool:
    """Whether its CPU time may be native code's. Waiting for a device does not count: it uses the CPU all the time."""
    on_device = program_frame(newest.frames) == 0 and _SOURCE_SYNCHRONIZES.search(newest.source)
    return doing is RankActivity.STANDING and not on_device and may_be_outside_python(samples)


def _shared(samples: Sequence[RankSample]) -> RankSample | None:
    """The newest sample, prepared for the judgement; None: the samples show several places, so the rank moves. For a
    polling loop the functions inside of the loop are removed."""
    newest = samples[-1]
    if not changes_place(samples):
        return newest
    frames = polls(samples)
    if not frames or not newest.frames:
        return None
    same_line = program_frame(frames) is not None and program_frame(newest.frames) == program_frame(frames)
    return structs.replace(newest, frames=frames, source=newest.source if same_line else "")


_STATE_WORDS = {
    RankActivity.STOPPED: "stopped by a signal (kill -CONT {pid} lets it go on)",
    RankActivity.HELD: "held by a debugger (process {pid})",
    RankActivity.GONE: "gone (process {pid})",
}


def _without_frames(story: RankStory, newest: RankSample, *, busy: bool) -> Where:
    if newest.state == "D":
        words = f"in the kernel (process {newest.pid}, state D: a disk or a device does not answer)"
    elif busy:
        words = f"busy without a Python stack (process {newest.pid})"
    else:
        words = f"asleep without a Python stack (process {newest.pid})"
    return Where(story, RankActivity.STANDING, words, f"{newest.state == 'D'} {busy}", computes=busy)


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
    """Key of its place: all functions and the program's innermost line, unless the program runs there (loops)."""
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


def _doing(sample: RankSample, *, busy: bool) -> tuple[RankActivity, str]:
    decisive, at = _decisive(sample.frames), _at(sample.frames)
    if decisive is None:
        if _called(sample.frames):
            return RankActivity.STANDING, _place(sample)
        return _doing_by_source(sample, busy=busy)
    if _LOADS.search(decisive.file):
        loader = any(_LOADER.search(frame.file) for frame in _called(sample.frames))
        return RankActivity.LOADING, f"for {'its data loader' if loader else 'another process'} {at}"
    if _COMMUNICATES.search(decisive.file):
        return RankActivity.COMMUNICATING, f"in {_interface(sample.frames)} {at}"
    if decisive.function == "_engine_run_backward" and not busy:
        return RankActivity.COMMUNICATING, f"in backward {at}"
    if decisive.function == "synchronize" and "/torch/" in decisive.file:
        return RankActivity.COMMUNICATING, f"in synchronize {at}"
    return RankActivity.STANDING, _place(sample)


def _doing_by_source(sample: RankSample, *, busy: bool) -> tuple[RankActivity, str]:
    """The activity of a rank whose innermost frame is the program's: that line, or a C function called there."""
    at, source = _at(sample.frames), sample.source
    if not busy:
        for pattern in (_SOURCE_COMMUNICATES, _SOURCE_WAITS, _SOURCE_SYNCHRONIZES):
            if match := pattern.search(source):
                return RankActivity.COMMUNICATING, f"in {match[1]} {at}"
        if match := _SOURCE_SLEEPS.search(source):
            return RankActivity.STANDING, f"in {match[1]} {at}"
    return RankActivity.STANDING, _place(sample)


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
    """The line of the program in words; for a program in an installed package (-m), the innermost line."""
    index = program_frame(frames)
    frame = frames[index or 0]
    return f"at {frame.file.rpartition('/')[2]}:{frame.line}"
