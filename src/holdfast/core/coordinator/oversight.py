"""The coordinator's part that sees how far the workers are: progress, looks, hangs, stragglers, the view for people.

Of what it finds one thing only changes the course of the job: a generation that hangs is ended, see `_oversee`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from holdfast.core.coordinator import view
from holdfast.core.coordinator.base import CoordinatorBase
from holdfast.core.coordinator.ending import Judge
from holdfast.core.coordinator.pace import Paces, of_world
from holdfast.core.coordinator.state import Member, Phase, World
from holdfast.core.coordinator.stragglers import Straggler, Stragglers
from holdfast.core.coordinator.watch import EndHung, HangDetector, HangOver, LookNow, Order, ReportHang
from holdfast.core.hang import Examine, Finding, HangKind, RankStory
from holdfast.core.outcome import Failure
from holdfast.core.policy import JobSpec, Limits
from holdfast.core.progress import JobView, Stage
from holdfast.core.protocol import Look, Looked, Notice, Progress, StopReason
from holdfast.core.stacks import RankSample

PARTING_LOOK_S = 2.0
"""So long a generation is kept after a wait in vain, for the stacks of those that did not come and the words of those that wait too."""
SEARCHED_CHARACTERS = 4096
IN_VAIN = re.compile(
    r"Timed out waiting \d+ms for|wait timeout after \d+ms|DistStoreError: Socket Timeout|Watchdog caught collective operation timeout"
    r"|timed out in monitoredBarrier|failed to pass monitoredBarrier"
)
"""What torch says when a collective or its store has waited for longer than the group's time-out."""
LAST_WORDS_S = 2.0
"""So long a generation is kept after a lost connection, for a word of the rank that closed it: Python needs a second or
two to end, and `finally: destroy_process_group()` comes before the traceback."""
CLOSED = re.compile(
    r"^[\w.]*(?:ConnectionResetError|ConnectionAbortedError|BrokenPipeError|EOFError)\b|ncclRemoteError|remote process exited"
    r"|received errors while waiting for send/recv from rank|gloo/transport/[\s\S]*(?:[Cc]onnection (?:closed|reset) by|[Bb]roken pipe)"
)
"""What torch and Python say when the other side has closed the connection."""


def waited_in_vain(failures: Iterable[Failure]) -> bool:
    """Whether all of these say so. Those that did not come are then still alive, and will be stopped."""
    return all(
        IN_VAIN.search(f"{each.message[:SEARCHED_CHARACTERS]}\n{each.stderr_tail[-SEARCHED_CHARACTERS:]}")
        and not each.after_stop
        for each in failures
    )


def lost_a_peer(failures: Iterable[Failure]) -> bool:
    """Whether all of these failures say so. The rank that closed the connection may only be cleaning up, and report its reason after that."""
    return all(
        CLOSED.search(each.message[:SEARCHED_CHARACTERS]) and not each.after_stop and each.exit_code > 0
        for each in failures
    )


@dataclass(slots=True)
class Round:
    number: int
    asked_s: float
    awaited: set[str]
    """Members that have not answered."""
    samples: dict[int, RankSample] = field(default_factory=dict)
    """By rank."""
    reach: list[str] = field(default_factory=list)
    """What nodes that cannot reach the store have said."""


SIGKILL = 9
NOTICES_SAID_MAX = 3
"""Stragglers that are told at a time; the journal has all."""


def cannot_tell(stories: object) -> Finding:  # noqa: ARG001 — one of many that examine
    """For a coordinator that was given nobody who can: nothing is ever found."""
    return Finding(kind=HangKind.MOVING, code="", text="")


class CoordinatorOversight(CoordinatorBase):
    """Watches over the generation that runs."""

    def __init__(
        self,
        job: JobSpec,
        limits: Limits,
        judge: Judge,
        now: float,
        *,
        fixed_master: tuple[str, int] | None = None,
        examine: Examine = cannot_tell,
    ) -> None:
        """`fixed_master`: the address and port every generation announces (static rendezvous), else rank 0's own."""
        super().__init__(job, limits, judge, now, fixed_master=fixed_master)
        self._examine = examine
        self._paces: Paces | None = None
        """Of the newest generation that was at work."""
        self._watch: HangDetector | None = None
        """None: nothing runs."""
        self._stragglers = Stragglers(limits.straggler_window_s)
        self._trained_s = 0.0
        """In generations that are over."""
        self._looks = 0
        self._round: Round | None = None
        """The look under way."""
        self._silent: set[str] = set()
        """Members that have not answered a look in time: they are asked, but not waited for again."""
        self._hung = ""
        """Why the generation is to be ended."""
        self._parting = ""
        """Why it will be, as soon as the survivors have been looked at or the one that left has spoken; empty: it is not so."""
        self._parting_due_s = inf
        """At the latest then."""

    def view(self, now: float) -> JobView:
        """The job as it is, for people. Costs as much as it has ranks."""
        training_s = self._trained_s + (self._paces.training_s if self._paces is not None else 0.0)
        hang = self._watch.standing(now) if self._watch is not None else None
        return view.JobView(
            run_id=self.job.run_id,
            phase=self.phase.value,
            generation=self.generation,
            restarts=self.budget.used,
            restarts_max=self.job.max_restarts,
            world_size=self.world.size if self.world is not None else 0,
            since_s=now - self._phase_since_s,
            job_s=now - self._born_s,
            training_s=training_s,
            why=self.world.stop_text if self.world is not None and self.phase is Phase.STOPPING else self._why,
            nodes=view.nodes(self.members.values(), self.world, self.phase, self._paces, self._membership, now, hang),
            notices=self._notices(hang),
        )

    def _notices(self, hang: Finding | None) -> tuple[str, ...]:
        stragglers = self._stragglers.standing if self._watch is not None else ()
        return (*([hang.text] if hang is not None else []), *(each.text for each in stragglers))

    # ---------------------------------------------------------------- what the agents say

    def _on_progress(self, now: float, member: Member, message: Progress) -> None:
        if not (self._at_work() and self._is_current(member, message.generation)):
            return
        paces = self._paces_of(self._world())
        if not paces.heard(member.name, message.ranks, now):
            return
        for pace in paces.of_member(member.name, len(message.ranks)):
            if pace.stage is not Stage.DONE:
                self._stragglers.heard(pace)
        if self._watch is not None:
            self._heed(now, self._watch.moved(now))
        news = self._stragglers.news()
        if news:
            self._tell_of_stragglers(news)

    def _rank_done(self, now: float, member: Member, local_rank: int) -> None:
        if self._paces is not None and self._paces.generation == self.generation:
            pace = self._paces.of(member.name, local_rank)
            if pace is not None:
                self._paces.enter(pace, Stage.DONE, now)
                self._stragglers.ended(pace.rank)

    def _on_looked(self, member: Member, message: Looked) -> None:
        asked = self._round
        if asked is None or asked.number != message.number or not self._is_current(member, message.generation):
            return
        paces = self._paces_of(self._world())
        asked.awaited.discard(member.name)
        self._silent.discard(member.name)
        asked.reach += message.reach
        for sample in message.samples:
            pace = paces.of(member.name, sample.local_rank)
            if pace is not None:
                asked.samples[pace.rank] = sample

    # ---------------------------------------------------------------- what follows

    def _oversight_due_s(self) -> float:
        """When `_oversee` has something to do."""
        if self.phase is Phase.RUNNING and self._parting:
            return self._parting_due_s
        if self.phase is not Phase.RUNNING or self._watch is None:
            return inf
        if self._round is not None:
            return self._round.asked_s + self.limits.look_wait_s
        return self._watch.due_s()

    def _oversee(self, now: float) -> tuple[StopReason, str] | None:
        """Why the generation must be ended; None: it need not."""
        if self.phase is not Phase.RUNNING:
            self._watch = self._round = None  # also between two worlds, and on the way to a safe point
            self._parting = ""
            return None
        if self._parting:
            return self._part(now)
        if self._watch is None:
            self._watch = HangDetector(self.limits, self._paces_of(self._world()), self._examined)
        asked = self._round
        if asked is not None and (not asked.awaited or now >= asked.asked_s + self.limits.look_wait_s):
            self._close_round(now, asked, self._watch)
        self._heed(now, self._watch.advance(now))
        hung, self._hung = self._hung, ""
        return (StopReason.HUNG, hung) if hung else None

    def _keep_for_evidence(self, now: float, failures: Sequence[Failure], why: str) -> bool:
        """Whether the generation goes on for a moment. These failures are consequences: of somebody who did not come, and
        is looked at before it is stopped, or of somebody who left, and may be about to say why."""
        world, in_vain = self._world(), waited_in_vain(failures)
        if not in_vain and (world.done_count or not lost_a_peer(failures)):
            return False
        if self._parting and (self._round is not None or not in_vain):
            return True
        if world.hang is not None:
            return False  # who is to blame is known
        if in_vain:
            self._look(now, store=False)
            if self._round is None or not self._round.awaited:
                return False
        else:
            self._round = None
        self._parting, self._parting_due_s = why, now + (PARTING_LOOK_S if in_vain else LAST_WORDS_S)
        return True

    def _part(self, now: float) -> tuple[StopReason, str] | None:
        asked, world = self._round, self._world()
        awaited = asked is not None and asked.awaited & self.members.keys()
        may_speak = not world.done_count and len(world.failures) < world.size
        if now < self._parting_due_s and (awaited or may_speak):
            return None
        if asked is not None:
            spoke = {failure.rank for failure in world.failures}
            world.survivors = tuple(
                RankStory(pace.rank, pace.host, pace.local_rank, now - pace.newest_s, (asked.samples[pace.rank],))
                for pace in self._paces_of(world).ranks
                if pace.rank in asked.samples and pace.rank not in spoke
            )
        why, self._parting, self._round = self._parting, "", None
        return StopReason.WORKER_FAILED, why

    def _paces_of(self, world: World) -> Paces:
        """Of this world, made when it is first asked for."""
        if self._paces is not None and self._paces.generation == world.generation:
            return self._paces
        if self._paces is not None:
            self._trained_s += self._paces.training_s
        hosts = {name: self.members[name].node.host for name in world.order if name in self.members}
        began_s = self._now if world.started_s is None else world.started_s
        nodes = of_world(world.order, world.nproc, hosts)
        self._paces = Paces(world.generation, nodes, began_s, self.limits.slow_report_s)
        self._stragglers = Stragglers(self.limits.straggler_window_s)
        for name, done in world.done.items():
            for local_rank in done:
                pace = self._paces.of(name, local_rank)
                if pace is not None:
                    self._paces.enter(pace, Stage.DONE, began_s)
        return self._paces

    def _examined(self, stories: Sequence[RankStory]) -> Finding:
        """Whoever examines was given to us: a fault of his is noted, and ends no job."""
        try:
            return self._examine(stories)
        except Exception as error:  # noqa: BLE001
            self._note("insight_fault", what="examine", error=f"{type(error).__name__}: {error}")
            return cannot_tell(stories)

    def _look(self, now: float, *, store: bool) -> None:
        world = self._world()
        self._looks += 1
        asked = [self.members[n] for n in world.order if n in self.members and not world.finished(n)]
        self._round = Round(self._looks, now, {member.name for member in asked} - self._silent)
        for member in asked:
            self._tell(member, Look(world.generation, self._looks, store))

    def _close_round(self, now: float, asked: Round, watch: HangDetector) -> None:
        self._round = None
        late = asked.awaited & self.members.keys()
        if late:
            self._silent |= late
            self._note("look_unanswered", generation=self.generation, members=sorted(late))
        samples, reach = asked.samples, tuple(asked.reach)
        for order in watch.looked(now, asked_s=asked.asked_s, samples=samples, reach=reach):
            self._heed(now, order)

    def _heed(self, now: float, order: Order | None) -> None:
        world = self._world()
        match order:
            case LookNow(store):
                self._look(now, store=store)
            case ReportHang(finding, text, still_s, files):
                world.hang = finding
                self._tell_world(world, Notice(text))
                self._note(
                    "hang",
                    generation=world.generation,
                    kind=finding.kind.value,
                    code=finding.code,
                    text=finding.text,
                    culprits=list(finding.culprits),
                    groups=[{"ranks": list(place.ranks), "place": place.words} for place in finding.groups],
                    files=files,
                    still_s=round(still_s, 3),
                )
            case HangOver(_, still_s):
                world.hang = None
                self._tell_world(world, Notice(f"the job goes on after {still_s:.0f} s without a step"))
                self._note("hang_over", generation=world.generation, still_s=round(still_s, 3))
            case EndHung(finding, text, culprit):
                world.hang, self._hung = finding, text
                lived_s = now - (world.started_s or now)
                world.hung = _failure_of(culprit, finding, lived_s) if culprit is not None else None
            case None:
                pass

    def _tell_of_stragglers(self, news: list[Straggler]) -> None:
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


def _failure_of(story: RankStory, finding: Finding, lived_s: float) -> Failure:
    """The culprit of a hang, as one that is about to be killed for it."""
    newest = story.samples[-1] if story.samples else None
    return Failure(
        rank=story.rank,
        local_rank=story.local_rank,
        host=story.host,
        pid=newest.pid if newest is not None else 0,
        exit_code=-SIGKILL,
        message=finding.text.partition("\n")[0],
        lived_s=round(lived_s, 3),
    )
