"""The next generation, announced with the stop of the present one, and what becomes of it when members change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.coordinator.coordinator_state import LinkClosed, LinkOpened, Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.policy import NodeSpec
from tests.coordinator.coordinator_harness import LIMITS, CoordinatorHarness, running, two_of_three


def announced(harness: CoordinatorHarness) -> dict[int, msg.Assign]:
    return {
        link: message.following for link, message in harness.told if isinstance(message, msg.Stop) and message.following
    }


def test_members_that_prepared_what_was_announced_are_started_without_an_assignment() -> None:
    harness = running(max_restarts=1)
    harness.fail(2)
    places = announced(harness)
    assert {link: (place.generation, place.restart_count) for link, place in places.items()} == {1: (2, 1), 2: (2, 1)}
    harness.say(2, msg.Stopped(1))
    harness.say(2, msg.Prepared(2))
    harness.say(1, msg.Stopped(1))
    assert harness.machine.phase is Phase.PREPARING, "the first one is not prepared yet"
    harness.say(1, msg.Prepared(2, 40_001))
    assert harness.last(2) == msg.Start(2, "10.0.0.1", 40_001, before="failed 0 exit code 1", job_uid="n1#1")
    assert not [message for _, message in harness.told if isinstance(message, msg.Assign) and message.generation == 2]


def one_joins(harness: CoordinatorHarness) -> None:
    harness.join(3)


def one_is_lost(harness: CoordinatorHarness) -> None:
    harness.give(LinkClosed(2, "reset"))


def one_leaves(harness: CoordinatorHarness) -> None:
    harness.say(2, msg.Leave("SIGTERM"))


def one_comes_back(harness: CoordinatorHarness) -> None:
    """Its link broke after it had prepared the announced generation, which the next join reports."""
    harness.say(2, msg.Stopped(1))
    harness.say(2, msg.Prepared(2))
    harness.give(LinkClosed(2, "reset"))
    harness.give(LinkOpened(4, "10.0.0.2", "10.0.0.9"))
    harness.say(4, msg.Join(NodeSpec(member="n2#1.1", host="n2", nproc=1), 2, led_by="n1 (rank 0)"))


@pytest.mark.parametrize("change", [one_joins, one_is_lost, one_leaves, one_comes_back])
def test_when_members_change_the_generation_gets_another_number(change: Callable[[CoordinatorHarness], None]) -> None:
    """Nothing that was prepared for the announced generation is taken for the one that is formed."""
    harness = two_of_three(least=1, max_restarts=1)
    harness.fail(2)
    assert list(announced(harness)) == [1, 2]
    change(harness)
    for link in (1, 2):
        harness.say(link, msg.Stopped(1))
        harness.say(link, msg.Prepared(2, 40_001 if link == 1 else None))
    assert harness.machine.phase is Phase.PREPARING
    assert harness.machine.generation > 2
    world = harness.machine.world
    assert world is not None
    assert (world.prepared, world.store_port) == (set(), None)
    assigned = {link for link, message in harness.told if isinstance(message, msg.Assign) and message.generation > 2}
    assert assigned == {harness.machine.members[name].link for name in world.order}


def test_a_member_that_comes_back_with_the_announced_number_met_no_other_coordinator() -> None:
    harness = running(least=1, max_restarts=1)
    harness.fail(1)
    one_comes_back(harness)
    assert harness.machine.view(harness.now).why == "rank 0 failed on n1"
    harness.say(1, msg.Stopped(1))
    assert harness.machine.phase is Phase.PREPARING, "no fence of a previous leader is waited for"


def test_a_member_that_is_lost_after_the_start_of_what_was_announced_ends_that() -> None:
    harness = running(least=1, max_restarts=1)
    harness.fail(2)
    for link in (1, 2):
        harness.say(link, msg.Stopped(1))
        harness.say(link, msg.Prepared(2, 40_001))
    harness.give(LinkClosed(2, "reset"))
    assert harness.last(1) == msg.Stop(2, msg.StopReason.MEMBER_LOST, "n2 was lost: reset")


def test_what_was_announced_waits_for_the_back_off() -> None:
    harness = running(max_restarts=2)
    for _ in range(2):
        harness.fail(2)
        harness.both_say(msg.Stopped(harness.machine.generation))
        for link in (1, 2):
            harness.say(
                link, msg.Prepared(harness.machine.generation + (harness.machine.phase is Phase.GATHERING), 40_001)
            )
    assert harness.machine.phase is Phase.GATHERING
    harness.wait(LIMITS.backoff_first_s)
    assert harness.last(2) == msg.Start(3, "10.0.0.1", 40_001, before="failed 0 exit code 1", job_uid="n1#1")


@pytest.mark.parametrize("options", [{"max_restarts": 0}, {"max_restarts": 1, "exclude_after": 1}])
def test_nothing_is_announced_where_a_restart_is_not_certain(options: dict[str, int]) -> None:
    harness = running(**options)
    harness.fail(2)
    assert isinstance(harness.last(2), msg.Stop)
    assert announced(harness) == {}


def test_nothing_is_announced_when_a_worker_asked_to_be_requeued() -> None:
    harness = running(max_restarts=1)
    harness.fail(2, 75)
    assert isinstance(harness.last(2), msg.Stop)
    assert announced(harness) == {}


def test_nothing_is_announced_when_the_job_is_being_ended() -> None:
    harness = running(max_restarts=1)
    harness.ask("stop")
    harness.fail(2)
    assert isinstance(harness.last(2), msg.Stop)
    assert announced(harness) == {}
