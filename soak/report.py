"""The table of a chaos soak, and its file under benchmarks/results, from which docs/measured.md takes the main figures.

The figures are made elsewhere. Machine and versions come from the benchmarks' report.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soak.checker import Violation
from soak.figures import BEGIN_AND_END, BETWEEN, Figures, quantile


@dataclass
class Outcome:
    """One launcher's run."""

    launcher: str
    figures: Figures
    violations: list[Violation]


def table(outcomes: list[Outcome]) -> str:
    names = [outcome.launcher for outcome in outcomes]
    lines = [f"| | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]

    def row(what: str, cells: list[str]) -> None:
        lines.append(f"| {what} | {' | '.join(cells)} |")

    each = [outcome.figures for outcome in outcomes]
    row("effective training time", [f"{f.share:.1%}" for f in each])
    row("… seconds, of", [f"{f.effective_s:.0f} of {f.wall_s:.0f}" for f in each])
    for when in (BEGIN_AND_END, BETWEEN):
        row(f"lost {when}", [f"{f.lost_s.get(when, 0.0):.1f} s" for f in each])
    row("steps in the surviving history", [str(f.steps) for f in each])
    row("steps trained and lost", [str(f.steps_lost) for f in each])
    row("generations that trained", [str(f.generations) for f in each])
    row("faults", [str(sum(f.faults.values())) for f in each])
    row("agents that gave up", [str(f.gave_up) for f in each])
    row("times the whole job died", [str(f.job_deaths) for f in each])
    row("times it stood still and was restarted by hand", [str(f.standstills) for f in each])
    row("processes left by dead agents", [str(f.left_behind) for f in each])
    row("**violations**", [f"**{len(outcome.violations)}**" for outcome in outcomes])
    for kind in sorted({kind for f in each for kind in f.faults}):
        row(f"pause: {kind}".replace("|", "\\|"), [_pauses(f, kind) for f in each])
    return "\n".join(lines) + "\n"


def _pauses(figures: Figures, kind: str) -> str:
    values = figures.pauses_s.get(kind, [])
    if not values:
        return "–" if not figures.faults.get(kind) else f"never ({figures.faults[kind]}×)"
    lost = f"; {figures.lost_s.get(kind, 0.0):.1f} s lost"
    return f"{quantile(values, 0.5):.1f} / {quantile(values, 0.95):.1f} / {max(values):.1f} ({len(values)}×){lost}"


def write(outcomes: list[Outcome], about: dict[str, Any], folder: Path) -> Path:
    """Write the newest run of this script in the place of the one before. Returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = {
        outcome.launcher: {
            **asdict(outcome.figures),
            "share": outcome.figures.share,
            "violations": [str(violation) for violation in outcome.violations],
        }
        for outcome in outcomes
    }
    path = folder / f"soak-{Path(about['script']).stem}.json"
    path.write_text(json.dumps({"facts": about, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    return path
