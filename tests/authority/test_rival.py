"""A coordinator that hears its voters and too few nodes: it steps aside for a voter that asks for their votes."""

from __future__ import annotations

from holdfast.coordinator.coordinator_state import Heard, LinkClosed, Phase, StepDown
from holdfast.protocol.charter import Renewed
from holdfast.protocol.messages import Stopped
from tests.authority.test_voters import Desk
from tests.coordinator.coordinator_desk import LIMITS

ASIDE = StepDown("too few nodes reach it, and another node wants to be the coordinator", aside=True)


def short(least: int) -> Desk:
    """Five nodes train, at least so many may, and the links 4 and 5 break."""
    desk = Desk(least=least, most=5).started(1, 2, 3, 4, 5)
    desk.silent |= {4, 5}
    desk.give(LinkClosed(4, "reset"))
    desk.give(LinkClosed(5, "reset"))
    for link in (1, 2, 3):
        desk.give(Heard(link, Stopped(1)))
    return desk


def stand(desk: Desk, seconds: float, every_s: float = 2.0) -> None:
    """Node 4 asks node 2 for its vote, again and again."""
    until = desk.now + seconds
    while desk.now < until and not desk.machine.stepped_down:
        desk.give(Heard(2, Renewed(desk.voters.term, 0, desk.voters.charter.position, rival=True)))
        desk.wait(every_s)


def test_it_steps_aside_for_one_that_stands_for_a_lease() -> None:
    desk = short(least=4)
    assert desk.machine.phase is Phase.GATHERING
    stand(desk, LIMITS.lease_s - 1.0)
    assert not desk.machine.stepped_down, "there may have been an election just before"
    stand(desk, LIMITS.lease_s)
    assert desk.commands[-1] == ASIDE


def test_it_stays_while_it_has_enough_nodes() -> None:
    desk = short(least=3)
    stand(desk, 3 * LIMITS.lease_s)
    assert not desk.machine.stepped_down


def test_one_that_asks_now_and_then_does_not_stand() -> None:
    desk = short(least=4)
    stand(desk, 5 * LIMITS.lease_s, every_s=LIMITS.lease_s + 1.0)
    assert not desk.machine.stepped_down


def test_it_stays_while_nobody_asks() -> None:
    desk = short(least=4)
    desk.wait(5 * LIMITS.lease_s)
    assert not desk.machine.stepped_down
