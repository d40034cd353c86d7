"""Reconstructs a run from the journals of its nodes: its generations and why each began (timeline), how its time was
spent (history), and what happened in order of time: failures, lost nodes, hangs, slow ranks (incidents).

Pure: parsed lines of events.jsonl in, rows and time intervals out. Times of different nodes are compared by the nodes'
own clocks. Knows the names of events; reads no files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import Any

from msgspec import Struct

from holdfast.diagnosis.screen import how_it_ended
from holdfast.protocol.errors import EXIT_REQUEUE, UsageError

Event = Mapping[str, Any]

PHASES = ("detect", "stop", "form", "spawn", "import", "store", "process_group", "first_step")
"""Phases in their order; docs/report.md explains each."""


class Generation(Struct):
    """One generation, as far as these journals show it."""

    number: int
    restart_count: int = 0
    world_size: int = 0
    """0: the coordinator's journal is missing."""
    began_epoch_s: float = 0.0
    """When the first of these nodes ordered the start of its workers, or when the coordinator assigned them."""
    why: str = ""
    """Why the previous generation ended; empty for the first one, and if the coordinator's journal is missing."""
    phases_s: dict[str, float] = {}
    """Duration by phase, on the slowest of these nodes; phases that did not occur are missing."""
    slowest_s: float = 0.0
    """All phases together on the node with the largest sum. Not the sum of phases_s: each may be of another node."""

    @property
    def total_s(self) -> float:
        return self.slowest_s + self.phases_s.get("detect", 0.0)


class Timeline(Struct):
    run_id: str
    nodes: list[str]
    generations: list[Generation]
    end: str
    """The end in one word, with the exit code; empty: these nodes have not ended."""
    preloaded: list[str]
    """Reports of the fork servers."""
    standbys: int
    """Number of standby workers at the end, on all nodes together."""
    standby_own_bytes: int
    """Private memory of these workers."""


def timeline(journals: Iterable[Iterable[Event]]) -> Timeline:
    """The timeline, from one journal per node. Raises UsageError if they belong to different runs."""
    result = Timeline("", [], [], "", [], 0, 0)
    found: dict[int, Generation] = {}
    for journal in journals:
        _read(journal, result, found)
    result.generations = [found[number] for number in sorted(found)]
    return result


def _read(journal: Iterable[Event], result: Timeline, found: dict[int, Generation]) -> None:
    why, silent_s, detect_s = "", 0.0, 0.0
    standby: Event = {}
    for event in journal:
        try:
            match event["event"]:
                case "begins":
                    if result.run_id not in ("", event["run_id"]):
                        raise UsageError(f"these are different runs: {result.run_id} and {event['run_id']}")
                    result.run_id = event["run_id"]
                    result.nodes.append(_host(event))
                case "preload" if "text" in event:
                    result.preloaded.append(event["text"])
                case "standby":
                    standby = event
                case "coordinator.lost":
                    silent_s = event.get("silent_s", 0.0)
                case "coordinator.stopping" | "coordinator.draining":
                    why = event.get("text", "")
                    if event.get("reason") == "member_lost":
                        # The journals of the other nodes do not show how long the lost node had been silent.
                        detect_s = silent_s
                case "coordinator.regroup_begun":
                    generation = _generation(found, event["generation"])
                    generation.world_size, generation.why = event["world_size"], event["text"].partition("; ")[0]
                    generation.began_epoch_s = event["time"]
                    if silent_s:
                        generation.phases_s["detect"] = silent_s
                    silent_s = 0.0
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
                    result.end = how_it_ended(event["kind"], event["exit_code"], event.get("text", ""))
        except KeyError:
            continue  # of a version that wrote less
    result.standbys += len(standby.get("pids", ()))
    result.standby_own_bytes += standby.get("own_bytes", 0)


def _generation(found: dict[int, Generation], number: int) -> Generation:
    return found.setdefault(number, Generation(number, phases_s={}))


class Activity(Enum):
    """How an interval of time was spent."""

    STARTUP = "start-up"
    """Up to the first step of the run."""
    TRAINING = "training"
    LOST = "lost work"
    """Training steps that were repeated after a restart."""
    HUNG = "hanging"
    """From the start of a hang to the end of its generation."""
    DOWN = "down"
    """From the end of a generation to the first step of the next."""
    END = "end"
    """After the last generation: saving and the end of the agents."""


class Stretch(Struct, frozen=True):
    doing: Activity
    from_s: float
    """Epoch seconds, as all times here."""
    to_s: float
    generation: int


class Life(Struct):
    """The course of one generation."""

    number: int
    ordered_s: float
    """When its workers were ordered to start."""
    over_s: float
    """When it ended: its first failure, or the end of its last worker; while it runs, its newest event."""
    ready_s: float | None = None
    """When the first step was done or, if no generation has steps, all workers ran; None: it did not get that far."""
    stepped: bool = False
    alive: int = 0
    """Number of workers that have not ended yet."""
    hung_s: float | None = None
    """Start of its hang; None: it does not hang, or no hang was found."""
    broken: bool = False
    """Whether a worker failed or was asked to end."""
    world_size: int = 0
    began_at: int = -1
    """Step of the whole job at its start; -1: the script does not report steps. `ended_at` is the same for its end."""
    ended_at: int = -1
    survived: bool = False
    """Whether its workers have gone on from the generation before, all but replacements."""
    steps_again: int = 0
    """Steps that a worker which went on did again."""
    again: int | None = None
    """Steps of it that a later generation repeated; None: unknown."""

    @property
    def lost_s(self) -> float:
        again, made = self.again or 0, self.ended_at - self.began_at
        if not again or made <= 0 or self.ready_s is None:
            return 0.0
        return ((self.over_s if self.hung_s is None else self.hung_s) - self.ready_s) * min(1.0, again / made)


class Point(Struct, frozen=True):
    """Progress of a node's slowest rank at one time."""

    at_s: float
    steps: int
    """Steps of the whole job if the script reports them, else of the generation."""


class NodeHistory(Struct):
    node: str
    began_s: float
    ended_s: float
    lives: list[Life]
    points: list[Point]


class Survival(Struct, frozen=True):
    """A loss after which the other workers went on in their processes."""

    generation: int
    """The one that the others formed."""
    ranks: int
    """How many went on."""
    went_on_s: float
    """From the loss until all of them had done a step."""
    steps_lost: int
    replaced_s: float | None
    """From the loss until as many ranks as before had done a step; None: they have not."""


class History(Struct):
    nodes: list[NodeHistory]
    lives: list[Life]
    """Generations of all nodes together."""
    stretches: list[Stretch]
    """Intervals of the job, without gaps."""
    lost_steps: int | None
    """Steps lost in all restarts together; None: the script does not report steps."""
    survivals: list[Survival] = []

    @property
    def total_s(self) -> float:
        return self.stretches[-1].to_s - self.stretches[0].from_s if self.stretches else 0.0

    def spent_s(self, doing: Activity) -> float:
        return sum(each.to_s - each.from_s for each in self.stretches if each.doing is doing)

    @property
    def effective(self) -> float | None:
        """Share of the time that went into training steps that were kept; None: no time has passed."""
        return self.spent_s(Activity.TRAINING) / self.total_s if self.total_s > 0 else None


def history(journals: Iterable[Iterable[Event]]) -> History | None:
    """The history, from one journal per node. None: no generation was started."""
    nodes = [_node(list(journal)) for journal in journals]
    if not any(node.lives for node in nodes):
        return None
    everywhere = [life for node in nodes for life in node.lives]
    if any(life.stepped for life in everywhere):  # else it trains from the moment at which all its workers run
        for life in everywhere:
            life.ready_s = life.ready_s if life.stepped else None
    lives = [
        _together([life for life in everywhere if life.number == number])
        for number in sorted({life.number for life in everywhere})
    ]
    began_s, ended_s = min(node.began_s for node in nodes), max(node.ended_s for node in nodes)
    counted = [life for life in lives if life.began_at >= 0]
    for life, after in pairwise(counted):
        life.again = max(0, life.ended_at - after.began_at)
    stretches = list(stretched(lives, began_s, ended_s))
    lost_steps = sum(life.again or 0 for life in counted) if counted else None
    return History(nodes, lives, stretches, lost_steps, list(survivals(lives)))


def survivals(lives: list[Life]) -> Iterable[Survival]:
    """The losses after which others went on: each generation that is smaller than the one before, or that waited."""
    for number, (before, life) in enumerate(pairwise(lives), start=1):
        if not (life.survived and before.broken and life.ready_s is not None):
            continue
        later = [each.ready_s for each in lives[number:] if each.world_size >= before.world_size]
        back_s = later[0] - before.over_s if later and later[0] is not None else None
        yield Survival(life.number, life.world_size, life.ready_s - before.over_s, life.steps_again, back_s)


def stretched(lives: list[Life], began_s: float, ended_s: float) -> Iterable[Stretch]:
    """The time from the first event to the last, cut into intervals without gaps."""
    at_s, waiting, number = began_s, Activity.STARTUP, 0
    for life in lives:
        number = life.number
        if life.ready_s is None:
            continue  # its time is part of the wait for a generation that makes its first step
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
    """One generation on several nodes: it trains from when the last is ready until the first fails or the last ends."""
    broken = [life.over_s for life in lives if life.broken]
    ready = [life.ready_s for life in lives if life.ready_s is not None]
    hung = [life.hung_s for life in lives if life.hung_s is not None]
    return Life(
        lives[0].number,
        ordered_s=min(life.ordered_s for life in lives),
        over_s=min(broken) if broken else max(life.over_s for life in lives),
        survived=any(life.survived for life in lives),
        steps_again=max(life.steps_again for life in lives),
        ready_s=max(ready) if ready else None,
        stepped=any(life.stepped for life in lives),
        alive=sum(life.alive for life in lives),
        hung_s=min(hung) if hung else None,
        broken=bool(broken),
        world_size=max(life.world_size for life in lives),
        began_at=max(life.began_at for life in lives),
        ended_at=max(life.ended_at for life in lives),
    )


def _node(journal: list[Event]) -> NodeHistory:
    result = NodeHistory("", journal[0]["time"] if journal else 0.0, journal[-1]["time"] if journal else 0.0, [], [])
    found: dict[int, Life] = {}
    for event in journal:
        with contextlib.suppress(KeyError):  # of a version that wrote less
            _take(event, found, result)
    result.lives = [found[number] for number in sorted(found)]
    if result.lives and result.lives[-1].alive > 0 and not result.lives[-1].broken:
        result.lives[-1].over_s = result.ended_s  # it runs, or its agent was killed
    return result


def _take(event: Event, found: dict[int, Life], result: NodeHistory) -> None:
    life = found.get(event.get("generation", 0))
    match event["event"]:
        case "begins":
            result.node, result.began_s = _host(event), event["time"]
        case "ended":
            result.ended_s = event["time"]
        case "generation":
            number = event["generation"]
            found[number] = Life(
                number,
                event["time"],
                event["time"],
                alive=event["nproc"],
                world_size=event["world_size"],
                survived="local_ranks" in event,
            )
        case "regroup" if found:
            before = found[max(found)]
            before.alive = 0
            if not before.broken:
                before.over_s = event["time"]
        case "went_on" if life is not None:
            life.ready_s, life.stepped = event["time"], True
            life.steps_again = max(life.steps_again, event["steps_lost"])
        case "phases" if life is not None and "until_monotonic" in event and "spawn_s" in event:
            life.ready_s = event["time"] - (event["monotonic"] - event["until_monotonic"])
            life.stepped = "first_step_s" in event
        case "progress" if life is not None:
            _progress(event, life, result)
        case "coordinator.hang" if life is not None and event["kind"] in ("hung", "stuck"):
            life.hung_s = event["time"] - event["still_s"]
        case "coordinator.hang_over" if life is not None:
            life.hung_s = None
        case "worker_ended" if life is not None:
            life.alive -= 1
            if not life.broken:
                life.over_s = event["time"]
            life.broken = life.broken or event["exit_code"] != 0 or event["stopped"]


def _progress(event: Event, life: Life, result: NodeHistory) -> None:
    steps, at = event["steps"], event["at"]
    if not steps:
        return
    if life.ready_s is None:  # its phases are recorded with the first optimizer step; these may be beats
        life.ready_s = event["time"]
    life.stepped = True
    life.began_at = max(life.began_at, *event["began_at"])
    life.ended_at = max(life.ended_at, *at)
    result.points.append(Point(event["time"], min(at) if min(at) >= 0 else min(steps)))


NOBODY_FAILED = "HF200"
"""A generation was ended on request: by a signal, by `holdfast stop`, or because a node joined or left."""


OF_A_DRAIN = frozenset({NOBODY_FAILED, "HF205", "HF209", "HF210", "HF229"})
"""Verdicts on generations that were asked to stop at a safe point, if all went as planned: a script may end with any
exit code, and ranks that stop a little later lose their peers."""


class Incident(Struct, frozen=True, kw_only=True):
    at_s: float
    """Epoch seconds."""
    what: str
    """One or two words."""
    text: str
    generation: int = 0
    """0: no generation."""
    code: str = ""
    advice: str = ""
    groups: tuple[tuple[tuple[int, ...], str], ...] = ()
    """For a hang: ranks at one place, and the place in words."""
    files: tuple[tuple[str, str], ...] = ()
    """For a hang: rank and the file with its stacks."""
    rank: int = -1
    """For a worker: whose logs say more."""


def incidents(journals: Iterable[Iterable[Event]]) -> list[Incident]:
    found = [each for journal in journals for each in map(_incident_or_none, _of_the_job(journal)) if each is not None]
    return sorted(found, key=lambda each: each.at_s)


def _of_the_job(journal: Iterable[Event]) -> Iterable[Event]:
    """Events without the ends of agents after the job, and without what workers ended with because they were asked to
    stop at a safe point. A crash before it is a failure, as is one after a save in which no worker stops."""
    drained: set[int] = set()
    for event in journal:
        match event["event"]:
            case "coordinator.over":
                return
            case "coordinator.drain_to" if not event.get("save"):
                drained.add(event.get("generation", 0))
            case "coordinator.verdict" if event.get("generation", 0) in drained and event.get("code") in OF_A_DRAIN:
                continue
        yield event


def _incident_or_none(event: Event) -> Incident | None:
    try:
        return _incident(event)
    except KeyError:
        return None  # of a version that wrote less


def _incident(event: Event) -> Incident | None:
    of_job = partial(Incident, at_s=event.get("time", 0.0))
    here = partial(of_job, generation=event.get("generation", 0))
    match event["event"]:
        case "coordinator.verdict" if event["code"] != NOBODY_FAILED:
            return here(what="failure", text=event["cause"], code=event["code"], advice=event.get("advice", ""))
        case "coordinator.regroup_begun":
            return here(what="regroup", text=event["text"])
        case "coordinator.regroup_refused":
            return here(what="restart", text=f"no regroup: {event['reason']}")
        case "coordinator.replacement_failed":
            return of_job(what="replacement", text=event["text"])
        case "coordinator.quit":
            return of_job(what="stop", text=f"asked for by {event['by']}")
        case "worker_failed" if event["exit_code"] == EXIT_REQUEUE:
            return here(what="stop", text=f"rank {event['rank']} asked to be requeued (exit code {EXIT_REQUEUE})")
        case "worker_failed" if not event["after_stop"]:
            what = event["message"] or f"exit code {event['exit_code']}"
            return here(what="worker", text=f"rank {event['rank']}: {what}", rank=event["rank"])
        case "coordinator.lost":
            return of_job(what="node lost", text=f"{_host(event)}: {event['reason']}")
        case "coordinator.leaving":
            return of_job(what="node leaves", text=f"{_host(event)}: {event['reason']}")
        case "coordinator.excluded":
            return of_job(what="excluded", text=f"{event['host']} for {event['for_s']:g} s")
        case "coordinator.hang":
            groups = tuple((tuple(group["ranks"]), group["place"]) for group in event["groups"])
            files = tuple((str(rank), str(path)) for rank, path in event["files"].items())
            return here(what="hang", text=event["text"], code=event["code"], groups=groups, files=files)
        case "coordinator.hang_over":
            return here(what="hang over", text=f"steps again, after {event['still_s']:.0f} s")
        case "coordinator.straggler" | "coordinator.straggler_over":
            over = " over" if event["event"].endswith("_over") else ""
            return here(what=f"straggler{over}", text=_straggler(event), code=event["code"])
        case "agent.fenced" | "agent.fenced_by_supervisor":
            return of_job(what="fenced", text="cut off too long: it stopped its own workers")
        case "supervisor_killed":
            return of_job(what="supervisor", text=f"the supervisor executed no order for {event['seconds']:.1f} s")
        case "supervisor_died":
            return of_job(what="supervisor", text="the supervisor was killed, and the workers with it")
        case "store_lost":
            return here(what="store lost", text=event["why"])
        case "unkillable":
            return of_job(what="unkillable", text=f"SIGKILL does not end {', '.join(map(str, event['pids']))}")
    return None


def _host(event: Event) -> str:
    return str(event["member"]).partition("#")[0]


def _straggler(event: Event) -> str:
    who = f"{event['host']}, rank{'s' if len(event['ranks']) > 1 else ''} {', '.join(map(str, event['ranks']))}"
    return f"{who}: {event['own_s'] * 1000:.1f} ms of its own per step, its peers {event['peers_s'] * 1000:.1f} ms"
