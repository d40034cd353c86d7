"""Watches the running generation for hangs. It has all workers sampled, reports what it finds, and ends a generation
that hangs. Pure.

It also finds out where the ranks are that others have waited for in vain, before a stop ends them (StopDelayed). When
samples are taken, and what follows from a finding, is decided in `hang_detector.py`; what samples mean, in
`diagnosis/hangs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from holdfast.extensions.hangs.hang_detector import (
    EndHung,
    HangDetector,
    HangOver,
    LookNow,
    ReportHang,
    ReportStill,
)
from holdfast.extensions.hangs.hang_detector import Order as DetectorOrder
from holdfast.extensions.hangs.messages import Look, Looked
from holdfast.protocol.extension import (
    Announce,
    CoordinatorExtension,
    DrainBegan,
    DrainEnded,
    Ended,
    EndGeneration,
    Figures,
    Happened,
    Job,
    Observed,
    Order,
    Orders,
    RankPlace,
    Started,
    StopDelayed,
    ToNode,
)
from holdfast.protocol.messages import StopReason
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import Note
from holdfast.protocol.rank_progress import (
    Examine,
    Finding,
    HangKind,
    RankSample,
    RankStory,
    Standing,
    stack_text,
)
from holdfast.protocol.throughput import Throughput

SIGKILL = 9


def judge_samples(stories: Sequence[RankStory]) -> Finding:
    """The finding of holdfast's rules."""
    from holdfast.diagnosis.hangs import examine  # the start of a job does not need it

    return examine(stories)


@dataclass(slots=True, eq=False, repr=False)
class SampleRound:
    """One round in which all nodes are asked for stacks."""

    number: int
    asked_s: float
    awaited: set[str]
    """Members that have not answered."""
    samples: dict[int, RankSample] = field(default_factory=dict)
    """Samples by rank."""
    reach: list[str] = field(default_factory=list)
    """Reports of the nodes that cannot reach the store."""
    answered: bool = False
    """A member has answered."""

    def due_s(self, wait_s: float) -> float:
        """The time at which it is over; -inf: now. If nobody is awaited, it is over with the first answer: members that
        were late once are often in time later (seed 132)."""
        return -inf if self.answered and not self.awaited else self.asked_s + wait_s


class AtCoordinator(CoordinatorExtension):
    messages = Looked

    def __init__(self, job: Job, examine: Examine = judge_samples) -> None:
        super().__init__(job)
        self._examine = examine
        self._watched = False
        """A generation runs, no drain is under way, and no worker has failed."""
        self._detector: HangDetector | None = None
        """None: hangs are not looked for, or no worker has reported progress yet."""
        self._hang: Finding | None = None
        """The hang that was found in the running generation, while nothing has moved since."""
        self._looks = 0
        self._round: SampleRound | None = None
        """The current round."""
        self._silent: set[str] = set()
        """Members that missed the end of a round: later rounds ask them but do not wait for them."""
        self._seeks_places = False
        """The round is for the verdict on a failure."""
        self._out: list[Order] = []

    # ---------------------------------------------------------------- events

    def happened(self, now: float, event: Happened) -> Orders:
        match event:
            case Started():
                self._watched = True
            case Ended():
                self._rest()
                self._hang = None
            case DrainBegan():
                self._rest()
            case DrainEnded():
                self._watched = True
                self._watch()
            case StopDelayed(_, _, seeks_places):
                self._on_stop_delayed(now, seeks_places=seeks_places)
        return self._taken()

    def _rest(self) -> None:
        """Stop looking for hangs."""
        self._watched = self._seeks_places = False
        self._detector = self._round = None

    def _watch(self) -> HangDetector:
        """Look for hangs from now on, if that is not done already."""
        if self._detector is None:
            self._detector = HangDetector(self.job.limits, self._throughput(), self._examined)
        return self._detector

    def _on_stop_delayed(self, now: float, *, seeks_places: bool) -> None:
        """Workers have failed, and the others will be stopped soon: ranks that make no progress now wait for those."""
        if self._seeks_places:
            return
        self._watched, self._round, self._seeks_places = False, None, seeks_places
        if seeks_places:
            self._look(now, store=False)

    def progressed(self, now: float, member: str) -> Orders:  # noqa: ARG002
        if self._watched:
            self._watch()
        if self._detector is not None:
            self._follow(now, self._detector.moved(now))
        return self._taken()

    def heard(self, now: float, member: str, message: Looked) -> Orders:  # noqa: ARG002
        """A node has sent the stacks of its workers."""
        asked = self._round
        if asked is None or asked.number != message.number or message.generation != self.job.generation:
            return ()
        throughput = self._throughput()
        asked.answered = True
        asked.awaited.discard(member)
        self._silent.discard(member)
        asked.reach += message.reach
        for sample in message.samples:
            pace = throughput.of(member, sample.local_rank)
            if pace is not None:
                asked.samples[pace.rank] = sample
        return ()

    # ---------------------------------------------------------------- what follows

    def due_s(self) -> float:
        if not self._watched or self._detector is None:
            return inf
        if self._round is not None:
            return self._round.due_s(self.job.limits.look_wait_s)
        return self._detector.due_s()

    def due(self, now: float) -> Orders:
        detector, asked = self._detector, self._round
        assert detector is not None
        if asked is not None:
            self._close_round(now, asked, detector)
        self._follow(now, detector.advance(now))
        return self._taken()

    def observed(self, now: float) -> Observed:
        asked = self._round
        if asked is None or not self._seeks_places:
            return Observed(self._hang)
        places = tuple(
            RankStory(pace.rank, pace.host, pace.local_rank, now - pace.newest_s, (asked.samples[pace.rank],))
            for pace in self._throughput().ranks
            if pace.rank in asked.samples
        )
        return Observed(self._hang, places, complete=not asked.awaited & self._members())

    def view(self, now: float) -> Figures:
        hang = self._detector.standing(now) if self._detector is not None else None
        if hang is None:
            return Figures()
        places = {}
        for place in hang.groups:
            for rank in place.ranks:
                places[rank] = RankPlace(Standing.HUNG if rank in hang.culprits else place.standing, place.words)
        notices = tuple(text for text in (hang.text, hang.collectives) if text)
        return Figures(notices=notices, places=places, stands_still=True)

    # ---------------------------------------------------------------- samples

    def _look(self, now: float, *, store: bool) -> None:
        """Begin a round."""
        self._looks += 1
        asked = [node.member for node in self.job.nodes() if not node.done]
        self._round = SampleRound(self._looks, now, set(asked) - self._silent)
        look = Look(self.job.generation, self._looks, store)
        self._out += [ToNode(member, look) for member in asked]

    def _close_round(self, now: float, asked: SampleRound, detector: HangDetector) -> None:
        self._round = None
        late = asked.awaited & self._members()
        if late:
            self._silent |= late
            self._note("look_unanswered", members=sorted(late))
        samples, reach = asked.samples, tuple(asked.reach)
        for order in detector.looked(now, asked_s=asked.asked_s, samples=samples, reach=reach):
            self._follow(now, order)

    def _examined(self, stories: Sequence[RankStory]) -> Finding:
        """The finding of `examine`, which is a parameter: an error in it goes to the journal and ends no watch."""
        try:
            return self._examine(stories)
        except Exception as error:  # noqa: BLE001
            self._out.append(Note("observer_fault", {"what": "examine", "error": f"{type(error).__name__}: {error}"}))
            return Finding(kind=HangKind.MOVING, code="", text="")

    # ---------------------------------------------------------------- reports

    def _follow(self, now: float, order: DetectorOrder | None) -> None:
        """Carry out an order of the hang detector."""
        match order:
            case LookNow(store):
                self._look(now, store=store)
            case ReportHang():
                self._report_hang(order)
            case HangOver(_, still_s):
                self._hang = None
                self._out.append(Announce(f"the job goes on after {still_s:.0f} s without a step"))
                self._note("hang_over", still_s=round(still_s, 3))
            case ReportStill(text, still_s):
                self._out.append(Announce(text))
                self._note("no_step", text=text, still_s=round(still_s, 3))
            case EndHung(finding, text, culprit):
                self._hang = finding
                lived_s = now - self._throughput().began_s
                failure = _failure_of(culprit, finding, lived_s) if culprit is not None else None
                self._out.append(EndGeneration(StopReason.HUNG, text, failure))
            case None:
                pass

    def _report_hang(self, report: ReportHang) -> None:
        finding = self._hang = report.finding
        self._out.append(Announce(report.text))
        self._note(
            "hang",
            kind=finding.kind.value,
            code=finding.code,
            text=finding.text,
            collectives=finding.collectives,
            culprits=list(finding.culprits),
            groups=[{"ranks": list(place.ranks), "place": place.words} for place in finding.groups],
            files=report.files,
            still_s=round(report.still_s, 3),
        )

    # ---------------------------------------------------------------- small steps

    def _throughput(self) -> Throughput:
        throughput = self.job.throughput
        assert throughput is not None, "a generation runs"
        return throughput

    def _members(self) -> set[str]:
        return {member.name for member in self.job.members()}

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, {"generation": self.job.generation, **fields}))

    def _taken(self) -> Orders:
        out, self._out = self._out, []
        return out


def _failure_of(story: RankStory, finding: Finding, lived_s: float) -> Failure:
    """The culprit of a hang as a Failure. Its process is about to be killed for it."""
    newest = story.samples[-1] if story.samples else None
    frames = newest.frames if newest is not None else ()
    return Failure(
        rank=story.rank,
        local_rank=story.local_rank,
        host=story.host,
        pid=newest.pid if newest is not None else 0,
        exit_code=-SIGKILL,
        message=finding.text.partition("\n")[0],
        stack=stack_text(frames, newest.source if newest is not None else ""),
        lived_s=round(lived_s, 3),
    )
