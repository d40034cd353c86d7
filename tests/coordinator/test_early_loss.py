"""Nodes whose workers must be suspended are lost before their lease expires, if the others go on without them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordinator.coordinator_state import Heard, LinkOpened, Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.policy import NodeSpec, Tick
from holdfast.protocol.train_contract import Survive
from tests.coordinator.coordinator_desk import LIMITS, Desk

SHORT_S = LIMITS.short_lease_of(LIMITS.suspend_of(3))
PING_S = 0.5


def surviving(nodes: int = 3, *, least: int = 1, old: int = 0, **options: Any) -> Desk:
    """All workers run in `ht.survive`. `old`: a node whose agent knows no suspension."""
    desk = Desk(least, nodes, **{"max_restarts": 3, **options})
    links = range(1, nodes + 1)
    desk.join(*links)
    if old:
        desk.machine.members[f"n{old}#1"].suspend_s = 0.0
    desk.prepare(*links)
    desk.able(*links)
    assert desk.machine.phase is Phase.RUNNING
    return desk


def pass_time(desk: Desk, seconds: float, *, speak: tuple[int, ...]) -> None:
    """Ticks come when they are due; these nodes ping as often as their agents do, and the others are silent."""
    until, ping_s = desk.now + seconds, desk.now
    while desk.now < until:
        due = desk.machine.next_deadline()
        desk.now = max(desk.now, min(until, ping_s, due if due is not None else until))
        if desk.now >= ping_s:
            ping_s += PING_S
            for link in speak:
                desk.say(link, msg.Ping(1))
        desk.give(Tick())


def lost(desk: Desk) -> list[tuple[object, object]]:
    return [(note["member"], note["reason"]) for note in desk.noted("lost")]


def test_a_silent_node_is_lost_after_the_short_lease_and_the_others_go_on() -> None:
    desk = surviving()
    pass_time(desk, SHORT_S - 0.01, speak=(1, 2))
    assert not lost(desk)
    pass_time(desk, 0.02, speak=(1, 2))
    assert lost(desk) == [("n3#1", "silent for more than 2.5 s")]
    assert desk.dropped == [3]
    assert desk.machine.phase is Phase.REGROUPING
    assert any(isinstance(each, msg.Regroup) for each in desk.told_to(1))


def test_nodes_that_fall_silent_together_are_lost_together() -> None:
    desk = surviving(4)
    pass_time(desk, 0.9, speak=(1, 2, 4))
    pass_time(desk, SHORT_S, speak=(1, 2))
    assert [member for member, _ in lost(desk)] == ["n3#1", "n4#1"]
    assert len(desk.noted("regroup_begun")) == 1


def test_a_node_that_speaks_again_in_time_is_kept() -> None:
    desk = surviving()
    pass_time(desk, SHORT_S - 0.1, speak=(1, 2))
    pass_time(desk, 20.0, speak=(1, 2, 3))
    assert not lost(desk)


@pytest.mark.parametrize(
    "options",
    [{"least": 3}, {"min_ranks": 3}, {"survive": Survive.WAIT}, {"survive": Survive.OFF}, {"old": 3}, {"old": 1}],
    ids=str,
)
def test_a_node_that_the_others_need_or_that_suspends_nothing_has_its_whole_lease(options: dict[str, Any]) -> None:
    desk = surviving(**options)
    pass_time(desk, LIMITS.lease_s - 0.1, speak=(1, 2))
    assert not lost(desk)
    pass_time(desk, 0.2, speak=(1, 2))
    assert lost(desk) == [("n3#1", "silent for more than 6 s")]


def test_a_node_whose_workers_are_not_in_ht_survive_yet_has_its_whole_lease() -> None:
    desk = Desk(1, 3, max_restarts=3)
    desk.join(1, 2, 3)
    desk.prepare(1, 2, 3)
    desk.able(1, 2)
    pass_time(desk, LIMITS.lease_s - 0.1, speak=(1, 2))
    assert not lost(desk)


def test_a_second_node_is_lost_as_early_while_the_others_regroup_for_the_first() -> None:
    desk = surviving(4)
    pass_time(desk, 1.9, speak=(1, 2, 3))
    pass_time(desk, 0.7, speak=(1, 2))
    assert [member for member, _ in lost(desk)] == ["n4#1"]
    pass_time(desk, 1.5, speak=(1, 2))
    assert [member for member, _ in lost(desk)] == ["n4#1", "n3#1"]
    assert desk.machine.phase is Phase.REGROUPING


def without_a_rank(desk: Desk, link: int) -> None:
    """Its worker was killed, and the replacement is not ready yet."""
    desk.kill_worker(link)
    desk.prepare(*desk.links)
    desk.able(*desk.links - {link})
    assert desk.machine.phase is Phase.RUNNING


def test_a_node_without_a_rank_has_its_whole_lease_if_it_alone_is_silent() -> None:
    """It may import torch, on a busy machine."""
    desk = surviving(4)
    without_a_rank(desk, 4)
    pass_time(desk, LIMITS.lease_s - 0.1, speak=(1, 2, 3))
    assert not lost(desk)


def test_a_node_without_a_rank_is_lost_with_others_and_delays_no_regroup() -> None:
    desk = surviving(4)
    without_a_rank(desk, 4)
    pass_time(desk, SHORT_S + 0.1, speak=(1, 2))
    assert sorted(str(member) for member, _ in lost(desk)) == ["n3#1", "n4#1"]
    desk.prepare(1, 2)
    assert desk.machine.phase is Phase.RUNNING


def test_after_a_start_a_node_has_its_whole_lease_until_all_are_able_again() -> None:
    desk = surviving(4)
    pass_time(desk, SHORT_S + 0.1, speak=(1, 2, 3))
    desk.prepare(1, 2, 3)
    assert desk.machine.phase is Phase.RUNNING
    desk.able(1, 2)
    pass_time(desk, SHORT_S + 0.5, speak=(1, 2))
    assert len(lost(desk)) == 1
    desk.able(3)
    pass_time(desk, SHORT_S + 0.5, speak=(1, 2))
    assert len(lost(desk)) == 2


def test_a_coordinator_that_stood_still_loses_nobody_for_its_own_pause() -> None:
    desk = surviving()
    pass_time(desk, 1.0, speak=(1, 2, 3))
    desk.now += SHORT_S
    desk.give(Tick())
    pass_time(desk, 1.0, speak=(1, 2, 3))
    assert not lost(desk)


def test_an_agent_that_suspends_no_more_is_not_relied_on() -> None:
    desk = Desk(1, 2)
    desk.join(1)
    joined = desk.told_to(1)[0]
    assert isinstance(joined, msg.Joined)
    assert joined.suspend_s == desk.machine.members["n1#1"].suspend_s == LIMITS.suspend_of(1)
    desk.give(LinkOpened(2, "10.0.0.2", "10.0.0.9"))
    desk.give(Heard(2, msg.Join(NodeSpec(member="n2#1", host="n2", nproc=1), suspends=False)))
    assert desk.machine.members["n2#1"].suspend_s == 0.0


def test_without_survivors_no_agent_suspends_anything() -> None:
    desk = Desk(1, 2, survive=Survive.OFF)
    desk.join(1)
    joined = desk.told_to(1)[0]
    assert isinstance(joined, msg.Joined)
    assert joined.suspend_s == 0.0
