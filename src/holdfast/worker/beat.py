"""A sign of life from a program that has no optimizer, or whose optimizer makes no steps for a long time.

Knows the environment variable and the board's layout. Standard library only; without a launcher it does nothing.
"""

from __future__ import annotations

import os
import time

from holdfast.core import board as layout


class _Beats:
    """This process's beats on the board, if it is a worker."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._slot = 0
        self._words = self._open(os.environ.get(layout.BOARD_VARIABLE, ""))

    def _open(self, address: str) -> memoryview | None:
        path, _, slot = address.rpartition("@")
        # A worker leads its session: what it starts has the variable too, but no say.
        if not path or os.getsid(0) != self._pid:
            return None
        import mmap

        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._slot = int(slot)
                return memoryview(mmap.mmap(fd, 0)).cast("Q")
            finally:
                os.close(fd)
        except (OSError, ValueError):
            return None  # the agent is gone

    def beat(self) -> None:
        words = self._words
        if words is not None and os.getpid() == self._pid:
            words[self._slot + layout.LAST_BEAT] = time.monotonic_ns()
            words[self._slot + layout.BEATS] += 1

    def at_step(self, step: int) -> None:
        words = self._words
        if words is not None and os.getpid() == self._pid:
            words[self._slot + layout.AT] = step + 1
            if not words[self._slot + layout.BEGAN_AT]:
                words[self._slot + layout.BEGAN_AT] = step + 1


_beats: _Beats | None = None
"""One per process, made at the first call: a worker may be forked from a process that is no worker."""


def beat() -> None:
    """Say that the program goes on: once in every turn of a loop in which no optimizer makes steps.

    Steps of torch's optimizers are counted without it. A rank whose steps and beats stop for long is looked at, and
    reported as hung when the others wait for it. A call costs about a microsecond; it never raises. Without holdfast, and
    in a child process of a worker, it does nothing.

        for batch in loader:
            evaluate(batch)
            beat()
    """
    _this_process().beat()


def at_step(step: int) -> None:
    """Say how many steps of the whole job are done, counted over all restarts: once after resuming, then after each step.

    From it `holdfast report` knows how many steps a restart cost. `holdfast.train.Snapshots` calls it. Like beat() it
    costs about a microsecond, never raises for a number of 0 or more, and does nothing without holdfast.
    """
    _this_process().at_step(step)


def _this_process() -> _Beats:
    global _beats  # noqa: PLW0603
    if _beats is None:
        _beats = _Beats()
    return _beats
