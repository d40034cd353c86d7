"""Where the ranks of a job are, in lines for people: equal stacks once, with the ranks that share them. PURE."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct

from holdfast.core.stacks import Frame, RankStack, StacksView
from holdfast.insight.numbers import plural, spans

LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")
"""What is in a file's path when it is not the user's own."""
BOOTSTRAP = ("/holdfast/worker/", "<frozen runpy>", "/runpy.py")
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "dead", "D": "waits in the kernel", "": "gone"}


class Group(Struct, frozen=True):
    """Ranks that are at the same place."""

    ranks: tuple[RankStack, ...]
    frames: tuple[Frame, ...]
    """Innermost first; empty: they did not answer."""

    @property
    def place(self) -> str:
        """`recv at train.py:17`: the innermost call, and where the user's own code makes it."""
        if not self.frames:
            return "no Python stack"
        inner = self.frames[0]
        own = next((frame for frame in self.frames if is_own(frame)), inner)
        return f"{inner.function} at {short(own.file)}:{own.line}"


def group(view: StacksView) -> list[Group]:
    """The largest first; the ranks of each in order."""
    together: dict[tuple[int, str], list[RankStack]] = defaultdict(list)
    for rank in view.ranks:
        together[rank.stack, rank.state if rank.stack < 0 else ""].append(rank)
    found = [Group(tuple(ranks), view.stacks[stack] if stack >= 0 else ()) for (stack, _), ranks in together.items()]
    return sorted(found, key=lambda each: (-len(each.ranks), each.ranks[0].rank))


def stack_lines(view: StacksView, *, full: bool = False) -> list[str]:
    """Without `full`, of each stack the innermost frame and the user's own."""
    groups = group(view)
    of = f" of {view.world_size}" if len(view.ranks) != view.world_size else ""
    if not groups and not view.silent:
        return [f"run {view.run_id}, generation {view.generation}: no worker runs now"]
    places = plural(len(groups), "place")
    lines = [f"run {view.run_id}, generation {view.generation}: {plural(len(view.ranks), 'rank')}{of} at {places}"]
    for each in groups:
        lines += ["", *group_lines(each, full=full)]
    if view.silent:
        lines += ["", f"no answer in time from {', '.join(view.silent)}"]
    return lines


def group_lines(each: Group, *, full: bool) -> list[str]:
    ranks = each.ranks
    hosts = sorted({rank.host for rank in ranks})
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes"
    head = f"rank{'' if len(ranks) == 1 else 's'} {spans(rank.rank for rank in ranks)} on {where}: {each.place}"
    states = {STATES[rank.state] for rank in ranks if rank.state in STATES}
    lines = [head + (f" ({', '.join(sorted(states))})" if states else "")]
    frames = each.frames if full else telling(each.frames)
    lines += [f"    {frame.function}  {frame.file}:{frame.line}" for frame in frames]
    if len(frames) < len(each.frames):
        lines.append(f"    … {plural(len(each.frames) - len(frames), 'frame')} of libraries not shown (--full)")
    sources = {rank.source for rank in ranks if rank.source}
    lines += [f"    > {source}" for source in sorted(sources)]
    lines += [f"    rank {rank.rank}: {rank.note}" for rank in ranks if rank.note]
    if full:
        lines += [f"    rank {rank.rank}, pid {rank.pid} on {rank.host}: {rank.file}" for rank in ranks if rank.file]
    return lines


def telling(frames: Sequence[Frame]) -> list[Frame]:
    """Where it is, and how the user's own code got there."""
    return [frame for index, frame in enumerate(frames) if index == 0 or is_own(frame)]


def is_own(frame: Frame) -> bool:
    return not any(part in frame.file for part in (*LIBRARY, *BOOTSTRAP))


def short(file: str) -> str:
    return file.rpartition("/")[2]
