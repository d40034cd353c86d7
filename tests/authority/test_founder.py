"""A coordinator that founds the job, and the witnesses that may know of an older start of it."""

from __future__ import annotations

import re

import pytest
from msgspec import structs

from holdfast.authority.voter_events import NoWitness, WitnessOpened
from holdfast.coordinator.coordinator_events import Heard, LinkOpened
from holdfast.coordinator.world import Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.charter import CharterPosition
from holdfast.protocol.outcome import Outcome, OutcomeKind
from tests.authority.test_voters import WITNESS, VotersHarness, charter_of, reported
from tests.coordinator.coordinator_harness import LIMITS


def test_the_founder_waits_for_the_voters_of_an_older_job_and_continues_it() -> None:
    harness = VotersHarness()
    reported(harness, 1, 2, 3)
    harness.wait(19.9)
    assert harness.machine.phase is Phase.GATHERING
    assert re.search("n11, n12, n13 may still run it.* another --rdzv-id .* s at most", harness.waits())
    assert harness.voters.founded
    harness.wait(0.2)
    assert harness.machine.phase is Phase.PREPARING
    assert harness.machine.generation == 5
    assert harness.machine.budget.used == 1
    assert harness.voters.term == 5, "after every term that anybody knows"


def test_the_founder_waits_for_no_voters_that_have_ended() -> None:
    harness = VotersHarness()
    harness.gone = {"n11#1", "n12#1"}
    reported(harness, 1, 2, 3)
    assert not harness.voters.founded, "those that know the older job may join it"
    assert harness.voters.forms, "and tell it what they know before they do"
    harness.wait(LIMITS.fence_s + LIMITS.kill_s - 1.0)
    assert harness.machine.generation == 5


def test_a_founder_that_waits_no_longer_still_hears_of_a_newer_charter() -> None:
    harness = VotersHarness()
    harness.gone = {"n11#1", "n12#1"}
    reported(harness, 1, 2)
    newer = structs.replace(charter_of(11, 12, 13), led_from=None, position=CharterPosition(3, 10), restarts=2)
    harness.give(LinkOpened(3, "10.0.0.3", "10.0.0.1"))
    harness.give(Heard(3, msg.ReportCharter(newer, 4, 1.0, 0.0)))
    harness.join(3)
    harness.wait(LIMITS.fence_s + LIMITS.kill_s)
    assert not harness.voters.forms
    assert harness.machine.budget.used == 2


def test_the_founder_asks_the_witnesses() -> None:
    harness = VotersHarness()
    harness.give(WitnessOpened(9, WITNESS))
    assert isinstance(harness.to(9, msg.Poll)[-1], msg.Poll)
    older = charter_of(11, 12, 13)
    harness.give(Heard(9, msg.Polled(4, False, 1.0, False, "w#1", 0, older)))
    harness.join(1, 2, 3)
    harness.wait(LIMITS.elect_s - 1.1)
    assert harness.machine.phase is Phase.GATHERING
    harness.wait(0.2)
    assert harness.machine.generation == 5


def test_a_witness_of_a_job_that_is_over_votes_in_the_next_one() -> None:
    """It would hold no charter of an earlier term, and deny its vote to those that do."""
    harness = VotersHarness(most=2)
    harness.give(WitnessOpened(9, WITNESS))
    over = structs.replace(charter_of(11, 12, 13), outcome=Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0))
    harness.give(Heard(9, msg.Polled(4, False, 99.0, False, "w#1", 0, over)))
    harness.join(1, 2)
    assert harness.machine.phase is Phase.PREPARING, "nothing is waited for"
    assert harness.machine.generation == 1
    assert harness.kept[-1].charter is not None
    assert harness.kept[-1].charter.position.term == 5


PLACES = [(WITNESS.host, WITNESS.port), ("n2", 7000)]
"""Where a witness may be."""


def test_the_founder_forms_nothing_before_its_witness_has_answered() -> None:
    harness = VotersHarness(places=PLACES)
    harness.join(1, 2, 3)
    harness.give(NoWitness(*PLACES[1]))
    harness.wait(LIMITS.poll_s * 0.9)
    harness.give(WitnessOpened(9, WITNESS))
    harness.wait(LIMITS.poll_s * 0.9)
    assert harness.machine.phase is Phase.GATHERING
    older = charter_of(11, 12, 13)
    harness.give(Heard(9, msg.Polled(4, False, LIMITS.elect_s, False, "w#1", 0, older)))
    assert harness.machine.generation == 5, "it continues the older job"


def test_without_an_older_job_the_answer_ends_the_wait_at_once() -> None:
    harness = VotersHarness(places=PLACES)
    harness.join(1, 2, 3)
    harness.give(WitnessOpened(9, WITNESS))
    harness.give(Heard(9, msg.Polled(0, False, 0.0, False, "w#1", 0, None)))
    assert harness.machine.phase is Phase.GATHERING
    harness.give(NoWitness(*PLACES[1]))
    assert harness.machine.phase is Phase.PREPARING


def test_where_no_witness_is_the_founder_does_not_wait() -> None:
    harness = VotersHarness(places=PLACES)
    for place in PLACES:
        harness.give(NoWitness(*place))
    harness.join(1, 2, 3)
    assert harness.machine.phase is Phase.PREPARING


def test_the_wait_for_a_silent_witness_is_short() -> None:
    harness = VotersHarness(places=PLACES)
    harness.join(1, 2, 3)
    harness.wait(LIMITS.poll_s * 0.9)
    harness.give(WitnessOpened(9, WITNESS))
    harness.wait(LIMITS.poll_s)
    assert harness.machine.phase is Phase.PREPARING


def test_a_founder_with_too_few_nodes_says_that_there_was_an_older_job() -> None:
    harness = VotersHarness(least=3)
    harness.join(1)
    reported(harness)
    harness.wait(LIMITS.say_interval_s)
    assert harness.waits().startswith("waiting: 1 of 3 nodes are here; this job was started before, and n")
    harness.wait(LIMITS.elect_s)
    assert "started before" not in harness.waits()


def test_the_founder_waits_while_a_witness_hears_the_lone_coordinator() -> None:
    harness = VotersHarness()
    harness.give(WitnessOpened(9, WITNESS))
    lone = charter_of(11)
    harness.give(Heard(9, msg.Polled(4, False, 0.1, False, "w#1", 4, lone)))
    harness.join(1, 2, 3)
    harness.wait(LIMITS.elect_s - 1.0)
    assert harness.machine.phase is Phase.GATHERING
    assert (
        "reaches this job's coordinator, and this one does not: check the network between this node and n11"
        in harness.waits()
    )
    assert "at most" not in harness.waits()
    harness.give(Heard(9, msg.Polled(4, False, LIMITS.fence_s, False, "w#1", 0, lone)))
    harness.wait(LIMITS.elect_s)
    assert harness.machine.generation == 5


def test_the_founder_waits_while_a_voter_follows_a_coordinator() -> None:
    harness = VotersHarness()
    harness.give(LinkOpened(9, "10.0.0.9", "10.0.0.1"))
    follows = Heard(9, msg.ReportCharter(charter_of(11, 12, 13), 4, 0.0, LIMITS.fence_s + LIMITS.kill_s, follows=True))
    harness.give(follows)
    harness.join(1, 2, 3)
    for _ in range(20):
        harness.wait(LIMITS.poll_s)
        harness.give(follows)
    assert harness.machine.phase is Phase.GATHERING
    assert "another node reaches this job's coordinator" in harness.waits()
    harness.wait(LIMITS.fence_s + LIMITS.kill_s)
    assert harness.machine.generation == 5


@pytest.mark.parametrize(("gone", "uid"), [({"n11#1", "n12#1"}, "n11#1"), ({"n12#1", "n13#1"}, "n1#1")])
def test_a_founder_is_the_same_job_only_where_nobody_else_can_continue_it(gone: set[str], uid: str) -> None:
    """The second time the older coordinator, on n11, may have gone on without the voters that ended."""
    harness = VotersHarness()
    harness.gone = gone
    reported(harness, 1, 2, 3)
    harness.wait(LIMITS.fence_s + LIMITS.kill_s)
    harness.prepare(1, 2, 3)
    assert harness.to(2, msg.Start)[0].job_uid == uid
