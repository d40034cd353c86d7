"""What the machines note in golden scenarios and in simulated jobs is what the table of events says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.agent.machine import AgentMachine
from holdfast.core.coordinator.machine import CoordinatorMachine
from holdfast.core.machines import Note
from holdfast.insight.events import problems
from tests.support.simulator.scenario import inputs, play
from tests.support.simulator.sweep import run_seed

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))
SEEDS = 40


def test_every_note_conforms(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: set[str] = set()
    seen: set[str] = set()

    def listening(machine: type, prefix: str) -> None:
        handle: Callable[..., list[object]] = machine.handle  # type: ignore[attr-defined]

        def listen(self: Any, now: float, event: object) -> list[object]:
            commands = handle(self, now, event)
            for command in commands:
                if isinstance(command, Note):
                    name = prefix + command.event
                    record = {"time": 1.0, "monotonic": 1.0, "event": name, **json.loads(json.dumps(command.fields))}
                    wrong.update(problems(record))
                    seen.add(name)
            return commands

        monkeypatch.setattr(machine, "handle", listen)

    listening(AgentMachine, "agent.")
    listening(CoordinatorMachine, "coordinator.")
    for path in SCENARIOS:
        play(inputs(path.read_text(encoding="utf-8")))
    for seed in range(SEEDS):
        run_seed(seed)
    assert wrong == set()
    assert seen >= {
        *("agent.fenced", "agent.link_lost", "agent.resumed", "coordinator.assigned", "coordinator.drain_to"),
        *("coordinator.lost", "coordinator.over", "coordinator.resumed", "coordinator.verdict"),
    }
