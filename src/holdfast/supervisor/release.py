"""How long a worker may take to leave its generation: time in which it only waited for a processor does not count.

On a machine with more to do than it has processors, a healthy worker is as late as one that cannot be released. The
kernel tells them apart (`schedstat`). A worker that sleeps, is suspended or computes waits for no processor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.protocol.policy import RELEASES_PER_WORKER
from holdfast.protocol.rank_progress import RankProgress
from holdfast.supervisor import processes

FIRST_LOOK = 0.1
"""After this share of the time the first look is taken: nearly all workers have come by then, and cost nothing."""


def allowed_s(limit_s: float, waited_s: float) -> float:
    """For how long a worker may take that has waited so long for a processor meanwhile.

    >>> allowed_s(2.0, 0.0), allowed_s(2.0, 0.5), allowed_s(2.0, 9.0)
    (2.0, 2.5, 4.0)
    """
    return min(limit_s + waited_s, RELEASES_PER_WORKER * limit_s)


@dataclass
class LongestStep:
    """The longest step of these workers so far, without the first step of each."""

    seconds: float = 0.0
    _newest: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Steps, and when the newest of them ended, by local rank."""

    def heard(self, now: float, ranks: Iterable[RankProgress]) -> None:
        for each in ranks:
            before, before_s = self._newest.get(each.local_rank, (0, 0.0))
            at_s = now - each.age_s
            if 0 < before < each.steps:
                self.seconds = max(self.seconds, (at_s - before_s) / (each.steps - before))
            if before != each.steps:
                self._newest[each.local_rank] = each.steps, at_s


@dataclass
class Lateness:
    """What is known of one worker that has not come: from the first call of `waited_s` on."""

    pid: int
    _before: dict[str, int] | None = field(default=None)

    def waited_s(self) -> float:
        """How long the thread that has waited longest for a processor has waited since the first call."""
        now = processes.waited_ns(self.pid)
        if self._before is None:
            self._before = now
        return max((each - self._before.get(task, 0) for task, each in now.items()), default=0) / 1e9
