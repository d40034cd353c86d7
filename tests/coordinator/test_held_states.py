"""What nodes have of states in memory: a newcomer gets to know who has those of its ranks."""

from __future__ import annotations

from holdfast.coordinator.coordinator_state import LinkClosed
from holdfast.protocol import messages as msg
from holdfast.protocol.policy import HeldStates
from tests.coordinator.coordinator_harness import regrouping, running


def test_a_newcomer_is_told_who_has_its_states() -> None:
    harness = running(max_restarts=3)
    states = HeldStates("10.0.0.1", 4_000, "a life", "/runs", 2, (0, 1))
    harness.give(LinkClosed(2, "gone"))
    harness.say(1, msg.Stopped(1))
    harness.join(3)
    generation = harness.machine.generation
    harness.say(1, msg.Prepared(generation, 40_001, states))
    harness.say(3, msg.Prepared(generation))
    of = {link: next(each for each in harness.told_to(link)[::-1] if isinstance(each, msg.Start)) for link in (1, 3)}
    assert {link: start.states for link, start in of.items()} == {1: (), 3: (states,)}


def test_workers_that_go_on_fetch_nothing() -> None:
    harness = regrouping()
    states = HeldStates("10.0.0.1", 4_000, "a life", "/runs", 1, (0,))
    for link in (1, 2):
        harness.say(link, msg.Prepared(harness.machine.generation, 40_001 if link == 1 else None, states))
    starts = [each for link in (1, 2) for each in harness.told_to(link) if isinstance(each, msg.Start)]
    assert starts[-1].generation == harness.machine.generation == 2
    assert not any(each.states for each in starts)
