"""A hang watch over two ranks on two nodes, for tests: time passes, looks are answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec import structs

from holdfast.extensions.hangs.hang_detector import EndHung, HangDetector, LookNow, Order, ReportHang
from holdfast.protocol.policy import Limits
from holdfast.protocol.rank_progress import (
    Finding,
    Frame,
    HangKind,
    RankProgress,
    RankSample,
    RanksAtPlace,
    RankStory,
    Stage,
)
from holdfast.protocol.throughput import Throughput

HUNG = Finding(
    kind=HangKind.HUNG,
    code="HF240",
    text="rank 1 on b is in sleep at data.py:17 for 64 s\n1 other waits in all_reduce",
    culprits=(1,),
    groups=(RanksAtPlace((1,), "in sleep"), RanksAtPlace((0,), "in all_reduce")),
    signature="s",
)
LIVELY = structs.replace(HUNG, lively=True)
STUCK = Finding(kind=HangKind.STUCK, code="HF241", text="all wait in all_reduce", signature="s")
PAUSED = Finding(kind=HangKind.PAUSED, code="", text="nobody waits for anybody", signature="s")
ALONE = structs.replace(PAUSED, code="HF246", text="rank 1 on b is in _shutdown for 31 s", culprits=(1,))
MOVING = Finding(kind=HangKind.MOVING, code="", text="rank 1 works", signature="m")


@dataclass
class Hall:
    """A watch over two ranks on two nodes, and what it was told to find."""

    timeout_s: float = 300.0
    finding: Finding = HUNG
    now: float = 0.0
    looks: list[float] = field(default_factory=list)
    stories: list[Sequence[RankStory]] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    answers_after_s: float = 0.5
    answer: tuple[int, ...] = (0, 1)
    """Ranks that are seen."""
    reach: tuple[str, ...] = ()
    report_s: float = 60.0

    def __post_init__(self) -> None:
        self.throughput = Throughput([("a#1", "a", (0,)), ("b#1", "b", (0,))], 0.0, 60.0)
        limits = Limits(hang_report_s=self.report_s, look_gap_s=2.0, hang_timeout_s=self.timeout_s)
        self.watch = HangDetector(limits, self.throughput, self.examine)

    def examine(self, stories: Sequence[RankStory]) -> Finding:
        self.stories.append(stories)
        return self.finding

    def progress(self, stage: Stage, steps: int = 0, *, ranks: str = "ab") -> None:
        moved = [self.throughput.heard(f"{each}#1", [RankProgress(0, stage, steps)], self.now) for each in ranks]
        if any(moved) and (over := self.watch.moved(self.now)) is not None:
            self.orders.append(over)

    def steps(self, number: int) -> None:
        self.progress(Stage.STEPPING, number)

    def wait(self, seconds: float) -> list[Order]:
        """Time passes; looks are answered. Returns what was ordered beside looks."""
        before, until = len(self.orders), self.now + seconds
        while (due := self.watch.due_s()) <= until:
            assert due < inf
            self.now = max(self.now, due)
            order = self.watch.advance(self.now)
            if order is not None:
                self._look(order)
            else:
                assert self.watch.due_s() > self.now, "asked for again at once"
            if any(isinstance(each, EndHung) for each in self.orders):
                break
        self.now = max(self.now, until)
        return self.orders[before:]

    def report(self, seconds: float) -> ReportHang:
        """The only order that is given meanwhile."""
        (report,) = self.wait(seconds)
        assert isinstance(report, ReportHang)
        return report

    def _look(self, order: LookNow) -> None:
        asked_s = self.now
        self.looks.append(asked_s)
        self.store = order.store
        self.now += self.answers_after_s
        frame = Frame("data.py", 17, "sleep")
        samples = {
            rank: RankSample(0, 10 + rank, "S", 0.0, (frame,), file=f"/run/rank{rank}.txt") for rank in self.answer
        }
        self.orders += self.watch.looked(self.now, asked_s=asked_s, samples=samples, reach=self.reach)


def training(**options: object) -> Hall:
    """It has made steps of 0.1 s, the newest at 10 s."""
    hall = Hall(**options)  # type: ignore[arg-type]
    for second in range(1, 11):
        hall.now = float(second)
        hall.steps(second * 10)
    return hall
