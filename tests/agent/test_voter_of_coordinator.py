"""The voter in the process of a coordinator that lives on, or has stepped aside."""

from __future__ import annotations

from holdfast.agent import voter as vote
from holdfast.agent.voter import VoterState
from tests.agent.test_voter import FOUNDER, LIMITS, Desk, charter


def test_one_that_stepped_aside_lets_the_others_stand_first() -> None:
    desk = Desk("abc", charter("abc"))
    desk.give("a", vote.Unlinked(FOUNDER, closed=False, local=True, aside=True))
    assert desk.voters["a"].next_deadline() == desk.now + LIMITS.lease_s


def test_it_does_not_stand_once_a_coordinator_that_lives_on_has_left_it_out() -> None:
    """Its agent hung up on the coordinator, which slept, and goes on without this node."""
    desk = Desk("abc", charter("abc"))
    desk.give("a", vote.Unlinked(FOUNDER, closed=False))
    desk.wait(0.2)
    voter = desk.voters["a"]
    assert voter.stage is VoterState.ASKING
    desk.renew("a", charter("bcd", number=2))
    voter.check_invariants()
    assert (voter.stage, voter.next_deadline()) == (VoterState.ALONE, None)
