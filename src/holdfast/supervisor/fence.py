"""When the supervisor suspends and kills the workers by itself, because the agent has not moved these times.

The agent moves them with every answer of the coordinator. So they also hold while the agent is stopped or starved.
Standard library only; knows processes and the machine's monotonic clock, nothing of coordinators.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from math import inf

from holdfast.linux import process_stat
from holdfast.supervisor.processes import signal_below

STOPPED, TRACED = "T", "t"
LOOK_AGAIN_S = 0.1
"""While workers are suspended: they may have forked in between, or somebody may have let one of them run."""


class Fence:
    """The two times, and the processes that are suspended now."""

    def __init__(self, workers: Callable[[], Collection[int]]) -> None:
        """`workers`: all living processes that it suspends."""
        self._workers = workers
        self._kill_at_s = inf
        self._suspend_at_s = inf
        self._suspended: set[int] | None = None
        """None: the workers run. Without those that somebody else has suspended, and may want to stay so."""
        self._look_at_s = inf

    def move(self, kill_at_s: float | None, suspend_at_s: float | None) -> None:
        """To these times of the monotonic clock; None: never."""
        self._kill_at_s = inf if kill_at_s is None else kill_at_s
        self._suspend_at_s = inf if suspend_at_s is None else suspend_at_s

    @property
    def due_s(self) -> float:
        """When `look` has something to do."""
        return min(self._kill_at_s, self._suspend_at_s if self._suspended is None else self._look_at_s)

    def look(self, now: float) -> bool:
        """Suspend the workers, or let them continue, as is due. Returns whether they have to be killed: once."""
        if now >= self._suspend_at_s:
            if self._suspended is None or now >= self._look_at_s:
                self._suspend(now)
        elif self._suspended is not None:
            for pid in self._suspended.intersection(self._workers()):
                signal_below(os.getpid(), pid, signal.SIGCONT)
            self._suspended, self._look_at_s = None, inf
        kill = now >= self._kill_at_s
        if kill:
            self._kill_at_s = inf
        return kill

    def _suspend(self, now: float) -> None:
        known = self._suspended or set()
        self._suspended, self._look_at_s = known, now + LOOK_AGAIN_S
        for pid in self._workers():
            stat = process_stat(pid)
            if stat is None or stat.has_ended or stat.state == STOPPED:
                continue
            if stat.state == TRACED and pid in known:
                continue  # the signal waits until its tracer lets it run
            signal_below(os.getpid(), pid, signal.SIGSTOP)
            known.add(pid)
