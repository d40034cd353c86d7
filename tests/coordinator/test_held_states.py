"""What nodes have of states in memory: a newcomer gets to know who has those of its ranks."""

from __future__ import annotations

from holdfast.coordinator.coordinator_state import LinkClosed
from holdfast.protocol import messages as msg
from holdfast.protocol.policy import HeldStates
from tests.coordinator.coordinator_desk import regrouping, running


def test_a_newcomer_is_told_who_has_its_states() -> None:
    desk = running(max_restarts=3)
    states = HeldStates("10.0.0.1", 4_000, "a life", "/runs", 2, (0, 1))
    desk.give(LinkClosed(2, "gone"))
    desk.say(1, msg.Stopped(1))
    desk.join(3)
    generation = desk.machine.generation
    desk.say(1, msg.Prepared(generation, 40_001, states))
    desk.say(3, msg.Prepared(generation))
    of = {link: next(each for each in desk.told_to(link)[::-1] if isinstance(each, msg.Start)) for link in (1, 3)}
    assert {link: start.states for link, start in of.items()} == {1: (), 3: (states,)}


def test_workers_that_go_on_fetch_nothing() -> None:
    desk = regrouping()
    states = HeldStates("10.0.0.1", 4_000, "a life", "/runs", 1, (0,))
    for link in (1, 2):
        desk.say(link, msg.Prepared(desk.machine.generation, 40_001 if link == 1 else None, states))
    starts = [each for link in (1, 2) for each in desk.told_to(link) if isinstance(each, msg.Start)]
    assert starts[-1].generation == desk.machine.generation == 2
    assert not any(each.states for each in starts)
