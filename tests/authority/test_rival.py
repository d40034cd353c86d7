"""A coordinator that hears its voters and too few nodes: it steps aside for a voter that asks for their votes."""

from __future__ import annotations

from holdfast.coordinator.coordinator_state import Heard, LinkClosed, Phase, StepDown
from holdfast.protocol.charter import Renewed
from holdfast.protocol.messages import Stopped
from tests.authority.test_voters import VotersHarness
from tests.coordinator.coordinator_harness import LIMITS

ASIDE = StepDown("too few nodes reach it, and another node wants to be the coordinator", aside=True)


def short(least: int) -> VotersHarness:
    """Five nodes train, at least so many may, and the links 4 and 5 break."""
    harness = VotersHarness(least=least, most=5).started(1, 2, 3, 4, 5)
    harness.silent |= {4, 5}
    harness.give(LinkClosed(4, "reset"))
    harness.give(LinkClosed(5, "reset"))
    for link in (1, 2, 3):
        harness.give(Heard(link, Stopped(1)))
    return harness


def stand(harness: VotersHarness, seconds: float, every_s: float = 2.0) -> None:
    """Node 4 asks node 2 for its vote, again and again."""
    until = harness.now + seconds
    while harness.now < until and not harness.machine.stepped_down:
        harness.give(Heard(2, Renewed(harness.voters.term, 0, harness.voters.charter.position, rival=True)))
        harness.wait(every_s)


def test_it_steps_aside_for_one_that_stands_for_a_lease() -> None:
    harness = short(least=4)
    assert harness.machine.phase is Phase.GATHERING
    stand(harness, LIMITS.lease_s - 1.0)
    assert not harness.machine.stepped_down, "there may have been an election just before"
    stand(harness, LIMITS.lease_s)
    assert harness.commands[-1] == ASIDE


def test_it_stays_while_it_has_enough_nodes() -> None:
    harness = short(least=3)
    stand(harness, 3 * LIMITS.lease_s)
    assert not harness.machine.stepped_down


def test_one_that_asks_now_and_then_does_not_stand() -> None:
    harness = short(least=4)
    stand(harness, 5 * LIMITS.lease_s, every_s=LIMITS.lease_s + 1.0)
    assert not harness.machine.stepped_down


def test_it_stays_while_nobody_asks() -> None:
    harness = short(least=4)
    harness.wait(5 * LIMITS.lease_s)
    assert not harness.machine.stepped_down
