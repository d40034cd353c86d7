"""`holdfast report --html`: one self-contained page without scripts, and without fonts or pictures from other servers.

Pure: data about a run in, HTML out. Every text of the run is escaped here. Pictures are plain SVG without text, so that
they scale to any width; captions are beside them. Colours are CSS classes, named as the activities; the style defines
them for light mode, dark mode and print.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from msgspec import Struct

from holdfast.diagnosis.history import PHASES, Activity, History, Incident, Life, NodeHistory, Timeline
from holdfast.text import duration, plural, spans

WIDE = 1000.0
POINTS_MAX = 400
"""Points of a curve; with more, only some are drawn."""


class Block(Struct, frozen=True):
    """One block of a bar."""

    from_: float
    to: float
    """End, in the bar's own unit."""
    colour: str
    """Name of a class of the style."""
    words: str
    """Shown when the pointer is over it."""


def bar(blocks: Iterable[Block], from_: float, to: float, label: str) -> str:
    """One bar. Blocks have a minimum width, so that short ones stay visible."""
    scale = WIDE / max(to - from_, 1e-9)
    drawn = "".join(
        f'<rect class="{block.colour}" x="{(block.from_ - from_) * scale:.2f}" y="0" '
        f'width="{max((block.to - block.from_) * scale, 1.0):.2f}" height="10">'
        f"<title>{escape(block.words)}</title></rect>"
        for block in blocks
    )
    return (
        f'<svg class="bar" viewBox="0 0 {WIDE:g} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label, quote=True)}">{drawn}</svg>'
    )


Curve = tuple[int, Sequence[tuple[float, float]]]
"""Colour (`line0` to `line7`) and points (x, y)."""


def lines(curves: Sequence[Curve], box: tuple[float, float, float, float], label: str) -> str:
    """Curves in a box: x from, x to, y from, y to."""
    left, right, low, high = box
    across, up = WIDE / max(right - left, 1e-9), 300 / max(high - low, 1e-9)
    drawn = []
    for colour, curve in curves:
        points = " ".join(f"{(x - left) * across:.1f},{300 - (y - low) * up:.1f}" for x, y in thinned(curve))
        drawn.append(f'<polyline class="line{colour}" points="{points}"/>')
    grid = "".join(f'<line class="grid" x1="0" x2="{WIDE:g}" y1="{y}" y2="{y}"/>' for y in (1, 75, 150, 225, 299))
    return (
        f'<svg class="chart" viewBox="0 0 {WIDE:g} 300" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label, quote=True)}">{grid}{"".join(drawn)}</svg>'
    )


def thinned(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most POINTS_MAX points of the curve, the first and the last included."""
    if len(curve) <= POINTS_MAX:
        return list(curve)
    stride = len(curve) / (POINTS_MAX - 1)
    return [curve[int(number * stride)] for number in range(POINTS_MAX - 1)] + [curve[-1]]


STYLE = (
    """
:root{--ink:#1b1f24;--paper:#fff;--soft:#eef1f4;--line:#d0d7de;--dim:#57606a;
--startup:#d4a72c;--training:#2da44e;--alternate:#1f883d;--lost:#cf222e;--hung:#8250df;--down:#fa8f3e;--end:#8c959f;
--c0:#0969da;--c1:#bf3989;--c2:#8250df;--c3:#1b7c83;--c4:#9a6700;--c5:#116329;--c6:#a40e26;--c7:#57606a}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--soft:#161b22;--line:#30363d;--dim:#9198a1;
--startup:#d29922;--training:#3fb950;--alternate:#2ea043;--lost:#f85149;--hung:#bc8cff;--down:#f0883e;--end:#6e7681;
--c0:#58a6ff;--c1:#f778ba;--c2:#bc8cff;--c3:#39c5cf;--c4:#e3b341;--c5:#7ee787;--c6:#ff7b72;--c7:#b1bac4}}
@media print{:root{--ink:#000;--paper:#fff;--soft:#fff;--line:#999;--dim:#333}
section{break-inside:avoid}svg rect,.key{print-color-adjust:exact;-webkit-print-color-adjust:exact}
details>*{display:block}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.45 system-ui,sans-serif}
main{max-width:68rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;margin:.2rem 0 .8rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 .6rem}h3{font-size:1rem;margin:1rem 0 .3rem}
p{margin:.3rem 0 .6rem;overflow-wrap:anywhere}
section{border-top:1px solid var(--line);padding:1rem 0}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:.6rem;margin:0 0 1rem}
dl div{background:var(--soft);border-radius:.4rem;padding:.4rem .6rem;min-width:0}
dt{color:var(--dim);font-size:.8rem}dd{margin:0;overflow-wrap:anywhere}
.verdict{border:1px solid var(--lost);border-radius:.4rem;padding:.8rem}
pre{overflow-x:auto;background:var(--soft);padding:.6rem;font-size:.8rem}
.row{display:grid;grid-template-columns:minmax(6rem,14rem) 1fr;gap:.6rem;align-items:center;margin:.25rem 0}
.row>span{font-size:.85rem;overflow-wrap:anywhere}
svg{display:block;width:100%;background:var(--soft)}svg.bar{height:1.3rem}svg.chart{height:14rem}
.axis{display:flex;justify-content:space-between;color:var(--dim);font-size:.8rem}
.keys{display:flex;flex-wrap:wrap;gap:.3rem 1rem;font-size:.85rem}
.key{display:inline-block;width:.8rem;height:.8rem;margin-right:.4rem;border-radius:2px;vertical-align:-1px}
table{border-collapse:collapse;font-size:.9rem}th,td{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;
border-bottom:1px solid var(--line)}th{color:var(--dim);font-weight:600}td:not(:last-child),th{white-space:nowrap}
td:last-child{min-width:14rem}.totals td{min-width:0}
.wide{overflow-x:auto}.totals{margin-top:.8rem}
.grid{stroke:var(--line);stroke-width:1;vector-effect:non-scaling-stroke}
polyline{fill:none;stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round}
@media (max-width:40rem){.row{grid-template-columns:1fr;gap:.1rem}body{font-size:15px}}
"""
    + "".join(
        f".{name}{{fill:var(--{name});background:var(--{name})}}\n"
        for name in ("startup", "training", "alternate", "lost", "hung", "down", "end")
    )
    + "".join(
        f".phase{n}{{fill:var(--c{n});background:var(--c{n})}}"
        f".line{n}{{stroke:var(--c{n})}}i.line{n}{{background:var(--c{n})}}\n"
        for n in range(8)
    )
)


COLOURS_OF_LINES = 8
NODES_MAX = 64
"""Nodes that are drawn; the others are only counted."""
INCIDENTS_MAX = 500
GENERATIONS_MAX = 200
"""Rows of the table; the newest generations are shown."""


LONG, SHORT = "%Y-%m-%d %H:%M:%S", "%m-%d %H:%M:%S"


class PageContent(Struct, frozen=True, kw_only=True):
    """The content of the page."""

    course: Timeline
    history: History | None
    incidents: Sequence[Incident]
    verdict: dict[str, Any] | None
    """`verdict` of verdict.json; None: there is none."""
    made_epoch_s: float


def render(report: PageContent) -> str:
    """The whole page."""
    title = f"holdfast: run {report.course.run_id}"
    parts = [
        head(report),
        verdict(report.verdict),
        timeline(report.history),
        steps(report.history),
        phases(report.course),
        troubles([each for each in report.incidents if not each.groups]),
        hangs([each for each in report.incidents if each.groups]),
        generations(report.course),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{STYLE}</style></head>\n'
        f"<body><main>\n{chr(10).join(part for part in parts if part)}\n</main></body></html>\n"
    )


def head(report: PageContent) -> str:
    course, history = report.course, report.history
    facts = [("run", course.run_id), ("nodes", ", ".join(course.nodes)), ("ended", course.end or "not yet")]
    if history is not None:
        effective = f"{history.effective:.1%}" if history.effective is not None else "unknown"
        lost = "unknown" if history.lost_steps is None else plural(history.lost_steps, "step")
        facts += [
            ("began", clock(history.nodes[0].began_s)),
            ("lasted", duration(history.total_s)),
            ("effective training time", effective),
            ("lost to restarts", lost),
        ]
    facts += [("generations", str(len(course.generations))), ("this page", clock(report.made_epoch_s))]
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts)
    return f"<h1>{escape(course.run_id)}</h1>\n<dl>{rows}</dl>"


def verdict(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    advice = f"<p><b>Do:</b> {escape(str(found.get('advice')))}</p>" if found.get("advice") else ""
    culprit = found.get("culprit") or {}
    trace = str(culprit.get("traceback") or culprit.get("stderr_tail") or "").rstrip()
    words = f"<details><summary>its last output</summary><pre>{escape(trace)}</pre></details>" if trace else ""
    return (
        f'<section class="verdict"><h2>{escape(str(found.get("code", "")))}: why it failed</h2>'
        f"<p>{escape(str(found.get('cause', '')))}</p>{advice}{words}</section>"
    )


def timeline(history: History | None) -> str:
    if history is None or not history.stretches:
        return ""
    from_s, to_s = history.stretches[0].from_s, history.stretches[-1].to_s
    blocks = [
        Block(
            each.from_s,
            each.to_s,
            each.doing.name.lower(),
            f"{each.doing.value}, generation {each.generation}: {duration(each.to_s - each.from_s)}",
        )
        for each in history.stretches
    ]
    rows = [bar_row("the job", bar(blocks, from_s, to_s, "the whole job"))]
    rows += [bar_row(node.node, bar(node_blocks(node), from_s, to_s, node.node)) for node in history.nodes[:NODES_MAX]]
    if len(history.nodes) > NODES_MAX:
        rows.append(f"<p>and {plural(len(history.nodes) - NODES_MAX, 'node')} more</p>")
    totals = "".join(
        f"<tr><td>{key(doing.name.lower())}{doing.value}</td><td>{duration(seconds)}</td>"
        f"<td>{seconds / history.total_s if history.total_s else 0:.1%}</td></tr>"
        for doing in Activity
        if (seconds := history.spent_s(doing)) > 0
    )
    axis = f'<div class="axis"><span>{clock(from_s)}</span><span>{clock(to_s)}</span></div>'
    return (
        f"<section><h2>Where the time went</h2>{''.join(rows)}{axis}"
        f'<table class="totals"><tr><th>what</th><th>time</th><th>share</th></tr>{totals}</table></section>'
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
    """One curve per node and generation."""
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
    """The curve from the first step on; empty: no steps."""
    points = [(point.at_s, float(point.steps)) for point in node.points if point.generation == life.number]
    if life.ready_s is None or not points or not life.steps:
        return []
    return [(life.ready_s, float(max(0, life.began_at))), *(point for point in points if point[0] > life.ready_s)]


def phases(course: Timeline) -> str:
    shown = [each for each in course.generations if each.phases_s][-GENERATIONS_MAX:]
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
        f"<th>code</th><th>details</th></tr>{rows}</table></div></section>"
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
        kept = f"<details><summary>files with stacks</summary><ul>{files}</ul></details>" if files else ""
        parts.append(
            f"<h3>{clock(each.at_s)}, generation {each.generation}: {escape(each.code)}</h3><p>{escape(each.text)}</p>"
            f'<div class="wide"><table><tr><th>ranks</th><th>place</th></tr>{groups}</table></div>{kept}'
        )
    return f"<section><h2>Hangs</h2>{''.join(parts)}</section>"


def generations(course: Timeline) -> str:
    if not course.generations:
        return ""
    rows = "".join(
        f"<tr><td>{each.number}</td><td>{clock(each.began_epoch_s, SHORT) if each.began_epoch_s else ''}</td>"
        f"<td>{each.world_size or ''}</td><td>{each.restart_count}</td><td>{each.total_s:.2f}</td>"
        f"<td>{escape(each.why or ('start' if each.number == 1 else ''))}</td></tr>"
        for each in course.generations[-GENERATIONS_MAX:]
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
        return "unknown"  # the clock of the machine was set to an invalid time
