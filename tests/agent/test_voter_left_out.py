"""Voters that are not among those of the newest charter, or do not stand for a while."""

from __future__ import annotations

from holdfast.agent import voter as vote
from holdfast.agent.voter import VoterState
from holdfast.protocol.charter import CharterPosition, Poll
from tests.agent.test_voter import FOUNDER, LIMITS, VoterHarness, charter, polled, seat


def test_one_that_stepped_aside_lets_the_others_stand_first() -> None:
    harness = VoterHarness("abc", charter("abc"))
    harness.give("a", vote.Unlinked(FOUNDER, closed=False, local=True, aside=True))
    assert harness.voters["a"].next_deadline() == harness.now + LIMITS.lease_s


def test_it_does_not_stand_once_a_coordinator_that_lives_on_has_left_it_out() -> None:
    """Its agent hung up on the coordinator, which slept, and goes on without this node."""
    harness = VoterHarness("abc", charter("abc"))
    harness.give("a", vote.Unlinked(FOUNDER, closed=False))
    harness.wait(0.2)
    voter = harness.voters["a"]
    assert voter.stage is VoterState.ASKING
    harness.renew("a", charter("bcd", number=2))
    voter.check_invariants()
    assert (voter.stage, voter.next_deadline()) == (VoterState.ALONE, None)


def test_it_gives_up_when_it_learns_of_a_charter_that_has_left_it_out() -> None:
    """The network was divided: the other side went on, and lost its coordinator. Only a founder can continue that."""
    harness = VoterHarness("abc", charter("abc"))
    harness.renew("c", charter("b", number=4))
    harness.lose("a", "c", closed=False)
    del harness.voters["b"]
    harness.wait(0.2)
    assert harness.voters["a"].elects(harness.now)
    harness.ask(to="c")
    harness.answer()
    assert harness.voters["a"].elects(harness.now), "with the third one, if it lives"
    poll = Poll(2, seat("a"), CharterPosition(FOUNDER, 1))
    harness.give("a", vote.PollFailed("b", poll, gone=True))
    assert not harness.voters["a"].elects(harness.now)
    told = harness.voters["a"].charter_report(harness.now, "d", 1, founded=True, forms=True)
    assert told is not None
    assert (told.charter, told.patience_s) == (charter("b", number=4), 0.0)
    assert not polled(harness, "a", "d", 9, CharterPosition(0, 0)).granted
