"""A run as the journals of its nodes tell it: its generations and why each began (timeline), where its time went
(history), and what happened in the order of time (incidents).

Pure: parsed lines of events.jsonl in, rows and stretches of time out. Times of different nodes are compared by their
own clocks. Knows the events' names; reads no files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import pairwise
from typing import Any

from msgspec import Struct

from holdfast.diagnosis.screen import how_it_ended
from holdfast.protocol.errors import EXIT_REQUEUE, UsageError

Event = Mapping[str, Any]

PHASES = ("detect", "stop", "form", "spawn", "import", "store", "process_group", "first_step")
"""In their order; docs/report.md explains each."""

NOBODY_FAILED = "HF200"
"""A generation was ended on request: a signal, `holdfast stop`, a node that came or left."""


class Generation(Struct):
    """One numbered formation of the worker group, as far as these journals show."""

    number: int
    restart_count: int = 0
    world_size: int = 0
    """0: no journal of the coordinator's is here."""
    began_epoch_s: float = 0.0
    """When the first of these nodes had its workers ordered to start, or the coordinator had assigned them."""
    why: str = ""
    """Why the one before ended; empty for the first and where no journal of the coordinator's is here."""
    phases_s: dict[str, float] = {}
    """By name, of the slowest of these nodes; those that were not there are missing."""
    slowest_s: float = 0.0
    """All phases of the node that needed longest: one may be slow at one thing and another one at the next."""

    @property
    def total_s(self) -> float:
        return self.slowest_s + self.phases_s.get("detect", 0.0)


class Timeline(Struct):
    run_id: str
    nodes: list[str]
    generations: list[Generation]
    end: str
    """In one word, with the exit code; empty when these nodes have not ended."""
    preloaded: list[str]
    """What the fork servers reported."""
    standbys: int
    """Standby workers at the end, on all nodes together."""
    standby_own_bytes: int
    """Memory that was theirs alone."""


def timeline(journals: Iterable[Iterable[Event]]) -> Timeline:
    """From one journal per node. Raises UsageError when they are of different runs."""
    told = Timeline("", [], [], "", [], 0, 0)
    found: dict[int, Generation] = {}
    for journal in journals:
        _read(journal, told, found)
    told.generations = [found[number] for number in sorted(found)]
    return told


def _read(journal: Iterable[Event], told: Timeline, found: dict[int, Generation]) -> None:
    why, silent_s, detect_s = "", 0.0, 0.0
    standby: Event = {}
    for event in journal:
        try:
            match event["event"]:
                case "begins":
                    if told.run_id not in ("", event["run_id"]):
                        raise UsageError(f"these are different runs: {told.run_id} and {event['run_id']}")
                    told.run_id = event["run_id"]
                    told.nodes.append(event["member"].partition("#")[0])
                case "preload" if "text" in event:
                    told.preloaded.append(event["text"])
                case "standby":
                    standby = event
                case "coordinator.lost":
                    silent_s = event.get("silent_s", 0.0)
                case "coordinator.stopping" | "coordinator.draining":
                    why = event.get("text", "")
                    if event.get("reason") == "member_lost":
                        # What the survivors could not see: how long the lost node had been silent.
                        detect_s = silent_s
                case "coordinator.assigned":
                    generation = _generation(found, event["generation"])
                    generation.world_size, generation.why = event["world_size"], why
                    generation.began_epoch_s = event["time"]
                    if detect_s:
                        generation.phases_s["detect"] = max(generation.phases_s.get("detect", 0.0), detect_s)
                    why, detect_s = "", 0.0
                case "phases":
                    generation = _generation(found, event["generation"])
                    generation.restart_count = event["restart_count"]
                    own_s = sum(event.get(f"{phase}_s") or 0.0 for phase in PHASES if phase != "detect")
                    generation.slowest_s = max(generation.slowest_s, own_s)
                    for phase in PHASES:
                        seconds = event.get(f"{phase}_s")
                        if seconds is not None:
                            generation.phases_s[phase] = max(generation.phases_s.get(phase, 0.0), seconds)
                case "ended":
                    told.end = how_it_ended(event["kind"], event["exit_code"], event.get("text", ""))
        except KeyError:
            continue  # of a version that wrote less
    told.standbys += len(standby.get("pids", ()))
    told.standby_own_bytes += standby.get("own_bytes", 0)


def _generation(found: dict[int, Generation], number: int) -> Generation:
    return found.setdefault(number, Generation(number, phases_s={}))


class Activity(Enum):
    """What a stretch of time was spent on."""

    STARTUP = "start-up"
    """Until the first step of the run."""
    TRAINING = "training"
    LOST = "lost work"
    """Training whose steps were done again after a restart."""
    HUNG = "standing still"
    """Until a generation was ended, or ended itself, in which nothing moved any more."""
    DOWN = "down"
    """From the end of a generation to the first step of the next."""
    END = "end"
    """After the last generation: saving, and the end of the agents."""


class Stretch(Struct, frozen=True):
    doing: Activity
    from_s: float
    """Epoch seconds, as all times here."""
    to_s: float
    generation: int


class Life(Struct):
    """One generation."""

    number: int
    ordered_s: float
    """Its workers were ordered to start."""
    over_s: float
    """It ended: its first failure, or its last worker; of one that runs, the last word of it."""
    ready_s: float | None = None
    """The first step was done; where no generation has steps, all workers ran; None: it did not come so far."""
    stepped: bool = False
    alive: int = 0
    """Workers that have not ended yet."""
    hung_s: float | None = None
    """Since when it hangs; None: it does not, or that was not seen."""
    broken: bool = False
    """A worker failed, or was asked to end."""
    world_size: int = 0
    steps: int = 0
    """Made in this generation, of the rank that has most."""
    began_at: int = -1
    """The step of the whole job; -1: the script does not say. So is `ended_at`."""
    ended_at: int = -1
    again: int | None = None
    """Steps of it that a later generation did again; None: unknown."""

    @property
    def lost_s(self) -> float:
        again, made = self.again or 0, self.ended_at - self.began_at
        if not again or made <= 0 or self.ready_s is None:
            return 0.0
        return ((self.over_s if self.hung_s is None else self.hung_s) - self.ready_s) * min(1.0, again / made)


class Point(Struct, frozen=True):
    """How far a node's slowest rank was."""

    at_s: float
    steps: int
    """Of the whole job where the script says it, else of the generation."""
    generation: int


class NodeHistory(Struct):
    node: str
    began_s: float
    ended_s: float
    lives: list[Life]
    points: list[Point]
    ended: bool = False
    """Its journal has its end."""


class History(Struct):
    nodes: list[NodeHistory]
    lives: list[Life]
    """Of all nodes together."""
    stretches: list[Stretch]
    """Of the job, without gaps."""
    lost_steps: int | None
    """All restarts together; None: the script does not say how far it is."""

    @property
    def total_s(self) -> float:
        return self.stretches[-1].to_s - self.stretches[0].from_s if self.stretches else 0.0

    def spent_s(self, doing: Activity) -> float:
        return sum(each.to_s - each.from_s for each in self.stretches if each.doing is doing)

    @property
    def effective(self) -> float | None:
        """The part of the time in which training went on that was kept; None: no time has passed."""
        return self.spent_s(Activity.TRAINING) / self.total_s if self.total_s > 0 else None


def history(journals: Iterable[Iterable[Event]]) -> History | None:
    """From one journal per node. None where the journals lack the start of generations: an older version wrote them."""
    nodes = [_node(list(journal)) for journal in journals]
    if not any(node.lives for node in nodes):
        return None
    everywhere = [life for node in nodes for life in node.lives]
    if any(life.stepped for life in everywhere):  # else it trains from the moment on which all its workers run
        for life in everywhere:
            life.ready_s = life.ready_s if life.stepped else None
    lives = [
        _together([life for life in everywhere if life.number == number])
        for number in sorted({life.number for life in everywhere})
    ]
    began_s, ended_s = min(node.began_s for node in nodes), max(node.ended_s for node in nodes)
    told = [life for life in lives if life.began_at >= 0]
    for life, after in pairwise(told):
        life.again = max(0, life.ended_at - after.began_at)
    stretches = list(stretched(lives, began_s, ended_s))
    return History(nodes, lives, stretches, sum(life.again or 0 for life in told) if told else None)


def stretched(lives: list[Life], began_s: float, ended_s: float) -> Iterable[Stretch]:
    """The time from the first event to the last, cut into stretches without gaps."""
    at_s, waiting, number = began_s, Activity.STARTUP, 0
    for life in lives:
        number = life.number
        if life.ready_s is None:
            continue  # its time is part of the wait for one that comes to its first step
        ready_s = max(at_s, life.ready_s)
        over_s = max(ready_s, life.over_s)
        yield Stretch(waiting, at_s, ready_s, number)
        moved_s = over_s if life.hung_s is None else min(over_s, max(ready_s, life.hung_s))
        kept_s = max(ready_s, moved_s - life.lost_s)
        yield Stretch(Activity.TRAINING, ready_s, kept_s, number)
        if kept_s < moved_s:
            yield Stretch(Activity.LOST, kept_s, moved_s, number)
        if moved_s < over_s:
            yield Stretch(Activity.HUNG, moved_s, over_s, number)
        at_s, waiting = over_s, Activity.DOWN
    if ended_s > at_s:
        last = lives[-1]
        if waiting is Activity.DOWN and last.ready_s is not None:
            waiting = Activity.END
        yield Stretch(waiting, at_s, ended_s, number)


def _together(lives: list[Life]) -> Life:
    """One generation of several nodes: it trains when the last is ready, until the first fails or the last is done."""
    broken = [life.over_s for life in lives if life.broken]
    ready = [life.ready_s for life in lives if life.ready_s is not None]
    hung = [life.hung_s for life in lives if life.hung_s is not None]
    return Life(
        lives[0].number,
        ordered_s=min(life.ordered_s for life in lives),
        over_s=min(broken) if broken else max(life.over_s for life in lives),
        ready_s=max(ready) if ready else None,
        stepped=any(life.stepped for life in lives),
        alive=sum(life.alive for life in lives),
        hung_s=min(hung) if hung else None,
        broken=bool(broken),
        world_size=max(life.world_size for life in lives),
        steps=max(life.steps for life in lives),
        began_at=max(life.began_at for life in lives),
        ended_at=max(life.ended_at for life in lives),
    )


def _node(journal: list[Event]) -> NodeHistory:
    told = NodeHistory("", journal[0]["time"] if journal else 0.0, journal[-1]["time"] if journal else 0.0, [], [])
    found: dict[int, Life] = {}
    for event in journal:
        with contextlib.suppress(KeyError):  # of a version that wrote less
            _take(event, found, told)
    told.lives = [found[number] for number in sorted(found)]
    if told.lives and told.lives[-1].alive > 0 and not told.lives[-1].broken:
        told.lives[-1].over_s = told.ended_s  # it runs, or its agent was killed
    return told


def _take(event: Event, found: dict[int, Life], told: NodeHistory) -> None:
    life = found.get(event.get("generation", 0))
    match event["event"]:
        case "begins":
            told.node, told.began_s = event["member"].partition("#")[0], event["time"]
        case "ended":
            told.ended, told.ended_s = True, event["time"]
        case "generation":
            number = event["generation"]
            size = event["world_size"]
            found[number] = Life(number, event["time"], event["time"], alive=event["nproc"], world_size=size)
        case "phases" if life is not None and "until_monotonic" in event and "spawn_s" in event:
            life.ready_s = event["time"] - (event["monotonic"] - event["until_monotonic"])
            life.stepped = "first_step_s" in event
        case "progress" if life is not None:
            _progress(event, life, told)
        case "coordinator.hang" if life is not None and event["kind"] in ("hung", "stuck"):
            life.hung_s = event["time"] - event["still_s"]
        case "coordinator.hang_over" if life is not None:
            life.hung_s = None
        case "worker_ended" if life is not None:
            life.alive -= 1
            if not life.broken:
                life.over_s = event["time"]
            life.broken = life.broken or event["exit_code"] != 0 or event["stopped"]


def _progress(event: Event, life: Life, told: NodeHistory) -> None:
    steps, at = event["steps"], event["at"]
    if not steps:
        return
    life.steps = max(life.steps, *steps)
    life.began_at = max(life.began_at, *event["began_at"])
    life.ended_at = max(life.ended_at, *at)
    told.points.append(Point(event["time"], min(at) if min(at) >= 0 else min(steps), event["generation"]))


class Incident(Struct, frozen=True, kw_only=True):
    at_s: float
    """Epoch seconds."""
    what: str
    """One word or two."""
    text: str
    generation: int = 0
    """0: of none."""
    code: str = ""
    advice: str = ""
    groups: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Of a hang: ranks that are at one place, and the place in words."""
    files: tuple[tuple[str, str], ...] = ()
    """Of a hang: rank and where its stacks are."""


def incidents(journals: Iterable[Iterable[Event]]) -> list[Incident]:
    found = [each for journal in journals for each in map(_incident_or_none, _of_the_job(journal)) if each is not None]
    return sorted(found, key=lambda each: each.at_s)


def _of_the_job(journal: Iterable[Event]) -> Iterable[Event]:
    """Without the ends of agents when the job is over, and of a generation that ended at a safe point, as it should."""
    drained: set[int] = set()
    for event in journal:
        match event["event"]:
            case "coordinator.over":
                return
            case "coordinator.drain_to":
                drained.add(event.get("generation", 0))
            case "coordinator.verdict" if event.get("generation", 0) in drained:
                continue
        yield event


def _incident_or_none(event: Event) -> Incident | None:
    try:
        return _incident(event)
    except KeyError:
        return None  # of a version that wrote less


def _incident(event: Event) -> Incident | None:
    at_s, generation = event.get("time", 0.0), event.get("generation", 0)
    match event["event"]:
        case "coordinator.verdict" if event["code"] != NOBODY_FAILED:
            return Incident(
                at_s=at_s,
                what="failure",
                text=event["cause"],
                generation=generation,
                code=event["code"],
                advice=event.get("advice", ""),
            )
        case "coordinator.quit":
            return Incident(at_s=at_s, what="stop", text=f"asked for by {event['by']}")
        case "worker_failed" if event["exit_code"] == EXIT_REQUEUE:
            text = f"rank {event['rank']} asked to be requeued (exit code {EXIT_REQUEUE})"
            return Incident(at_s=at_s, what="stop", text=text, generation=generation)
        case "worker_failed" if not event["after_stop"]:
            what, rank = f"exit code {event['exit_code']}", event["rank"]
            text = f"rank {rank}: {event['message'] or what}"
            return Incident(at_s=at_s, what="worker", text=text, generation=generation)
        case "coordinator.lost":
            return Incident(at_s=at_s, what="node lost", text=f"{_host(event)}: {event['reason']}")
        case "coordinator.leaving":
            return Incident(at_s=at_s, what="node leaves", text=f"{_host(event)}: {event['reason']}")
        case "coordinator.excluded":
            return Incident(at_s=at_s, what="excluded", text=f"{event['host']} for {event['for_s']:g} s")
        case "coordinator.hang":
            return _hang(event, at_s, generation)
        case "coordinator.hang_over":
            text = f"steps again, after {event['still_s']:.0f} s"
            return Incident(at_s=at_s, what="hang over", text=text, generation=generation)
        case "coordinator.straggler" | "coordinator.straggler_over":
            return _straggler(event, at_s, generation)
        case "agent.fenced" | "agent.fenced_by_keeper":
            return Incident(at_s=at_s, what="fenced", text="cut off too long: it stopped its own workers")
        case "keeper_died":
            return Incident(at_s=at_s, what="supervisor", text="the supervisor was killed, and the workers with it")
        case "store_lost":
            return Incident(at_s=at_s, what="store lost", text=event["why"], generation=generation)
        case "unkillable":
            text = f"SIGKILL does not end {', '.join(map(str, event['pids']))}"
            return Incident(at_s=at_s, what="unkillable", text=text)
    return None


def _host(event: Event) -> str:
    return str(event["member"]).partition("#")[0]


def _hang(event: Event, at_s: float, generation: int) -> Incident:
    return Incident(
        at_s=at_s,
        what="hang",
        text=event["text"],
        generation=generation,
        code=event["code"],
        groups=tuple((tuple(group["ranks"]), group["place"]) for group in event["groups"]),
        files=tuple((str(rank), str(path)) for rank, path in event["files"].items()),
    )


def _straggler(event: Event, at_s: float, generation: int) -> Incident:
    over = event["event"].endswith("_over")
    who = f"{event['host']}, rank{'s' if len(event['ranks']) > 1 else ''} {', '.join(map(str, event['ranks']))}"
    numbers = f"{event['own_s'] * 1000:.1f} ms of its own per step, its peers {event['peers_s'] * 1000:.1f} ms"
    return Incident(
        at_s=at_s,
        what="straggler over" if over else "straggler",
        text=f"{who}: {numbers}",
        generation=generation,
        code=event["code"],
    )
