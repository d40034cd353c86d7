"""The times at which the supervisor suspends and kills workers by itself, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.linux import process_stat
from holdfast.supervisor.fence import LOOK_AGAIN_S, Fence
from tests.support.limits import until


def state(pid: int) -> str:
    stat = process_stat(pid)
    return stat.state if stat is not None else ""


@pytest.fixture
def workers() -> Iterator[list[int]]:
    """Three processes."""
    line = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
    running = [subprocess.Popen(line) for _ in range(3)]
    yield [each.pid for each in running]
    for each in running:
        each.kill()
        each.wait()


def are(workers: list[int], wanted: str) -> None:
    until(lambda: all((state(pid) == "T") is (wanted == "T") for pid in workers), f"{workers} to be {wanted}")


def suspending(workers: list[int]) -> Fence:
    """It has suspended them at 5.0, and kills them at 9.0."""
    fence = Fence(lambda: workers)
    fence.move(9.0, 5.0)
    fence.look(5.0)
    are(workers, "T")
    return fence


def test_workers_are_suspended_at_their_time_and_run_again_when_it_is_moved(workers: list[int]) -> None:
    fence = Fence(lambda: workers)
    fence.move(9.0, 5.0)
    assert fence.due_s == 5.0
    assert not fence.look(4.9)
    are(workers, "running")
    assert not fence.look(5.0)
    are(workers, "T")
    assert fence.due_s == 5.0 + LOOK_AGAIN_S
    fence.move(9.5, 5.5)
    assert not fence.look(5.6)
    are(workers, "T")
    fence.move(11.0, 7.0)
    assert not fence.look(5.7)
    are(workers, "running")
    assert fence.due_s == 7.0


def test_workers_that_are_suspended_are_killed_at_the_fence(workers: list[int]) -> None:
    fence = suspending(workers)
    assert fence.look(9.0)
    assert not fence.look(9.1), "once"
    are(workers, "T")


def test_without_a_time_they_run_again(workers: list[int]) -> None:
    fence = suspending(workers)
    fence.move(None, None)
    assert not fence.look(100.0)
    are(workers, "running")


def test_what_somebody_else_has_suspended_stays_suspended(workers: list[int]) -> None:
    os.kill(workers[0], signal.SIGSTOP)
    are(workers[:1], "T")
    fence = suspending(workers)
    fence.move(None, None)
    fence.look(5.1)
    are(workers[1:], "running")
    assert state(workers[0]) == "T"


def test_nobody_else_lets_them_run_meanwhile(workers: list[int]) -> None:
    """Neither one that was suspended by somebody else before, nor one that the fence has suspended."""
    os.kill(workers[0], signal.SIGSTOP)
    are(workers[:1], "T")
    fence = suspending(workers)
    for pid in workers[:2]:
        os.kill(pid, signal.SIGCONT)
    are(workers[:2], "running")
    assert not fence.look(5.0 + LOOK_AGAIN_S)
    are(workers, "T")
    fence.move(None, None)
    fence.look(5.2)
    are(workers, "running")


def test_a_process_that_was_forked_meanwhile_is_found(workers: list[int]) -> None:
    found = workers[:2]
    fence = Fence(lambda: found)
    fence.move(9.0, 5.0)
    fence.look(5.0)
    found = workers
    fence.look(5.0 + LOOK_AGAIN_S)
    are(workers, "T")


def test_a_worker_that_was_killed_meanwhile_is_left_alone(workers: list[int]) -> None:
    living = list(workers)
    fence = Fence(lambda: living)
    fence.move(9.0, 5.0)
    fence.look(5.0)
    os.kill(living.pop(), signal.SIGKILL)
    fence.move(None, None)
    assert not fence.look(6.0)
    are(living, "running")
