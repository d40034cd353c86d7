"""What the source of a program shows about a line: the lock that it takes, what a loop polls, and whether an exception
may be handled there."""

from __future__ import annotations

import ast
import textwrap

import pytest

from holdfast.protocol.program_source import is_inside, may_handle, polled_at, wanted_at
from holdfast.protocol.rank_progress import Polling

PROGRAM = ast.parse(
    """\
def save(self):
    with self.lock:
        write()
    rest()
def save_by_hand(self):
    self.lock.acquire()
    try:
        write()
    finally:
        self.lock.release()
    rest()
def step(self):
    with self.lock:
        pass
    with open(path) as file, other:
        read(file)
    if self.lock.acquire(timeout=3):
        pass
with short: pass
"""
)


def test_the_lock_that_a_line_takes() -> None:
    taken = {line: wanted_at(PROGRAM, line) for line in range(1, 20)}
    assert {line: lock for line, lock in taken.items() if lock} == {
        2: "self.lock",
        6: "self.lock",
        13: "self.lock",
        15: "other",
        17: "self.lock",
        19: "short",
    }


def test_who_is_inside_of_it() -> None:
    assert [line for line in range(1, 20) if is_inside(PROGRAM, line, "self.lock")] == [3, 7, 8, 9, 10, 14, 18]
    assert [line for line in range(1, 20) if is_inside(PROGRAM, line, "other")] == [16]
    assert not any(is_inside(PROGRAM, line, "lock") for line in range(1, 20)), "other words may be another lock"


LOOPS = {
    "a file": ("while not os.path.exists(path): time.sleep(5)", Polling.OUTSIDE, "os.path.exists"),
    "in a body": (
        """
        while True:
            if Path(path).is_file():
                break
            time.sleep(1)  # HERE
        """,
        Polling.OUTSIDE,
        "Path(path).is_file",
    ),
    "by a function of the file": (
        """
        def is_there(): return os.path.isfile(path)
        while not is_there():
            time.sleep(1)  # HERE
        """,
        Polling.OUTSIDE,
        "os.path.isfile",
    ),
    "by opening it": (
        """
        while True:
            try:
                return open(path)
            except FileNotFoundError:
                time.sleep(1)  # HERE
        """,
        Polling.OUTSIDE,
        "a file",
    ),
    "a queue of jobs": (
        """
        while "RUNNING" in subprocess.check_output(["squeue"]):
            time.sleep(30)  # HERE
        """,
        Polling.OUTSIDE,
        "subprocess.check_output",
    ),
    "a child": (
        """
        while child.poll() is None:
            time.sleep(1)  # HERE
        """,
        Polling.CHILD,
        "child.poll",
    ),
    "a thread": (
        """
        while not event.is_set():
            time.sleep(1)  # HERE
        """,
        Polling.THREADS,
        "event.is_set",
    ),
    "an operation": (
        """
        while not work.is_completed():
            time.sleep(0.01)  # HERE
        """,
        Polling.RANKS,
        "work.is_completed",
    ),
    "a server that refuses": (
        """
        while True:
            try:
                return socket.create_connection(address)  # HERE
            except OSError:
                time.sleep(1)
        """,
        Polling.RETRY,
        "OSError",
    ),
    "nothing, with all of a processor": ("while not ready(): pass", Polling.SPIN, "not ready()"),
    "nothing": ("while True: time.sleep(1)", Polling.NOTHING, ""),
    "a variable": ("while not ready: time.sleep(1)", Polling.NOTHING, ""),
    "no loop": ("os.path.exists(path); time.sleep(600)", Polling.NOTHING, ""),
    "a training loop with a look": (
        """
        for step in range(9):
            if os.path.exists("STOP"): break
            if step == 5: time.sleep(600)  # HERE
            optimizer.step()
        """,
        Polling.NOTHING,
        "",
    ),
    "a call in a loop that sleeps and looks": (
        """
        while not os.path.exists(path):
            lock.acquire()  # HERE
            time.sleep(1)
        """,
        Polling.NOTHING,
        "",
    ),
    "a small function that sleeps": (
        """
        def pause():
            time.sleep(1)  # HERE
        while not os.path.exists(path):
            pause()  # CALLER
        """,
        Polling.OUTSIDE,
        "os.path.exists",
    ),
}


def lines_of(text: str) -> list[int]:
    """The lines that are marked, the innermost first; without a mark the first."""
    lines = text.splitlines()
    marked = [number for mark in ("HERE", "CALLER") for number, line in enumerate(lines, start=1) if mark in line]
    return marked or [1]


@pytest.mark.parametrize("name", LOOPS)
def test_what_a_loop_polls(name: str) -> None:
    text, polled, polls = LOOPS[name]
    text = textwrap.dedent(text).strip()
    assert polled_at(ast.parse(text.replace("return ", "")), lines_of(text)) == (polled, polls)


def test_where_an_exception_may_be_handled() -> None:
    program = textwrap.dedent("""\
        try:
            work()
        except ValueError:
            clean_up()
        finally:
            close()
        with pool:
            work()
        rest()
        """)
    assert [line for line in range(1, 10) if may_handle(ast.parse(program), [line])] == [3, 4, 6, 7]
