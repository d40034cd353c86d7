"""A run's generations, from the journals of its nodes: when each began, why the one before ended, how long its start took.

Pure: parsed lines of events.jsonl in, rows out. Knows the events' names; reads no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from holdfast.core.errors import UsageError
from holdfast.insight.screen import how_it_ended

PHASES = ("detect", "stop", "form", "spawn", "import", "store", "process_group", "first_step")
"""In the order in which they pass; what each is, docs/report.md tells."""

Event = Mapping[str, Any]


class Generation(Struct):
    """One numbered formation of the worker group, as far as these journals tell."""

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
    """What nurseries told."""
    standbys: int
    """Workers that stood parked at last, on all nodes together."""
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
            continue  # of a version that did not tell so much
    told.standbys += len(standby.get("pids", ()))
    told.standby_own_bytes += standby.get("own_bytes", 0)


def _generation(found: dict[int, Generation], number: int) -> Generation:
    return found.setdefault(number, Generation(number, phases_s={}))
