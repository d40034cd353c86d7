"""`holdfast report --html`: one page that needs nothing else: no script, no font, no picture from elsewhere.

Pure: what is known of a run in, HTML out. Every text of the run's is escaped here or in pictures.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from msgspec import Struct

from holdfast.core.spans import spans
from holdfast.insight.history import Activity, History, Life, NodeHistory
from holdfast.insight.incidents import Incident
from holdfast.insight.numbers import duration, plural
from holdfast.insight.page_style import STYLE
from holdfast.insight.pictures import Block, Curve, bar, lines
from holdfast.insight.timeline import PHASES, Timeline

COLOURS = {
    Activity.STARTUP: "startup",
    Activity.TRAINING: "training",
    Activity.LOST: "lost",
    Activity.HUNG: "hung",
    Activity.DOWN: "down",
    Activity.END: "end",
}
COLOURS_OF_LINES = 8
NODES_MAX = 64
"""Drawn; the others are counted."""
INCIDENTS_MAX = 500
GENERATIONS_MAX = 200
"""Rows; the newest of them."""


LONG, SHORT = "%Y-%m-%d %H:%M:%S", "%m-%d %H:%M:%S"


class PageContent(Struct, frozen=True, kw_only=True):
    """All that the page shows."""

    told: Timeline
    history: History | None
    incidents: Sequence[Incident]
    verdict: dict[str, Any] | None
    """verdict.json's `verdict`; None: there is none."""
    made_epoch_s: float


def render(report: PageContent) -> str:
    """The whole page."""
    title = f"holdfast: run {report.told.run_id}"
    parts = [
        head(report),
        verdict(report.verdict),
        timeline(report.history),
        steps(report.history),
        phases(report.told),
        troubles([each for each in report.incidents if not each.groups]),
        hangs([each for each in report.incidents if each.groups]),
        generations(report.told),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{STYLE}</style></head>\n'
        f"<body><main>\n{chr(10).join(part for part in parts if part)}\n</main></body></html>\n"
    )


def head(report: PageContent) -> str:
    told, history = report.told, report.history
    facts = [("run", told.run_id), ("nodes", ", ".join(told.nodes)), ("ended", told.end or "not yet")]
    if history is not None:
        effective = f"{history.effective:.1%}" if history.effective is not None else "unknown"
        lost = "unknown" if history.lost_steps is None else plural(history.lost_steps, "step")
        facts += [
            ("began", clock(history.nodes[0].began_s)),
            ("lasted", duration(history.total_s)),
            ("effective training time", effective),
            ("lost to restarts", lost),
        ]
    facts += [("generations", str(len(told.generations))), ("this page", clock(report.made_epoch_s))]
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts)
    return f"<h1>{escape(told.run_id)}</h1>\n<dl>{rows}</dl>"


def verdict(told: dict[str, Any] | None) -> str:
    if told is None:
        return ""
    advice = f"<p><b>Do:</b> {escape(str(told.get('advice')))}</p>" if told.get("advice") else ""
    culprit = told.get("culprit") or {}
    trace = str(culprit.get("traceback") or culprit.get("stderr_tail") or "").rstrip()
    words = f"<details><summary>its last words</summary><pre>{escape(trace)}</pre></details>" if trace else ""
    return (
        f'<section class="verdict"><h2>{escape(str(told.get("code", "")))}: why it failed</h2>'
        f"<p>{escape(str(told.get('cause', '')))}</p>{advice}{words}</section>"
    )


def timeline(history: History | None) -> str:
    if history is None or not history.stretches:
        return ""
    from_s, to_s = history.stretches[0].from_s, history.stretches[-1].to_s
    blocks = [
        Block(
            each.from_s,
            each.to_s,
            COLOURS[each.doing],
            f"{each.doing.value}, generation {each.generation}: {duration(each.to_s - each.from_s)}",
        )
        for each in history.stretches
    ]
    rows = [bar_row("the job", bar(blocks, from_s, to_s, "the whole job"))]
    rows += [bar_row(node.node, bar(node_blocks(node), from_s, to_s, node.node)) for node in history.nodes[:NODES_MAX]]
    if len(history.nodes) > NODES_MAX:
        rows.append(f"<p>and {plural(len(history.nodes) - NODES_MAX, 'node')} more</p>")
    totals = "".join(
        f"<tr><td>{key(COLOURS[doing])}{doing.value}</td><td>{duration(seconds)}</td>"
        f"<td>{seconds / history.total_s if history.total_s else 0:.1%}</td></tr>"
        for doing in Activity
        if (seconds := history.spent_s(doing)) > 0
    )
    axis = f'<div class="axis"><span>{clock(from_s)}</span><span>{clock(to_s)}</span></div>'
    return (
        f"<section><h2>Where the time went</h2>{''.join(rows)}{axis}"
        f'<table class="totals"><tr><th>what</th><th>time</th><th>part</th></tr>{totals}</table></section>'
    )


def node_blocks(node: NodeHistory) -> Iterable[Block]:
    for life in node.lives:
        name = f"{node.node}, generation {life.number}"
        ready_s = life.ready_s if life.ready_s is not None else life.over_s
        ready_s = min(ready_s, life.over_s)
        yield Block(life.ordered_s, ready_s, "startup", f"{name}: starts, {duration(ready_s - life.ordered_s)}")
        if life.over_s > ready_s:
            colour = "alternate" if life.number % 2 == 0 else "training"
            yield Block(ready_s, life.over_s, colour, f"{name}: trains, {duration(life.over_s - ready_s)}")


def steps(history: History | None) -> str:
    """A curve for each node, broken where a generation ends."""
    if history is None:
        return ""
    curves: list[Curve] = []
    names = []
    for number, node in enumerate(history.nodes[:COLOURS_OF_LINES]):
        own = [(number, curve) for life in node.lives if (curve := curve_of(node, life))]
        if own:
            curves += own
            names.append(f'<span><i class="key line{number}"></i>{escape(node.node)}</span>')
    points = [point for _, curve in curves for point in curve]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    picture = lines(curves, (min(xs), max(xs), 0.0, max(ys)), "steps over time")
    unit = "the job's" if history.lost_steps is not None else "each generation's own"
    return (
        f"<section><h2>Steps</h2><p>Of {unit} count; the slowest rank of each node. Top: {max(ys):,.0f}.</p>{picture}"
        f'<div class="axis"><span>{clock(min(xs))}</span><span>{clock(max(xs))}</span></div>'
        f'<p class="keys">{"".join(names)}</p></section>'
    )


def curve_of(node: NodeHistory, life: Life) -> list[tuple[float, float]]:
    """From its first step on; empty where there is none."""
    points = [(point.at_s, float(point.steps)) for point in node.points if point.generation == life.number]
    if life.ready_s is None or not points or not life.steps:
        return []
    return [(life.ready_s, float(max(0, life.began_at))), *(point for point in points if point[0] > life.ready_s)]


def phases(told: Timeline) -> str:
    shown = [each for each in told.generations if each.phases_s][-GENERATIONS_MAX:]
    if not shown:
        return ""
    longest = max(each.total_s for each in shown)
    rows = []
    for generation in shown:
        at, blocks = 0.0, []
        for number, phase in enumerate(PHASES):
            seconds = generation.phases_s.get(phase, 0.0)
            if seconds > 0:
                blocks.append(Block(at, at + seconds, f"phase{number}", f"{phase}: {seconds:.3f} s"))
                at += seconds
        label = f"generation {generation.number}: {generation.total_s:.2f} s"
        rows.append(bar_row(label, bar(blocks, 0.0, longest, label)))
    keys = "".join(f"<span>{key(f'phase{number}')}{phase}</span>" for number, phase in enumerate(PHASES))
    return (
        "<section><h2>Until the first step</h2><p>Each generation's start, by phase; the slowest node counts.</p>"
        f'{"".join(rows)}<p class="keys">{keys}</p></section>'
    )


def troubles(found: Sequence[Incident]) -> str:
    if not found:
        return ""
    rows = "".join(
        f"<tr><td>{clock(each.at_s, SHORT)}</td><td>{each.generation or ''}</td><td>{escape(each.what)}</td>"
        f"<td>{escape(each.code)}</td><td>{escape(each.text)}{advice(each)}</td></tr>"
        for each in found[-INCIDENTS_MAX:]
    )
    return (
        '<section><h2>What happened</h2><div class="wide"><table><tr><th>when</th><th>gen</th><th>what</th>'
        f"<th>code</th><th>in words</th></tr>{rows}</table></div></section>"
    )


def advice(incident: Incident) -> str:
    return f"<br><b>Do:</b> {escape(incident.advice)}" if incident.advice else ""


def hangs(found: Sequence[Incident]) -> str:
    if not found:
        return ""
    parts = []
    for each in found[-INCIDENTS_MAX:]:
        groups = "".join(
            f"<tr><td>{escape(spans(ranks))}</td><td>{escape(place)}</td></tr>" for ranks, place in each.groups
        )
        files = "".join(f"<li>rank {escape(rank)}: {escape(path)}</li>" for rank, path in each.files)
        kept = f"<details><summary>stacks are kept in</summary><ul>{files}</ul></details>" if files else ""
        parts.append(
            f"<h3>{clock(each.at_s)}, generation {each.generation}: {escape(each.code)}</h3><p>{escape(each.text)}</p>"
            f'<div class="wide"><table><tr><th>ranks</th><th>stand</th></tr>{groups}</table></div>{kept}'
        )
    return f"<section><h2>Hangs</h2>{''.join(parts)}</section>"


def generations(told: Timeline) -> str:
    if not told.generations:
        return ""
    rows = "".join(
        f"<tr><td>{each.number}</td><td>{clock(each.began_epoch_s, SHORT) if each.began_epoch_s else ''}</td>"
        f"<td>{each.world_size or ''}</td><td>{each.restart_count}</td><td>{each.total_s:.2f}</td>"
        f"<td>{escape(each.why or ('start' if each.number == 1 else ''))}</td></tr>"
        for each in told.generations[-GENERATIONS_MAX:]
    )
    return (
        '<section><h2>Generations</h2><div class="wide"><table><tr><th>gen</th><th>began</th><th>ranks</th>'
        f"<th>restarts</th><th>start, s</th><th>why</th></tr>{rows}</table></div></section>"
    )


def bar_row(label: str, picture: str) -> str:
    return f'<div class="row"><span>{escape(label)}</span>{picture}</div>'


def key(colour: str) -> str:
    return f'<i class="key {colour}"></i>'


def clock(epoch_s: float, form: str = LONG) -> str:
    try:
        return time.strftime(form, time.localtime(epoch_s))
    except (OverflowError, OSError, ValueError):
        return "at no time"  # a clock that was set to anything
