"""Detects hangs of one generation. Pure: it decides when stacks are sampled, and what follows from the finding.

    QUIET ──► EXAMINING ──► (between examinations) ──► EXAMINING …      any progress: QUIET

An examination starts when
- a rank has made three steps, and then no rank made one for max(hang_report_s, hang_steps × the median step);
- a rank waits for the process group, and no rank has reached a new stage of start-up for hang_report_s;
- the process group is ready, and no rank has made one of the first three steps for hang_report_s.

An examination takes LOOKS samples of all workers. The `examine` function makes a Finding of them:

| finding          | what follows                                                                               |
|------------------|--------------------------------------------------------------------------------------------|
| MOVING           | another examination later                                                                  |
| PAUSED           | the same; reported only after hang_timeout_s without any movement                          |
| PAUSED, one rank | all other ranks have ended: as HUNG                                                        |
| HUNG, STUCK      | reported once, then sampled again; slow: reported after slow_report_s; busy: as PAUSED     |
| all but MOVING   | the generation is ended after hang_timeout_s without any movement since the same was found |
| ... and lively   | the same after LATE times hang_timeout_s                                                   |

The generation is not ended while a missing rank computes, nor for a pause before the first step unless another rank has
ended: up to then nothing shows that the script trains at all.

Whatever is found, the time without a step is reported after pause_report_s, and again when it has doubled: work that no
step follows may be noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec import Struct, structs

from holdfast.protocol.policy import Limits
from holdfast.protocol.rank_progress import Examine, Finding, HangKind, RankSample, RankStory, Stage, when_over
from holdfast.protocol.throughput import GROUPING, RankThroughput, Throughput
from holdfast.text import listed

LATE = 6
"""Factor of the time-out where the awaited rank may go on by itself. With the default of 300 s these
are the 30 minutes after which torch's collectives give up."""
LOOKS = 3
"""Samples of one examination, look_gap_s apart."""
LOOKS_MAX = 6
"""Limit of these if some ranks answered only one: a single sample does not show whether a rank moves."""
NO_GROUP = "HF245"
"""The process group is not formed."""
STEPS_MIN = 3
"""A step may take at least this many times the median before an examination starts."""
REACH_SHOWN_MAX = 3
RANKS_NAMED_MAX = 4


class LookNow(Struct, frozen=True):
    """Sample all workers; ends in HangDetector.looked. `store`: the nodes also try to reach the generation's store."""

    store: bool


class ReportHang(Struct, frozen=True):
    """Report the hang to all nodes, once."""

    finding: Finding
    text: str
    still_s: float
    """Time without a step of any rank."""
    files: dict[int, str]
    """The file with the stacks of each rank, on its own node."""


class HangOver(Struct, frozen=True):
    """The hang that was reported is over."""

    finding: Finding
    still_s: float


class EndHung(Struct, frozen=True):
    """End the generation."""

    finding: Finding
    text: str
    culprit: RankStory | None


class ReportStill(Struct, frozen=True):
    """Report for how long no rank has made a step, although ranks work."""

    text: str
    still_s: float


Order = LookNow | ReportHang | HangOver | EndHung | ReportStill


@dataclass(slots=True, eq=False, repr=False)
class _Suspicion:
    store: bool
    """Ranks wait for the process group, and not for a step."""
    warm_up: bool
    """No rank has made a step that counts."""
    since_s: float
    next_look_s: float
    looking: bool = False
    looks: int = 0
    """Samples of the current examination."""
    began_s: float = 0.0
    """The time at which its first sample was asked for."""
    samples: dict[int, deque[RankSample]] = field(default_factory=dict)
    reach: tuple[str, ...] = ()
    signature: str = ""
    same_since_s: float = 0.0
    """No rank has moved since, as far as the samples show."""
    lively_s: float = -inf
    """The time at which something last showed that the awaited rank may go on by itself."""
    reported: Finding | None = None
    still_reported_s: float = 0.0
    """The time without a step that was reported last."""

    @property
    def seen_once(self) -> bool:
        return any(len(samples) == 1 for samples in self.samples.values())


class HangDetector:
    """Hang detector for one generation."""

    def __init__(self, limits: Limits, throughput: Throughput, examine: Examine) -> None:
        self._limits = limits
        self._throughput = throughput
        self._examine = examine
        self._suspicion: _Suspicion | None = None
        self._patience_s = limits.hang_report_s
        """Time without a step after which an examination starts. Computed again after each step."""

    def standing(self, now: float) -> Finding | None:
        """The hang that was reported and is not over, with its present age and the places of the newest sample."""
        suspicion = self._suspicion
        if suspicion is None or suspicion.reported is None:
            return None
        finding = self._find(now, suspicion, self._stories(now, suspicion))
        return suspicion.reported if finding.kind is HangKind.MOVING else finding

    def due_s(self) -> float:
        """The time at which `advance` must run next."""
        suspicion = self._suspicion
        if suspicion is not None:
            return inf if suspicion.looking else suspicion.next_look_s
        since_s = self._still_since_s()
        if since_s is None:
            return inf
        return since_s + self._patience_s

    def advance(self, now: float) -> LookNow | None:
        if now < self.due_s():
            return None
        suspicion = self._suspicion or self._suspect(now)
        if suspicion is None:
            return None
        if suspicion.looks == 0:
            suspicion.began_s = now
        suspicion.looking = True
        return LookNow(suspicion.store)

    def moved(self, now: float) -> HangOver | None:
        """A rank made a step or reached a new stage."""
        suspicion, self._suspicion = self._suspicion, None
        self._patience_s = self._limits.hang_report_s
        if suspicion is None or suspicion.reported is None:
            return None
        return HangOver(suspicion.reported, now - suspicion.since_s)

    def looked(
        self, now: float, *, asked_s: float, samples: Mapping[int, RankSample], reach: tuple[str, ...]
    ) -> list[Order]:
        """Take the samples of one round, by rank. Ranks that did not answer in time are missing."""
        suspicion = self._suspicion
        if suspicion is None or not suspicion.looking:
            return []
        suspicion.looking = False
        suspicion.looks += 1
        suspicion.reach = reach
        for rank, sample in samples.items():
            suspicion.samples.setdefault(rank, deque(maxlen=LOOKS)).append(sample)
        if suspicion.looks < LOOKS or (suspicion.looks < LOOKS_MAX and suspicion.seen_once):
            suspicion.next_look_s = max(now, asked_s + self._limits.look_gap_s)
            return []
        return self._conclude(now, suspicion)

    # ---------------------------------------------------------------- suspicion

    def _still_since_s(self) -> float | None:
        throughput = self._throughput
        if throughput.newest_s is not None:
            return throughput.newest_s
        if throughput.warms_up:
            return max(throughput.stage_newest_s, throughput.warm_up_newest_s)
        return throughput.stage_newest_s if throughput.grouping else None

    def _suspect(self, now: float) -> _Suspicion | None:
        since_s = self._still_since_s()
        assert since_s is not None
        limits, throughput = self._limits, self._throughput
        if throughput.newest_s is None:
            self._suspicion = _Suspicion(not throughput.warms_up, throughput.warms_up, since_s, next_look_s=now)
            return self._suspicion
        step_s = throughput.step_s()
        steps_s = min(limits.hang_steps * step_s, max(limits.hang_report_max_s, STEPS_MIN * step_s))
        self._patience_s = max(limits.hang_report_s, steps_s)
        if now < since_s + self._patience_s:
            return None
        self._suspicion = _Suspicion(False, False, since_s, next_look_s=now)
        return self._suspicion

    # ---------------------------------------------------------------- what was found

    def _conclude(self, now: float, suspicion: _Suspicion) -> list[Order]:
        stories = self._stories(now, suspicion)
        finding = self._find(now, suspicion, stories)
        if finding.kind is HangKind.MOVING or not any(story.samples for story in stories):
            return self._goes_on(now, suspicion, finding)
        if finding.signature != suspicion.signature:
            suspicion.signature, suspicion.same_since_s = finding.signature, suspicion.began_s
        same_s = now - suspicion.same_since_s
        orders: list[Order] = []
        endable = not finding.busy and not (finding.kind is HangKind.PAUSED and self._may_serve(suspicion))
        if finding.lively:
            suspicion.lively_s = now
        timeout_s = self._limits.hang_timeout_s
        due_s = self._due_s(finding, suspicion)
        if suspicion.reported is None and same_s >= self._silence_s(finding):
            suspicion.reported = finding
            orders.append(self._report(finding, stories, now - suspicion.since_s, due_s - now, endable=endable))
        if timeout_s and now >= due_s and endable:
            first = next((story for story in stories if story.rank in finding.culprits), None)
            finding = structs.replace(finding, text=when_over(finding.text))
            limit = f"--hang-timeout {timeout_s:g}" + (f", {LATE} times" if finding.lively else "")
            text = f"nothing has moved for {same_s:.0f} s ({limit}): {_first_line(finding.text)}"
            suspicion.next_look_s = inf
            return [*orders, EndHung(finding, text, first)]
        self._look_again(now, suspicion, finding)
        return orders

    def _due_s(self, finding: Finding, suspicion: _Suspicion) -> float:
        """The time at which the generation is ended. Signs of life come and go: the time-out counts from the newest
        one, up to LATE times as long."""
        latest_s = suspicion.same_since_s + LATE * self._limits.hang_timeout_s
        since_s = max(suspicion.same_since_s, suspicion.lively_s)
        return latest_s if finding.lively else min(latest_s, since_s + self._limits.hang_timeout_s)

    def _may_serve(self, suspicion: _Suspicion) -> bool:
        """Whether the script may be a server that waits for requests: no rank has made a step or ended."""
        throughput = self._throughput
        return suspicion.warm_up and not throughput.stepped and not throughput.in_stage[Stage.DONE]

    def _find(self, now: float, suspicion: _Suspicion, stories: Sequence[RankStory]) -> Finding:
        finding = self._examine(stories)
        if suspicion.store and self._throughput.grouping:  # a rank in it may have ended meanwhile
            return self._about_the_group(finding, now - suspicion.since_s, suspicion.reach)
        if self._throughput.in_stage[Stage.DONE]:
            return _about_the_last(finding)
        return finding

    def _goes_on(self, now: float, suspicion: _Suspicion, finding: Finding) -> list[Order]:
        """A rank makes progress. While no steps are counted, only this shows the end of a hang that was reported."""
        orders: list[Order] = []
        still_s = now - suspicion.since_s
        if suspicion.warm_up and suspicion.reported is not None:
            orders.append(HangOver(suspicion.reported, still_s))
            suspicion.reported = None
        elif finding.kind is HangKind.MOVING and finding.text and still_s >= self._still_report_s(suspicion):
            suspicion.still_reported_s = still_s
            orders.append(ReportStill(f"no step for {still_s:.0f} s: {_first_line(finding.text)}", still_s))
        suspicion.signature = ""
        self._look_again(now, suspicion, None)
        return orders

    def _still_report_s(self, suspicion: _Suspicion) -> float:
        """The time without a step that is reported next. A script that has made no steps may make none at all."""
        early = suspicion.warm_up or suspicion.store
        return inf if early else max(self._limits.pause_report_s, 2 * suspicion.still_reported_s)

    def _silence_s(self, finding: Finding) -> float:
        """Time for which all ranks must stay in place before the finding is reported (s)."""
        limits = self._limits
        at_the_end_s = limits.hang_timeout_s or limits.pause_report_s
        if finding.kind is HangKind.PAUSED or finding.busy:
            return at_the_end_s
        if not finding.slow:
            return 0.0
        # hang_report_s have passed already when the examination starts.
        return min(max(0.0, limits.slow_report_s - limits.hang_report_s), at_the_end_s)

    def _look_again(self, now: float, suspicion: _Suspicion, finding: Finding | None) -> None:
        """Schedule one more sample of a reported hang, else a whole examination. `finding` None: a rank works."""
        limits = self._limits
        if suspicion.reported is not None:
            suspicion.looks, suspicion.next_look_s = LOOKS - 1, now + limits.look_again_s
            suspicion.began_s = suspicion.next_look_s
            silence_s = limits.hang_timeout_s or limits.pause_report_s
        else:
            pause_s = (
                limits.slow_report_s if suspicion.warm_up and not self._throughput.stepped else limits.look_moving_s
            )
            suspicion.looks, suspicion.next_look_s = 0, now + pause_s
            suspicion.samples.clear()
            silence_s = self._silence_s(finding) if finding is not None else inf
        decisive_s = suspicion.same_since_s + silence_s
        if suspicion.reported is not None and limits.hang_timeout_s and finding is not None:
            decisive_s = self._due_s(finding, suspicion)
        if suspicion.signature and now < decisive_s < suspicion.next_look_s:
            suspicion.next_look_s = decisive_s

    def _stories(self, now: float, suspicion: _Suspicion) -> list[RankStory]:
        return [
            RankStory(
                rank=pace.rank,
                host=pace.host,
                local_rank=pace.local_rank,
                age_s=now - (pace.stage_since_s if suspicion.store else max(pace.newest_s, pace.stage_since_s)),
                samples=tuple(samples) if len(samples := suspicion.samples.get(pace.rank, ())) > 1 else (),
            )
            for pace in self._throughput.alive()
        ]

    def _about_the_group(self, finding: Finding, still_s: float, reach: tuple[str, ...]) -> Finding:
        """The finding in words about the process group: which ranks are missing, which node cannot reach the store."""
        alive = self._throughput.alive()
        missing = [pace for pace in alive if pace.stage is Stage.STARTING]
        waiting = [pace.rank for pace in alive if pace.stage in GROUPING]
        if finding.kind is HangKind.MOVING and not reach:
            return finding
        lines = [_first_line(finding.text)]
        if finding.kind is not HangKind.HUNG:
            absent = f"; {_named(missing)} not come" if missing else ""
            lines = [f"{_ranks(waiting)} in init_process_group for {still_s:.0f} s{absent}"]
        if reach:
            lines.append(f"{'; '.join(reach[:REACH_SHOWN_MAX])} (firewall? wrong address?)")
        named = finding.kind is HangKind.HUNG or bool(missing)
        return structs.replace(
            finding,
            kind=HangKind.HUNG if named else HangKind.STUCK,
            code=finding.code if finding.kind is HangKind.HUNG and finding.code and not reach else NO_GROUP,
            text="\n".join(lines),
            culprits=finding.culprits or tuple(pace.rank for pace in missing),
            slow=not reach and (finding.slow or finding.kind is HangKind.PAUSED),
        )

    def _report(
        self, finding: Finding, stories: Sequence[RankStory], still_s: float, left_s: float, *, endable: bool
    ) -> ReportHang:
        by_rank = {story.rank: story for story in stories}
        shown = [*finding.culprits, *(place.ranks[0] for place in finding.groups if place.ranks)]
        files = {
            rank: by_rank[rank].samples[-1].file
            for rank in dict.fromkeys(shown)
            if rank in by_rank and by_rank[rank].samples and by_rank[rank].samples[-1].file
        }
        lines = finding.text.splitlines()[:2]
        if finding.collectives:
            lines.append(finding.collectives)
        if files:
            rank, file = next(iter(files.items()))
            lines.append(f"stacks of rank {rank}, on {by_rank[rank].host}: {file}")
        if not self._limits.hang_timeout_s:
            lines.append("it is left alone (--hang-timeout 0)")
        elif not endable:
            lines.append(
                "it is left alone while it is at work" if finding.busy else "it is left alone before its first step"
            )
        elif left_s > 0:
            lines.append(f"if nothing moves for another {left_s:.0f} s its workers are ended (--hang-timeout)")
        return ReportHang(finding, "\n".join(lines), still_s, files)


def _about_the_last(finding: Finding) -> Finding:
    """The finding for a rank that stays in place after all others have ended: only the job waits for it."""
    if finding.kind is not HangKind.PAUSED or not finding.culprits:
        return finding
    text = f"{finding.text}; all other ranks have ended"
    return structs.replace(finding, kind=HangKind.HUNG, text=text)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    if len(ranks) > RANKS_NAMED_MAX:
        return f"{len(ranks)} ranks wait"
    return f"ranks {', '.join(map(str, ranks))} wait"


def _named(missing: Sequence[RankThroughput]) -> str:
    words = listed([f"rank {pace.rank} on {pace.host}" for pace in missing], RANKS_NAMED_MAX)
    return f"{words} {'has' if len(missing) == 1 else 'have'}"
