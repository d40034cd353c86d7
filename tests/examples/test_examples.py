"""The examples do what they say. What does not need a launcher runs on ranks that are forked and not launched."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.support.limits import until
from tests.warm import ON_CPU, Warm
from tests.warm_jobs import WarmJobs

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
ON_RANKS = ROOT / "tests" / "train" / "scripts" / "on_ranks.py"
ACCURACY_MIN = 0.95

pytestmark = [pytest.mark.xdist_group("torch examples"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def jobs(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmJobs]:
    with WarmJobs(warm, tmp_path_factory.mktemp("jobs"), "sklearn.datasets") as made:
        yield made


def accuracy(text: str) -> float:
    found = re.findall(r"test accuracy ([\d.]+)", text)
    assert len(found) == 1, f"one rank tells the accuracy, once:\n{text}"
    return float(found[0])


def last_loss(text: str) -> str:
    return re.findall(r"step (\d+ loss [\d.]+)", text)[-1]


def on_forked_ranks(jobs: WarmJobs, *lines: tuple[int, str, *tuple[str, ...]]) -> list[str]:
    """What each of these examples printed, run as `on_ranks.py` says: (ranks or 0 for one plain process, example, arguments…)."""
    words = [word for ranks, name, *rest in lines for word in ("--", str(ranks), EXAMPLES / name, *rest)]
    done = jobs.run(ON_RANKS, "sklearn.datasets", *words[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("\f")[:-1]


def test_without_a_launcher(jobs: WarmJobs) -> None:
    alone, spawned = on_forked_ranks(
        jobs, (0, "single_gpu.py", "--epochs", "6"), (0, "multigpu.py", "--epochs", "6", "--nproc", "2")
    )
    assert accuracy(alone) >= ACCURACY_MIN
    assert accuracy(spawned) >= ACCURACY_MIN


def test_ddp_toy(jobs: WarmJobs) -> None:
    done = jobs.run("holdfast", "run", "--standalone", "--nproc-per-node", "2", EXAMPLES / "ddp_toy.py")
    assert done.returncode == 0, done
    assert sorted(re.findall(r"rank (\d) of 2 on cpu: weights agree: True", done.stdout)) == ["0", "1"], done


def test_a_resumed_training_is_the_same_training(jobs: WarmJobs, tmp_path: Path) -> None:
    """Its launch line is that of the demo."""

    def line(epochs: int, snapshot: str) -> tuple[int, str, *tuple[str, ...]]:
        return 2, "multigpu_torchrun.py", "--epochs", str(epochs), "--snapshot", str(tmp_path / snapshot)

    whole, _, resumed = on_forked_ranks(jobs, line(2, "whole.pt"), line(1, "parts.pt"), line(2, "parts.pt"))
    assert "resuming after epoch 1 step 23" in resumed
    assert last_loss(resumed) == last_loss(whole)
    assert accuracy(resumed) == accuracy(whole)


def test_multinode_goes_on_with_another_world(jobs: WarmJobs, tmp_path: Path) -> None:
    snapshot = ("--snapshot", str(tmp_path / "digits.pt"))
    on_forked_ranks(jobs, (2, "multinode.py", "--epochs", "3", *snapshot))
    launcher = ("holdfast", "run", "--standalone", "--nproc-per-node", "3")
    done = jobs.run(*launcher, EXAMPLES / "multinode.py", "--epochs", "7", *snapshot, timeout=200)
    assert done.returncode == 0, done
    assert "resuming after 4224 images on 3 ranks" in done.stdout
    assert accuracy(done.stdout) >= ACCURACY_MIN


def test_demo(jobs: WarmJobs, tmp_path: Path) -> None:
    """The main job: a rank is killed, training resumes, the story is told."""
    command = jobs.command("holdfast", "run")
    (tmp_path / "launcher.py").write_text(f"import os, sys\nos.execv(sys.executable, {command} + sys.argv[1:])\n")
    done = jobs.run(EXAMPLES / "demo.py", "--module", "launcher", cwd=tmp_path, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"step 126: kill -9 \d+ \(rank 1\)", done.stdout), done.stdout
    # Usually after epoch 5, step 115. Where the demo is slow to read what is printed, a later epoch ends before its kill.
    found = re.search(r"going on after epoch (\d+), step (\d+)", done.stdout)
    assert found, done.stdout
    epoch, step = map(int, found.groups())
    assert epoch >= 5
    assert step == 23 * epoch
    assert re.search(rf"Lost: [\d.]+ s; {126 - step} steps were done again", done.stdout), done.stdout
    assert re.search(r"exit code 0, test accuracy 0\.9[5-9]", done.stdout), done.stdout


@pytest.mark.parametrize("example", ["survivors.py", "fsdp.py"])
def test_survivors_keep_their_processes(jobs: WarmJobs, tmp_path: Path, example: str) -> None:
    """One of three is killed: the others go on as two, and a replacement joins them."""
    arguments = ("--step-seconds", "0.02", "--steps", "100000", "--folder", str(tmp_path / "snapshots"))
    options = ("--standalone", "--nproc-per-node", "3", "--max-restarts", "1", "--log-dir", tmp_path / "logs")
    line = jobs.command("holdfast", "run", *options, EXAMPLES / example, *arguments)
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, **ON_CPU}) as job:
        assert job.stdout is not None
        first, two, three = [], [], []
        try:
            first = begun(job.stdout, 3)
            os.kill(first[1][2], signal.SIGKILL)
            two = begun(job.stdout, 2)
            three = begun(job.stdout, 3)
        finally:
            job.terminate()
            job.stdout.read()
    before, after = {pid for _, _, pid in first}, {pid for _, _, pid in three}
    assert {pid for _, _, pid in two} == before - {first[1][2]}
    assert len(after - before) == 1
    assert after & before == before - {first[1][2]}
    assert len({step for _, step, _ in two}) == 1
    # The rank may be killed before the first step, and a replacement may be there before the two have done one.
    assert 0 <= two[0][1] <= three[0][1]


def begun(screen: IO[str], world: int) -> list[tuple[int, int, int]]:
    """Rank, step and process of each rank of a world of this size, when all of them have printed theirs."""
    found: dict[int, tuple[int, int, int]] = {}
    for text in screen:
        if match := re.search(rf"rank (\d) of {world} goes on after step (\d+), pid (\d+)", text):
            rank, step, pid = map(int, match.groups())
            found[rank] = (rank, step, pid)
        if len(found) == world:
            break
    assert len(found) == world, "the job has ended"
    return [found[rank] for rank in range(world)]


def test_draining_goes_on_at_the_step_where_it_stopped(jobs: WarmJobs, tmp_path: Path) -> None:
    """SIGTERM to the launcher, and the same again."""
    arguments = ("--steps", "300", "--snapshot", str(tmp_path / "d.pt"))
    options = ("--standalone", "--nproc-per-node", "2", "--log-dir", tmp_path / "logs")
    line = jobs.command("holdfast", "run", *options, EXAMPLES / "draining.py", *arguments)
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, **ON_CPU}) as job:
        assert job.stdout is not None
        first = next(text for text in job.stdout if "begins at step 0" in text)
        (journal,) = (tmp_path / "logs").glob("*/events.jsonl")
        until(lambda: "first_step_s" in journal.read_text(), "a first step")
        job.terminate()
        rest = job.stdout.read()
    assert job.returncode == 75, first + rest
    left = re.findall(r"leaves after step (\d+)", rest)
    assert len(left) == 2
    assert left[0] == left[1]
    (again,) = on_forked_ranks(jobs, (2, "draining.py", *arguments))
    assert f"begins at step {int(left[0]) + 1}" in again
    assert "done after step 300" in again
