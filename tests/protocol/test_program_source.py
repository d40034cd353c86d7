"""What the source of a program shows about a line: the lock that it takes, what a loop polls, and whether an exception
may be handled there."""

from __future__ import annotations

import ast

from holdfast.protocol.program_source import is_inside, wanted_at

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
