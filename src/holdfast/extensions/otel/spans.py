"""Makes spans of the journal's events: one of the run, and below it one of each generation, with what ended it.

Knows events and time. Must not know OpenTelemetry: exporter.py has that, since its packages are an extra.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

NOBODY_FAILED = "HF200"
"""Code of a verdict that names no failure."""
Attributes = dict[str, str | int | float | bool]


@dataclass
class Span:
    """A span that has ended, or that is open."""

    name: str
    began_ns: int
    attributes: Attributes
    is_run: bool = False
    ended_ns: int = 0
    failure: str = ""
    """The reason for its failure, in words; empty: it has not failed."""


@dataclass
class _Why:
    """The reason for the end of a generation."""

    at_ns: int
    reason: str = ""
    """The reason for programs: `worker_failed`, `member_lost`, `arrival` …"""
    text: str = ""
    code: str = ""
    cause: str = ""

    def under(self, prefix: str) -> Attributes:
        """The attributes `PREFIX.reason` and so on; those that are not known are left out."""
        found = {"reason": self.reason, "code": self.code, "cause": self.cause or self.text}
        return {f"{prefix}.{name}": value for name, value in found.items() if value}


@dataclass
class Spans:
    """The spans of one run, as the node of the coordinator sees it."""

    about: Attributes
    """Attributes of every span."""
    send: Callable[[Span], None]
    now_ns: Callable[[], int] = time.time_ns
    _run: Span | None = None
    """The run; None: this node never had the coordinator."""
    _generation: Span | None = None
    _why: _Why | None = None
    """The reason for the end of the generation, or for the next one; None: it is not known yet."""
    _world: Attributes = field(default_factory=dict)
    _leads: bool = False
    _began_ns: int = 0

    def __post_init__(self) -> None:
        self._began_ns = self.now_ns()

    def heard(self, event: str, fields: Mapping[str, Any]) -> None:
        """Handle an event of the journal."""
        match event:
            case "coordinator.assigned" | "coordinator.regroup_begun":
                self._world = {"holdfast.world_size": fields["world_size"], "holdfast.nodes": len(fields["order"])}
                if event == "coordinator.regroup_begun":
                    self._ends(reason="regroup", text=fields["text"])
            case "coordinator.started" | "coordinator.regrouped":
                self._begin(fields["generation"], went_on=event == "coordinator.regrouped")
            case "coordinator.resumed":
                # The coordinator before, on another node, has sent nothing about its last generation.
                self._world = {"holdfast.nodes": len(fields["order"])}
                self._ends(reason="succession", text="this node has the coordinator now")
                self._begin(fields["generation"], went_on=True)
            case "coordinator.stopping" | "coordinator.draining":
                self._ends(reason=fields["reason"], text=fields["text"])
            case "coordinator.drain_to" if fields.get("save") or not fields["safe_point"]:
                self._why = None  # nothing ends: the workers save and go on, or they are let go
            case "coordinator.verdict" if fields["code"] != NOBODY_FAILED:
                self._ends(code=fields["code"], cause=fields["cause"])
            case "coordinator.steps_down":
                self._leads = False
            case "ended" if self._leads:
                self._end(fields)

    def _ends(self, **known: str) -> None:
        """Note why the generation ends; what is known first counts."""
        self._why = self._why or _Why(self.now_ns())
        for name, value in known.items():
            setattr(self._why, name, getattr(self._why, name) or value)

    def _begin(self, generation: int, *, went_on: bool) -> None:
        """A generation has begun, and the one before is over."""
        self._leads = True
        if self._run is None:
            self._run = Span("run", self._began_ns, dict(self.about), is_run=True)
        before, why = self._generation, self._why
        if before is not None:
            self._close(before, why)
        restart = why.under("holdfast.restart") if why is not None else {}
        attributes = {"holdfast.generation": generation, "holdfast.went_on": went_on}
        name = f"generation {generation}"
        self._generation = Span(name, self.now_ns(), {**self.about, **attributes, **self._world, **restart})
        self._why = None

    def _close(self, generation: Span, why: _Why | None) -> None:
        generation.ended_ns = why.at_ns if why is not None else self.now_ns()
        if why is not None:
            generation.attributes |= why.under("holdfast.end")
            generation.failure = why.cause if why.code else ""
        self.send(generation)

    def _end(self, fields: Mapping[str, Any]) -> None:
        """The job is over."""
        kind, cause, code = fields["kind"], fields.get("cause") or fields["text"], fields.get("code") or ""
        failed = code not in ("", NOBODY_FAILED)
        if self._generation is not None:
            self._ends(reason=kind, code=code if failed else "", cause=cause)
            self._close(self._generation, self._why)
        if self._run is not None:
            run, self._run = self._run, None
            run.ended_ns, run.failure = self.now_ns(), cause if failed else ""
            run.attributes |= {"holdfast.end.reason": kind, "holdfast.exit_code": fields["exit_code"]}
            run.attributes |= {"holdfast.end.code": code, "holdfast.end.cause": cause} if failed else {}
            self.send(run)
