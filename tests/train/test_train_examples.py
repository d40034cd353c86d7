"""The examples of holdfast.train do what they say, tiny and on the CPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.train.conftest import on_ranks
from tests.warm import ON_CPU, Warm
from tests.warm_jobs import WarmJobs

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
TUTORIALS = EXAMPLES / "train_tutorials"
ACCURACY_MIN = 0.8
"""After two epochs; guessing gives 0.1."""
TINY = "--layers 1 --heads 1 --width 8 --context 64 --global-batch-size 64 --batch-size 32 --epochs 4 --write 2 --log-every 1"
BOOK_CHARACTERS = 48_000

pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.timeout(240)]


def accuracy(text: str) -> float:
    found = re.findall(r"test accuracy ([\d.]+)", text)
    assert len(found) == 1, f"told once:\n{text}"
    return float(found[0])


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)(?: of \d+)? loss ([\d.]+)", text)}


def test_single_gpu_goes_on(warm: Warm, tmp_path: Path) -> None:
    script, folder = TUTORIALS / "single_gpu.py", ("--folder", str(tmp_path / "s"))
    first, second = on_ranks(
        warm, "digits", (0, script, ("--epochs", "1", *folder)), (0, script, ("--epochs", "2", *folder))
    )
    assert "epoch 1 loss" in first
    assert "epoch 1 loss" not in second
    assert accuracy(second) >= ACCURACY_MIN


def test_multigpu(warm: Warm) -> None:
    done = warm.run([TUTORIALS / "multigpu.py", "--nproc", "2", "--epochs", "2"], timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert accuracy(done.stdout) >= ACCURACY_MIN


def test_multigpu_torchrun_goes_on_with_another_world(warm: Warm, tmp_path: Path) -> None:
    script, folder = TUTORIALS / "multigpu_torchrun.py", ("--folder", str(tmp_path / "m"), "--log-every", "1")
    whole, first, second = on_ranks(
        warm,
        "digits",
        (0, script, ("--epochs", "2", "--folder", str(tmp_path / "whole"), "--log-every", "1")),
        (2, script, ("--epochs", "1", *folder)),
        (0, script, ("--epochs", "2", *folder)),
    )
    assert "resuming after step" in second
    parts, expected = {**losses(first), **losses(second)}, losses(whole)
    # At this learning rate the last bit of a sum grows tenfold every few steps, sooner on one kind of processor than on
    # another (in float64 the curves are equal to ten digits); another order of the data is far off still.
    assert [parts[step] for step in range(1, 7)] == pytest.approx([expected[step] for step in range(1, 7)], abs=1e-4)
    assert [parts[step] for step in expected] == pytest.approx(list(expected.values()), abs=0.03)
    assert accuracy(second) >= ACCURACY_MIN


@pytest.mark.usefixtures("fsdp_on_cpus")
def test_a_character_model_drained_and_gone_on_with_fsdp(warm: Warm, tmp_path: Path) -> None:
    """DDP on two ranks, asked to stop in the middle; FSDP2 on three ranks from there. Beside it one plain process."""
    place = tmp_path / "charmodel"
    shutil.copytree(EXAMPLES / "train_charmodel", place, ignore=shutil.ignore_patterns("__pycache__"))
    book, script = place / "tom_sawyer.txt", place / "train.py"
    book.write_text(book.read_text()[:BOOK_CHARACTERS])
    folder = ("--folder", str(tmp_path / "parts"))
    with WarmJobs(warm, tmp_path) as jobs:
        launcher = ("holdfast", "run", "--standalone", "--nproc-per-node", "2", "--log-dir", tmp_path / "logs")
        line = jobs.command(*launcher, script, *TINY.split(), *folder)
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, **ON_CPU}) as job:
            assert job.stdout is not None
            printed = []
            for text in job.stdout:
                printed.append(text)
                if re.search(r"step 3 of", text):
                    job.terminate()
    first = "".join(printed)
    assert job.returncode == 75, first
    whole, second = on_ranks(
        warm,
        "",
        (0, script, (*TINY.split(), "--folder", str(tmp_path / "whole"))),
        (3, script, ("--shard", *TINY.split(), *folder)),
    )
    going_on = re.search(r"going on after step (\d+), from disk, saved by 2 ranks", second)
    assert going_on is not None, second
    assert max(losses(first)) == int(going_on[1]) == min(losses(second)) - 1
    assert {**losses(first), **losses(second)} == pytest.approx(losses(whole), abs=0.002)
    assert re.findall(r"epoch 4 test loss ([\d.]+)", second)
