"""Nodes whose workers must be suspended are lost before their lease expires, if the others go on without them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordinator.coordinator_events import Heard, LinkOpened
from holdfast.coordinator.world import Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.policy import NodeSpec, Tick
from holdfast.protocol.train_contract import Survive
from tests.coordinator.coordinator_harness import LIMITS, CoordinatorHarness

SHORT_S = LIMITS.short_lease_of(LIMITS.suspend_of(3))
PING_S = 0.5


def surviving(nodes: int = 3, *, least: int = 1, old: int = 0, **options: Any) -> CoordinatorHarness:
    """All workers run in `ht.survive`. `old`: a node whose agent knows no suspension."""
    harness = CoordinatorHarness(least, nodes, **{"max_restarts": 3, **options})
    links = range(1, nodes + 1)
    harness.join(*links)
    if old:
        harness.machine.members[f"n{old}#1"].suspend_s = 0.0
    harness.prepare(*links)
    harness.can_go_on(*links)
    assert harness.machine.phase is Phase.RUNNING
    return harness


def pass_time(harness: CoordinatorHarness, seconds: float, *, speak: tuple[int, ...]) -> None:
    """Ticks come when they are due; these nodes ping as often as their agents do, and the others are silent."""
    until, ping_s = harness.now + seconds, harness.now
    while harness.now < until:
        due = harness.machine.next_deadline()
        harness.now = max(harness.now, min(until, ping_s, due if due is not None else until))
        if harness.now >= ping_s:
            ping_s += PING_S
            for link in speak:
                harness.say(link, msg.Ping(1))
        harness.give(Tick())


def lost(harness: CoordinatorHarness) -> list[tuple[object, object]]:
    return [(note["member"], note["reason"]) for note in harness.noted("lost")]


def test_a_silent_node_is_lost_after_the_short_lease_and_the_others_go_on() -> None:
    harness = surviving()
    pass_time(harness, SHORT_S - 0.01, speak=(1, 2))
    assert not lost(harness)
    pass_time(harness, 0.02, speak=(1, 2))
    assert lost(harness) == [("n3#1", "silent for more than 2.5 s")]
    assert harness.dropped == [3]
    assert harness.machine.phase is Phase.REGROUPING
    assert any(isinstance(each, msg.Regroup) for each in harness.told_to(1))


def test_nodes_that_fall_silent_together_are_lost_together() -> None:
    harness = surviving(4)
    pass_time(harness, 0.9, speak=(1, 2, 4))
    pass_time(harness, SHORT_S, speak=(1, 2))
    assert [member for member, _ in lost(harness)] == ["n3#1", "n4#1"]
    assert len(harness.noted("regroup_begun")) == 1


def test_a_node_that_speaks_again_in_time_is_kept() -> None:
    harness = surviving()
    pass_time(harness, SHORT_S - 0.1, speak=(1, 2))
    pass_time(harness, 20.0, speak=(1, 2, 3))
    assert not lost(harness)


@pytest.mark.parametrize(
    "options",
    [{"least": 3}, {"min_ranks": 3}, {"survive": Survive.WAIT}, {"survive": Survive.OFF}, {"old": 3}, {"old": 1}],
    ids=str,
)
def test_a_node_that_the_others_need_or_that_suspends_nothing_has_its_whole_lease(options: dict[str, Any]) -> None:
    harness = surviving(**options)
    pass_time(harness, LIMITS.lease_s - 0.1, speak=(1, 2))
    assert not lost(harness)
    pass_time(harness, 0.2, speak=(1, 2))
    assert lost(harness) == [("n3#1", "silent for more than 6 s")]


def test_a_node_whose_workers_are_not_in_ht_survive_yet_has_its_whole_lease() -> None:
    harness = CoordinatorHarness(1, 3, max_restarts=3)
    harness.join(1, 2, 3)
    harness.prepare(1, 2, 3)
    harness.can_go_on(1, 2)
    pass_time(harness, LIMITS.lease_s - 0.1, speak=(1, 2))
    assert not lost(harness)


def test_a_second_node_is_lost_as_early_while_the_others_regroup_for_the_first() -> None:
    harness = surviving(4)
    pass_time(harness, 1.9, speak=(1, 2, 3))
    pass_time(harness, 0.7, speak=(1, 2))
    assert [member for member, _ in lost(harness)] == ["n4#1"]
    pass_time(harness, 1.5, speak=(1, 2))
    assert [member for member, _ in lost(harness)] == ["n4#1", "n3#1"]
    assert harness.machine.phase is Phase.REGROUPING


def without_a_rank(harness: CoordinatorHarness, link: int) -> None:
    """Its worker was killed, and the replacement is not ready yet."""
    harness.kill_worker(link)
    harness.prepare(*harness.links)
    harness.can_go_on(*harness.links - {link})
    assert harness.machine.phase is Phase.RUNNING


def test_a_node_without_a_rank_has_its_whole_lease_if_it_alone_is_silent() -> None:
    """It may import torch, on a busy machine."""
    harness = surviving(4)
    without_a_rank(harness, 4)
    pass_time(harness, LIMITS.lease_s - 0.1, speak=(1, 2, 3))
    assert not lost(harness)


def test_a_node_without_a_rank_is_lost_with_others_and_delays_no_regroup() -> None:
    harness = surviving(4)
    without_a_rank(harness, 4)
    pass_time(harness, SHORT_S + 0.1, speak=(1, 2))
    assert sorted(str(member) for member, _ in lost(harness)) == ["n3#1", "n4#1"]
    harness.prepare(1, 2)
    assert harness.machine.phase is Phase.RUNNING


def test_after_a_start_a_node_has_its_whole_lease_until_all_are_able_again() -> None:
    harness = surviving(4)
    pass_time(harness, SHORT_S + 0.1, speak=(1, 2, 3))
    harness.prepare(1, 2, 3)
    assert harness.machine.phase is Phase.RUNNING
    harness.can_go_on(1, 2)
    pass_time(harness, SHORT_S + 0.5, speak=(1, 2))
    assert len(lost(harness)) == 1
    harness.can_go_on(3)
    pass_time(harness, SHORT_S + 0.5, speak=(1, 2))
    assert len(lost(harness)) == 2


def test_a_coordinator_that_stood_still_loses_nobody_for_its_own_pause() -> None:
    harness = surviving()
    pass_time(harness, 1.0, speak=(1, 2, 3))
    harness.now += SHORT_S
    harness.give(Tick())
    pass_time(harness, 1.0, speak=(1, 2, 3))
    assert not lost(harness)


def test_an_agent_that_suspends_no_more_is_not_relied_on() -> None:
    harness = CoordinatorHarness(1, 2)
    harness.join(1)
    joined = harness.told_to(1)[0]
    assert isinstance(joined, msg.Joined)
    assert joined.suspend_s == harness.machine.members["n1#1"].suspend_s == LIMITS.suspend_of(1)
    harness.give(LinkOpened(2, "10.0.0.2", "10.0.0.9"))
    harness.give(Heard(2, msg.Join(NodeSpec(member="n2#1", host="n2", nproc=1), suspends=False)))
    assert harness.machine.members["n2#1"].suspend_s == 0.0


def test_without_survivors_no_agent_suspends_anything() -> None:
    harness = CoordinatorHarness(1, 2, survive=Survive.OFF)
    harness.join(1)
    joined = harness.told_to(1)[0]
    assert isinstance(joined, msg.Joined)
    assert joined.suspend_s == 0.0
