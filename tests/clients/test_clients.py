"""Real clients of torchrun's environment run unchanged under `holdfast run`: 2 ranks, on the CPU.

Plain DDP is `examples/ddp_toy.py`, see tests/examples.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.warm_jobs import WarmJobs

SCRIPTS = Path(__file__).parent / "scripts"
ON_TWO_RANKS = ("holdfast", "run", "--standalone", "--nproc-per-node", "2")

pytestmark = [pytest.mark.xdist_group("torch trainers"), pytest.mark.timeout(180)]


def client_lines(text: str) -> list[str]:
    """What the ranks said about themselves, without the prefix of the console."""
    return sorted(re.findall(r"client (rank=.*?)\s*$", text, re.MULTILINE))


def test_accelerate(trainer_jobs: WarmJobs) -> None:
    done = trainer_jobs.run(*ON_TWO_RANKS, SCRIPTS / "accelerate_ddp.py", timeout=120)
    assert done.returncode == 0, done
    assert client_lines(done.stdout) == [f"rank={rank} world=2 MULTI_CPU total=16 agree=True" for rank in (0, 1)], done


def test_lightning(trainer_jobs: WarmJobs) -> None:
    done = trainer_jobs.run(*ON_TWO_RANKS, SCRIPTS / "lightning_ddp.py", timeout=150)
    assert done.returncode == 0, done
    assert client_lines(done.stdout) == [f"rank={rank} world=2 steps=2 elastic=True" for rank in (0, 1)], done


def test_torch_record(trainer_jobs: WarmJobs, tmp_log_dir: Path) -> None:
    """The error file is torch's own, the verdict is drawn from it, and the worker's exit code is the job's."""
    script = SCRIPTS / "torch_record.py"
    done = trainer_jobs.run(*ON_TWO_RANKS, "--log-dir", tmp_log_dir, script, timeout=120)
    assert done.returncode == 1, done
    assert "ValueError: the loss is a pineapple" in done.stderr, done

    files = list(tmp_log_dir.rglob("error.json"))
    assert [path.parent.name for path in files] == ["1"], files
    message = json.loads(files[0].read_text())["message"]
    assert message["message"] == "ValueError: the loss is a pineapple"
    assert f'File "{script}"' in message["extraInfo"]["py_callstack"]
    assert message["extraInfo"]["timestamp"].isdigit()
