"""The states that nodes have in memory: a newcomer gets to know who has those of its ranks."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.coordinator.coordinator_commands import Tell
from holdfast.coordinator.coordinator_events import LinkClosed
from holdfast.extensions.saver.coordinator import offers
from holdfast.extensions.saver.messages import HeldStates, Holds, StateSources
from holdfast.protocol import messages as msg
from holdfast.protocol.extension import NodeSeen
from tests.coordinator.coordinator_harness import regrouping, running


def held(*ranks: int, world: int = 6) -> HeldStates:
    return HeldStates("10.0.0.1", 4_000 + ranks[0], "a life", "/runs", world, ranks)


def nodes(names: str) -> list[NodeSeen]:
    return [NodeSeen(name, name, 2 * at, (0, 1), done=False) for at, name in enumerate(names)]


def test_a_node_without_states_learns_who_has_those_of_its_ranks() -> None:
    assert offers(nodes("abc"), 6, {}) == {}
    assert offers(nodes("abc"), 6, {"a": held(0, 1, 4), "c": held(5, 2)}) == {"b": (held(5, 2),)}
    assert offers(nodes("abc"), 6, {"a": held(0, 1, 3), "c": held(5, 2)}) == {"b": (held(5, 2), held(0, 1, 3))}
    resized = {"a": held(0, 1, 3), "c": held(5, 2, world=8)}
    assert offers(nodes("abc"), 6, resized) == {"b": (held(0, 1, 3),)}, "a job of another size is split in another way"


def test_states_of_an_older_life_are_not_offered() -> None:
    found = {"a": held(0, 1, 2, world=8), "b": replace(held(4, 5, 2, world=8), word="older"), "c": held(4, 5, world=8)}
    assert offers(nodes("abcd"), 8, found) == {"d": ()}
    assert offers(nodes("abcd"), 8, {**found, "c": held(4, 6, world=8)}) == {"d": (held(4, 6, world=8),)}


def test_a_newcomer_is_told_who_has_its_states_before_its_workers_start() -> None:
    harness = running(max_restarts=3)
    states = HeldStates("10.0.0.1", 4_000, "a life", "/runs", 2, (0, 1))
    harness.give(LinkClosed(2, "gone"))
    harness.say(1, msg.Stopped(1))
    harness.join(3)
    generation = harness.machine.generation
    harness.extend(1, "saver", Holds(generation, states))
    harness.say(1, msg.Prepared(generation, 40_001))
    harness.say(3, msg.Prepared(generation))
    told = [type(each.message) for each in harness.commands if isinstance(each, Tell) and each.link == 3]
    assert told == [msg.Extended, msg.Start]
    assert harness.ordered(3, StateSources) == StateSources(generation, (states,))
    assert harness.extended == []


def test_what_a_node_had_before_an_earlier_generation_is_not_offered() -> None:
    harness = running(max_restarts=3)
    harness.extend(1, "saver", Holds(1, HeldStates("10.0.0.1", 4_000, "a life", "/runs", 2, (0, 1))))
    harness.give(LinkClosed(2, "gone"))
    harness.say(1, msg.Stopped(1))
    harness.join(3)
    harness.say(1, msg.Prepared(harness.machine.generation, 40_001))
    harness.say(3, msg.Prepared(harness.machine.generation))
    assert isinstance(harness.told_to(3)[-1], msg.Start)
    assert harness.extended == []


def test_workers_that_go_on_fetch_nothing() -> None:
    harness = regrouping()
    generation = harness.machine.generation
    harness.extend(1, "saver", Holds(generation, HeldStates("10.0.0.1", 4_000, "a life", "/runs", 1, (0,))))
    for link in (1, 2):
        harness.say(link, msg.Prepared(generation, 40_001 if link == 1 else None))
    starts = [each for link in (1, 2) for each in harness.told_to(link) if isinstance(each, msg.Start)]
    assert starts[-1].generation == generation == 2
    assert harness.extended == []
