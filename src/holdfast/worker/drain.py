"""A worker's side of the board: safe points, at which all ranks of a job can stop together.

Knows the environment variable and the board's layout. Standard library only; without a launcher nothing ever asks
anybody to stop.
"""

from __future__ import annotations

import os

from holdfast.core import board as layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Callback = TypeVar("Callback", bound=Callable[[], object])

LOOK_AGAIN_S = 0.001
"""While held at a safe point: between two looks at the board. A hold lasts as long as the agents need to agree."""


class _Slot:
    """This process's slot on the board."""

    def __init__(self, words: memoryview, slot: int) -> None:
        self._words = words
        self._slot = slot
        self._pid = os.getpid()
        self._reached = 0
        self._told = False

    @property
    def own(self) -> bool:
        """A child of the worker has the memory too, but no say."""
        return os.getpid() == self._pid

    def reach(self) -> bool:
        """One more safe point; True: stop here."""
        if self._told:
            return True
        words = self._words
        self._reached += 1
        words[self._slot + layout.REACHED] = self._reached
        # In this order: whoever still finds HELD unset is counted as having passed.
        if words[layout.HELD]:
            self._wait()
        if 0 < words[layout.SAFE_POINT] <= self._reached:
            self._told = True
            words[self._slot + layout.TOLD] = self._reached
        return self._told

    def _wait(self) -> None:
        import time

        words = self._words
        while words[layout.HELD] and not words[layout.SAFE_POINT]:
            time.sleep(LOOK_AGAIN_S)


class SafePoints:
    """The safe points of one process. A program uses the functions below, which share one of these."""

    def __init__(self, address: str) -> None:
        """`address`: the value of HOLDFAST_BOARD; empty: nobody will ever ask to stop."""
        self._address = address
        self._slot_of_mine: _Slot | None = None
        self._callbacks: list[Callable[[], object]] = []

    def on_stop(self, callback: Callable[[], object]) -> None:
        self._callbacks.append(callback)

    def reach(self) -> bool:
        if not self._address:
            return False
        if self._slot_of_mine is None:
            self._slot_of_mine = _open(self._address)
            if self._slot_of_mine is None:
                self._address = ""
                return False
        if not self._slot_of_mine.own:
            return False
        stop = self._slot_of_mine.reach()
        if stop:
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()
        return stop


def _open(address: str) -> _Slot | None:
    """None when the agent is gone, or another process of this worker has the slot."""
    import mmap

    path, _, slot = address.rpartition("@")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        words = memoryview(mmap.mmap(fd, 0)).cast("Q")
    finally:
        os.close(fd)
    mine = int(slot) + layout.PID
    if words[mine] not in (0, os.getpid()):
        return None
    words[mine] = os.getpid()
    return _Slot(words, int(slot))


_safe_points: SafePoints | None = None
"""One per process, made at the first call: a worker may be forked from a process that is no worker."""


def _of_this_process() -> SafePoints:
    global _safe_points  # noqa: PLW0603
    if _safe_points is None:
        _safe_points = SafePoints(os.environ.get(layout.BOARD_VARIABLE, ""))
    return _safe_points


def should_stop() -> bool:
    """Ask, once in every step and on every rank, whether to stop here.

    When a node is to leave or to join (or a scheduler announces a preemption), holdfast picks one of the coming calls,
    and exactly that call returns True on every rank: all have done the same steps. Save a snapshot then and leave with
    exit code 0; the job goes on from it with its new nodes, and no restart is counted. Once True, it stays True.

    A call costs about a microsecond, except while the ranks agree (milliseconds). Without holdfast, and in a child
    process of a worker, it is always False.

        for step, batch in enumerate(loader, start):
            train(batch)
            if should_stop():
                save(step + 1)
                sys.exit(0)
    """
    return _of_this_process().reach()


def on_stop(callback: Callback) -> Callback:
    """Have `callback()` called in the `should_stop()` that returns True, before it does, in order of registration.

    Works as a decorator. What it raises comes out of `should_stop()`.
    """
    _of_this_process().on_stop(callback)
    return callback
