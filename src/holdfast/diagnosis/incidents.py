"""What happened in a run, in order of time, from the journals of its nodes: failures, lost nodes, hangs, slow ranks.

Pure: parsed lines of events.jsonl in, rows out. Knows the names of events; reads no files.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from holdfast.diagnosis.history import Event
from holdfast.protocol.errors import EXIT_REQUEUE

NOBODY_FAILED = "HF200"
"""A generation was ended on request: by a signal, by `holdfast stop`, or because a node joined or left."""


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


def incidents(journals: Iterable[Iterable[Event]]) -> list[Incident]:
    found = [each for journal in journals for each in map(_incident_or_none, _of_the_job(journal)) if each is not None]
    return sorted(found, key=lambda each: each.at_s)


def _of_the_job(journal: Iterable[Event]) -> Iterable[Event]:
    """Events without the ends of agents after the job, and without the end of a generation that drained as planned."""
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
        case "coordinator.regroup_begun":
            return Incident(at_s=at_s, what="regroup", text=event["text"], generation=generation)
        case "coordinator.regroup_refused":
            return Incident(at_s=at_s, what="restart", text=f"no regroup: {event['reason']}", generation=generation)
        case "coordinator.replacement_failed":
            return Incident(at_s=at_s, what="replacement", text=event["text"])
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
