"""holdfast.worker.at_step: how far the whole job is, on the board and in the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.core.board import BOARD_VARIABLE
from holdfast.runtime.workers.board import Board
from tests.support.limits import limit_s


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board(2)
    yield made
    made.close()


def test_where_it_began_and_where_it_is(board: Board) -> None:
    assert board.job_steps(1) == (-1, -1)
    program = "from holdfast.worker import at_step\nat_step(0)\nat_step(1)\nat_step(41)"
    environment = {**os.environ, BOARD_VARIABLE: board.address(1)}
    subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, timeout=limit_s(30), start_new_session=True
    )
    assert board.job_steps(1) == (0, 41)
    assert board.job_steps(0) == (-1, -1)


def test_without_a_launcher_it_does_nothing() -> None:
    program = "from holdfast.worker import at_step\nat_step(3)"
    environment = {name: value for name, value in os.environ.items() if name != BOARD_VARIABLE}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=limit_s(30))
    assert (done.returncode, done.stderr) == (0, b"")


FAILS = """
import os, sys
from holdfast.worker import at_step, beat
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
at_step(20 if again else 0)
for step in range(20 if again else 0, 60 if again else 33):
    beat()
    at_step(step + 1)
sys.exit(0 if again else 5)
"""


def test_a_restart_costs_steps_and_the_report_says_how_many(run_cli: Any, tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text(FAILS)
    line = ["--standalone", "--max-restarts", "1", "--log-dir", str(tmp_path / "logs"), str(tmp_path / "train.py")]
    done = run_cli(line, timeout=60)
    assert done.code == 0, done
    (folder,) = (tmp_path / "logs").iterdir()
    line = [sys.executable, "-m", "holdfast", "report", "--json", str(folder)]
    told = json.loads(subprocess.run(line, capture_output=True, timeout=limit_s(30), check=True).stdout)
    assert told["history"]["lost_steps"] == 13
