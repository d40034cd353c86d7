"""The recipes do what they say: a rank is killed, and the job goes on and ends with the losses of an undisturbed one; asked to leave, it
saves, ends with 75, and the next start goes on there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.protocol.exit_codes import EXIT_REQUEUE
from tests.support.limits import limit_s
from tests.warm import ON_CPU
from tests.warm_jobs import WarmJobs

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SAFE_LINES_MAX = 10
LOSS = r"step (\d+) loss ([\d.]+)"
pytestmark = [pytest.mark.xdist_group("torch trainers"), pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Recipe:
    script: str
    folder: str = "--folder"
    more: tuple[str, ...] = ()


RECIPES = {
    "dcp": Recipe("recipes/dcp_loop.py", more=("--save-every", "5")),  # it has saved before its first line
    "transformers": Recipe("recipes/transformers_trainer.py"),
    "lightning": Recipe("recipes/lightning_trainer.py"),
    "nanogpt": Recipe("train_charmodel/nanogpt_loop.py", "--out-dir"),
}


@dataclass
class Ended:
    code: int
    screen: str

    @property
    def losses(self) -> dict[int, str]:
        """By step; a step that was repeated has its last one."""
        return {int(step): loss for step, loss in re.findall(LOSS, self.screen)}

    @property
    def resumed(self) -> list[int]:
        return [int(step) for step in re.findall(r"going on after step (\d+)", self.screen)]


def trained(trainer_jobs: WarmJobs, recipe: Recipe, folder: Path, fault: signal.Signals | None = None) -> Ended:
    """A job of two ranks. At the first line about a loss, SIGKILL goes to the worker of rank 1, and SIGTERM to the agent.
    Most steps are still to come then, so that the signal does not come after the job."""
    logs = folder.with_suffix(".logs")
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", logs)
    arguments = (recipe.folder, str(folder), *recipe.more)
    line = trainer_jobs.command("holdfast", "run", *options, EXAMPLES / recipe.script, *arguments)
    environment = {**os.environ, **ON_CPU}
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder.parent
    ) as job:
        assert job.stdout is not None
        screen = []
        for text in job.stdout:
            screen.append(text)
            if fault is not None and re.search(LOSS, text):
                if fault == signal.SIGTERM:
                    job.terminate()  # passed on to the agent
                else:
                    os.kill(worker_of_rank_1(logs), fault)
                fault = None
        code = job.wait(limit_s(60))
    return Ended(code, "".join(screen))


def worker_of_rank_1(logs: Path) -> int:
    (journal,) = logs.glob("*/events.jsonl")
    events = [json.loads(each) for each in journal.read_text().splitlines()]
    return [each["pid"] for each in events if each["event"] == "worker_started" and each["rank"] == 1][-1]


@pytest.mark.parametrize("name", RECIPES)
def test_a_killed_rank_and_a_preemption_change_no_loss(name: str, trainer_jobs: WarmJobs, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    undisturbed = trained(trainer_jobs, recipe, tmp_path / "undisturbed")
    assert undisturbed.code == 0, undisturbed.screen
    assert len(undisturbed.losses) >= 8

    killed = trained(trainer_jobs, recipe, tmp_path / "killed", signal.SIGKILL)
    assert killed.code == 0, killed.screen
    assert len(killed.resumed) == 1, killed.screen
    assert killed.losses == undisturbed.losses

    left = trained(trainer_jobs, recipe, tmp_path / "left", signal.SIGTERM)
    assert left.code == EXIT_REQUEUE, left.screen
    again = trained(trainer_jobs, recipe, tmp_path / "left")
    assert again.code == 0, again.screen
    (first,) = again.resumed
    assert first >= max(left.losses), "nothing that was done is repeated"
    assert {**left.losses, **again.losses} == undisturbed.losses


@pytest.mark.parametrize("name", ["dcp", "nanogpt"])
def test_a_loop_is_made_safe_by_ten_lines(name: str) -> None:
    lines = (EXAMPLES / RECIPES[name].script).read_text().splitlines()
    assert 0 < sum("  # safe" in line for line in lines) <= SAFE_LINES_MAX
