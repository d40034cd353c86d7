"""A coordinator that founds the job, and the witnesses that may know of an older start of it."""

from __future__ import annotations

import re

import pytest
from msgspec import structs

from holdfast.authority.voter_events import NoWitness, WitnessOpened
from holdfast.coordinator.coordinator_state import Heard, LinkOpened, Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.charter import CharterPosition
from holdfast.protocol.outcome import Outcome, OutcomeKind
from tests.authority.test_voters import WITNESS, Desk, charter_of, recalled
from tests.coordinator.coordinator_desk import LIMITS


def test_the_founder_waits_for_the_voters_of_an_older_job_and_continues_it() -> None:
    desk = Desk()
    recalled(desk, 1, 2, 3)
    desk.wait(19.9)
    assert desk.machine.phase is Phase.GATHERING
    assert re.search("n11, n12, n13 may still run it.* another --rdzv-id .* s at most", desk.waits())
    assert desk.voters.founded
    desk.wait(0.2)
    assert desk.machine.phase is Phase.PREPARING
    assert desk.machine.generation == 5
    assert desk.machine.budget.used == 1
    assert desk.voters.term == 5, "after every term that anybody knows"


def test_the_founder_waits_for_no_voters_that_have_ended() -> None:
    desk = Desk()
    desk.gone = {"n11#1", "n12#1"}
    recalled(desk, 1, 2, 3)
    assert not desk.voters.founded, "those that know the older job may join it"
    assert desk.voters.forms, "and tell it what they know before they do"
    desk.wait(LIMITS.fence_s + LIMITS.kill_s - 1.0)
    assert desk.machine.generation == 5


def test_a_founder_that_waits_no_longer_still_hears_of_a_newer_charter() -> None:
    desk = Desk()
    desk.gone = {"n11#1", "n12#1"}
    recalled(desk, 1, 2)
    newer = structs.replace(charter_of(11, 12, 13), led_from=None, position=CharterPosition(3, 10), restarts=2)
    desk.give(LinkOpened(3, "10.0.0.3", "10.0.0.1"))
    desk.give(Heard(3, msg.Recall(newer, 4, 1.0, 0.0)))
    desk.join(3)
    desk.wait(LIMITS.fence_s + LIMITS.kill_s)
    assert not desk.voters.forms
    assert desk.machine.budget.used == 2


def test_the_founder_asks_the_witnesses() -> None:
    desk = Desk()
    desk.give(WitnessOpened(9, WITNESS))
    assert isinstance(desk.to(9, msg.Poll)[-1], msg.Poll)
    older = charter_of(11, 12, 13)
    desk.give(Heard(9, msg.Polled(4, False, 1.0, False, "w#1", 0, older)))
    desk.join(1, 2, 3)
    desk.wait(LIMITS.elect_s - 1.1)
    assert desk.machine.phase is Phase.GATHERING
    desk.wait(0.2)
    assert desk.machine.generation == 5


def test_a_witness_of_a_job_that_is_over_votes_in_the_next_one() -> None:
    """It would hold no charter of an earlier term, and deny its vote to those that do."""
    desk = Desk(most=2)
    desk.give(WitnessOpened(9, WITNESS))
    over = structs.replace(charter_of(11, 12, 13), outcome=Outcome(kind=OutcomeKind.SUCCEEDED, exit_code=0))
    desk.give(Heard(9, msg.Polled(4, False, 99.0, False, "w#1", 0, over)))
    desk.join(1, 2)
    assert desk.machine.phase is Phase.PREPARING, "nothing is waited for"
    assert desk.machine.generation == 1
    assert desk.kept[-1].charter is not None
    assert desk.kept[-1].charter.position.term == 5


PLACES = [(WITNESS.host, WITNESS.port), ("n2", 7000)]
"""Where a witness may be."""


def test_the_founder_forms_nothing_before_its_witness_has_answered() -> None:
    desk = Desk(places=PLACES)
    desk.join(1, 2, 3)
    desk.give(NoWitness(*PLACES[1]))
    desk.wait(LIMITS.poll_s * 0.9)
    desk.give(WitnessOpened(9, WITNESS))
    desk.wait(LIMITS.poll_s * 0.9)
    assert desk.machine.phase is Phase.GATHERING
    older = charter_of(11, 12, 13)
    desk.give(Heard(9, msg.Polled(4, False, LIMITS.elect_s, False, "w#1", 0, older)))
    assert desk.machine.generation == 5, "it continues the older job"


def test_without_an_older_job_the_answer_ends_the_wait_at_once() -> None:
    desk = Desk(places=PLACES)
    desk.join(1, 2, 3)
    desk.give(WitnessOpened(9, WITNESS))
    desk.give(Heard(9, msg.Polled(0, False, 0.0, False, "w#1", 0, None)))
    assert desk.machine.phase is Phase.GATHERING
    desk.give(NoWitness(*PLACES[1]))
    assert desk.machine.phase is Phase.PREPARING


def test_where_no_witness_is_the_founder_does_not_wait() -> None:
    desk = Desk(places=PLACES)
    for place in PLACES:
        desk.give(NoWitness(*place))
    desk.join(1, 2, 3)
    assert desk.machine.phase is Phase.PREPARING


def test_the_wait_for_a_silent_witness_is_short() -> None:
    desk = Desk(places=PLACES)
    desk.join(1, 2, 3)
    desk.wait(LIMITS.poll_s * 0.9)
    desk.give(WitnessOpened(9, WITNESS))
    desk.wait(LIMITS.poll_s)
    assert desk.machine.phase is Phase.PREPARING


def test_a_founder_with_too_few_nodes_says_that_there_was_an_older_job() -> None:
    desk = Desk(least=3)
    desk.join(1)
    recalled(desk)
    desk.wait(LIMITS.say_interval_s)
    assert desk.waits().startswith("waiting: 1 of 3 nodes are here; this job was started before, and n")
    desk.wait(LIMITS.elect_s)
    assert "started before" not in desk.waits()


def test_the_founder_waits_while_a_witness_hears_the_lone_coordinator() -> None:
    desk = Desk()
    desk.give(WitnessOpened(9, WITNESS))
    lone = charter_of(11)
    desk.give(Heard(9, msg.Polled(4, False, 0.1, False, "w#1", 4, lone)))
    desk.join(1, 2, 3)
    desk.wait(LIMITS.elect_s - 1.0)
    assert desk.machine.phase is Phase.GATHERING
    assert (
        "reaches this job's coordinator, and this node does not: check the network between this node and n11"
        in desk.waits()
    )
    assert "at most" not in desk.waits()
    desk.give(Heard(9, msg.Polled(4, False, LIMITS.fence_s, False, "w#1", 0, lone)))
    desk.wait(LIMITS.elect_s)
    assert desk.machine.generation == 5


@pytest.mark.parametrize(("gone", "uid"), [({"n11#1", "n12#1"}, "n11#1"), ({"n12#1", "n13#1"}, "n1#1")])
def test_a_founder_is_the_same_job_only_where_nobody_else_can_continue_it(gone: set[str], uid: str) -> None:
    """The second time the older coordinator, on n11, may have gone on without the voters that ended."""
    desk = Desk()
    desk.gone = gone
    recalled(desk, 1, 2, 3)
    desk.wait(LIMITS.fence_s + LIMITS.kill_s)
    desk.prepare(1, 2, 3)
    assert desk.to(2, msg.Start)[0].job_uid == uid
