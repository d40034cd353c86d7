"""Reports stragglers of the running generation, and shows those that still are; asks their nodes for the clocks of
their GPUs. Pure. The comparison of the ranks is in `straggler_detector.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.extensions.stragglers.messages import GpuClocks, ReadClocks
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
    ToNode,
)
from holdfast.protocol.policy import Note
from holdfast.protocol.rank_progress import Stage

ANNOUNCED_MAX = 3
"""Stragglers reported on the console at a time; the journal has all."""


class AtCoordinator(CoordinatorExtension):
    messages = GpuClocks

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
        return [
            *orders,
            Announce("\n".join(lines)),
            *self._asks(each for each in news[:ANNOUNCED_MAX] if not each.over),
        ]

    def _asks(self, slow: Iterable[Straggler]) -> Iterator[Order]:
        """Ask the nodes of these for the clocks of their GPUs."""
        ranks = {rank for each in slow for rank in each.ranks}
        for node in self.job.nodes():
            places = {node.rank_base + place: local_rank for place, local_rank in enumerate(node.local_ranks)}
            asked = {rank: local_rank for rank, local_rank in places.items() if rank in ranks}
            if asked:
                yield ToNode(node.member, ReadClocks(self.job.generation, asked))

    def heard(self, now: float, member: str, message: GpuClocks) -> Orders:  # noqa: ARG002
        if message.generation != self.job.generation:
            return ()
        host = next((each.host for each in self.job.nodes() if each.member == member), member)
        about = {"generation": message.generation, "host": host, "rank": message.rank, "gpu": message.gpu}
        text = f"rank {message.rank} on {host}: its GPU {message.gpu} runs at {message.text}"
        return [Note("straggler_gpu", {**about, "text": message.text}), Announce(text)]

    def view(self, now: float) -> Figures:  # noqa: ARG002
        standing = self._stragglers.standing if self._stragglers is not None else ()
        return Figures(notices=tuple(each.text for each in standing))
