"""Safe points: both sides of the board, in this process and in real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.protocol import board_layout as layout
from holdfast.protocol.board_layout import BOARD_VARIABLE
from holdfast.protocol.rank_progress import Stage
from holdfast.supervisor.board import HOLD_SETTLES_S, Board
from holdfast.worker import bootstrap
from holdfast.worker.drain import SafePoints
from tests.support.limits import limit_s


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board(2)
    yield made
    made.close()


def run(source: str, address: str | None, *, leads: bool = True) -> None:
    env = {"PATH": "/usr/bin:/bin", **({} if address is None else {BOARD_VARIABLE: address})}
    line = [sys.executable, "-c", source]
    done = subprocess.run(line, env=env, start_new_session=leads, capture_output=True, text=True, timeout=limit_s(30))
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_launcher_nobody_asks() -> None:
    assert not any(SafePoints("").reach() for _ in range(3))


def test_an_agent_that_is_gone_asks_nothing() -> None:
    assert not SafePoints("/proc/0/fd/7@8").reach()


def test_what_has_the_number_of_a_board_that_is_gone_is_left_alone(tmp_path: Path) -> None:
    """The variable has come into a job that a worker has submitted, or into a container."""
    (tmp_path / "file").write_bytes(bytes(layout.size_bytes(1)))
    reading, writing = os.pipe()
    with (tmp_path / "file").open("r+b") as file:
        for fd in (file.fileno(), writing):
            assert not SafePoints(f"/proc/{os.getpid()}/fd/{fd}@{layout.slot(0)}").reach()
    os.close(reading)
    os.close(writing)
    assert not any((tmp_path / "file").read_bytes())


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
    assert board.stop_seen(0)
    assert board.stop_seen(1)
    assert ranks[0].reach(), "it stays so"


def test_all_save_once_at_the_same_one_and_go_on(board: Board) -> None:
    ranks = [SafePoints(board.address(rank)) for rank in range(2)]
    ranks[0].reach()
    assert not ranks[0].save_wanted()
    assert not board.all_save(range(2)), "the other has not asked yet"
    assert not ranks[1].save_wanted(), "before its first safe point it is no worker"
    for rank in ranks:
        rank.reach()
        rank.save_wanted()
    assert board.all_save(range(2))
    board.hold()
    board.release(board.reached() + 1, save=True)
    wanted = [(rank.reach(), rank.save_wanted()) for _ in range(3) for rank in ranks]
    assert not any(stop for stop, _ in wanted)
    # Rank 0 has been at 2, rank 1 at 1: they save at 3.
    assert [save for _, save in wanted] == [True, False, False, True, False, False]


def test_another_save_is_agreed_while_a_slow_rank_is_on_its_way_to_the_first(board: Board) -> None:
    fast, slow = ranks = [SafePoints(board.address(rank)) for rank in range(2)]
    for rank in ranks:
        rank.reach()
    for _ in range(2):
        board.hold()
        board.release(board.reached() + 1, save=True)
        fast.reach()
        assert fast.save_wanted()
    assert [(slow.reach(), slow.save_wanted()) for _ in range(3)] == [(False, True), (False, True), (False, False)]
    board.begin_again()
    for rank in ranks:
        rank.begin_again()
    assert not any(rank.reach() or rank.save_wanted() for _ in range(9) for rank in ranks), "of another generation"


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
    assert not board.stop_seen(0)


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


def test_callbacks_are_kept_when_ranks_only_regroup(board: Board) -> None:
    class Regroups(BaseException):
        pass

    rank, called = SafePoints(board.address(0)), list[str]()
    rank.on_stop(lambda: called.append("stop"))

    def regroup() -> None:
        raise Regroups

    rank.before_stop = regroup
    board.release(1)
    with pytest.raises(Regroups):
        rank.reach()
    assert called == []
    rank.begin_again()
    board.begin_again()
    rank.before_stop = lambda: called.append("asked")
    board.release(1)
    assert rank.reach()
    assert called == ["asked", "stop"]


def test_a_child_of_a_worker_has_no_say(board: Board) -> None:
    rank = SafePoints(board.address(0))
    rank.reach()
    pid = os.fork()
    if pid == 0:
        os._exit(int(rank.reach()) + 2 * int(SafePoints(board.address(0)).reach()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert board.reached() == 1


CHILD_ASKS_FIRST = """
import os, subprocess, sys
from holdfast.worker import at_step, should_stop
if sys.argv[1:]:
    at_step(999)
    should_stop()
else:
    subprocess.run([sys.executable, __file__, "child"], start_new_session=True, check=True)
    if os.fork() == 0:
        os._exit(should_stop())
    os.wait()
    at_step(5)
    for _ in range(3):
        should_stop()
"""


def test_a_child_that_asks_first_has_no_say_either(board: Board, tmp_path: Path) -> None:
    """Nor does one that leads a session of its own."""
    script = tmp_path / "asks.py"
    script.write_text(CHILD_ASKS_FIRST)
    line = [sys.executable, "-u", bootstrap.__file__, "script", str(script)]
    environment = {**os.environ, BOARD_VARIABLE: board.address(0)}
    subprocess.run(line, env=environment, start_new_session=True, check=True, timeout=limit_s(30))
    assert (board.reached(), board.step(0)) == (3, 5)


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


# --- holdfast.worker.at_step: how far the whole job is, on the board and in the report --------------------------------


def test_where_it_began_and_where_it_is(board: Board) -> None:
    assert board.job_steps(1) == (-1, -1)
    run("from holdfast.worker import at_step\nat_step(0)\nat_step(1)\nat_step(41)", board.address(1))
    assert board.job_steps(1) == (0, 41)
    assert board.job_steps(0) == (-1, -1)


@pytest.mark.parametrize(
    ("said", "known"),
    [("3.0, of=1250.0", (3, 1250)), ("3, of=float('inf')", (0, 0)), ("2**64 - 1, of=2**64", (0, 0))],
)
def test_any_numbers_of_0_or_more_are_taken(board: Board, said: str, known: tuple[int, int]) -> None:
    run(f"from holdfast.worker import at_step\nat_step({said})", board.address(0))
    assert board.job_position([0]) == known


def test_how_many_steps_there_will_be_is_said_once(board: Board) -> None:
    assert board.job_position([0, 1]) == (0, 0)
    for rank, said in enumerate(
        ("at_step(0, of=100); at_step(8)", "at_step(0, of=100); at_step(7); at_step(9, of=90)")
    ):
        run(f"from holdfast.worker import at_step\n{said}", board.address(rank))
    assert board.job_position([0, 1]) == (8, 100)
    board.clear(0)
    assert board.job_position([0, 1]) == (9, 90)


def test_a_rank_without_which_the_others_go_on_does_not_hold_back_the_jobs_step(board: Board) -> None:
    for rank in (0, 1):
        run("from holdfast.worker import at_step\nat_step(0, of=100)\nat_step(5)", board.address(rank))
    board.begin_again()  # rank 1 was lost
    run("from holdfast.worker import at_step\nat_step(5)\nat_step(50)", board.address(0))
    assert board.job_position([0]) == (50, 100)


def test_without_a_launcher_it_does_nothing() -> None:
    run("from holdfast.worker import at_step\nat_step(3)", None)


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


# --- beat(): on the board under an agent, and nothing anywhere else ---------------------------------------------------


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


def test_a_callback_may_be_registered_before_the_worker_is_forked(board: Board) -> None:
    """As by a module that --preload imports: the fork server gives up where a variable of the worker's own is read."""
    source = f"""
import os
from holdfast import worker
worker.on_stop(lambda: os._exit(7))
if os.fork() == 0:
    os.setsid()
    os.environ["{BOARD_VARIABLE}"] = "{board.address(0)}"
    worker.should_stop()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
    board.release(1)
    run(source, None)
    assert board.stop_seen(0)


def test_stages_in_their_order(board: Board) -> None:
    told = [board.progress(time.monotonic_ns())[0].stage]
    for mark in (layout.MEETING, layout.STORE, layout.GROUP, layout.STEPS):
        board._words[layout.slot(0) + mark] = 1
        told.append(board.progress(time.monotonic_ns())[0].stage)
    assert told == [Stage.STARTING, Stage.MEETING, Stage.GROUPING, Stage.READY, Stage.STEPPING]
    assert board.progress(time.monotonic_ns() + 5_000_000_000)[1].age_s > 5, "before the first step: since the start"


def test_a_regrouped_worker_counts_safe_points_and_steps_from_0(board: Board) -> None:
    rank = SafePoints(board.address(0))
    steps = layout.slot(0) + layout.STEPS
    rank.reach()
    rank.reach()
    board._words[steps] = 300
    board.begin_again()
    rank.begin_again()
    assert (board.reached(), board.progress(0)[0].steps, board.stepped(0)) == (0, 0, False)
    rank.reach()
    board._words[steps] += 1  # its optimizer makes another step
    assert (board.reached(), board.progress(0)[0].steps, board.stepped(0)) == (1, 1, True)


def test_a_worker_has_stepped_when_its_script_counts_on_from_where_it_began(board: Board) -> None:
    at = layout.slot(0)
    board._words[at + layout.BEGAN_AT], board._words[at + layout.AT] = 21, 21
    assert not board.stepped(0)
    board._words[at + layout.AT] = 22
    assert board.stepped(0)
