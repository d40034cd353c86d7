"""The examples do what they say, each with its own launch line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
PRELOADED = ("--preload", "torch,torch._dynamo,sklearn.datasets")
"""Imported once for all ranks: most of what these short trainings cost."""
TWO_RANKS = ("--standalone", "--nproc-per-node", "2", *PRELOADED)
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ACCURACY_MIN = 0.95

pytestmark = [pytest.mark.xdist_group("torch examples"), pytest.mark.timeout(240)]


def accuracy(text: str) -> float:
    found = re.findall(r"test accuracy ([\d.]+)", text)
    assert len(found) == 1, f"one rank tells the accuracy, once:\n{text}"
    return float(found[0])


def last_loss(text: str) -> str:
    return re.findall(r"step (\d+ loss [\d.]+)", text)[-1]


@pytest.mark.parametrize("name", ["single_gpu.py", "multigpu.py"])
def test_without_a_launcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in ON_CPU.items():
        monkeypatch.setenv(variable, value)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--epochs", "6"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) >= ACCURACY_MIN


def test_ddp_toy(run_cli) -> None:
    done = run_cli(["--standalone", "--nproc-per-node", "2", str(EXAMPLES / "ddp_toy.py")], env=ON_CPU, timeout=120)
    assert done.code == 0, done
    assert sorted(re.findall(r"rank (\d) of 2 on cpu: weights agree: True", done.out)) == ["0", "1"], done


def test_a_resumed_training_is_the_same_training(run_cli, tmp_path: Path) -> None:
    script = str(EXAMPLES / "multigpu_torchrun.py")

    def train(epochs: int, snapshot: str) -> str:
        flags = ["--epochs", str(epochs), "--snapshot", str(tmp_path / snapshot)]
        done = run_cli([*TWO_RANKS, script, *flags], env=ON_CPU, timeout=200)
        assert done.code == 0, done
        return done.out

    whole = train(2, "whole.pt")
    train(1, "parts.pt")
    resumed = train(2, "parts.pt")
    assert "resuming after epoch 1 step 23" in resumed
    assert last_loss(resumed) == last_loss(whole)
    assert accuracy(resumed) == accuracy(whole)


def test_multinode_goes_on_with_another_world(run_cli, tmp_path: Path) -> None:
    script, snapshot = str(EXAMPLES / "multinode.py"), str(tmp_path / "digits.pt")
    first = run_cli([*TWO_RANKS, script, "--epochs", "3", "--snapshot", snapshot], env=ON_CPU, timeout=200)
    assert first.code == 0, first
    flags = ["--standalone", "--nproc-per-node", "3", *PRELOADED, script, "--epochs", "7", "--snapshot", snapshot]
    second = run_cli(flags, env=ON_CPU, timeout=200)
    assert second.code == 0, second
    assert "resuming after 4224 images on 3 ranks" in second.out
    assert accuracy(second.out) >= ACCURACY_MIN


def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main job: a rank is killed, training resumes, the story is told."""
    for variable, value in ON_CPU.items():
        monkeypatch.setenv(variable, value)
    done = subprocess.run([sys.executable, str(EXAMPLES / "demo.py")], capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"step 126: kill -9 \d+ \(rank 1\)", done.stdout), done.stdout
    assert re.search(r"going on after epoch 5, step 115", done.stdout), done.stdout
    assert re.search(r"Lost: [\d.]+ s; 11 steps were done again", done.stdout), done.stdout
    assert re.search(r"exit code 0, test accuracy 0\.9[5-9]", done.stdout), done.stdout


def test_draining_goes_on_at_the_step_where_it_stopped(tmp_path: Path) -> None:
    """SIGTERM to the launcher, and the same line again."""
    line = [sys.executable, "-m", "holdfast.run", "--standalone", "--nproc-per-node", "2"]
    line += ["--preload", "torch,torch._dynamo"]
    line += ["--log-dir", str(tmp_path / "logs")]
    line += [str(EXAMPLES / "draining.py"), "--steps", "200", "--snapshot", str(tmp_path / "d.pt")]
    environ = {**os.environ, **ON_CPU}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environ) as job:
        assert job.stdout is not None
        first = next(text for text in job.stdout if "begins at step 0" in text)
        time.sleep(0.5)
        job.terminate()
        rest = job.stdout.read()
    assert job.returncode == 75, first + rest
    left = re.findall(r"leaves after step (\d+)", rest)
    assert len(left) == 2
    assert left[0] == left[1]
    done = subprocess.run(line, capture_output=True, text=True, env=environ, timeout=200)
    assert done.returncode == 0, done
    assert f"begins at step {int(left[0]) + 1}" in done.stdout
    assert "done after step 200" in done.stdout
