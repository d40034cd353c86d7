"""A running job in lines for people: what `holdfast status` shows. PURE: from the coordinator's view to text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from holdfast.core.progress import JobView, NodeView, RankView, Stage
from holdfast.core.text import spans
from holdfast.insight.numbers import duration, plural

RANKS_SHOWN_MAX = 16
"""Of larger jobs the nodes alone, unless the ranks are asked for."""

Row = tuple[str, ...]


def status_lines(view: JobView, *, ranks: bool | None = None) -> list[str]:
    """`ranks` None: a line for each rank where there are few."""
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
    """Of the rank that has waited longest; empty while none has made one."""
    ages = [rank.age_s for rank in ranks if rank.stage is Stage.STEPPING]
    return f"{duration(max(ages))} ago" if ages else ""


def steps_per_s(ranks: Sequence[RankView]) -> float:
    """By the median of the ranks' median steps; 0 while unknown, and in a hang."""
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
    """Side by side; a column of which nobody has anything is left out."""
    used = [index for index in range(len(rows[0])) if any(row[index] for row in rows[1:])]
    widths = {index: max(len(row[index]) for row in rows) for index in used}
    return ["  ".join(row[index].ljust(widths[index]) for index in used).rstrip() for row in rows]
