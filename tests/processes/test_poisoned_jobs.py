"""Jobs whose snapshots are intact and poisoned, and jobs that do not get on: agents and workers as users have them.

The benchmark `train-poisoned` has twenty such jobs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.train.snapshots import folder
from tests.processes.conftest import Agent, Site
from tests.processes.test_survive_jobs import agent_server  # noqa: F401 - a fixture

POISON = Path(__file__).parents[2] / "benchmarks" / "scripts" / "poison.py"
LIMIT_S = 120.0
pytestmark = [pytest.mark.xdist_group("torch survivors"), pytest.mark.timeout(240)]


def trained(site: Site, code: int, kind: str, *options: str) -> Agent:
    """A job that has to end with this code."""
    line = ("--standalone", "--nproc-per-node", "2", "--preload", "torch", *options, POISON, site.folder, kind)
    return site.ends(code, *line, limit_s=LIMIT_S)


def history(site: Site) -> dict[str, Any]:
    return dict(json.loads((site.folder / "snaps" / "history.json").read_text()))


@pytest.mark.parametrize("kind", ["numbers", "silent", "error", "crash"])
def test_a_poisoned_state_is_left_out(site: Site, kind: str) -> None:
    trained(site, 0, kind, "--max-restarts", "8")
    end = (site.folder / "end").read_text()
    found = folder.survey(site.folder / "snaps")
    if kind in ("numbers", "silent"):  # noticed when it was saved, and passed over at once
        assert not found.suspects
        assert all(each.manifest.finite for each in found.committed)
    else:
        assert [each.step for each in found.suspects] == [60]  # kept, and not used
    assert found.committed[-1].step == 100
    for path in (site.folder / "end", site.folder / "poisoned"):
        path.unlink()
    (site.folder / "snaps").rename(site.folder / "before")
    trained(site, 0, "calm")
    assert (site.folder / "end").read_text() == end


def test_a_poisoned_state_is_left_out_by_jobs_that_a_scheduler_starts_again(site: Site) -> None:
    for code in (1, 1, 0):
        trained(site, code, "error", "--max-restarts", "0")
    assert [each.step for each in folder.survey(site.folder / "snaps").suspects] == [60]


def test_a_job_that_does_not_get_on_ends_with_93(site: Site) -> None:
    agent = trained(site, 93, "bug", "--max-restarts", "20")
    assert agent.verdict["verdict"]["code"] == "HF253"
    assert "3 restarts did not come past step 65; the last failure: ValueError: bug at step 65" in agent.text
    (site.folder / "snaps" / "failure.json").write_text("torn")
    agent = trained(site, 0, "calm")  # the cause is removed
    assert history(site)["stalled"] == 0


def test_workers_that_are_killed_from_outside_are_no_poison(site: Site) -> None:
    """Five times at the same step, right after a resume."""
    trained(site, 0, "killed", "--max-restarts", "9")
    assert not folder.survey(site.folder / "snaps").marks
    assert history(site)["stalled"] == 0
