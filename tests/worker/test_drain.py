"""Safe points: both sides of the board, in this process and in real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.core import board as layout
from holdfast.core.board import BOARD_VARIABLE
from holdfast.runtime.workers.board import HOLD_SETTLES_S, Board
from holdfast.worker.drain import SafePoints
from tests.support.limits import limit_s


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board(2)
    yield made
    made.close()


def test_without_a_launcher_nobody_asks() -> None:
    assert not any(SafePoints("").reach() for _ in range(3))


def test_an_agent_that_is_gone_asks_nothing() -> None:
    assert not SafePoints("/proc/0/fd/7@8").reach()


def test_safe_points_are_counted(board: Board) -> None:
    ranks = [SafePoints(board.address(rank)) for rank in range(2)]
    assert board.reached() == 0
    assert not any(ranks[0].reach() for _ in range(3))
    assert not ranks[1].reach()
    assert board.reached() == 3


def test_all_stop_at_the_same_one(board: Board) -> None:
    ranks = [SafePoints(board.address(rank)) for rank in range(2)]
    for _ in range(3):
        ranks[0].reach()
    board.hold()
    board.release(5)
    assert [ranks[0].reach(), ranks[0].reach()] == [False, True]
    assert [ranks[1].reach() for _ in range(5)] == [False, False, False, False, True]
    assert board.told(0)
    assert board.told(1)
    assert ranks[0].reach(), "it stays so"


def test_a_held_worker_waits_and_goes_on(board: Board) -> None:
    rank = SafePoints(board.address(0))
    rank.reach()
    board.hold()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(rank.reach()))
    thread.start()
    while board.reached() < 2:
        time.sleep(0.001)
    assert not answers
    board.release(0)
    thread.join(limit_s(10))
    assert answers == [False]
    assert not board.told(0)


def test_callbacks_run_once_in_order_at_the_safe_point(board: Board) -> None:
    rank, called = SafePoints(board.address(0)), list[str]()
    rank.on_stop(lambda: called.append("first"))
    rank.on_stop(lambda: called.append("second"))
    rank.reach()
    board.hold()
    board.release(2)
    assert not called
    assert rank.reach()
    assert rank.reach()
    assert called == ["first", "second"]


def test_a_child_of_a_worker_has_no_say(board: Board) -> None:
    rank = SafePoints(board.address(0))
    rank.reach()
    pid = os.fork()
    if pid == 0:
        os._exit(int(rank.reach()) + 2 * int(SafePoints(board.address(0)).reach()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert board.reached() == 1


def test_nobody_passes_where_all_are_to_stop(board: Board) -> None:
    """Real processes at full speed: the safe point after the newest one seen in a hold has been passed by nobody."""
    program = "from holdfast.worker import should_stop\ncount = 1\nwhile not should_stop(): count += 1\nprint(count)"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, BOARD_VARIABLE: board.address(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    while any(not board._words[layout.slot(rank) + layout.REACHED] for rank in range(2)):
        time.sleep(0.001)
    board.hold()
    time.sleep(HOLD_SETTLES_S)
    safe_point = board.reached() + 1
    board.release(safe_point)
    assert [int(worker.communicate(timeout=limit_s(30))[0]) for worker in workers] == [safe_point, safe_point]


def test_a_board_takes_no_name_in_any_folder(board: Board) -> None:
    path = board.address(0).partition("@")[0]
    assert os.readlink(path).startswith("/memfd:")
