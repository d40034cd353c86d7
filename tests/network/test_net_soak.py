"""A short chaos soak, with a fixed seed: what `make soak` does for longer, and for torchrun as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from soak import disk
from tests.network.hosts import why_not

ROOT = Path(__file__).resolve().parent.parent.parent
MINUTES, SEED, GAP_S = 0.7, 11, 8.0
LIMIT_S = 400.0


@pytest.mark.slow
@pytest.mark.xdist_group("torch jobs")
@pytest.mark.timeout(LIMIT_S + 20)
def test_a_short_soak(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if why := why_not() or disk.why_not():
        pytest.skip(why)
    line = [sys.executable, "-m", "soak", "--folder", tmp_path / "soak", "chaos", "--launchers", "holdfast"]
    options = ["--minutes", MINUTES, "--seed", SEED, "--gap", GAP_S, "--results", "none"]
    done = subprocess.run(map(str, [*line, *options]), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
