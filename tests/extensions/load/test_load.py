"""The load of each node in the view of the job."""

from __future__ import annotations

from holdfast.coordinator.coordinator_state import LinkClosed
from holdfast.extensions.load.coordinator import SHOWN_S_MAX
from holdfast.extensions.load.messages import NodeLoad
from tests.coordinator.coordinator_desk import Desk, running, steps


def load(cpu_percent: int) -> NodeLoad:
    return NodeLoad(8, cpu_percent, 10, 100, 5, 50, 1, 2)


def shown(desk: Desk) -> list[object]:
    return [node.more["load"] for node in desk.machine.view(desk.now).nodes]


def test_the_newest_load_of_each_node_is_shown() -> None:
    desk = running(max_restarts=1)
    assert shown(desk) == [None, None]
    for percent in (1, 7):
        desk.extend(2, "load", load(percent))
    assert shown(desk) == [None, load(7)]
    desk.ask("status")
    assert desk.answer()["nodes"][1]["more"]["load"]["cpu_percent"] == 7


def test_an_old_load_and_that_of_a_lost_node_are_not_shown() -> None:
    desk = running(max_restarts=1)
    desk.extend(2, "load", load(7))
    for number in range(1, 7):
        desk.wait(SHOWN_S_MAX / 6)
        steps(desk, number)
    assert shown(desk) == [None, None]
    desk.extend(2, "load", load(8))
    desk.give(LinkClosed(2, "reset"))
    assert [node.more["load"] for node in desk.machine.view(desk.now).nodes] == [None]
