"""Trainers killed at random moments and at the phases of a save. `python -m benchmarks train-kills` kills two hundred."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.warm import Warm

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scripts" / "train_kills.py"
KILLS, SEED = 16, 0
"""Eight at random moments; at eight of the script's named points, some of each kind."""
pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.timeout(180)]


def test_every_life_goes_on_from_the_newest_state_bit_for_bit(warm: Warm, tmp_path: Path) -> None:
    done = warm.run([SCRIPT, tmp_path / "runs", str(KILLS), str(SEED)], timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert sum(found["resumed"].values()) == KILLS + 1
    assert found["newest"] > 0
