"""The report's page in a real browser: it loads, says nothing on the console and asks for nothing. Without Chromium: skipped."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.cli import main
from tests.support.limits import limit_s

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OWN = {"time": 1.0, "monotonic": 1.0}
EVENTS = [
    {"event": "begins", "member": "a#1", "run_id": "demo", "endpoint": "e"},
    {"time": 2.0, "event": "generation", "generation": 1, "world_size": 2, "nproc": 2, "rank_base": 0},
    {"time": 9.0, "event": "phases", "generation": 1, "restart_count": 0, "spawn_s": 0.5, "first_step_s": 1.0,
     "until_monotonic": 1.0},
    {"time": 20.0, "event": "progress", "generation": 1, "steps": [5, 5], "began_at": [0, 0], "at": [5, 5]},
]  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(OWN | event) + "\n" for event in EVENTS))
    page = tmp_path / "page.html"
    assert main(["report", "--html", str(page), str(tmp_path)]) == 0
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    own = [f"--user-data-dir={tmp_path / 'profile'}", "--disable-background-networking"]
    shot = ["--window-size=390,844", f"--screenshot={tmp_path / 'shot.png'}"]
    done = subprocess.run(
        [str(CHROMIUM), *options, *own, *shot, page.as_uri()], capture_output=True, text=True, timeout=limit_s(60)
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "shot.png").stat().st_size > 5_000
    assert "CONSOLE" not in done.stderr, done.stderr  # whatever the page asked for would be refused, and told there
