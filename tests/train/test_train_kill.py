"""Trainers killed at random moments and at the phases of a save. `python -m benchmarks train-kills` kills two hundred."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scripts" / "train_kills.py"
KILLS = 12


@pytest.mark.parametrize("seed", [0, 8])
def test_every_life_goes_on_from_the_newest_state_bit_for_bit(seed: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "runs", str(KILLS), str(seed)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert sum(found["resumed"].values()) == KILLS + 1
    assert found["newest"] > 0
