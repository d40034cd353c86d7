"""The examples do what they say. What does not need a launcher runs on ranks that are forked and not launched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import limit_s, until
from tests.warm import Warm

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
PRELOADED = "torch,torch._dynamo,sklearn.datasets"
"""Imported once for all ranks: most of what these short trainings cost."""
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ACCURACY_MIN = 0.95

pytestmark = [pytest.mark.xdist_group("torch examples"), pytest.mark.timeout(240)]


def accuracy(text: str) -> float:
    found = re.findall(r"test accuracy ([\d.]+)", text)
    assert len(found) == 1, f"one rank tells the accuracy, once:\n{text}"
    return float(found[0])


def last_loss(text: str) -> str:
    return re.findall(r"step (\d+ loss [\d.]+)", text)[-1]


def on_forked_ranks(warm: Warm, *lines: tuple[int, str, *tuple[str, ...]]) -> list[str]:
    """What each of these examples printed, run as `scripts/ranks.py` says: (ranks, example, arguments…)."""
    arguments = [json.dumps([ranks, str(EXAMPLES / name), *rest]) for ranks, name, *rest in lines]
    done = warm.run([Path(__file__).parent / "scripts" / "ranks.py", *arguments], env={**os.environ, **ON_CPU})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("---\n")[:-1]


def test_without_a_launcher(warm: Warm) -> None:
    alone, spawned = on_forked_ranks(
        warm, (0, "single_gpu.py", "--epochs", "6"), (0, "multigpu.py", "--epochs", "6", "--nproc", "2")
    )
    assert accuracy(alone) >= ACCURACY_MIN
    assert accuracy(spawned) >= ACCURACY_MIN


def test_ddp_toy(run_cli) -> None:
    done = run_cli(["--standalone", "--nproc-per-node", "2", str(EXAMPLES / "ddp_toy.py")], env=ON_CPU, timeout=120)
    assert done.code == 0, done
    assert sorted(re.findall(r"rank (\d) of 2 on cpu: weights agree: True", done.out)) == ["0", "1"], done


def test_a_resumed_training_is_the_same_training(warm: Warm, tmp_path: Path) -> None:
    """Its launch line is that of the demo."""

    def line(epochs: int, snapshot: str) -> tuple[int, str, *tuple[str, ...]]:
        return 2, "multigpu_torchrun.py", "--epochs", str(epochs), "--snapshot", str(tmp_path / snapshot)

    whole, _, resumed = on_forked_ranks(warm, line(2, "whole.pt"), line(1, "parts.pt"), line(2, "parts.pt"))
    assert "resuming after epoch 1 step 23" in resumed
    assert last_loss(resumed) == last_loss(whole)
    assert accuracy(resumed) == accuracy(whole)


def test_multinode_goes_on_with_another_world(warm: Warm, run_cli, tmp_path: Path) -> None:
    snapshot = ("--snapshot", str(tmp_path / "digits.pt"))
    on_forked_ranks(warm, (2, "multinode.py", "--epochs", "3", *snapshot))
    launcher = ["--standalone", "--nproc-per-node", "3", "--preload", PRELOADED]
    done = run_cli([*launcher, str(EXAMPLES / "multinode.py"), "--epochs", "7", *snapshot], env=ON_CPU, timeout=200)
    assert done.code == 0, done
    assert "resuming after 4224 images on 3 ranks" in done.out
    assert accuracy(done.out) >= ACCURACY_MIN


def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main job: a rank is killed, training resumes, the story is told."""
    for variable, value in {**ON_CPU, "HOLDFAST_PRELOAD": PRELOADED}.items():
        monkeypatch.setenv(variable, value)
    line = [sys.executable, str(EXAMPLES / "demo.py")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s(220))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"step 126: kill -9 \d+ \(rank 1\)", done.stdout), done.stdout
    assert re.search(r"going on after epoch 5, step 115", done.stdout), done.stdout
    assert re.search(r"Lost: [\d.]+ s; 11 steps were done again", done.stdout), done.stdout
    assert re.search(r"exit code 0, test accuracy 0\.9[5-9]", done.stdout), done.stdout


def test_draining_goes_on_at_the_step_where_it_stopped(warm: Warm, tmp_path: Path) -> None:
    """SIGTERM to the launcher, and the same again."""
    arguments = ("--steps", "300", "--snapshot", str(tmp_path / "d.pt"))
    line = [sys.executable, "-m", "holdfast.run", "--standalone", "--nproc-per-node", "2"]
    line += ["--log-dir", str(tmp_path / "logs"), str(EXAMPLES / "draining.py"), *arguments]
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
    (again,) = on_forked_ranks(warm, (2, "draining.py", *arguments))
    assert f"begins at step {int(left[0]) + 1}" in again
    assert "done after step 300" in again
