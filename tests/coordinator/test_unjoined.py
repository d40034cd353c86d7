"""Links on which nobody joins, and members that never end: neither may stay for ever."""

from __future__ import annotations

from holdfast.coordinator.coordinator_state import LinkOpened, Phase
from holdfast.coordinator.membership import LINKS_PER_ADDRESS_MAX
from holdfast.protocol.messages import Assign, Join, Running
from holdfast.protocol.policy import NodeSpec, Tick
from tests.coordinator.coordinator_desk import LIMITS, Desk, running


def test_a_link_that_does_not_join_is_dropped() -> None:
    desk = running()
    desk.give(LinkOpened(9, "10.0.0.9", "10.0.0.1"))
    desk.wait(LIMITS.unjoined_s - 1)
    assert desk.dropped == []
    desk.wait(2)
    assert desk.dropped == [9]
    assert len(desk.machine.members) == 2


def test_so_is_one_beside_a_claim_that_waits() -> None:
    """Somebody who waits for a rank that another holds has asked to join: it is not dropped."""
    desk = Desk(fixed_ranks=True)
    for link, name in ((1, "a#1"), (2, "b#1")):
        desk.give(LinkOpened(link, "10.0.0.1", "10.0.0.9"))
        desk.say(link, Join(NodeSpec(member=name, host=name[0], nproc=1, node_rank=0)))
    desk.give(LinkOpened(3, "10.0.0.9", "10.0.0.1"))
    desk.now += LIMITS.lease_s / 2  # nobody speaks
    desk.give(Tick())
    assert not desk.dropped
    assert desk.machine.next_deadline() is not None


def test_the_local_link_stays() -> None:
    desk = Desk()
    desk.give(LinkOpened(1, "127.0.0.1", "127.0.0.1", local=True))
    desk.wait(LIMITS.unjoined_s * 2)
    assert desk.dropped == []


def test_one_address_has_a_bounded_number_of_them() -> None:
    desk = Desk()
    for link in range(LINKS_PER_ADDRESS_MAX + 3):
        desk.give(LinkOpened(link, "10.0.0.66", "10.0.0.1"))
    assert desk.dropped == [0, 1, 2], "the oldest go"
    desk.give(LinkOpened(99_999, "10.0.0.7", "10.0.0.1"))
    assert len(desk.dropped) == 3, "others may come"


def test_workers_of_an_earlier_generation_are_not_waited_for_for_ever() -> None:
    desk = Desk(least=1, most=2)
    desk.give(LinkOpened(1, "10.0.0.1", "10.0.0.9"))
    desk.say(1, Join(NodeSpec(member="n1#1", host="n1", nproc=1), 7, 0.0, Running(7, 0, 2, 0)))
    desk.join(2)
    desk.wait(LIMITS.stop_grace_s + LIMITS.stop_slack_s + LIMITS.settle_s + 2)
    assert 1 in desk.dropped
    assert isinstance(desk.last(2), Assign), "the others go on"
    assert desk.machine.phase is Phase.PREPARING
