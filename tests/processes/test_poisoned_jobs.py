"""Jobs whose snapshots are intact and poisoned, and jobs that do not get on: agents and workers as users have them.

The benchmark `train-poisoned` has twenty such jobs.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.train.snapshots import folder
from tests.processes.conftest import Agent, JobFolder, WarmAgents
from tests.processes.test_survive_jobs import agent_server  # noqa: F401 - a fixture

POISON = Path(__file__).parents[2] / "benchmarks" / "scripts" / "poison.py"
LIMIT_S = 120.0
pytestmark = [pytest.mark.xdist_group("torch survivor jobs"), pytest.mark.timeout(240)]


def trained(job_folder: JobFolder, code: int, kind: str, *options: str) -> Agent:
    """A job that has to end with this code."""
    line = ("--standalone", "--nproc-per-node", "2", "--preload", "torch", *options, POISON, job_folder.folder, kind)
    return job_folder.ends(code, *line, limit_s=LIMIT_S)


def history(job_folder: JobFolder) -> dict[str, Any]:
    return dict(json.loads((job_folder.folder / "snaps" / "history.json").read_text()))


@pytest.fixture(scope="module")
def calm_end(agent_server: WarmAgents, tmp_path_factory: pytest.TempPathFactory) -> str:  # noqa: F811
    """The weights of a job without poison."""
    with contextlib.closing(JobFolder(tmp_path_factory.mktemp("calm"), agent_server)) as calm:
        trained(calm, 0, "calm")
        return (calm.folder / "end").read_text()


@pytest.mark.parametrize("kind", ["numbers", "silent", "error", "crash"])
def test_a_poisoned_state_is_left_out(job_folder: JobFolder, calm_end: str, kind: str) -> None:
    trained(job_folder, 0, kind, "--max-restarts", "8")
    assert (job_folder.folder / "end").read_text() == calm_end
    found = folder.survey(job_folder.folder / "snaps")
    if kind in ("numbers", "silent"):  # noticed when it was saved, and passed over at once
        assert not found.suspects
        assert all(each.manifest.finite for each in found.committed)
    else:
        assert [each.step for each in found.suspects] == [60]  # kept, and not used
    assert found.committed[-1].step == 100


def test_a_poisoned_state_is_left_out_by_jobs_that_a_scheduler_starts_again(job_folder: JobFolder) -> None:
    for code in (1, 1, 0):
        trained(job_folder, code, "error", "--max-restarts", "0")
    assert [each.step for each in folder.survey(job_folder.folder / "snaps").suspects] == [60]


def test_a_job_that_does_not_get_on_ends_with_93(job_folder: JobFolder) -> None:
    agent = trained(job_folder, 93, "bug", "--max-restarts", "20")
    assert agent.verdict["verdict"]["code"] == "HF253"
    assert "3 restarts did not come past step 65; the last failure: ValueError: bug at step 65" in agent.text
    (job_folder.folder / "snaps" / "failure.json").write_text("torn")
    agent = trained(job_folder, 0, "calm")  # the cause is removed
    assert history(job_folder)["stalled"] == 0


def test_workers_that_are_killed_from_outside_are_no_poison(job_folder: JobFolder) -> None:
    """Five times at the same step, right after a resume."""
    trained(job_folder, 0, "killed", "--max-restarts", "9")
    assert not folder.survey(job_folder.folder / "snaps").marks
    assert history(job_folder)["stalled"] == 0
