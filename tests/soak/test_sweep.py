"""The sweep finds, counts and tells."""

from __future__ import annotations

import pytest

from tests.support.simulator import sweep
from tests.support.simulator.checkers import BrokenPromiseError
from tests.support.simulator.cluster import SimOptions
from tests.support.simulator.sweep import Draw, SweepResult, main, parse_seeds, report, run_seed, run_seeds


def hopeless(seed: int) -> Draw:
    """Success is demanded of a job that lacks a node."""
    return Draw(seed, 1, SimOptions(min_nodes=2, max_nodes=2), must_succeed=True)


def test_a_seed_tells_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["3"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Draw(seed=3, ")
    assert "every promise held" in told
    assert "boots" in told


def test_success_can_be_demanded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep, "draw", hopeless)
    with pytest.raises(BrokenPromiseError, match="nobody succeeded"):
        run_seed(0)
    assert main(["0"]) == 1
    assert "1 of at least 2 nodes came" in capsys.readouterr().out


def test_failing_seeds_come_with_the_command_that_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "draw", hopeless)
    tally = run_seeds(5, 8)
    assert sorted(tally.failures) == [5, 6, 7]
    told = report(tally)
    assert told.startswith("3 of 3 simulated jobs broke a promise\nseed 5 at ")
    assert "\n  python -m tests.support.simulator.sweep plain 7" in told


def test_many_seeds_on_all_cores(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "CHUNK_SEEDS", 3)
    assert main(["0:8"]) == 0
    assert capsys.readouterr().out.startswith("8 jobs, ")


def test_tallies_add_up() -> None:
    total, one = SweepResult(), run_seeds(0, 3)
    total.add(one)
    total.add(run_seeds(3, 5))
    assert total.jobs == 5
    assert total.events > one.events > 0
    assert sum(total.outcomes.values()) >= sum(one.outcomes.values()) > 0


@pytest.mark.parametrize("arguments", [[], ["x"], ["5:5"], ["7:3"], [":"], ["1", "2"], ["1:x"]])
def test_what_is_no_seed_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_ranges() -> None:
    assert parse_seeds("3:9") == (3, 9)
    with pytest.raises(ValueError, match="first:end"):
        parse_seeds("9")
