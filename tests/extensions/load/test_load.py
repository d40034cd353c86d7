"""The load of each node in the view of the job."""

from __future__ import annotations

from holdfast.coordinator.coordinator_state import LinkClosed
from holdfast.extensions.load.coordinator import SHOWN_S_MAX
from holdfast.extensions.load.messages import NodeLoad
from tests.coordinator.coordinator_harness import CoordinatorHarness, running, steps


def load(cpu_percent: int) -> NodeLoad:
    return NodeLoad(8, cpu_percent, 10, 100, 5, 50, 1, 2)


def shown(harness: CoordinatorHarness) -> list[object]:
    return [node.more["load"] for node in harness.machine.view(harness.now).nodes]


def test_the_newest_load_of_each_node_is_shown() -> None:
    harness = running(max_restarts=1)
    assert shown(harness) == [None, None]
    for percent in (1, 7):
        harness.extend(2, "load", load(percent))
    assert shown(harness) == [None, load(7)]
    harness.ask("status")
    assert harness.answer()["nodes"][1]["more"]["load"]["cpu_percent"] == 7


def test_an_old_load_and_that_of_a_lost_node_are_not_shown() -> None:
    harness = running(max_restarts=1)
    harness.extend(2, "load", load(7))
    for number in range(1, 7):
        harness.wait(SHOWN_S_MAX / 6)
        steps(harness, number)
    assert shown(harness) == [None, None]
    harness.extend(2, "load", load(8))
    harness.give(LinkClosed(2, "reset"))
    assert [node.more["load"] for node in harness.machine.view(harness.now).nodes] == [None]
