"""What the machines note in golden scenarios and in simulated jobs is what the table of events says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.agent.machine import AgentMachine
from holdfast.core.coordinator.base import CoordinatorBase
from holdfast.insight.events import problems
from tests.support.simulator.scenario import inputs, play
from tests.support.simulator.sweep import run_seed

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))
SEEDS = 40


def test_every_note_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: set[str] = set()
    seen: set[str] = set()

    def listening(machine: type, prefix: str) -> None:
        noted: Callable[..., None] = machine._note  # type: ignore[attr-defined]

        def note(self: Any, event: str, **fields: object) -> None:
            record = {"time": 1.0, "monotonic": 1.0, "event": prefix + event, **json.loads(json.dumps(fields))}
            wrong.update(problems(record))
            seen.add(prefix + event)
            noted(self, event, **fields)

        monkeypatch.setattr(machine, "_note", note)

    listening(AgentMachine, "agent.")
    listening(CoordinatorBase, "coordinator.")
    for path in SCENARIOS:
        play(inputs(path.read_text(encoding="utf-8")))
    for seed in range(SEEDS):
        run_seed(seed)
    assert wrong == set()
    assert seen >= {
        *("agent.fenced", "agent.link_lost", "agent.resumed", "coordinator.assigned", "coordinator.drain_to"),
        *("coordinator.lost", "coordinator.over", "coordinator.resumed", "coordinator.verdict"),
    }
