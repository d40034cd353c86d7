"""How fast the ranks of a running generation are, from what their agents tell. Bookkeeping: it decides nothing.

A message costs as much as it has ranks. What looks at all ranks (`step_s`) is for those who ask rarely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.protocol.rank_progress import RankProgress, Stage

STEPS_TO_COUNT = 3
"""Until then a rank warms up: it compiles, fills caches, opens connections."""
WINDOW_S = 5.0
WINDOWS_MAX = 12
"""Their median is that of the last minute, or of so many steps where a step is longer than a window."""
GROUPING = frozenset({Stage.MEETING, Stage.GROUPING})


@dataclass(slots=True)
class Mark:
    """Where a rank was at some moment: two of them tell how long its steps took in between."""

    steps: int
    at_s: float
    own_s: float

    def per_step(self, later: Mark) -> tuple[float, float]:
        """(duration, its own part of it) in seconds."""
        steps = later.steps - self.steps
        return (later.at_s - self.at_s) / steps, max(0.0, later.own_s - self.own_s) / steps


@dataclass(slots=True)
class RankThroughput:
    """One rank."""

    rank: int
    member: str
    host: str
    local_rank: int
    newest_s: float
    """When its newest step or beat was done, by the coordinator's clock; before the first: when its generation began."""
    stage_since_s: float
    stage: Stage = Stage.STARTING
    steps: int = 0
    beats: int = 0
    own_s: float = 0.0
    windows: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOWS_MAX))
    """(Duration, own part) of a step in each, oldest first."""
    _first: Mark | None = None
    """The first step that was heard of: all there is to go by until a step that counts has been measured."""
    _from: Mark | None = None
    """The window under way begins here."""

    def heard(self, told: RankProgress, at_s: float) -> bool:
        """Whether it has made steps or beats since it was last heard of. `at_s`: when the newest was done."""
        if told.steps < self.steps:
            self._begin_anew()
        stepped = told.steps > self.steps
        if stepped or told.beats > self.beats:
            self.newest_s, self.beats = at_s, told.beats
            if stepped:
                self.steps, self.own_s = told.steps, told.own_s
                self._first = self._first or self.mark
                if self.counts:
                    self._measure()
            return True
        return False

    def _begin_anew(self) -> None:
        """Beats were counted, and now an optimizer makes its first steps."""
        self.steps, self._first, self._from = 0, None, None
        self.windows.clear()

    @property
    def counts(self) -> bool:
        return self.steps >= STEPS_TO_COUNT

    @property
    def mark(self) -> Mark:
        return Mark(self.steps, self.newest_s, self.own_s)

    @property
    def step_s(self) -> float:
        """Median of the last minute; 0: unknown."""
        return median([step_s for step_s, _ in self._measured()])

    @property
    def own_step_s(self) -> float:
        return median([own_s for _, own_s in self._measured()])

    def _measured(self) -> Collection[tuple[float, float]]:
        if self.windows:
            return self.windows
        begins = (mark for mark in (self._from, self._first) if mark is not None and mark.steps < self.steps)
        return [mark.per_step(self.mark) for mark in begins][:1]

    def _measure(self) -> None:
        mark = self.mark
        if self._from is None:
            self._from = mark
        elif mark.at_s - self._from.at_s >= WINDOW_S:
            self.windows.append(self._from.per_step(mark))
            self._from = mark


class Throughput:
    """Of all ranks of one generation."""

    def __init__(self, nodes: Iterable[tuple[str, str, int]], began_s: float, gap_s_max: float) -> None:
        """`nodes`: (member, host, number of workers) by group rank. `gap_s_max`: training stands still where there is no
        step for longer."""
        self.ranks: list[RankThroughput] = []
        self._first: dict[str, int] = {}
        """The first rank of each member."""
        self._began_s = began_s
        self._gap_s_max = gap_s_max
        self.newest_s: float | None = None
        """When the newest step of any rank that counts was done; None: none counts yet."""
        self.warm_up_newest_s = began_s
        """When the newest step or beat of any rank was done that does not count."""
        self.stage_newest_s = began_s
        """When a rank has last come to another stage."""
        self.training_s = 0.0
        self.in_stage: dict[Stage, int] = dict.fromkeys(Stage, 0)
        for member, host, nproc in nodes:
            self._first[member] = len(self.ranks)
            for local_rank in range(nproc):
                self.ranks.append(RankThroughput(len(self.ranks), member, host, local_rank, began_s, began_s))
        self.in_stage[Stage.STARTING] = len(self.ranks)

    def heard(self, member: str, ranks: Iterable[RankProgress], now: float) -> bool:
        """What an agent tells; whether something has moved: a step was made, or a rank has come to another stage."""
        moved = False
        for told in ranks:
            pace = self.of(member, told.local_rank)
            if pace is None or pace.stage is Stage.DONE:
                continue
            at_s = max(self._began_s, now - max(0.0, told.age_s))
            if pace.heard(told, at_s):
                moved = True
                if pace.counts:
                    self._stepped(at_s)
                else:
                    self.warm_up_newest_s = max(self.warm_up_newest_s, at_s)
            if self.enter(pace, told.stage, now) and told.stage is not Stage.DONE:
                moved = True
        return moved

    def of(self, member: str, local_rank: int) -> RankThroughput | None:
        first = self._first.get(member)
        if first is None or local_rank < 0 or first + local_rank >= len(self.ranks):
            return None
        pace = self.ranks[first + local_rank]
        return pace if pace.member == member else None

    def of_member(self, member: str, nproc: int) -> list[RankThroughput]:
        first = self._first.get(member)
        return [] if first is None else self.ranks[first : first + nproc]

    def enter(self, pace: RankThroughput, stage: Stage, now: float) -> bool:
        if stage is pace.stage:
            return False
        self.in_stage[pace.stage] -= 1
        self.in_stage[stage] += 1
        pace.stage, pace.stage_since_s, self.stage_newest_s = stage, now, now
        return True

    @property
    def grouping(self) -> bool:
        """Somebody waits for the process group."""
        return any(self.in_stage[stage] for stage in GROUPING)

    @property
    def warms_up(self) -> bool:
        """The process group stands where it was asked for, and no rank has made a step that counts."""
        ready = self.in_stage[Stage.READY] + self.in_stage[Stage.STEPPING]
        return self.newest_s is None and ready > 0 and not self.grouping

    def alive(self) -> list[RankThroughput]:
        return [pace for pace in self.ranks if pace.stage is not Stage.DONE]

    def step_s(self) -> float:
        """The median step of all ranks; 0: unknown."""
        return median([step_s for pace in self.ranks if pace.counts and (step_s := pace.step_s)])

    def _stepped(self, at_s: float) -> None:
        if self.newest_s is None:
            self.newest_s = at_s
        elif at_s > self.newest_s:
            gap_s = at_s - self.newest_s
            self.training_s += gap_s if gap_s <= self._gap_s_max else 0.0
            self.newest_s = at_s


def median(values: Collection[float]) -> float:
    """0 of none. (The standard library's loads decimal and fractions.)

    >>> median([3.0, 1.0, 2.0]), median([1.0, 2.0]), median([])
    (2.0, 1.5, 0.0)
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def of_world(order: Iterable[str], nproc: Mapping[str, int], hosts: Mapping[str, str]) -> list[tuple[str, str, int]]:
    """A world's nodes as Throughput wants them; a member whose host is not known is called by its own name."""
    return [(member, hosts.get(member, member.partition("#")[0]), nproc[member]) for member in order]
