"""beat(): on the board under an agent, and nothing anywhere else."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from holdfast.core import board as layout
from holdfast.core.progress import Stage
from holdfast.runtime.workers.board import Board
from tests.support.limits import limit_s


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board(2)
    yield made
    made.close()


def run(source: str, address: str | None, *, leads: bool = True) -> None:
    env = {"PATH": "/usr/bin:/bin", **({} if address is None else {layout.BOARD_VARIABLE: address})}
    line = [sys.executable, "-c", source]
    done = subprocess.run(line, env=env, start_new_session=leads, capture_output=True, text=True, timeout=limit_s(30))
    assert (done.returncode, done.stderr) == (0, "")


BEATS = "from holdfast.worker import beat\nfor _ in range(3): beat()"


def test_beats_are_counted(board: Board) -> None:
    before_ns = time.monotonic_ns()
    run(BEATS, board.address(1))
    now_ns = time.monotonic_ns()
    other, mine = board.progress(now_ns)
    assert (mine.stage, mine.steps, mine.local_rank) == (Stage.STEPPING, 3, 1)
    assert 0 <= mine.age_s <= (now_ns - before_ns) / 1e9
    assert (other.stage, other.steps) == (Stage.STARTING, 0)


def test_steps_count_where_there_are_both(board: Board) -> None:
    run(BEATS, board.address(0))
    board._words[layout.slot(0) + layout.STEPS] = 7
    progress = board.progress(time.monotonic_ns())[0]
    assert (progress.steps, progress.beats) == (7, 3)


def test_a_child_has_no_say(board: Board) -> None:
    run(
        "import os\nfrom holdfast.worker import beat\nbeat()\nif os.fork() == 0:\n    beat()\n    os._exit(0)\nos.wait()",
        board.address(0),
    )
    run(BEATS, board.address(0), leads=False)
    assert board.progress(time.monotonic_ns())[0].steps == 1


@pytest.mark.parametrize("address", [None, "", "nonsense", "/proc/1/nothing@16", "/dev/null@16", "@", "/x@y"])
def test_it_never_raises(address: str | None) -> None:
    run(BEATS, address)


def test_stages_in_their_order(board: Board) -> None:
    told = [board.progress(time.monotonic_ns())[0].stage]
    for mark in (layout.MEETING, layout.STORE, layout.GROUP, layout.STEPS):
        board._words[layout.slot(0) + mark] = 1
        told.append(board.progress(time.monotonic_ns())[0].stage)
    assert told == [Stage.STARTING, Stage.MEETING, Stage.GROUPING, Stage.READY, Stage.STEPPING]
    assert board.progress(time.monotonic_ns() + 5_000_000_000)[1].age_s > 5, "before the first step: since the start"
