"""Where a run's time went, from the journals of its nodes: starting, training, work that a restart lost, being down.

Pure: parsed lines of events.jsonl in, stretches of time out. Times of different nodes are compared by their own clocks.
Knows the events' names; reads no files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import pairwise
from typing import Any

from msgspec import Struct

Event = Mapping[str, Any]


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
    """After the last generation: saving, going home."""


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
    """Since when it stands still; None: it does not, or nobody has seen it."""
    broken: bool = False
    """A worker failed, or was told to end."""
    world_size: int = 0
    steps: int = 0
    """Made in this generation, of the rank that has most."""
    began_at: int = -1
    """The step of the whole job; -1: the script does not say. So is `ended_at`."""
    ended_at: int = -1
    again: int | None = None
    """Steps of it that a later generation did once more; None: nobody knows."""

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
    """It told its end."""


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
    """From one journal per node. None where nothing tells when generations began: journals of an older version."""
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
        with contextlib.suppress(KeyError):  # of a version that did not tell so much
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
