"""Finds ranks and nodes that slow down the others at every step, reports them, shows those that still do, and asks
their nodes for the clocks of their GPUs. Pure.

Collectives make the steps of all ranks equally long, whichever rank is slow. The ranks differ in their own part of a
step: from the end of the previous step to the start of backward, before a rank can wait for another.

A rank is slow in a window of at least STEPS_MIN steps when its own part exceeds FACTOR times the median of its peers,
and exceeds it by EXCESS_S or by EXCESS_SHARE of the step. After IN_A_ROW slow windows it is a straggler; after as many
other windows it is not one any more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import Struct

from holdfast.extensions.stragglers.messages import GpuClocks, ReadClocks
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
from holdfast.protocol.throughput import Mark, RankThroughput

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


# --- the comparison of the ranks of one generation --------------------------------------------------------------------

FACTOR = 1.5
STEPS_MIN = 20
EXCESS_S = 0.005
EXCESS_SHARE = 0.05
IN_A_ROW = 3

RANK_SLOW, NODE_SLOW = "HF250", "HF251"


class Straggler(Struct, frozen=True, kw_only=True):
    """A rank or a node has become a straggler or, with `over`, is not one any more."""

    code: str
    host: str
    ranks: tuple[int, ...]
    own_s: float
    """Its own part of a step; for a node: the median of its ranks."""
    peers_s: float
    """The median own part of its peers."""
    step_s: float
    over: bool = False

    @property
    def who(self) -> str:
        return f"node {self.host}" if self.code == NODE_SLOW else f"rank {self.ranks[0]} on {self.host}"

    @property
    def text(self) -> str:
        if self.over:
            return f"{self.who} is as fast as the others again"
        own = f"{_ms(self.own_s)} of its own in each step of {_ms(self.step_s)}, the others {_ms(self.peers_s)}"
        return f"{self.who} is slow: {own}; all other ranks wait for it"


@dataclass(slots=True, eq=False, repr=False)
class _Course:
    """The windows of one rank."""

    pace: RankThroughput
    since: Mark
    """Start of the current window."""
    step_s: float = 0.0
    own_s: float = 0.0
    slow: int = 0
    """Number of slow windows in a row; negative: of other windows in a row."""


class Stragglers:
    """Straggler detector for one generation. `heard` is cheap; `news` compares once every rank has closed a window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._courses: dict[int, _Course] = {}
        self._open: set[int] = set()
        """Ranks that have not closed a window since the last comparison."""
        self._standing: dict[tuple[int, ...], Straggler] = {}

    @property
    def standing(self) -> Sequence[Straggler]:
        return tuple(self._standing.values())

    def heard(self, pace: RankThroughput) -> None:
        """Take the newest steps of this rank."""
        if not pace.counts:
            return
        course = self._courses.get(pace.rank)
        if course is None:
            self._courses[pace.rank] = _Course(pace, pace.mark)
            self._open.add(pace.rank)
            return
        since = course.since
        if pace.steps < since.steps:  # it counts optimizer steps now instead of beats
            course.since = pace.mark
        elif pace.steps - since.steps >= STEPS_MIN and pace.newest_s - since.at_s >= self._window_s:
            course.since = pace.mark
            course.step_s, course.own_s = since.per_step(course.since)
            self._open.discard(pace.rank)

    def forget_done(self) -> None:
        """Leave out the ranks that have ended with 0: they close no window any more."""
        for rank in [rank for rank, course in self._courses.items() if course.pace.stage is Stage.DONE]:
            del self._courses[rank]
            self._open.discard(rank)

    def news(self) -> list[Straggler]:
        """Compare the ranks if each of them has closed a window since the last comparison."""
        if self._open or len(self._courses) < 2:
            return []
        self._open = set(self._courses)
        own = sorted(course.own_s for course in self._courses.values())
        quick_s = FACTOR * own[len(own) // 2 - 1]  # the median of a rank's peers is not below this value
        for course in self._courses.values():
            own_s = course.own_s
            if own_s > quick_s and _is_slow(own_s, _median_without(own, own_s), course.step_s):
                course.slow = max(1, course.slow + 1)
            else:
                course.slow = min(-1, course.slow - 1)
        return self._recovered(own) + self._fallen_behind(own)

    def _fallen_behind(self, own: list[float]) -> list[Straggler]:
        named = {rank for ranks in self._standing for rank in ranks}
        slow: dict[str, list[_Course]] = {}
        for course in self._courses.values():
            if course.slow >= IN_A_ROW and course.pace.rank not in named:
                slow.setdefault(course.pace.member, []).append(course)
        if not slow:
            return []
        found: list[Straggler] = []
        sizes = Counter(course.pace.member for course in self._courses.values())
        for member, courses in slow.items():
            if len(courses) == sizes[member] > 1 and len(sizes) > 1:
                found.append(_named(NODE_SLOW, courses, own))
            else:
                found += [_named(RANK_SLOW, [course], own) for course in courses]
        for each in found:
            self._standing[each.ranks] = each
        return found

    def _recovered(self, own: list[float]) -> list[Straggler]:
        over: list[Straggler] = []
        for ranks, straggler in list(self._standing.items()):
            courses = [self._courses[rank] for rank in ranks if rank in self._courses]
            if all(course.slow <= -IN_A_ROW for course in courses):
                del self._standing[ranks]
                if courses:
                    over.append(_named(straggler.code, courses, own, over=True))
        return over


def _named(code: str, courses: list[_Course], own: list[float], *, over: bool = False) -> Straggler:
    """`own`: the own parts of all ranks, in order."""
    middle = sorted(courses, key=lambda course: course.own_s)[len(courses) // 2]
    return Straggler(
        code=code,
        host=middle.pace.host,
        ranks=tuple(sorted(course.pace.rank for course in courses)),
        own_s=middle.own_s,
        peers_s=_median_without(own, middle.own_s),
        step_s=middle.step_s,
        over=over,
    )


def _is_slow(own_s: float, peers_s: float, step_s: float) -> bool:
    excess_s = own_s - peers_s
    return own_s > FACTOR * peers_s and (excess_s >= EXCESS_S or excess_s >= EXCESS_SHARE * step_s)


def _median_without(ordered: list[float], one: float) -> float:
    """The median of all values except this one, which must be among them.

    >>> _median_without([1.0, 2.0, 9.0], 9.0), _median_without([1.0, 9.0], 9.0)
    (1.5, 1.0)
    """
    left_out, count = bisect_left(ordered, one), len(ordered) - 1
    middle = count // 2
    upper = ordered[middle + (middle >= left_out)]
    if count % 2:
        return upper
    return (ordered[middle - 1 + (middle > left_out)] + upper) / 2


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
