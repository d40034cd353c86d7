"""Whether a rank moves, from the samples that were taken of it: stacks, processor time, input and output. Pure.

Knows nothing of what a stack means, see places.py for that.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from holdfast.core.faultdump import program_frame
from holdfast.core.stacks import Frame, RankSample

GAP_S = 2.0
"""The limits below are for two samples at most so far apart; where the gap is longer they grow with it."""
BUSY_S = 0.15
"""Processor time between two samples that is more than what a waiting rank's idle threads need."""
MAIN_BUSY_S = 0.06
"""The same of the main thread alone, which has no idle work: an evaluation in short steps needs 0.1 s, a loop that looks
for something every 10 ms needs 0.01 s."""
WANTED_S = 0.8
"""The same with the time for which it waited for a processor: of one that computes, on a machine that has too much to do."""
WAITED_SHARE_MAX = 0.9
"""Of the time between two samples: so much of it at most is taken to have been lost to others on a full machine."""
STIRS_S = 0.025
"""Processor time of the main thread between two samples that is more than what a loop of sleeps and looks needs."""
COPIED_BYTES = 1 << 20
"""Read or written between two samples, that is more than what logs, heartbeats and data loaders' messages are."""
SAVED_BYTES = 64 << 10
"""The same of a rank that does not wait for others, its children included: a slow save, a slow download."""
TALKED_BYTES = 4 << 10
"""Sent and received by a rank that does not wait for others, its children included: a download into memory, however slow.
What clients tell their servers all the time, as that they are alive, is less."""

_MAY_CALL = re.compile(r"[(@]")
"""In a line of Python that may spend its time in native code."""

Samples = Sequence[RankSample]


def _grows(samples: Samples, value: Callable[[RankSample], float], limit: float) -> bool:
    """Whether the value has grown by more than the limit between every two samples; False while there is only one."""
    pairs = list(itertools.pairwise(samples))
    return bool(pairs) and all(
        value(later) - value(earlier) > limit * max(1.0, (later.at_s - earlier.at_s) / GAP_S)
        for earlier, later in pairs
    )


def is_busy(samples: Samples) -> bool:
    """It uses the processor, or would if others left it more of it."""
    if _grows(samples, lambda sample: sample.wanted_s, WANTED_S):
        return True
    return _grows_alone(samples, lambda sample: sample.cpu_s, BUSY_S) or _grows_alone(
        samples, lambda sample: sample.main_cpu_s, MAIN_BUSY_S
    )


def _grows_alone(samples: Samples, cpu_s: Callable[[RankSample], float], limit: float) -> bool:
    """Whether it would have used more processor time than the limit, had it never waited for a processor.

    A rank that computes a little and sleeps a little, again and again, comes round less often on a machine that has too
    much to do."""
    growths = [
        (cpu_s(later) - cpu_s(earlier)) / (1 - _waited_share(earlier, later))
        > limit * max(1.0, (later.at_s - earlier.at_s) / GAP_S)
        for earlier, later in itertools.pairwise(samples)
    ]
    return bool(growths) and all(growths)


def _waited_share(earlier: RankSample, later: RankSample) -> float:
    """Of the time between two samples: for how much it waited for a processor."""
    waited_s = later.wanted_s - earlier.wanted_s - (later.cpu_s - earlier.cpu_s)
    return min(max(waited_s / max(later.at_s - earlier.at_s, 1e-9), 0.0), WAITED_SHARE_MAX)


def stirs(samples: Samples) -> bool:
    """Its main thread uses a little of it."""
    return _grows(samples, lambda sample: sample.main_cpu_s, STIRS_S)


def children_are_busy(samples: Samples) -> bool:
    return _grows(samples, lambda sample: sample.children_cpu_s, BUSY_S) or _grows(
        samples, lambda sample: sample.children_wanted_s, WANTED_S
    )


def copies(samples: Samples) -> bool:
    """It reads or writes a lot: a checkpoint, a download, a collective that is slow."""
    return _grows(samples, lambda sample: sample.moved_bytes, COPIED_BYTES)


def saves(samples: Samples) -> bool:
    """It or its children read or write, files or the network, or it waits for a disk that does: a file is being brought to the disk."""
    waits_for_disk = all(sample.state == "D" for sample in samples)
    return (
        _grows(samples, lambda sample: sample.moved_bytes + sample.children_bytes, SAVED_BYTES)
        or _grows(samples, lambda sample: sample.talked_bytes, TALKED_BYTES)
        or (waits_for_disk and _grows(samples, lambda sample: sample.disk_bytes, COPIED_BYTES))
    )


def changes_place(samples: Samples) -> bool:
    """Whether it was seen at two places. Lines of the innermost function do not count: that may be a loop for ever."""
    return len({_outline(sample) for sample in samples if sample.frames}) > 1


def polls(samples: Samples) -> tuple[Frame, ...]:
    """The frames that all samples share, where only what the innermost of these calls has changed, and that without
    processor time: a loop of looks and sleeps over several functions. Empty when it is something else."""
    if is_busy(samples) or stirs(samples) or any(sample.state == "D" for sample in samples):
        return ()
    shared: list[Frame] = []  # the outermost first
    stacks = [sample.frames[::-1] for sample in samples if sample.frames]
    for frames in zip(*stacks, strict=False):
        if len({(frame.file, frame.function) for frame in frames}) > 1:
            break
        shared.append(frames[-1])
        if len({frame.line for frame in frames}) > 1 and _called_alike(stacks, len(shared)):
            return ()  # the same function, called from another line: it came further
    return tuple(reversed(shared))


def _called_alike(stacks: Sequence[Sequence[Frame]], depth: int) -> bool:
    """Whether the next function inside is the same in all of these."""
    inside = {(stack[depth].file, stack[depth].function) if len(stack) > depth else None for stack in stacks}
    return len(inside) == 1 and None not in inside


def may_be_outside_python(samples: Samples) -> bool:
    """Whether the processor time of a rank that stays at one place may be native code's. It is Python's where every line
    that was met is the program's own and calls nothing: a loop for ever."""
    return not all(
        program_frame(sample.frames) == 0 and sample.source and not _MAY_CALL.search(sample.source)
        for sample in samples
    )


def _outline(sample: RankSample) -> tuple[object, ...]:
    innermost, *others = sample.frames
    return ((innermost.file, innermost.function), *others)
