"""Golden scenarios. HOLDFAST_UPDATE_SCENARIOS=1 writes the traces anew: review them as a diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.simulator.scenario import ScenarioError, inputs, play

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*.txt"))
# Read while the tests are collected: the session's own home removes HOLDFAST_ variables afterwards.
UPDATE = os.environ.get("HOLDFAST_UPDATE_SCENARIOS") == "1"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    before = path.read_text(encoding="utf-8")
    trace = play(inputs(before))
    if UPDATE:
        path.write_text(trace, encoding="utf-8")
    else:
        assert trace == before, "if this is meant: HOLDFAST_UPDATE_SCENARIOS=1"


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 14


@pytest.mark.parametrize(
    "lines",
    [["boot a"], ["job 1", "frobnicate a"], ["job 1", "boot a", "done b"], ["job 1", "boot a", "fail a 7 exit=1"]],
)
def test_a_line_that_means_nothing_is_refused(lines: list[str]) -> None:
    with pytest.raises(ScenarioError):
        play(lines)
