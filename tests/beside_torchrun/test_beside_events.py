"""`--event-log-handler console` beside torchrun: the same keys, and the same story."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")


def events(program: str, tmp_path: Path) -> list[dict[str, Any]]:
    script = tmp_path / "train.py"
    script.write_text("")
    line = [sys.executable, "-m", program, "--standalone", "--nproc-per-node", "2", "--event-log-handler", "console"]
    done = subprocess.run(
        [*line, "--log-dir", str(tmp_path / program), str(script)], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in done.stderr.splitlines() if text.startswith('{"name"')]


def place(event: dict[str, Any]) -> tuple[str, int]:
    return event["name"] + event["source"], event["metadata"]["global_rank"] or 0


def test_the_same_events_with_the_same_keys(tmp_path: Path) -> None:
    theirs, ours = events("torch.distributed.run", tmp_path), events("holdfast.run", tmp_path)

    def story(told: list[dict[str, Any]]) -> list[tuple[str, str]]:
        return [(each["source"], each["name"]) for each in told]

    assert story(ours) == story(theirs)
    ours.sort(key=place)  # workers end in any order
    theirs.sort(key=place)
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == list(other)
        assert list(mine["metadata"]) == list(other["metadata"])
        assert list(json.loads(mine["metadata"]["metadata"])) == list(json.loads(other["metadata"]["metadata"]))
        for key in ("global_rank", "group_rank", "role", "state", "rdzv_backend", "agent_restarts"):
            assert mine["metadata"][key] == other["metadata"][key], key
