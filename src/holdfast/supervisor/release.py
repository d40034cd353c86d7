"""The time that a worker may take to leave its generation: waiting for a processor does not count.

On a machine with more to do than it has processors, a healthy worker is as late as one that cannot be released. A
counter of the kernel distinguishes them (`schedstat`): a worker that sleeps, is suspended or computes waits for no
processor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.protocol.policy import RELEASES_PER_WORKER
from holdfast.protocol.rank_progress import RankProgress
from holdfast.supervisor import processes

FIRST_LOOK = 0.1
"""Share of the time limit after which the first look is taken. Nearly all workers have left their generation by then,
and are not measured."""


def allowed_s(limit_s: float, waited_s: float) -> float:
    """The time limit of a worker that has waited `waited_s` for a processor meanwhile (s).

    >>> allowed_s(2.0, 0.0), allowed_s(2.0, 0.5), allowed_s(2.0, 9.0)
    (2.0, 2.5, 4.0)
    """
    return min(limit_s + waited_s, RELEASES_PER_WORKER * limit_s)


@dataclass(eq=False, repr=False)
class LongestStep:
    """The longest step of these workers so far. The first step of each does not count: it may take much longer."""

    seconds: float = 0.0
    _newest: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Number of steps, and the time at which the newest of them ended (s), by local rank."""

    def add(self, now: float, ranks: Iterable[RankProgress]) -> None:
        """Take a report into account. Steps that ended since the report before count with their mean."""
        for each in ranks:
            before, before_s = self._newest.get(each.local_rank, (0, 0.0))
            at_s = now - each.age_s
            if 0 < before < each.steps:
                self.seconds = max(self.seconds, (at_s - before_s) / (each.steps - before))
            if before != each.steps:
                self._newest[each.local_rank] = each.steps, at_s


@dataclass(eq=False, repr=False)
class Lateness:
    """Measures how long a late process has waited for a processor, from the first call of `waited_s` on."""

    pid: int
    _before: dict[str, int] | None = field(default=None)
    """The kernel's counter of each thread at the first call (ns); None: there was no call yet."""

    def waited_s(self) -> float:
        """The time for which a thread has waited for a processor since the first call (s): that of the longest wait."""
        now = processes.waited_ns(self.pid)
        if self._before is None:
            self._before = now
        return max((each - self._before.get(task, 0) for task, each in now.items()), default=0) / 1e9
