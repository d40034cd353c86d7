"""Where the ranks of a job are, in lines for people: equal stacks once, with the ranks that share them. PURE."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct

from holdfast.core.faultdump import is_library
from holdfast.core.progress import Frame, RankSample, RankStack, RankStory, StacksView
from holdfast.core.text import spans
from holdfast.insight.numbers import plural
from holdfast.insight.places import Where, where_is

NOT_RUNNING = ("T", "t", "Z", "X", "")
"""States of the kernel's in which a stack says nothing of what a rank does."""


class Group(Struct, frozen=True):
    """Ranks that are at the same place."""

    ranks: tuple[RankStack, ...]
    frames: tuple[Frame, ...]
    """Innermost first; empty: they did not answer."""

    @property
    def place(self) -> str:
        """`waits in all_reduce at train.py:42`, `is in fetch at data.py:17`: of one of them."""
        where = self._where
        return f"{'waits' if where.waits else 'is'} {where.place}"

    def told(self, who: str) -> str:
        """The same of all: `ranks 0-2 wait in all_reduce at train.py:42`."""
        where, many = self._where, len(self.ranks) > 1
        verb = ("wait" if many else "waits") if where.waits else ("are" if many else "is")
        return f"{who} {verb} {where.place}"

    def order(self) -> tuple[bool, int, int]:
        """Who keeps the others waiting is among the few that wait for nobody."""
        waits, size = self._where.waits, len(self.ranks)
        return waits, -size if waits else size, self.ranks[0].rank

    @property
    def _where(self) -> Where:
        first = self.ranks[0]
        sample = RankSample(
            first.local_rank, first.pid, first.state, first.cpu_s, self.frames, first.note, first.file, first.source
        )
        return where_is(RankStory(first.rank, first.host, first.local_rank, 0.0, (sample,)))


def group(view: StacksView) -> list[Group]:
    """Those that do not wait for others first, the fewest ranks before more, then those that wait, the most first; the ranks
    of each in order."""
    together: dict[tuple[int, str], list[RankStack]] = defaultdict(list)
    for rank in view.ranks:
        together[rank.stack, rank.state if rank.stack < 0 or rank.state in NOT_RUNNING else ""].append(rank)
    found = [Group(tuple(ranks), view.stacks[stack] if stack >= 0 else ()) for (stack, _), ranks in together.items()]
    return sorted(found, key=Group.order)


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
    lines = [each.told(f"rank{'' if len(ranks) == 1 else 's'} {spans(rank.rank for rank in ranks)} on {where}")]
    frames = each.frames if full else telling(each.frames)
    lines += [f"    {frame.function}  {frame.file}:{frame.line}" for frame in frames]
    if len(frames) < len(each.frames):
        lines.append(f"    … {plural(len(each.frames) - len(frames), 'frame')} of libraries not shown (--full)")
    sources = {rank.source for rank in ranks if rank.source}
    lines += [f"    > {source}" for source in sorted(sources)]
    lines += [f"    rank {rank.rank}: {rank.note}" for rank in ranks if rank.note]
    if full:
        lines += [line for rank in ranks for line in thread_lines(rank)]
        lines += [f"    rank {rank.rank}, pid {rank.pid} on {rank.host}: {rank.file}" for rank in ranks if rank.file]
    return lines


def thread_lines(rank: RankStack) -> list[str]:
    """Its other threads; the stack above is the main thread's."""
    lines = []
    for number, frames in enumerate(rank.threads, 1):
        lines.append(f"    rank {rank.rank}, other thread {number}:")
        lines += [f"        {frame.function}  {frame.file}:{frame.line}" for frame in frames]
    return lines


def telling(frames: Sequence[Frame]) -> list[Frame]:
    """Where it is, and how the user's own code got there."""
    return [frame for index, frame in enumerate(frames) if index == 0 or not is_library(frame.file)]
