"""Monitors the running generation: stragglers, hangs, and the sample rounds that collect the stacks of all workers.

The coordinator owns it, passes events to it and carries out the commands it returns. Only one of them changes the state
of the job: `EndGeneration`. What the verdict needs is returned by `observed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from holdfast.coordinator.coordinator_commands import Command, Tell
from holdfast.coordinator.hang_detector import EndHung, HangDetector, HangOver, LookNow, Order, ReportHang, ReportStill
from holdfast.coordinator.stragglers import Straggler, Stragglers
from holdfast.coordinator.training import Training
from holdfast.coordinator.world import Member, World
from holdfast.protocol.extension import EndGeneration, Observed, StopDelayed
from holdfast.protocol.messages import FromCoordinator, Look, Looked, Notice, StopReason
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import Limits, Note
from holdfast.protocol.rank_progress import (
    Examine,
    Finding,
    HangKind,
    RankSample,
    RankStory,
    Stage,
    stack_text,
)
from holdfast.protocol.throughput import Throughput

SIGKILL = 9
NOTICES_SAID_MAX = 3
"""Stragglers reported on the console at a time; the journal has all."""


def cannot_tell(stories: object) -> Finding:  # noqa: ARG001 - it takes the place of a function that looks at them
    """The `examine` function of a coordinator that has none: it finds nothing."""
    return Finding(kind=HangKind.MOVING, code="", text="")


@dataclass(slots=True)
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


class Monitor:
    """Monitors one generation after the other. Methods that take an event return the commands that follow."""

    def __init__(self, limits: Limits, members: Mapping[str, Member], training: Training, examine: Examine) -> None:
        """`members`: the coordinator's live table of members by name."""
        self._limits = limits
        self._members = members
        self._training = training
        self._examine = examine
        self._at_work: World | None = None
        """The newest world that was started."""
        self._watch: HangDetector | None = None
        """None: no generation is monitored."""
        self._stragglers = Stragglers(limits.straggler_window_s)
        self._hang: Finding | None = None
        """The hang that was found in that world, while nothing has moved since."""
        self._looks = 0
        self._round: SampleRound | None = None
        """The current round."""
        self._silent: set[str] = set()
        """Members that missed the end of a round: later rounds ask them but do not wait for them."""
        self._delayed: StopDelayed | None = None
        """Workers have failed, and the others are about to be stopped."""
        self._done = 0
        """Number of ranks that had ended with 0 when the stragglers were last compared."""
        self._out: list[Command | EndGeneration] = []

    # ---------------------------------------------------------------- events

    def begin(self, world: World) -> None:
        """Start to monitor this world: its workers were started."""
        self._at_work, self._hang, self._done = world, None, 0
        self._stragglers = Stragglers(self._limits.straggler_window_s)

    def rest(self) -> None:
        """Stop looking for hangs: the generation drains, is stopped or is over."""
        self._watch = self._round = self._delayed = None

    def progressed(self, now: float, member: str) -> list[Command | EndGeneration]:
        """A worker of this node made a step, or reached a new stage."""
        throughput = self._throughput()
        if throughput.in_stage[Stage.DONE] > self._done:
            self._done = throughput.in_stage[Stage.DONE]
            self._stragglers.forget_done()
        for pace in throughput.of_member(member):
            if pace.stage is not Stage.DONE:
                self._stragglers.heard(pace)
        if self._watch is not None:
            self._follow(now, self._watch.moved(now))
        news = self._stragglers.news()
        if news:
            self._report_stragglers(news)
        return self._taken()

    def looked(self, member: Member, message: Looked) -> None:
        """An agent has sent the stacks of its workers."""
        asked = self._round
        if asked is None or asked.number != message.number:
            return
        throughput = self._throughput()
        asked.awaited.discard(member.name)
        self._silent.discard(member.name)
        asked.reach += message.reach
        for sample in message.samples:
            pace = throughput.of(member.name, sample.local_rank)
            if pace is not None:
                asked.samples[pace.rank] = sample

    def stop_delayed(self, now: float, event: StopDelayed) -> list[Command | EndGeneration]:
        """Workers have failed, and the others are stopped soon. No hang is looked for any more."""
        if self._delayed is None or not self._delayed.seeks_places:
            self._delayed, self._round = event, None
            if event.seeks_places:
                self._look(now, store=False)
        return self._taken()

    # ---------------------------------------------------------------- what follows

    def due_s(self) -> float:
        """The time at which `advance` must run next while a generation runs."""
        if self._delayed is not None or self._watch is None:
            return inf
        if self._round is not None:
            return self._round.asked_s + self._limits.look_wait_s
        return self._watch.due_s()

    def advance(self, now: float) -> list[Command | EndGeneration]:
        """Act on the newest state. It is called after each event while a generation runs."""
        if self._delayed is not None:
            return []
        if self._watch is None:
            self._watch = HangDetector(self._limits, self._throughput(), self._examined)
        asked = self._round
        if asked is not None and (not asked.awaited or now >= asked.asked_s + self._limits.look_wait_s):
            self._close_round(now, asked, self._watch)
        self._follow(now, self._watch.advance(now))
        return self._taken()

    def observed(self, now: float) -> Observed:
        """What the verdict needs, if the generation ends now."""
        asked = self._round
        if asked is None or self._delayed is None or not self._delayed.seeks_places:
            return Observed(self._hang)
        places = tuple(
            RankStory(pace.rank, pace.host, pace.local_rank, now - pace.newest_s, (asked.samples[pace.rank],))
            for pace in self._throughput().ranks
            if pace.rank in asked.samples
        )
        return Observed(self._hang, places, complete=not asked.awaited & self._members.keys())

    def _throughput(self) -> Throughput:
        throughput = self._training.throughput
        assert throughput is not None
        return throughput

    def _examined(self, stories: Sequence[RankStory]) -> Finding:
        """The finding of `examine`, which is a parameter: an error in it goes to the journal and ends no job."""
        try:
            return self._examine(stories)
        except Exception as error:  # noqa: BLE001
            self._note("observer_fault", what="examine", error=f"{type(error).__name__}: {error}")
            return cannot_tell(stories)

    def _look(self, now: float, *, store: bool) -> None:
        world = self._world()
        self._looks += 1
        asked = [self._members[n] for n in world.order if n in self._members and not world.finished(n)]
        self._round = SampleRound(self._looks, now, {member.name for member in asked} - self._silent)
        for member in asked:
            self._out.append(Tell(member.link, Look(world.generation, self._looks, store)))

    def _close_round(self, now: float, asked: SampleRound, watch: HangDetector) -> None:
        self._round = None
        late = asked.awaited & self._members.keys()
        if late:
            self._silent |= late
            self._note("look_unanswered", generation=self._world().generation, members=sorted(late))
        samples, reach = asked.samples, tuple(asked.reach)
        for order in watch.looked(now, asked_s=asked.asked_s, samples=samples, reach=reach):
            self._follow(now, order)

    def _follow(self, now: float, order: Order | None) -> None:
        """Carry out an order of the hang detector."""
        world = self._world()
        match order:
            case LookNow(store):
                self._look(now, store=store)
            case ReportHang():
                self._report_hang(world, order)
            case HangOver(_, still_s):
                self._hang = None
                self._tell_world(world, Notice(f"the job goes on after {still_s:.0f} s without a step"))
                self._note("hang_over", generation=world.generation, still_s=round(still_s, 3))
            case ReportStill(text, still_s):
                self._tell_world(world, Notice(text))
                self._note("no_step", generation=world.generation, text=text, still_s=round(still_s, 3))
            case EndHung(finding, text, culprit):
                self._hang = finding
                lived_s = now - self._throughput().began_s
                failure = _failure_of(culprit, finding, lived_s) if culprit is not None else None
                self._out.append(EndGeneration(StopReason.HUNG, text, failure))
            case None:
                pass

    # ---------------------------------------------------------------- reports

    def _report_hang(self, world: World, report: ReportHang) -> None:
        finding = self._hang = report.finding
        self._tell_world(world, Notice(report.text))
        self._note(
            "hang",
            generation=world.generation,
            kind=finding.kind.value,
            code=finding.code,
            text=finding.text,
            culprits=list(finding.culprits),
            groups=[{"ranks": list(place.ranks), "place": place.words} for place in finding.groups],
            files=report.files,
            still_s=round(report.still_s, 3),
        )

    def _report_stragglers(self, news: list[Straggler]) -> None:
        world = self._world()
        for each in news:
            self._note(
                "straggler_over" if each.over else "straggler",
                generation=world.generation,
                code=each.code,
                host=each.host,
                ranks=list(each.ranks),
                own_s=round(each.own_s, 6),
                peers_s=round(each.peers_s, 6),
                step_s=round(each.step_s, 6),
            )
        more = len(news) - NOTICES_SAID_MAX
        lines = [each.text for each in news[:NOTICES_SAID_MAX]] + ([f"and {more} more"] if more > 0 else [])
        self._tell_world(world, Notice("\n".join(lines)))

    def hang(self, now: float) -> Finding | None:
        """The hang that was reported and is not over."""
        return self._watch.standing(now) if self._watch is not None else None

    def notices(self, hang: Finding | None) -> tuple[str, ...]:
        """Current hangs and stragglers of the running generation, in words."""
        stragglers = self._stragglers.standing if self._watch is not None else ()
        return (*([hang.text] if hang is not None else []), *(each.text for each in stragglers))

    # ---------------------------------------------------------------- small steps

    def _world(self) -> World:
        assert self._at_work is not None
        return self._at_work

    def _tell_world(self, world: World, message: FromCoordinator) -> None:
        self._out += [Tell(self._members[name].link, message) for name in world.order if name in self._members]

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, fields))

    def _taken(self) -> list[Command | EndGeneration]:
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
