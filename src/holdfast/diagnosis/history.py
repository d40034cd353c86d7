"""Reconstructs a run from the journals of its nodes: its generations and why each began (timeline), how its time was
spent (history), and what happened in order of time: failures, lost nodes, hangs, slow ranks (incidents).

Pure: parsed lines of events.jsonl in, rows and time intervals out. Times of different nodes are compared by the nodes'
own clocks. Knows the names of events; reads no files.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import Any

from msgspec import Struct

from holdfast.diagnosis.screen import how_it_ended
from holdfast.protocol.errors import UsageError
from holdfast.protocol.exit_codes import REQUESTS, Scheduler
from holdfast.protocol.messages import StopReason

Event = Mapping[str, Any]

PHASES = ("detect", "stop", "form", "spawn", "import", "store", "process_group", "first_step")
"""Phases in their order; docs/report.md explains each."""
FAILED = frozenset({StopReason.WORKER_FAILED.value, StopReason.HUNG.value})
"""Reasons of a stop after which a verdict names the rank that failed first."""
HOSTS = re.compile(r"[\w-]+(?:\.[\w-]+)*")
"""Words that may be the name of a host."""


class Generation(Struct):
    """One generation, as far as these journals show it."""

    number: int
    restart_count: int = 0
    world_size: int = 0
    """Number of its workers; 0: the coordinator's journal is missing."""
    began_epoch_s: float = 0.0
    """Time at which the coordinator assigned it or, without its journal, a node first ordered the start of workers."""
    why: str = ""
    """The reason for the end of the previous generation: the verdict's cause if it failed. Empty for the first one, and
    without the coordinator's journal."""
    phases_s: dict[str, float] = {}
    """Duration by phase, on the slowest of these nodes; phases that did not occur are missing."""
    slowest_s: float = 0.0
    """Sum of all phases but `detect` on the node where that is largest. It may be less than the sum of phases_s, each
    of which may be of another node."""

    @property
    def total_s(self) -> float:
        return self.slowest_s + self.phases_s.get("detect", 0.0)


class KeptKernels(Struct):
    """The folder of one node in which compiled kernels are kept."""

    node: str
    folder: str
    had_entries: bool
    """Something was kept there before this run."""
    error: str = ""
    """The reason why its size is unknown; empty: there is none."""
    bytes: int | None = None
    """Its size at the end of the run; None: unknown."""
    removed_bytes: int = 0
    seeded_bytes: int | None = None
    """What was copied into it at the start (--cache-from); None: nothing was to be."""
    shared_bytes: int | None = None
    """What was copied from it at the end (--cache-from); None: nothing was to be."""
    copy_errors: list[str] = []
    """The reasons why one of the two was not done."""


class Timeline(Struct):
    """The generations of a run, and why each began."""

    run_id: str
    nodes: list[str]
    generations: list[Generation]
    end: str
    """The end in one word, with the exit code; empty: these nodes have not ended."""
    preloaded: list[str]
    """The fork servers' reports on what they have imported."""
    standbys: int
    """Number of standby workers at the end, on all nodes together."""
    standby_own_bytes: int
    """Private memory of these workers."""
    kernels: list[KeptKernels] = []
    """The folders with compiled kernels, by node."""


def timeline(journals: Iterable[Iterable[Event]]) -> Timeline:
    """The timeline, from one journal per node. Raises UsageError if they belong to different runs."""
    result = Timeline("", [], [], "", [], 0, 0, [])
    found: dict[int, Generation] = {}
    for journal in journals:
        _read(journal, result, found)
    result.generations = [found[number] for number in sorted(found)]
    return result


def _read(journal: Iterable[Event], result: Timeline, found: dict[int, Generation]) -> None:
    """Add one node's events to the timeline."""
    why, silent_s, detect_s, host, lost = "", 0.0, 0.0, "", ""
    failed = 0  # the generation that ends by a failure
    standby: Event = {}
    kept: KeptKernels | None = None
    for event in journal:
        try:
            match event["event"]:
                case "begins":
                    if result.run_id not in ("", event["run_id"]):
                        raise UsageError(f"these are different runs: {result.run_id} and {event['run_id']}")
                    result.run_id = event["run_id"]
                    result.nodes.append(host := _host(event))
                case "preload" if "text" in event:
                    result.preloaded.append(event["text"])
                case "caches" | "caches_bounded" | "caches_seeded" | "caches_shared":
                    kept = _kept(event, kept)
                case "standby":
                    standby = event
                case "coordinator.lost":
                    silent_s, lost = event.get("silent_s", 0.0), str(event["member"]).partition("#")[0]
                case "coordinator.stopping" | "coordinator.draining":
                    why = event.get("text", "")
                    failed = event.get("generation", 0) if event.get("reason") in FAILED else 0
                    if event.get("reason") == "member_lost":
                        # The journals of the other nodes do not show how long the lost node had been silent.
                        detect_s = silent_s
                case "coordinator.verdict" if failed and event["generation"] == failed:
                    # Until now `why` names the rank that was reported first, which may be a victim.
                    why = event["cause"] if event["code"] != NOBODY_FAILED else why
                case "coordinator.regroup_begun":
                    generation = _generation(found, event["generation"])
                    generation.world_size, generation.why = event["world_size"], event["text"].partition("; ")[0]
                    generation.began_epoch_s = event["time"]
                    if silent_s and lost in HOSTS.findall(event["text"]):  # and not of a spare, or of an earlier loss
                        generation.phases_s["detect"] = silent_s
                    silent_s = 0.0
                case "coordinator.assigned":
                    generation = _generation(found, event["generation"])
                    generation.world_size, generation.why = event["world_size"], why
                    generation.began_epoch_s = event["time"]
                    if detect_s:
                        generation.phases_s["detect"] = max(generation.phases_s.get("detect", 0.0), detect_s)
                    why, silent_s, detect_s, failed = "", 0.0, 0.0, 0
                case "phases":
                    _add_phases(_generation(found, event["generation"]), event)
                case "ended":
                    result.end = how_it_ended(event["kind"], event["exit_code"], event.get("text", ""))
        except KeyError:
            continue  # the record lacks a field
    if kept is not None:
        kept.node = host
        result.kernels.append(kept)
    result.standbys += len(standby.get("pids", ()))
    result.standby_own_bytes += standby.get("own_bytes", 0)


def _kept(event: Event, kept: KeptKernels | None) -> KeptKernels | None:
    """What is known of the folder after this event. Raises KeyError for a record that lacks a field."""
    if event["event"] == "caches":
        return KeptKernels("", event["folder"], event["had_entries"])
    if kept is None:
        return None
    match event["event"]:
        case "caches_bounded":
            kept.bytes, kept.error = event.get("bytes"), event.get("error", "")
            kept.removed_bytes = event.get("removed_bytes", 0)
        case "caches_seeded":
            kept.seeded_bytes = event.get("bytes")
        case "caches_shared":
            kept.shared_bytes = event.get("bytes")
    if event["event"] != "caches_bounded" and "error" in event:
        kept.copy_errors.append(f"{event['folder']}: {event['error']}")
    return kept


def _add_phases(generation: Generation, event: Event) -> None:
    """Add what one node reports of a start: each phase lasts as long as on the slowest node."""
    generation.restart_count = event["restart_count"]
    own_s = sum(event.get(f"{phase}_s") or 0.0 for phase in PHASES if phase != "detect")
    generation.slowest_s = max(generation.slowest_s, own_s)
    for phase in PHASES:
        seconds = event.get(f"{phase}_s")
        if seconds is not None:
            generation.phases_s[phase] = max(generation.phases_s.get(phase, 0.0), seconds)


def _generation(found: dict[int, Generation], number: int) -> Generation:
    return found.setdefault(number, Generation(number, phases_s={}))


class Activity(Enum):
    """What an interval of time was spent on."""

    STARTUP = "start-up"
    """The time up to the first step of the run."""
    TRAINING = "training"
    LOST = "lost work"
    """Training steps that were repeated after a restart."""
    HUNG = "hanging"
    """The time from the start of a hang to the end of its generation."""
    DOWN = "down"
    """The time from the end of a generation to the first step of the next."""
    END = "end"
    """The time after the last generation: saving and the end of the agents."""


class Stretch(Struct, frozen=True):
    """An interval of the job's time."""

    doing: Activity
    from_s: float
    """Beginning, in epoch seconds, as all times in this module."""
    to_s: float
    generation: int


class GenerationCourse(Struct):
    """The course of one generation, on one node or on all together."""

    number: int
    ordered_s: float
    """Time at which its workers were ordered to start."""
    ended_s: float
    """Time of its first failure, or of the end of its last worker; while it runs, of its newest event."""
    ready_s: float | None = None
    """Time of its first step or, if no generation has steps, at which all workers ran; None: it did not get that
    far."""
    stepped: bool = False
    """Whether it has made a step."""
    workers_alive: int = 0
    """Number of workers that have not ended yet."""
    hung_s: float | None = None
    """Start of its hang; None: it does not hang, or no hang was found."""
    failed: bool = False
    """Whether a worker failed or was asked to end."""
    world_size: int = 0
    began_at: int = -1
    """Step of the whole job at its start; -1: the script does not report steps."""
    ended_at: int = -1
    """Step of the whole job at its end; -1: the script does not report steps."""
    survived: bool = False
    """Whether its workers have gone on from the generation before, all but replacements."""
    steps_again: int = 0
    """Number of steps of the generation before that a worker which went on repeated in this one."""
    steps_repeated: int | None = None
    """Number of its steps that the next generation repeated; None: unknown."""

    @property
    def lost_s(self) -> float:
        """Training time of the steps that were repeated: their share of all its steps, times its training time."""
        repeated, made = self.steps_repeated or 0, self.ended_at - self.began_at
        if not repeated or made <= 0 or self.ready_s is None:
            return 0.0
        return ((self.ended_s if self.hung_s is None else self.hung_s) - self.ready_s) * min(1.0, repeated / made)


class Point(Struct, frozen=True):
    """Progress of a node's slowest rank at one time."""

    at_s: float
    steps: int
    """Steps of the whole job if the script reports them, else of the generation."""


class NodeHistory(Struct):
    """The part of one node in a run."""

    node: str
    began_s: float
    ended_s: float
    courses: list[GenerationCourse]
    points: list[Point]


class Survival(Struct, frozen=True):
    """A loss after which the other workers went on in their processes."""

    generation: int
    """The generation that the others formed."""
    ranks: int
    """Number of ranks that went on."""
    went_on_s: float
    """Time from the loss until all of them had done a step."""
    steps_lost: int
    """Number of steps that they repeated."""
    replaced_s: float | None
    """Time from the loss until as many ranks as before had done a step; None: they have not."""


class History(Struct):
    """What a run's time was spent on."""

    nodes: list[NodeHistory]
    courses: list[GenerationCourse]
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
        """Share of the time that went into training steps that were not repeated; None: no time has passed."""
        return self.spent_s(Activity.TRAINING) / self.total_s if self.total_s > 0 else None


def history(journals: Iterable[Iterable[Event]]) -> History | None:
    """The history, from one journal per node; None: no generation was started."""
    nodes = [_node(list(journal)) for journal in journals]
    if not any(node.courses for node in nodes):
        return None
    everywhere = [course for node in nodes for course in node.courses]
    # If the script has no steps, a generation counts as training from the moment at which all its workers run.
    if any(course.stepped for course in everywhere):
        for course in everywhere:
            course.ready_s = course.ready_s if course.stepped else None
    courses = [
        _together([course for course in everywhere if course.number == number])
        for number in sorted({course.number for course in everywhere})
    ]
    began_s, ended_s = min(node.began_s for node in nodes), max(node.ended_s for node in nodes)
    counted = [course for course in courses if course.began_at >= 0]
    for course, after in pairwise(counted):
        course.steps_repeated = max(0, course.ended_at - after.began_at)
    stretches = list(stretches_of(courses, began_s, ended_s))
    lost_steps = sum(course.steps_repeated or 0 for course in counted) if counted else None
    return History(nodes, courses, stretches, lost_steps, list(survivals(courses)))


def survivals(courses: list[GenerationCourse]) -> Iterable[Survival]:
    """The losses after which others went on: each generation of surviving workers that follows a failure."""
    for number, (before, course) in enumerate(pairwise(courses), start=1):
        if not (course.survived and before.failed and course.ready_s is not None):
            continue
        later = [each.ready_s for each in courses[number:] if each.world_size >= before.world_size]
        back_s = later[0] - before.ended_s if later and later[0] is not None else None
        yield Survival(course.number, course.world_size, course.ready_s - before.ended_s, course.steps_again, back_s)


def stretches_of(courses: list[GenerationCourse], from_s: float, to_s: float) -> Iterable[Stretch]:
    """The time from the first event to the last as intervals without gaps.

    A generation is a wait for its first step, then training, of which the end may be lost work, then a hang if there
    was one. The loss comes at the end: what was done since the newest snapshot is what the next generation repeats.
    """
    at_s, waiting, number = from_s, Activity.STARTUP, 0
    for course in courses:
        number = course.number
        if course.ready_s is None:
            continue  # its time is part of the wait for a generation that makes its first step
        ready_s = max(at_s, course.ready_s)
        ended_s = max(ready_s, course.ended_s)
        yield Stretch(waiting, at_s, ready_s, number)
        moving_until_s = ended_s if course.hung_s is None else min(ended_s, max(ready_s, course.hung_s))
        useful_until_s = max(ready_s, moving_until_s - course.lost_s)
        yield Stretch(Activity.TRAINING, ready_s, useful_until_s, number)
        if useful_until_s < moving_until_s:
            yield Stretch(Activity.LOST, useful_until_s, moving_until_s, number)
        if moving_until_s < ended_s:
            yield Stretch(Activity.HUNG, moving_until_s, ended_s, number)
        at_s, waiting = ended_s, Activity.DOWN

    if to_s > at_s:
        last = courses[-1]
        if waiting is Activity.DOWN and last.ready_s is not None:
            waiting = Activity.END
        yield Stretch(waiting, at_s, to_s, number)


def _together(courses: list[GenerationCourse]) -> GenerationCourse:
    """One generation on several nodes: it trains from when the last is ready until the first fails or the last ends."""
    failed = [course.ended_s for course in courses if course.failed]
    ready = [course.ready_s for course in courses if course.ready_s is not None]
    hung = [course.hung_s for course in courses if course.hung_s is not None]
    return GenerationCourse(
        courses[0].number,
        ordered_s=min(course.ordered_s for course in courses),
        ended_s=min(failed) if failed else max(course.ended_s for course in courses),
        survived=any(course.survived for course in courses),
        steps_again=max(course.steps_again for course in courses),
        ready_s=max(ready) if ready else None,
        stepped=any(course.stepped for course in courses),
        workers_alive=sum(course.workers_alive for course in courses),
        hung_s=min(hung) if hung else None,
        failed=bool(failed),
        world_size=max(course.world_size for course in courses),
        began_at=max(course.began_at for course in courses),
        ended_at=max(course.ended_at for course in courses),
    )


def _node(journal: list[Event]) -> NodeHistory:
    result = NodeHistory("", journal[0]["time"] if journal else 0.0, journal[-1]["time"] if journal else 0.0, [], [])
    found: dict[int, GenerationCourse] = {}
    for event in journal:
        with contextlib.suppress(KeyError):  # the record lacks a field
            _take(event, found, result)
    result.courses = [found[number] for number in sorted(found)]
    if result.courses and result.courses[-1].workers_alive > 0 and not result.courses[-1].failed:
        result.courses[-1].ended_s = result.ended_s  # the generation runs, or the agent was killed
    return result


def _take(event: Event, found: dict[int, GenerationCourse], result: NodeHistory) -> None:
    course = found.get(event.get("generation", 0))
    match event["event"]:
        case "begins":
            result.node, result.began_s = _host(event), event["time"]
        case "ended":
            result.ended_s = event["time"]
        case "generation":
            number = event["generation"]
            found[number] = GenerationCourse(
                number,
                event["time"],
                event["time"],
                workers_alive=event["nproc"],
                world_size=event["world_size"],
                survived="local_ranks" in event,
            )
        case "regroup" if found:
            before = found[max(found)]
            before.workers_alive = 0
            if not before.failed:
                before.ended_s = event["time"]
        case "went_on" if course is not None:
            course.ready_s, course.stepped = event["time"], True
            course.steps_again = max(course.steps_again, event["steps_lost"])
        case "phases" if course is not None and "until_monotonic" in event and "spawn_s" in event:
            course.ready_s = event["time"] - (event["monotonic"] - event["until_monotonic"])
            course.stepped = "first_step_s" in event
        case "progress" if course is not None:
            _progress(event, course, result)
        case "coordinator.hang" if course is not None and event["kind"] in ("hung", "stuck"):
            course.hung_s = event["time"] - event["still_s"]
        case "coordinator.hang_over" if course is not None:
            course.hung_s = None
        case "worker_ended" if course is not None:
            course.workers_alive -= 1
            if not course.failed:
                course.ended_s = event["time"]
            course.failed = course.failed or event["exit_code"] != 0 or event["stopped"]


def _progress(event: Event, course: GenerationCourse, result: NodeHistory) -> None:
    steps, at = event["steps"], event["at"]
    if not steps:
        return
    course.began_at = max(course.began_at, *event["began_at"])
    course.ended_at = max(course.ended_at, *at)
    if not any(steps) and not any(now > began >= 0 for now, began in zip(at, event["began_at"], strict=True)):
        return  # written from the start on, also before the first step
    # The event `phases`, which has the exact time, comes with the first step of an optimizer. These may be beats only.
    if course.ready_s is None:
        course.ready_s = event["time"]
    course.stepped = True
    result.points.append(Point(event["time"], min(at) if min(at) >= 0 else min(steps)))


NOBODY_FAILED = "HF200"
"""The verdict on a generation that was ended on request: a signal, `holdfast stop`, a node that joined or left."""


VERDICTS_OF_DRAINS = frozenset({NOBODY_FAILED, "HF205", "HF209", "HF210", "HF229"})
"""Verdicts on generations that were asked to stop at a safe point, if all went as planned: a script may end with any
exit code, and ranks that stop a little later lose their peers."""


class Occurrence(Struct, frozen=True, kw_only=True):
    """Something that disturbed the job, or that a user did to it."""

    at_s: float
    what: str
    """The kind of incident, in one or two words."""
    text: str
    generation: int = 0
    """Number of the generation; 0: the incident belongs to none."""
    code: str = ""
    advice: str = ""
    groups: tuple[tuple[tuple[int, ...], str], ...] = ()
    """The ranks at each place, and the place in words; empty if the incident is no hang."""
    files: tuple[tuple[str, str], ...] = ()
    """Ranks and the files with their stacks; empty if the incident is no hang."""
    rank: int = -1
    """The rank whose logs say more; -1: no worker failed."""


def incidents(journals: Iterable[Iterable[Event]]) -> list[Occurrence]:
    """The incidents of a run in order of time, from one journal per node."""
    found = [
        each for journal in journals for each in map(_incident_or_none, _without_the_end(journal)) if each is not None
    ]
    return sorted(found, key=lambda each: each.at_s)


def _without_the_end(journal: Iterable[Event]) -> Iterable[Event]:
    """The events without the ends of agents after the job, and without failures of workers that were asked to stop at a
    safe point. A crash before that safe point is a failure, as is one after a save, at which no worker stops."""
    drained: set[int] = set()
    for event in journal:
        match event["event"]:
            case "coordinator.over":
                return
            case "coordinator.drain_to" if not event.get("save"):
                drained.add(event.get("generation", 0))
            case "coordinator.verdict" if (
                event.get("generation", 0) in drained and event.get("code") in VERDICTS_OF_DRAINS
            ):
                continue
        yield event


def _incident_or_none(event: Event) -> Occurrence | None:
    try:
        return _incident(event)
    except KeyError:
        return None  # the record lacks a field


def _incident(event: Event) -> Occurrence | None:
    """The incident that this event reports; None: it reports none. Raises KeyError for a record that lacks a field."""
    of_job = partial(Occurrence, at_s=event.get("time", 0.0))
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
        case "worker_failed" if (asked := REQUESTS.get(event["exit_code"])) and asked.scheduler is Scheduler.AGAIN:
            return here(what="stop", text=f"rank {event['rank']} asked {asked.asks} (exit code {asked.number})")
        case "worker_failed" if not event["after_stop"]:
            what = event["message"] or f"exit code {event['exit_code']}"
            return here(what="worker", text=f"rank {event['rank']}: {what}", rank=event["rank"])
        case "coordinator.lost":
            return of_job(what="node lost", text=f"{_host(event)}: {event['reason']}")
        case "coordinator.leaving":
            return of_job(what="node leaves", text=f"{_host(event)}: {event['reason']}")
        case "coordinator.parked":
            return here(what="parked", text=f"{_host(event)}: {event['reason']}")
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
    return _device_incident(event, here)


def _device_incident(event: Event, here: Callable[..., Occurrence]) -> Occurrence | None:
    """The same for events of GPUs and network ports."""
    match event["event"]:
        case "coordinator.device" if event["severe"]:
            return here(what="device", text=f"{event['text']} on {event['device']} of node {_host(event)}")
        case "coordinator.node_differs" if event["slows"]:
            return here(what="node differs", text=f"{_host(event)} {event['text']}")
        case "gpu_memory" if event["left_bytes"]:
            left = ", ".join(f"{bytes_ >> 20} MiB on {gpu}" for gpu, bytes_ in event["left_bytes"].items())
            return here(what="GPU memory", text=f"{left} still in use {event['seconds']:.0f} s after the workers' end")
    return None


def _host(event: Event) -> str:
    return str(event["member"]).partition("#")[0]


def _straggler(event: Event) -> str:
    who = f"{event['host']}, rank{'s' if len(event['ranks']) > 1 else ''} {', '.join(map(str, event['ranks']))}"
    return f"{who}: {event['own_s'] * 1000:.1f} ms of its own per step, its peers {event['peers_s'] * 1000:.1f} ms"
