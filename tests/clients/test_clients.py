"""Real clients of torchrun's environment run unchanged under `holdfast run`: 2 ranks, on the CPU.

Plain DDP is `examples/ddp_toy.py`, see tests/examples.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
TWO_RANKS = ("--standalone", "--nproc-per-node", "2")
OFFLINE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

# They import torch and more: one after the other, so that they do not starve each other.
pytestmark = [pytest.mark.xdist_group("torch jobs"), pytest.mark.timeout(180)]


def client_lines(text: str) -> list[str]:
    """What the ranks said about themselves, without the prefix of the console."""
    return sorted(re.findall(r"client (rank=.*?)\s*$", text, re.MULTILINE))


def test_accelerate(run_cli) -> None:
    done = run_cli([*TWO_RANKS, str(SCRIPTS / "accelerate_ddp.py")], env=OFFLINE, timeout=120)
    assert done.code == 0, done
    assert client_lines(done.out) == [f"rank={rank} world=2 MULTI_CPU total=16 agree=True" for rank in (0, 1)], done


def test_lightning(run_cli) -> None:
    done = run_cli([*TWO_RANKS, str(SCRIPTS / "lightning_ddp.py")], env=OFFLINE, timeout=150)
    assert done.code == 0, done
    assert client_lines(done.out) == [f"rank={rank} world=2 steps=2 elastic=True" for rank in (0, 1)], done


def test_torch_record(run_cli, tmp_log_dir: Path) -> None:
    """The error file is torch's own, the verdict is drawn from it, and the worker's exit code is the job's."""
    script = SCRIPTS / "torch_record.py"
    done = run_cli([*TWO_RANKS, "--log-dir", str(tmp_log_dir), str(script)], env=OFFLINE, timeout=120)
    assert done.code == 1, done
    assert "ValueError: the loss is a pineapple" in done.err, done

    files = list(tmp_log_dir.rglob("error.json"))
    assert [path.parent.name for path in files] == ["1"], files
    message = json.loads(files[0].read_text())["message"]
    assert message["message"] == "ValueError: the loss is a pineapple"
    assert f'File "{script}"' in message["extraInfo"]["py_callstack"]
    assert message["extraInfo"]["timestamp"].isdigit()
