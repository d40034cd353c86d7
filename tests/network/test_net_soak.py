"""A short chaos soak, with a fixed seed and workers without torch: what `make soak` does for longer, with torch, and for
torchrun as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from soak import disk
from tests.network.hosts import why_not
from tests.support.limits import limit_s

ROOT = Path(__file__).resolve().parent.parent.parent
MINUTES, SEED, GAP_S = 0.25, 3, 3.0
LIMIT_S = 200.0


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_a_short_soak(tmp_path: Path) -> None:
    if why := why_not() or disk.why_not():
        pytest.skip(why)
    site = tmp_path / "soak" / "holdfast"
    line = [sys.executable, "-m", "soak", "--folder", site.parent, "chaos", "--launchers", "holdfast"]
    options = ["--worker", "plain", "--minutes", MINUTES, "--seed", SEED, "--gap", GAP_S, "--results", "none"]
    done = subprocess.run(
        map(str, [*line, *options]), cwd=ROOT, capture_output=True, text=True, timeout=limit_s(LIMIT_S)
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    events = [json.loads(line) for line in (site / "rig.jsonl").read_text().splitlines()]
    happened = [event["event"] for event in events]
    assert happened.count("fault") == len(json.loads((site / "schedule.json").read_text())) >= 4
    assert (happened[0], happened[-1]) == ("start", "end")
    assert [event["together"] for event in events if event["event"] == "reunion"] == [True]
