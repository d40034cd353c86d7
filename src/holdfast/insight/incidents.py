"""What happened in a run, in the order of time: failures, losses, hangs, stragglers, wished ends. For the report's page.

Pure: parsed lines of events.jsonl in, rows out. Knows the events' names; reads no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from holdfast.core.errors import EXIT_REQUEUE

Event = Mapping[str, Any]

NOBODY_FAILED = "HF200"
"""A generation was ended because somebody wished it: a signal, `holdfast stop`, a node that came or left."""


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
    """Of a hang: ranks that stand at one place, and the place in words."""
    files: tuple[tuple[str, str], ...] = ()
    """Of a hang: rank and where its stacks are."""


def incidents(journals: Iterable[Iterable[Event]]) -> list[Incident]:
    found = [each for journal in journals for each in map(_told, _of_the_job(journal)) if each is not None]
    return sorted(found, key=lambda each: each.at_s)


def _of_the_job(journal: Iterable[Event]) -> Iterable[Event]:
    """Not that everybody goes home when it is over; nor that a generation ended which was to end, at a safe point."""
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


def _told(event: Event) -> Incident | None:
    try:
        return _incident(event)
    except KeyError:
        return None  # of a version that did not tell so much


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
            return Incident(at_s=at_s, what="keeper", text="the keeper was killed, and the workers with it")
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
