"""Reports stragglers of the running generation, and shows those that still are. Pure. The comparison of the ranks is in
`straggler_detector.py`."""

from __future__ import annotations

from holdfast.extensions.stragglers.straggler_detector import Straggler, Stragglers
from holdfast.protocol.extension import (
    Announce,
    CoordinatorExtension,
    Ended,
    Figures,
    Happened,
    Job,
    Order,
    Orders,
    Started,
)
from holdfast.protocol.policy import Note
from holdfast.protocol.rank_progress import Stage

ANNOUNCED_MAX = 3
"""Stragglers reported on the console at a time; the journal has all."""


class AtCoordinator(CoordinatorExtension):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._stragglers: Stragglers | None = None
        """None: no generation runs."""
        self._done = 0
        """Number of ranks that had ended with 0 when a worker last made a step."""

    def happened(self, now: float, event: Happened) -> Orders:  # noqa: ARG002
        match event:
            case Started():
                self._stragglers, self._done = Stragglers(self.job.limits.straggler_window_s), 0
            case Ended():
                self._stragglers = None
        return ()

    def progressed(self, now: float, member: str) -> Orders:  # noqa: ARG002
        throughput, stragglers = self.job.throughput, self._stragglers
        if throughput is None or stragglers is None:
            return ()
        if throughput.in_stage[Stage.DONE] > self._done:
            self._done = throughput.in_stage[Stage.DONE]
            stragglers.forget_done()
        for pace in throughput.of_member(member):
            if pace.stage is not Stage.DONE:
                stragglers.heard(pace)
        news = stragglers.news()
        return self._reported(news) if news else ()

    def _reported(self, news: list[Straggler]) -> Orders:
        orders: list[Order] = [
            Note(
                "straggler_over" if each.over else "straggler",
                {
                    "generation": self.job.generation,
                    "code": each.code,
                    "host": each.host,
                    "ranks": list(each.ranks),
                    "own_s": round(each.own_s, 6),
                    "peers_s": round(each.peers_s, 6),
                    "step_s": round(each.step_s, 6),
                },
            )
            for each in news
        ]
        more = len(news) - ANNOUNCED_MAX
        lines = [each.text for each in news[:ANNOUNCED_MAX]] + ([f"and {more} more"] if more > 0 else [])
        return [*orders, Announce("\n".join(lines))]

    def view(self, now: float) -> Figures:  # noqa: ARG002
        standing = self._stragglers.standing if self._stragglers is not None else ()
        return Figures(notices=tuple(each.text for each in standing))
