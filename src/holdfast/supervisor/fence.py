"""The fence: two times at which the supervisor suspends and kills the workers by itself.

The agent moves both into the future with every answer of the coordinator. If they come, the agent is stopped, starved
or cut off, and the job may go on elsewhere without these workers.

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
"""States of a suspended process in /proc/PID/stat."""
LOOK_AGAIN_S = 0.1
"""Time between two looks at suspended workers (s): one may have forked before its SIGSTOP, or somebody may have let it
continue."""


class Fence:
    """The two times, and the processes that are suspended now."""

    def __init__(self, workers: Callable[[], Collection[int]]) -> None:
        """`workers` returns all living processes that the fence is for."""
        self._workers = workers
        self._kill_at_s = inf
        self._suspend_at_s = inf
        self._suspended: set[int] | None = None
        """Processes that we have suspended; None: the workers run. One that somebody else had suspended before is not
        here: it stays suspended."""
        self._look_at_s = inf

    def move(self, kill_at_s: float | None, suspend_at_s: float | None) -> None:
        """Set both to these times of the monotonic clock; None: never."""
        self._kill_at_s = inf if kill_at_s is None else kill_at_s
        self._suspend_at_s = inf if suspend_at_s is None else suspend_at_s

    @property
    def due_s(self) -> float:
        """The time at which `look` has something to do; inf: never."""
        return min(self._kill_at_s, self._suspend_at_s if self._suspended is None else self._look_at_s)

    def look(self, now: float) -> bool:
        """Suspend the workers, or let them continue, as is due. Returns whether the caller has to kill them; True only
        once."""
        if now >= self._suspend_at_s:
            if self._suspended is None or now >= self._look_at_s:
                self._suspend(now)
        elif self._suspended is not None:  # the agent has moved the time: the coordinator has answered
            # Only those that are still here: the number of one that was killed may be another process's
            # (test_a_worker_that_was_killed_meanwhile_is_left_alone).
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
            # One that somebody has suspended for a purpose stays so when we let the others run
            # (test_what_somebody_else_has_suspended_stays_suspended).
            if stat is None or stat.has_ended or stat.state == STOPPED:
                continue
            if stat.state == TRACED and pid in known:
                continue  # it has our SIGSTOP already, which waits until its tracer lets it run
            signal_below(os.getpid(), pid, signal.SIGSTOP)
            known.add(pid)
