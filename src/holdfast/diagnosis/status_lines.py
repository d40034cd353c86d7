"""Output of `holdfast status` and `holdfast stacks` about a running job. Equal stacks are shown once, with all their
ranks. PURE: from the coordinator's view to text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from holdfast.diagnosis.places import Where, where_is
from holdfast.protocol.faultdump import is_library
from holdfast.protocol.rank_progress import (
    Frame,
    JobView,
    NodeView,
    RankSample,
    RankStack,
    RankStory,
    RankView,
    StacksView,
    Stage,
)
from holdfast.text import duration, plural, spans

NOT_RUNNING = ("T", "t", "Z", "X", "")
"""States of the kernel in which a stack does not show what a rank does."""


RANKS_SHOWN_MAX = 16
"""For larger jobs only nodes are shown, unless ranks are asked for."""

Row = tuple[str, ...]


def status_lines(view: JobView, *, ranks: bool | None = None) -> list[str]:
    """The lines of `holdfast status`. `ranks` None: a line for each rank if there are few."""
    lines = [headline(view), progress_line(view)]
    if view.why:
        lines.append(f"the generation before ended: {view.why}")
    if view.nodes:
        lines += ["", *columns([NODE_HEADINGS, *(node_row(node) for node in view.nodes)])]
    told = [(node.host, rank) for node in view.nodes for rank in node.ranks]
    shown = len(told) <= RANKS_SHOWN_MAX if ranks is None else ranks
    if told and shown:
        told.sort(key=lambda each: each[1].rank)
        lines += ["", *columns([RANK_HEADINGS, *(rank_row(host, rank) for host, rank in told)])]
    if view.notices:
        lines += ["", *view.notices]
    return [line for line in lines if line is not None]


def headline(view: JobView) -> str:
    at_work = [node for node in view.nodes if node.group_rank is not None]
    size = f"{plural(view.world_size, 'rank')} on {plural(len(at_work), 'node')}, " if view.world_size else ""
    return (
        f"run {view.run_id}: {view.phase} for {duration(view.since_s)}, generation {view.generation}, {size}"
        f"restarts {view.restarts} of {view.restarts_max}"
    )


def progress_line(view: JobView) -> str:
    ranks = [rank for node in view.nodes for rank in node.ranks]
    parts = []
    if any(rank.stage is Stage.STEPPING for rank in ranks):
        parts.append(f"step {between([rank.steps for rank in ranks])}")
        rate = steps_per_s(ranks)
        parts += [f"{rate:.3g} steps/s"] if rate else []
        age = last_step(ranks)
        parts += [f"last step {age}"] if age else []
    elif ranks:
        parts.append("no step yet")
    if view.job_s > 0:
        share = f"{min(1.0, view.training_s / view.job_s):.0%} of {duration(view.job_s)}"
        parts.append(f"effective training time {share}")
    return ", ".join(parts)


NODE_HEADINGS: Row = ("NODE", "GROUP RANK", "STATE", "RANKS", "STEP", "STEPS/S", "LAST STEP", "HEARD")
RANK_HEADINGS: Row = ("RANK", "NODE", "LOCAL", "STAGE", "STEP", "STEP TIME", "OWN PART", "LAST STEP", "WHERE")


def node_row(node: NodeView) -> Row:
    rate = steps_per_s(node.ranks)
    return (
        node.host,
        "" if node.group_rank is None else str(node.group_rank),
        node.state,
        spans(rank.rank for rank in node.ranks),
        between([rank.steps for rank in node.ranks]),
        f"{rate:.3g}" if rate else "",
        last_step(node.ranks),
        f"{duration(node.heard_s)} ago",
    )


def rank_row(host: str, rank: RankView) -> Row:
    return (
        str(rank.rank),
        host,
        str(rank.local_rank),
        (rank.standing or rank.stage).value,
        str(rank.steps),
        f"{rank.step_s * 1e3:.3g} ms" if rank.step_s else "",
        f"{rank.own_s * 1e3:.3g} ms" if rank.own_s else "",
        last_step([rank]),
        rank.place,
    )


def last_step(ranks: Sequence[RankView]) -> str:
    """Text about the oldest of the ranks' newest steps; empty: no rank has made a step."""
    ages = [rank.age_s for rank in ranks if rank.stage is Stage.STEPPING]
    return f"{duration(max(ages))} ago" if ages else ""


def steps_per_s(ranks: Sequence[RankView]) -> float:
    """Steps per second, from the median of the ranks' median steps; 0: unknown, or in a hang."""
    known = [rank.step_s for rank in ranks if rank.step_s > 0 and rank.standing is None]
    return 1 / median(known) if known else 0.0


def between(numbers: Sequence[int]) -> str:
    """
    >>> between([7, 9, 7]), between([7]), between([])
    ('7-9', '7', '')
    """
    if not numbers:
        return ""
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least}-{most}"


def columns(rows: Sequence[Row]) -> list[str]:
    """The rows as aligned columns, without columns that are empty in all rows."""
    used = [index for index in range(len(rows[0])) if any(row[index] for row in rows[1:])]
    widths = {index: max(len(row[index]) for row in rows) for index in used}
    return ["  ".join(row[index].ljust(widths[index]) for index in used).rstrip() for row in rows]


class Group(Struct, frozen=True):
    """Ranks that are at the same place."""

    ranks: tuple[RankStack, ...]
    frames: tuple[Frame, ...]
    """Innermost frame first; empty: the ranks did not answer."""

    @property
    def place(self) -> str:
        """Text about one of the ranks: `waits in all_reduce at train.py:42`, `is in fetch at data.py:17`."""
        where = self._where
        return f"{'waits' if where.waits else 'is'} {where.place}"

    def told(self, who: str) -> str:
        """The same about all of them: `ranks 0-2 wait in all_reduce at train.py:42`."""
        where, many = self._where, len(self.ranks) > 1
        verb = ("wait" if many else "waits") if where.waits else ("are" if many else "is")
        return f"{who} {verb} {where.place}"

    def order(self) -> tuple[bool, int, int]:
        """Sort key. Ranks that wait for no other come first, since they may be the ones that the others wait for."""
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
    """Groups of ranks at the same place: first those that do not wait for others, the smallest first; then those that
    wait, the largest first."""
    together: dict[tuple[int, str], list[RankStack]] = defaultdict(list)
    for rank in view.ranks:
        together[rank.stack, rank.state if rank.stack < 0 or rank.state in NOT_RUNNING else ""].append(rank)
    found = [Group(tuple(ranks), view.stacks[stack] if stack >= 0 else ()) for (stack, _), ranks in together.items()]
    return sorted(found, key=Group.order)


def stack_lines(view: StacksView, *, full: bool = False) -> list[str]:
    """The lines of `holdfast stacks`. Without `full`: of each stack only the innermost frame and the user's own."""
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
    """Lines about a rank's other threads; the stack above them is the main thread's."""
    lines = []
    for number, frames in enumerate(rank.threads, 1):
        lines.append(f"    rank {rank.rank}, other thread {number}:")
        lines += [f"        {frame.function}  {frame.file}:{frame.line}" for frame in frames]
    return lines


def telling(frames: Sequence[Frame]) -> list[Frame]:
    """The innermost frame and the frames of the user's own code."""
    return [frame for index, frame in enumerate(frames) if index == 0 or not is_library(frame.file)]
