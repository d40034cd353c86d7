"""A training script's side of the board: safe points where all ranks can stop together, and signs of progress.

`should_stop()` marks a safe point, at which all ranks of a job can stop together. `beat()` is a sign of progress from a
program that has no optimizer, or whose optimizer makes no steps for a long time.

Knows the environment variable and the board's layout. Standard library only; without a launcher it does nothing.
"""

from __future__ import annotations

import os
import time

from holdfast.protocol import board_layout as layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Callback = TypeVar("Callback", bound=Callable[[], object])

WORD_END = 1 << 8 * layout.WORD_BYTES
"""The smallest number that a word of the board is too short for."""
READ_AGAIN_S = 0.001
"""Pause between two reads of the board by a worker that is held at a safe point until the agents agree."""


def _words_of(path: str) -> memoryview | None:
    """The words of the board with this path, mapped; None: the agent is gone."""
    import mmap

    try:
        # The variable may outlive its agent, as in a job that a worker has submitted, or come into a container with
        # other process numbers. The path then leads to any file of any process, into which we would write.
        if not os.readlink(path).startswith(f"/memfd:{layout.BOARD_NAME}"):
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return memoryview(mmap.mmap(fd, 0)).cast("Q")
        finally:
            os.close(fd)
    except OSError:
        return None


def _word(number: float) -> int:
    """This number of 0 or more as a word of the board: a script may count in floats (`epochs * samples / batch`).
    Returns 0 (unknown) if it is too large, as the steps of a loop without end (inf) are."""
    return int(number) if number < WORD_END else 0


# --- signs of progress ------------------------------------------------------------------------------------------------


class _Beats:
    """Writes this process's beats to the board, if it is a worker."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._slot = 0
        """Index of the slot's first word on the board."""
        self._words = self._open(os.environ.get(layout.BOARD_VARIABLE, ""))
        """None: this process is no worker, or its agent is gone."""

    def _open(self, address: str) -> memoryview | None:
        path, _, slot = address.rpartition("@")
        words = _words_of(path) if path else None
        if words is None:
            return None
        self._slot = int(slot)
        # Children of the worker inherit the variable, but must not write. A worker without our bootstrap has no PID on
        # the board before it asks for a safe point: it leads its session.
        worker = words[self._slot + layout.PID] or os.getsid(0)
        return words if worker == self._pid else None

    def beat(self) -> None:
        words = self._words
        if words is not None and os.getpid() == self._pid:
            words[self._slot + layout.LAST_BEAT] = time.monotonic_ns()
            words[self._slot + layout.BEATS] += 1

    def at_step(self, step: int, of: int | None) -> None:
        words = self._words
        if words is not None and os.getpid() == self._pid:
            if of is not None:
                words[self._slot + layout.TOTAL] = _word(of)
            words[self._slot + layout.AT] = _word(step + 1)
            if not words[self._slot + layout.BEGAN_AT]:
                words[self._slot + layout.BEGAN_AT] = _word(step + 1)

    def wait_as_spare(self, waits: bool) -> None:
        words = self._words
        if words is not None and os.getpid() == self._pid:
            words[self._slot + layout.SPARE] = int(waits)


_beats: _Beats | None = None
"""One per process, made at the first call: a worker may be forked from a process that is no worker."""


def beat() -> None:
    """Report that the program makes progress: call it once in every turn of a loop in which no optimizer makes steps.

    Steps of torch's optimizers are counted without it. When a rank's steps and beats stop for long, holdfast samples
    its stack, and reports it as hung when the others wait for it. A call costs about a microsecond; it never raises.
    Without holdfast, and in a child process of a worker, it does nothing.

        for batch in loader:
            evaluate(batch)
            beat()
    """
    _own_beats().beat()


def at_step(step: int, of: int | None = None) -> None:
    """Report how many steps of the whole job are done, over all restarts: once after resuming, then after each step.

    `of` is the number of steps that the whole job will have, if it is known. It holds for this process until another
    one is given. `holdfast status` and the dashboard then show the time that is left.

    `holdfast report` uses the step to compute how many steps a restart cost. `holdfast.train.Snapshots` calls it. Like
    beat() it costs about a microsecond, never raises for numbers of 0 or more, and does nothing without holdfast.
    """
    _own_beats().at_step(step, of)


def wait_as_spare(waits: bool) -> None:
    """Report that this rank waits as a spare from now on, or does not any more. `ht.survive` calls it."""
    _own_beats().wait_as_spare(waits)


def _own_beats() -> _Beats:
    global _beats  # noqa: PLW0603
    if _beats is None:
        _beats = _Beats()
    return _beats


# --- safe points ------------------------------------------------------------------------------------------------------


class _Slot:
    """This process's slot on the board."""

    def __init__(self, words: memoryview, slot: int) -> None:
        self._words = words
        self._slot = slot
        self._pid = os.getpid()
        self._reached = 0
        """Number of safe points that this process has reached in its generation."""
        self._stopped = False
        """Whether the safe point was reached at which all stop."""

    @property
    def own(self) -> bool:
        """Whether this process owns the slot. A child of the worker maps the memory too, but must not write."""
        return os.getpid() == self._pid

    def reach(self) -> bool:
        """Count one more safe point, and wait there if the agents hold the workers. Returns whether to stop here."""
        if self._stopped:
            return True
        words = self._words
        self._reached += 1
        words[self._slot + layout.REACHED] = self._reached
        # REACHED is written before HELD is read. So the agents, who set HELD before they read REACHED, count a worker
        # that did not see it as having passed.
        if words[layout.HELD]:
            self._wait()
        if 0 < words[layout.SAFE_POINT] <= self._reached:
            self._stopped = True
            words[self._slot + layout.STOP_SEEN] = self._reached
        return self._stopped

    @property
    def stopping(self) -> bool:
        return self._stopped

    @property
    def asked(self) -> bool:
        """Whether the agents hold the workers, or have named the safe point at which all stop."""
        return bool(self._words[layout.HELD] or self._words[layout.SAFE_POINT])

    def save_wanted(self) -> bool:
        """Whether to save at the newest safe point."""
        self._words[self._slot + layout.SAVES] = 1
        return 0 < self._words[layout.save_word(self._reached)] == self._reached

    def begin_again(self) -> None:
        """Count safe points from 0, as all workers of a new generation do. The agent resets the board's words."""
        self._reached, self._stopped = 0, False

    def _wait(self) -> None:
        words = self._words
        while words[layout.HELD] and not words[layout.SAFE_POINT]:
            time.sleep(READ_AGAIN_S)


class SafePoints:
    """The safe points of one process. A program uses the functions below, which share one object of this class."""

    def __init__(self, address: str | None = None) -> None:
        """`address` is the value of HOLDFAST_BOARD; empty: no agent will ever ask to stop. None: it is read at the
        first safe point, since modules that register callbacks may be imported before the worker is forked."""
        self._address = address
        """Empty, too, once it is known that this process has no slot there."""
        self._slot: _Slot | None = None
        """This process's slot, from the first safe point on."""
        self._callbacks: list[Callable[[], object]] = []
        self.before_stop: Callable[[], object] | None = None
        """A function that is called before the callbacks. Its exception leaves reach(), and they stay for the next
        stop."""

    def on_stop(self, callback: Callable[[], object]) -> None:
        self._callbacks.append(callback)

    def begin_again(self) -> None:
        if self._slot is not None and self._slot.own:
            self._slot.begin_again()

    @property
    def stopping(self) -> bool:
        slot = self._slot
        return slot is not None and slot.own and slot.stopping

    def save_wanted(self) -> bool:
        slot = self._slot
        return slot is not None and slot.own and slot.save_wanted()

    @property
    def asked(self) -> bool:
        return self._opened() and self._slot is not None and self._slot.asked

    def _opened(self) -> bool:
        """Whether this process has a slot; it is opened at the first call."""
        if self._slot is None and self._address != "":
            address = os.environ.get(layout.BOARD_VARIABLE, "") if self._address is None else self._address
            self._slot = _open(address) if address else None
            if self._slot is None:
                self._address = ""
        return self._slot is not None and self._slot.own

    def reach(self) -> bool:
        if not self._opened() or self._slot is None:
            return False
        stop = self._slot.reach()
        if stop:
            # It raises where the ranks only regroup, and the callbacks stay for the stop
            # (test_callbacks_are_kept_when_ranks_only_regroup).
            if self.before_stop is not None:
                self.before_stop()
            self.stop()
        return stop

    def stop(self) -> None:
        """Call the callbacks of `on_stop`, once."""
        # Each runs once, also if should_stop() is asked again after the stop
        # (test_callbacks_run_once_in_order_at_the_safe_point).
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def _open(address: str) -> _Slot | None:
    """Map this worker's slot; None: the agent is gone, or the slot is that of another process."""
    path, _, slot = address.rpartition("@")
    words = _words_of(path)
    if words is None:
        return None
    mine = int(slot) + layout.PID
    # Another process is the worker: this is one of its children, which inherits the variable
    # (test_a_child_of_a_worker_has_no_say).
    if words[mine] not in (0, os.getpid()):
        return None
    words[mine] = os.getpid()
    return _Slot(words, int(slot))


_safe_points = SafePoints()
"""A forked process keeps the callbacks, and has no slot if its parent has one."""


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
    return _safe_points.reach()


def should_save() -> bool:
    """Ask, after each call of should_stop() that returned False, whether to save here and go on.

    `holdfast save` asks all ranks for it: the call that follows the same should_stop() returns True on every rank,
    once. `ht.Snapshots` makes both calls; a script that saves by itself adds this one:

        if should_stop() or should_save():
            save(step + 1)

    It costs about a microsecond. Without holdfast it is always False.
    """
    return _safe_points.save_wanted()


def asked() -> bool:
    """Whether all ranks are being asked to stop at a safe point. A rank that makes no steps, as a spare, calls
    should_stop() only then: otherwise it would be ahead of the others, who had to come to the same safe point."""
    return _safe_points.asked


def stopping() -> bool:
    """Whether `should_stop()` has returned True."""
    return _safe_points.stopping


def begin_again() -> None:
    """Count safe points from 0: this worker goes on in another generation. `ht.survive` calls it."""
    _safe_points.begin_again()


def before_stop(callback: Callable[[], object] | None) -> None:
    """Call `callback()` in the `should_stop()` that returns True, before the callbacks of `on_stop`; None: nothing.

    If it raises, all go on in another generation, and the callbacks of `on_stop` stay. `ht.survive` calls it.
    """
    _safe_points.before_stop = callback


def stop() -> None:
    """Call the callbacks of `on_stop`: this worker ends here, though its `should_stop()` does not return."""
    _safe_points.stop()


def on_stop(callback: Callback) -> Callback:
    """Call `callback()` in the `should_stop()` that returns True, before it returns, in order of registration.

    Works as a decorator. An exception of a callback leaves `should_stop()`.
    """
    _safe_points.on_stop(callback)
    return callback
