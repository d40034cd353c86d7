"""Lives of one job, one after the other, that hand on their state in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import until
from tests.warm import Warm

LAUNCHER = Path(__file__).parent / "scripts" / "launch_lives.py"
pytestmark = [pytest.mark.xdist_group("torch lives"), pytest.mark.timeout(180)]


def lives(warm: Warm, count: int, case: str, folder: Path) -> list[list[dict[str, Any]]]:
    """What each life said; they have one launcher."""
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": f"lives-{os.getpid()}"}
    done = warm.run([LAUNCHER, str(count), case, folder / "snaps"], env=environ)
    shelves = f"holdfast-{os.getuid()}-lives-{os.getpid()}-*"
    until(lambda: not any(Path("/dev/shm").glob(shelves)), "the saver goes with the launcher")
    said = done.stdout.split("\n\n")[:count]
    assert len(said) == count, done.stderr
    return [[json.loads(text) for text in each.splitlines()] for each in said]


def test_the_last_of_several_saves_of_one_step_comes_back_whole(warm: Warm, tmp_path: Path) -> None:
    """A script that calls save() and never step(): both slots have step 0."""
    _, second, third, fourth = lives(warm, 4, "saves", tmp_path)
    assert second == [{"source": "memory", "count": 3, "bias": [3.0, 3.0]}]
    assert third == [{"source": "memory", "count": 5, "bias": [5.0, 5.0]}]
    # The life before saved once: the other slot has what its predecessor left.
    assert fourth == [{"source": "memory", "count": 6, "bias": [6.0, 6.0]}]


def test_the_end_of_a_forked_child_is_not_the_job_s(warm: Warm, tmp_path: Path) -> None:
    first, second = lives(warm, 2, "fork", tmp_path)
    assert first[-1] == {"free": False}
    assert second[0] == {"source": "memory", "count": 3, "bias": [3.0, 3.0]}
