"""What must be true of a run, whatever happened to it. PURE: plain data in, violations out.

It is not the system under test: it knows neither holdfast nor torchrun, only what the workers wrote about themselves and
what the rig did. The surviving history is the chain of snapshots that leads to the last one, and the steps between them.

| rule | what must hold |
|---|---|
| once | every sample of every epoch of the surviving history is there once; what the state counted says the same |
| order | step numbers of the surviving history grow by one; nobody goes back behind a snapshot that was there |
| chain | every snapshot grew from one that exists, and by the steps in between |
| alone | no step of a generation lies in the time of another; no worker of it lives on when another trains |
| late | no generation saves once a later one trains |
| drain | ranks that leave on purpose leave after the same step, and it is saved (unless the disk was full) |
| leak | nothing is left of a dead agent, of the run in /dev/shm or among the temporary files |
| stands | the job does not stand still, ends when it is told to, with all nodes together and with 0 |
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise

from soak.ledger import Event, Life, Record, Snapshot, Step

STOPPED_AGENT_GRACE_S = 2.0
"""Nobody can end a worker whose agent stands still; once that goes on, it has this long."""
SHOWN_MAX = 8
"""Samples named in one violation."""


@dataclass(frozen=True)
class Violation:
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass(frozen=True)
class Link:
    """From one snapshot of the surviving history to the next."""

    snapshot: Snapshot
    after_step: int
    """The step of the snapshot before."""


@dataclass
class Generation:
    id: str
    lives: list[Life]

    @property
    def first_began_s(self) -> float:
        return min(step.began_s for life in self.lives for step in life.steps.values())

    @property
    def first_ended_s(self) -> float | None:
        """When its first step was done; None: it trained nothing."""
        return min(self._ends(), default=None)

    @property
    def last_s(self) -> float:
        """The last time at which it demonstrably trained: a step was begun after another, or done."""
        begun = max(step.began_s for life in self.lives for step in life.steps.values())
        return max([begun, *self._ends()])

    def _ends(self) -> Iterator[float]:
        return (step.ended_s for life in self.lives for step in life.steps.values() if step.ended_s is not None)


def check(record: Record) -> list[Violation]:
    """All that is wrong with it; empty when nothing is."""
    links, violations = surviving(record)
    return [
        *violations,
        *_once(record, links),
        *_order(record),
        *_alone(record),
        *_late(record),
        *_drain(record),
        *_leaks(record.events),
        *_stands(record.events),
    ]


def generations(record: Record) -> list[Generation]:
    """Those that began at least one step, in the order of their first."""
    lives: dict[str, list[Life]] = defaultdict(list)
    for life in record.lives:
        if life.generation:
            lives[life.generation].append(life)
    found = [Generation(name, each) for name, each in lives.items() if any(life.steps for life in each)]
    return sorted(found, key=lambda generation: generation.first_began_s)


def surviving(record: Record) -> tuple[list[Link], list[Violation]]:
    """The chain of snapshots that leads to the last one, oldest first."""
    by_id = {snapshot.id: snapshot for snapshot in record.snapshots}
    violations = [
        Violation("chain", f"snapshot {each.id} of step {each.step} is an orphan: there is no snapshot {each.parent}")
        for each in record.snapshots
        if each.parent and each.parent not in by_id
    ]
    if not by_id:
        return [], [Violation("chain", "there is no snapshot at all")]
    links: list[Link] = []
    at: Snapshot | None = max(record.snapshots, key=lambda snapshot: (snapshot.step, snapshot.written_s))
    met: set[str] = set()
    while at is not None and at.id not in met:
        met.add(at.id)
        parent = by_id.get(at.parent)
        links.append(Link(at, parent.step if parent else 0))
        at = parent
    if at is not None:
        violations.append(Violation("chain", f"snapshot {at.id} is its own ancestor"))
    for link in links:
        if link.snapshot.step <= link.after_step:
            text = f"snapshot {link.snapshot.id} of step {link.snapshot.step} grew from one of step {link.after_step}"
            violations.append(Violation("order", text))
    return links[::-1], violations


def surviving_steps(record: Record, links: Iterable[Link]) -> Iterator[tuple[int, dict[int, Step], Snapshot]]:
    """Each step number of the surviving history, the ranks' parts in it, and the snapshot that it went into."""
    by_generation: dict[str, list[Life]] = defaultdict(list)
    for life in record.lives:
        by_generation[life.generation].append(life)
    for link in links:
        for number in range(link.after_step + 1, link.snapshot.step + 1):
            lives = by_generation[_trained_by(number, by_generation, link.snapshot.generation)]
            yield number, {life.rank: life.steps[number] for life in lives if number in life.steps}, link.snapshot


def _trained_by(number: int, lives: Mapping[str, list[Life]], generation: str) -> str:
    """The generation that did this step: this one, or one whose state it has taken over."""
    met = set()
    while (
        generation not in met and (found := lives.get(generation)) and found[0].after and number <= found[0].base_step
    ):
        met.add(generation)
        generation = found[0].after
    return generation


# --- the rules --------------------------------------------------------------------------------------------------------


def _once(record: Record, links: list[Link]) -> Iterator[Violation]:
    lives: dict[str, list[Life]] = defaultdict(list)
    for life in record.lives:
        lives[life.generation].append(life)
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for number, parts, snapshot in surviving_steps(record, links):
        generation = _trained_by(number, lives, snapshot.generation)
        world = lives[generation][0].world if lives[generation] else 0
        if not world or set(parts) != set(range(world)):
            text = f"step {number} of generation {generation} has the ranks {sorted(parts)} of {world}"
            yield Violation("once", text)
        ids = [each for step in parts.values() for each in step.ids]
        for step in parts.values():
            counts[step.epoch].update(step.ids)
            if step.seen is not None and step.seen != (len(ids), sum(ids)):
                yield Violation(
                    "once", f"step {number}: the ranks summed up {step.seen}, their ledgers {(len(ids), sum(ids))}"
                )
                break
    if not links:
        return
    last = links[-1].snapshot
    for epoch in range(last.epoch + bool(last.offset)):
        yield from _epoch(record.samples, last, epoch, counts[epoch])
    total = sum(sum(counter.values()) for counter in counts.values())
    numbers = sum(each * times for counter in counts.values() for each, times in counter.items())
    if last.tally != (total, numbers):
        yield Violation("once", f"the last state counted {last.tally}, the ledgers {(total, numbers)}")


def _epoch(samples: int, last: Snapshot, epoch: int, counts: Counter[int]) -> Iterator[Violation]:
    twice = sorted(each for each, times in counts.items() if times > 1)
    if twice:
        yield Violation("once", f"epoch {epoch}: {len(twice)} samples came more than once: {twice[:SHOWN_MAX]}")
    if epoch < last.epoch:
        lost = sorted(set(range(samples)) - set(counts))
        if lost:
            yield Violation("once", f"epoch {epoch}: {len(lost)} samples are lost: {lost[:SHOWN_MAX]}")
    elif len(counts) != last.offset:
        yield Violation("once", f"epoch {epoch}: {len(counts)} samples where the last snapshot counts {last.offset}")
    strange = sorted(set(counts) - set(range(samples)))
    if strange:
        yield Violation("once", f"epoch {epoch}: samples that do not exist: {strange[:SHOWN_MAX]}")


def _order(record: Record) -> Iterator[Violation]:
    for life in record.lives:
        numbers = list(life.steps)
        for before, after in pairwise([life.base_step, *numbers]):
            if after != before + 1:
                yield Violation("order", f"{life.host}, pid {life.pid}: step {after} came after step {before}")
    for generation in generations(record):
        first = next((life for life in generation.lives if life.rank == 0), None)
        if first is None:
            continue
        passed = [each for each in record.snapshots if each.step > first.base_step and each.written_s < first.looked_s]
        if passed:
            newest = max(passed, key=lambda snapshot: snapshot.step)
            text = f"generation {generation.id} went back to step {first.base_step}, behind snapshot {newest.id} of step {newest.step}"
            yield Violation("order", text)


def _alone(record: Record) -> Iterator[Violation]:
    found = generations(record)
    excuses = list(_stopped_agents(record.events))
    for earlier, later in combinations(found, 2):
        if earlier.last_s > later.first_began_s:
            both_s = earlier.last_s - later.first_began_s
            text = f"generation {earlier.id} trained for {both_s:.3f} s beside {later.id}"
            yield Violation("alone", text)
            continue
        trains_s = later.first_ended_s
        for life in earlier.lives:
            if trains_s is not None and life.alive_s > trains_s and not _excused(life, trains_s, excuses):
                text = (
                    f"{life.host}, pid {life.pid} of generation {earlier.id} lived for {life.alive_s - trains_s:.3f} s"
                )
                yield Violation("alone", f"{text} after the first step of {later.id}")


def _stopped_agents(events: list[Event]) -> Iterator[tuple[str, float, float]]:
    """Host, from when, until when."""
    for event in events:
        if _is_fault(event, "agent stopped"):
            yield f"node{event.fields['node']}", event.t, _over_s(event, events) + STOPPED_AGENT_GRACE_S


def _is_fault(event: Event, kind: str) -> bool:
    return event.name == "fault" and bool(event.fields["kind"] == kind)


def _over_s(fault: Event, events: list[Event]) -> float:
    """When the rig ended a fault: on a slow machine later than the schedule says."""
    ends = (each.t for each in events if each.name == "over" and each.fields["kind"] == fault.fields["kind"])
    return min((t for t in ends if t >= fault.t), default=fault.t + fault.fields["lasts_s"])


def _excused(life: Life, trains_s: float, excuses: list[tuple[str, float, float]]) -> bool:
    return any(host == life.host and since <= trains_s and life.alive_s <= until for host, since, until in excuses)


def _late(record: Record) -> Iterator[Violation]:
    begins = {generation.id: generation.first_began_s for generation in generations(record)}
    for snapshot in record.snapshots:
        own = begins.get(snapshot.generation)
        if own is None:
            yield Violation(
                "chain", f"snapshot {snapshot.id}: nobody has heard of its generation {snapshot.generation}"
            )
            continue
        later = [(began_s, name) for name, began_s in begins.items() if own < began_s < snapshot.written_s]
        if later:
            began_s, name = min(later)
            text = f"snapshot {snapshot.id} of generation {snapshot.generation} was written {snapshot.written_s - began_s:.3f} s after {name} trained"
            yield Violation("late", text)


def _drain(record: Record) -> Iterator[Violation]:
    saved = {(snapshot.generation, snapshot.step) for snapshot in record.snapshots}
    for generation in generations(record):
        last = {max(life.steps) for life in generation.lives if life.finished and life.steps}
        if len(last) > 1:
            yield Violation("drain", f"ranks of generation {generation.id} left after different steps: {sorted(last)}")
        unsaved = {step for life in generation.lives for step in life.unsaved}
        for step in last - unsaved:
            if (generation.id, step) not in saved:
                yield Violation("drain", f"generation {generation.id} left after step {step} and had not saved it")


def _leaks(events: list[Event]) -> Iterator[Violation]:
    for event in events:
        if event.name == "left behind":
            yield Violation("leak", f"node{event.fields['node']}, after its agent's end: {event.fields['processes']}")
        elif event.name == "leftovers":
            for what in ("processes", "shared_memory", "temporary"):
                if event.fields.get(what):
                    yield Violation("leak", f"node{event.fields['node']}, at the end, {what}: {event.fields[what]}")


def _stands(events: list[Event]) -> Iterator[Violation]:
    full = [(each.t, _over_s(each, events)) for each in events if _is_fault(each, "disk full")]
    started_s: dict[int, float] = {}
    for event in events:
        if event.name == "agent started":
            started_s[event.fields["node"]] = event.t
        elif event.name == "not in time":
            yield Violation("stands", f"not within {event.fields['limit_s']:g} s: {event.fields['what']}")
        elif event.name == "stands still":
            yield Violation("stands", f"no step for {event.fields['limit_s']:g} s")
        elif event.name == "agent ended" and not event.fields["told"] and event.fields["code"]:
            if any(since <= started_s.get(event.fields["node"], 0.0) <= until for since, until in full):
                continue  # whoever is started on a full disk may refuse; whoever is at work may not
            yield Violation(
                "stands", f"the agent of node{event.fields['node']} ended by itself with {event.fields['code']}"
            )
        elif event.name == "finished":
            bad = {node: code for node, code in event.fields["codes"].items() if code}
            if bad:
                yield Violation("stands", f"at the end agents had other codes than 0: {bad}")
    if not any(event.name == "end" for event in events):
        yield Violation("stands", "the run has no end")
