"""The soak's table and files say what was measured, and nothing of the machine's folders."""

from __future__ import annotations

import json
from pathlib import Path

from soak.checker import Violation
from soak.figures import Figures
from soak.report import Outcome, table, write

OURS = Outcome(
    "holdfast",
    Figures(wall_s=100.0, effective_s=50.0, steps=900, faults={"link down": 2}, pauses_s={"link down": [8.0, 9.5]}),
    [],
)
THEIRS = Outcome(
    "torchrun",
    Figures(wall_s=100.0, effective_s=5.0, steps=90, faults={"link down": 1, "partition 2|2": 1}, standstills=3),
    [Violation("stands", "no step for 120 s")],
)
ABOUT = {"date": "2026-01-02T03:04:05+00:00", "cpu": "Some CPU", "cores": 2, "seed": 7}


def test_the_table() -> None:
    lines = table([OURS, THEIRS]).splitlines()
    assert lines[0] == "| | holdfast | torchrun |"
    assert "| effective training time | 50.0% | 5.0% |" in lines
    assert "| times it stood still and was restarted by hand | 0 | 3 |" in lines
    assert "| **violations** | **0** | **1** |" in lines
    assert "| pause: link down | 8.0 / 9.5 / 9.5 (2×) | never (1×) |" in lines
    assert "| pause: partition 2\\|2 | – | never (1×) |" in lines


def test_the_files(tmp_path: Path) -> None:
    page = write([OURS, THEIRS], ABOUT, tmp_path)
    assert page.name == "2026-01-02-some-cpu-2-cores-soak.md"
    text = page.read_text()
    assert "- seed: 7" in text
    assert "- torchrun: stands: no step for 120 s" in text
    data = json.loads(page.with_suffix(".json").read_text())
    assert data["runs"]["holdfast"]["share"] == 0.5
    assert data["runs"]["torchrun"]["violations"] == ["stands: no step for 120 s"]
