"""Asks a running job a question, for commands whose answer is one Struct."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from holdfast.runs.finding import running_job
from holdfast.runtime.running import ASKED_S, RunningAgent, ask_any

Body = TypeVar("Body")


def ask_job(
    run: str | None,
    question: str,
    kind: type[Body],
    about: Mapping[str, object] | None = None,
    *,
    within_s: float = ASKED_S,
) -> tuple[RunningAgent, Body]:
    """Ask a job. Returns the agent that answered, and its answer. Raises ControlRefusedError when it refuses."""
    entry, reply = ask_any(running_job(run), question, about, within_s=within_s)
    return entry, reply.read(kind)
