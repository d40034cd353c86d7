"""How much of the time was training that lasts, and how long each kind of fault stopped it. PURE."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from statistics import median

from soak import checker
from soak.ledger import Event, Record

EFFECT_S = 10.0
"""A fault's effect may begin this long after it is over (a lease, and the time to notice)."""
WAITED = 2.0
"""No step counts for more than so many times the median: what it took longer, it waited for a fault to pass."""
BETWEEN_S_MAX = 0.05
"""A longer time between two steps is a wait."""
BETWEEN, BEGIN_AND_END = "between two steps", "before the first step and after the last"


@dataclass
class Figures:
    wall_s: float = 0.0
    """From the start of the first agent to the end of the last."""
    effective_s: float = 0.0
    """In steps that are part of the surviving history, without what they waited in vain."""
    steps: int = 0
    """Of the surviving history."""
    steps_lost: int = 0
    """Trained, and not part of it."""
    generations: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    """Kind -> how many there were."""
    missed: dict[str, int] = field(default_factory=dict)
    """Kind -> how many found nothing to hit (a torchrun has no supervisor)."""
    pauses_s: dict[str, list[float]] = field(default_factory=dict)
    """Kind -> for each fault the longest time without a step that it caused: from the last before it to the next."""
    lost_s: dict[str, float] = field(default_factory=dict)
    """Kind -> the time that was not effective after such a fault; also BETWEEN and BEGIN_AND_END. All of it together is
    the difference between `wall_s` and `effective_s`."""
    gave_up: int = 0
    """Agents that ended by themselves before their time."""
    job_deaths: int = 0
    """Times that no agent was left, and the last had ended by itself."""
    standstills: int = 0
    """Times that somebody had to end the job on all nodes and start it again."""
    left_behind: int = 0
    """Processes that outlived their agent."""

    @property
    def share(self) -> float:
        return self.effective_s / self.wall_s if self.wall_s else 0.0


def figures(record: Record) -> Figures:
    begun = [event.t for event in record.events if event.name == "start"]
    ended = [event.t for event in record.events if event.name in {"finished", "end"}]
    links, _ = checker.surviving(record)
    firsts = [parts.get(0) for _, parts, _ in checker.surviving_steps(record, links)]
    spans = [(each.began_s, each.ended_s) for each in firsts if each is not None and each.ended_s is not None]
    lasted_s = [ended_s - began_s for began_s, ended_s in spans]
    longest_s = WAITED * median(lasted_s) if lasted_s else 0.0
    steps = len(firsts)
    trained = [step for life in record.lives if life.rank == 0 for step in life.steps.values() if step.ended_s]
    events = Counter(event.name for event in record.events)
    gave_up = [
        e for e in record.events if e.name == "agent ended" and not e.fields["told"] and not _late(e, record.events)
    ]
    return Figures(
        wall_s=min(ended) - min(begun) if begun and ended else 0.0,
        lost_s=lost(_hits(record.events), spans, longest_s, min(begun), min(ended)) if begun and ended else {},
        effective_s=sum(min(each, longest_s) for each in lasted_s),
        steps=steps,
        steps_lost=len(trained) - steps,
        generations=len(checker.generations(record)),
        faults=dict(Counter(event.fields["kind"] for event in _hits(record.events))),
        missed=dict(Counter(event.fields["kind"] for event in record.events if event.name == "missed")),
        pauses_s=pauses(_hits(record.events), sorted(step.ended_s for step in trained if step.ended_s)),
        gave_up=len(gave_up),
        job_deaths=sum(event.name == "no agent left" and not event.fields["told"] for event in record.events),
        standstills=events["stands still"],
        left_behind=sum(len(event.fields["processes"]) for event in record.events if event.name == "left behind"),
    )


def _late(event: Event, events: list[Event]) -> bool:
    """The agents end when the training has: that is no giving up."""
    return any(other.name == "reunion" and other.t < event.t for other in events)


def _hits(events: list[Event]) -> list[Event]:
    """The faults that found something."""
    missed = {event.fields["at_s"] for event in events if event.name == "missed"}
    return [event for event in events if event.name == "fault" and event.fields["at_s"] not in missed]


def pauses(faults: list[Event], trained_s: list[float]) -> dict[str, list[float]]:
    """A pause counts for a fault if it begins before the next fault, or goes on at the fault."""
    found: dict[str, list[float]] = defaultdict(list)
    gaps = list(pairwise(trained_s))
    for fault, following in zip_longest(faults, faults[1:]):
        over_s = fault.t + fault.fields["lasts_s"] + fault.fields["pause_s"] + EFFECT_S
        until_s = min(over_s, following.t) if following is not None else over_s
        own = [end - max(begin, fault.t) for begin, end in gaps if end > fault.t and begin < until_s]
        if own:
            found[fault.fields["kind"]].append(max(own))
    return dict(found)


def lost(
    faults: list[Event], steps: list[tuple[float, float]], longest_s: float, begin_s: float, end_s: float
) -> dict[str, float]:
    """The time in which no step was under way, or one for longer than `longest_s`: by the newest fault before it."""
    found: dict[str, float] = defaultdict(float)
    at_s = begin_s
    for began_s, ended_s in [*sorted(steps), (end_s, end_s)]:
        waited_s = max(0.0, ended_s - began_s - longest_s)
        before = [fault.fields["kind"] for fault in faults if fault.t < max(began_s, ended_s - longest_s)]
        kind = before[-1] if before else BETWEEN
        if at_s == begin_s or began_s == end_s:
            found[BEGIN_AND_END] += began_s - at_s
        else:
            found[kind if began_s - at_s > BETWEEN_S_MAX else BETWEEN] += began_s - at_s
        if waited_s:
            found[kind] += waited_s
        at_s = ended_s
    return dict(found)


def quantile(values: list[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
