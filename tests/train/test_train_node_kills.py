"""Two nodes whose trainers, savers and memory are killed and lost at random: each life goes on from what all ranks have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "node_kills.py"
KILLS = 7
"""Each of the script's kinds once."""
pytestmark = [pytest.mark.xdist_group("torch"), pytest.mark.timeout(200)]


@pytest.mark.parametrize("seed", [0])
def test_every_rank_goes_on_from_the_newest_step_that_all_have(seed: int, tmp_path: Path) -> None:
    line = [sys.executable, SCRIPT, tmp_path / "runs", str(KILLS), str(seed)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["faults"] == [], done.stderr[-3000:]
    assert sum(found["resumed"].values()) == KILLS + 1
    assert found["newest"] > 0
