"""Throughput of the ranks of a running generation, from the reports of their agents. Bookkeeping: it decides nothing.

The cost of a report grows with its ranks. `step_s` looks at all ranks, so it is for rare calls.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from msgspec import Struct

from holdfast.protocol.messages import Progress
from holdfast.protocol.rank_progress import RankProgress, Stage

STEPS_TO_COUNT = 3
"""Earlier steps are warm-up: the rank compiles, fills caches, opens connections."""
WINDOW_S = 5.0
WINDOWS_MAX = 12
"""Their median is that of the last minute; of this many steps or reports if these take longer than a window."""
GROUPING = frozenset({Stage.MEETING, Stage.GROUPING})


class Mark(Struct, frozen=True, gc=False):
    """Progress of a rank at one moment. Two marks give the duration of the steps in between. Not tracked by the
    collector of cycles: there are three for each rank, and new ones in every window."""

    steps: int
    at_s: float
    own_s: float

    def per_step(self, later: Mark) -> tuple[float, float]:
        """Seconds per step between the marks, and the rank's own part of them."""
        steps = later.steps - self.steps
        return (later.at_s - self.at_s) / steps, max(0.0, later.own_s - self.own_s) / steps


@dataclass(slots=True, eq=False, repr=False)
class RankThroughput:
    """Throughput of one rank."""

    rank: int
    member: str
    host: str
    local_rank: int
    newest_s: float
    """The end of its newest step or beat, by the coordinator's clock; before the first: the begin of its generation."""
    stage_since_s: float
    stage: Stage = Stage.STARTING
    steps: int = 0
    beats: int = 0
    own_s: float = 0.0
    job_step: int = 0
    """The step of the whole job, as in RankProgress."""
    pid: int = 0
    window_steps_s: array[float] | None = None
    """Seconds per step in each of the last WINDOWS_MAX windows, oldest first. Arrays, made for the first window: a job
    may have 100,000 ranks, all of which begin at once."""
    window_owns_s: array[float] | None = None
    """The own parts of these."""
    _first: Mark | None = None
    """The first step that was reported. Used until a step after the warm-up has been measured."""
    _from: Mark | None = None
    """Start of the current window."""

    def heard(self, report: RankProgress, at_s: float) -> bool:
        """Take a report. True if it has new steps or beats. `at_s`: when the newest of them ended."""
        self.job_step, self.pid = max(self.job_step, report.job_step), report.pid
        if report.steps < self.steps:
            self._begin_anew()
        stepped = report.steps > self.steps
        if stepped or report.beats > self.beats:
            self.newest_s, self.beats = at_s, report.beats
            if stepped:
                self.steps, self.own_s = report.steps, report.own_s
                self._first = self._first or self.mark
                if self.counts:
                    self._measure()
            return True
        return False

    def _begin_anew(self) -> None:
        """Start to count optimizer steps: up to now only beats were counted."""
        self.steps, self._first, self._from = 0, None, None
        self.window_steps_s = self.window_owns_s = None

    @property
    def counts(self) -> bool:
        return self.steps >= STEPS_TO_COUNT

    @property
    def mark(self) -> Mark:
        return Mark(self.steps, self.newest_s, self.own_s)

    @property
    def step_s(self) -> float:
        """Median of the last minute; 0: unknown."""
        return median(self.window_steps_s) if self.window_steps_s else self._rough()[0]

    @property
    def own_step_s(self) -> float:
        return median(self.window_owns_s) if self.window_owns_s else self._rough()[1]

    def _rough(self) -> tuple[float, float]:
        """A first estimate, used before the end of the first window."""
        begins = (mark for mark in (self._from, self._first) if mark is not None and mark.steps < self.steps)
        return next((mark.per_step(self.mark) for mark in begins), (0.0, 0.0))

    def _measure(self) -> None:
        if self._from is None:
            self._from = self.mark
        elif self.newest_s - self._from.at_s >= WINDOW_S:
            mark = self.mark
            step_s, own_s = self._from.per_step(mark)
            if self.window_steps_s is None or self.window_owns_s is None:
                self.window_steps_s, self.window_owns_s = array("d"), array("d")
            self.window_steps_s.append(step_s)
            self.window_owns_s.append(own_s)
            del self.window_steps_s[:-WINDOWS_MAX], self.window_owns_s[:-WINDOWS_MAX]
            self._from = mark


class Throughput:
    """Throughput of all ranks of one generation."""

    def __init__(self, nodes: Iterable[tuple[str, str, Iterable[int]]], began_s: float, gap_s_max: float) -> None:
        """`nodes`: (member, host, local ranks) by group rank. `gap_s_max`: a longer time without a step does not
        count as training."""
        self.ranks: list[RankThroughput] = []
        self._by_member: dict[str, dict[int, RankThroughput]] = {}
        """The ranks of each member, by local rank."""
        self.began_s = began_s
        """The time at which the workers were started."""
        self._gap_s_max = gap_s_max
        self.newest_s: float | None = None
        """The end of the newest step of any rank after its warm-up; None: all ranks warm up."""
        self.warm_up_newest_s = began_s
        """The end of the newest warm-up step or beat of any rank."""
        self.stage_newest_s = began_s
        """The time at which a rank last reached a new stage."""
        self.training_s = 0.0
        self.job = RankThroughput(0, "", "", 0, began_s, began_s)
        """The whole job, in steps as the script counts them over all restarts."""
        self.job_steps = 0
        """Number of steps that the job will have; 0: unknown."""
        self.longest_step_s = 0.0
        """The longest step of a rank, without its first one."""
        self.in_stage: dict[Stage, int] = dict.fromkeys(Stage, 0)
        for member, host, local_ranks in nodes:
            own = self._by_member[member] = {}
            for local_rank in local_ranks:
                own[local_rank] = RankThroughput(len(self.ranks), member, host, local_rank, began_s, began_s)
                self.ranks.append(own[local_rank])
        self.in_stage[Stage.STARTING] = len(self.ranks)

    def heard(self, member: str, ranks: Iterable[RankProgress], now: float) -> bool:
        """Take an agent's report. True if a rank made a step or reached a new stage."""
        moved, own = False, self._by_member.get(member, {})
        for report in ranks:
            pace = own.get(report.local_rank)
            if pace is None or pace.stage is Stage.DONE:
                continue
            if report.stage is Stage.SPARE:
                pace.pid = report.pid
                moved |= self.enter(pace, Stage.SPARE, now)
                continue
            at_s = max(self.began_s, now - max(0.0, report.age_s))
            steps, newest_s = pace.steps, pace.newest_s
            if pace.heard(report, at_s):
                moved = True
                if 0 < steps < pace.steps:
                    self.longest_step_s = max(self.longest_step_s, (at_s - newest_s) / (pace.steps - steps))
                if pace.counts:
                    self._stepped(at_s)
                else:
                    self.warm_up_newest_s = max(self.warm_up_newest_s, at_s)
            if self.enter(pace, report.stage, now) and report.stage is not Stage.DONE:
                moved = True
        return moved

    def follow_job(self, now: float, member: str, message: Progress) -> None:
        """Only rank 0's node counts: others report the same step earlier or later, and the count must not go back."""
        if message.job_steps and message.ranks and member == self.ranks[0].member:
            self.job_steps = message.job_steps
            age_s = min(each.age_s for each in message.ranks)
            self.job.heard(RankProgress(0, Stage.STEPPING, message.job_step), max(self.began_s, now - age_s))

    @property
    def left_s(self) -> float:
        """The time for the job's other steps at the present rate; 0: unknown."""
        return max(0, self.job_steps - self.job.steps) * self.job.step_s

    def of(self, member: str, local_rank: int) -> RankThroughput | None:
        return self._by_member.get(member, {}).get(local_rank)

    def of_member(self, member: str) -> Collection[RankThroughput]:
        return self._by_member.get(member, {}).values()

    def enter(self, pace: RankThroughput, stage: Stage, now: float) -> bool:
        if stage is pace.stage:
            return False
        self.in_stage[pace.stage] -= 1
        self.in_stage[stage] += 1
        pace.stage, pace.stage_since_s, self.stage_newest_s = stage, now, now
        return True

    @property
    def grouping(self) -> bool:
        """Whether a rank waits for the process group."""
        return any(self.in_stage[stage] for stage in GROUPING)

    @property
    def warms_up(self) -> bool:
        """The process group is ready if one was asked for, and all ranks are in their warm-up."""
        ready = self.in_stage[Stage.READY] + self.in_stage[Stage.STEPPING]
        return self.newest_s is None and ready > 0 and not self.grouping

    @property
    def stepped(self) -> bool:
        """Whether a rank has made a step or a beat."""
        return self.newest_s is not None or any(pace.steps for pace in self.ranks)

    def alive(self) -> list[RankThroughput]:
        """The ranks that train, or are on the way to it."""
        return [pace for pace in self.ranks if pace.stage not in (Stage.DONE, Stage.SPARE)]

    def spares(self) -> list[RankThroughput]:
        return [pace for pace in self.ranks if pace.stage is Stage.SPARE] if self.in_stage[Stage.SPARE] else []

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
    """The median; 0 for no values. (The standard library's imports decimal and fractions.)

    >>> median([3.0, 1.0, 2.0]), median([1.0, 2.0]), median([])
    (2.0, 1.5, 0.0)
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def of_world(
    order: Iterable[str], places: Mapping[str, Iterable[int]], hosts: Mapping[str, str]
) -> list[tuple[str, str, Iterable[int]]]:
    """The `nodes` argument of Throughput for a world. A member of unknown host is listed under its own name."""
    return [(member, hosts.get(member, member.partition("#")[0]), places[member]) for member in order]
