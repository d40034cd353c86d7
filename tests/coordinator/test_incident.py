"""One loss as an object: what belongs to it, what evidence changes, and when another one begins."""

from __future__ import annotations

from dataclasses import fields

from msgspec import structs

from holdfast.coordinator.incident import Incident, Incidents
from holdfast.protocol.outcome import Failure, Verdict
from tests.coordinator.test_regrouping import all_can_go_on

BARE = Failure(rank=2, local_rank=0, host="b", pid=7, exit_code=-9)
READ = structs.replace(BARE, message="killed")
OTHER = structs.replace(BARE, rank=3, pid=8)
VERDICT = Verdict(code="HF200", cause="rank 2 was killed")


def hit(*failures: Failure) -> Incidents:
    """These failures were reported, and their evidence was not."""
    incidents = Incidents()
    assert incidents.failed(failures, evidence_follows=True)
    return incidents


def test_evidence_replaces_the_report_of_the_same_process() -> None:
    incidents = hit(BARE, OTHER)
    assert not incidents.failed([READ], evidence_follows=False), "it is no new failure"
    assert incidents.newest.failures == [READ, OTHER]
    assert incidents.newest.unread == {(3, 8)}


def test_a_loss_before_the_verdict_belongs_to_the_same_incident() -> None:
    incidents = hit(BARE)
    before = incidents.newest
    incidents.lost("c", "silent", range(4, 6))
    assert incidents.newest is before
    assert (before.lost_nodes, before.lost_hosts, before.lost_ranks) == (["c (silent)"], ["c"], [4, 5])


def test_a_loss_after_the_verdict_is_another_incident_and_is_covered_by_the_charge_for_the_first() -> None:
    incidents = hit(BARE)
    first = incidents.newest
    first.read(READ)
    first.charged, first.verdict = True, VERDICT
    assert incidents.failed([OTHER], evidence_follows=False)
    second = incidents.newest
    assert (first.failures, second.failures) == ([READ], [OTHER])
    assert second.charged
    assert second.charged_before
    assert second.verdict is None


def test_a_generation_that_is_formed_before_all_can_go_on_has_the_same_incident_without_its_verdict() -> None:
    incidents = hit(BARE)
    first = incidents.newest
    incidents.carried_on()
    assert incidents.newest is first, "its evidence may still come, and then counts for both generations"
    first.read(READ)
    first.charged, first.verdict = True, VERDICT
    incidents.carried_on()
    incidents.failed([OTHER], evidence_follows=False)
    assert incidents.newest.failures == [READ, OTHER]
    assert incidents.newest.charged
    assert not incidents.newest.charged_before
    assert first.failures == [READ], "nothing is shared with the generation before"


def test_replacements_that_fail_are_charged_and_leave_the_evidence_to_the_loss_itself() -> None:
    incidents = hit(BARE)
    first = incidents.newest
    first.charged = True
    incidents.replacements_failed([OTHER])
    assert incidents.newest.failures == [BARE, OTHER]
    assert not incidents.newest.charged
    assert first.awaits([READ])
    first.read(READ)
    assert incidents.newest.failures == [BARE, OTHER]
    incidents.newest.check_invariants()


def test_evidence_of_an_earlier_loss_makes_that_one_the_reason_and_keeps_the_nodes_lost_since() -> None:
    incidents = hit(BARE)
    first = incidents.newest
    incidents.over()
    incidents.lost("c", "silent", [4])
    first.read(structs.replace(READ, exit_code=1))
    assert first.own_fault == "rank 2 exited"
    incidents.reopen(first)
    assert incidents.newest is first
    assert first.lost_nodes == ["c (silent)"]


def test_two_worlds_share_nothing_that_changes() -> None:
    harness = all_can_go_on()
    harness.kill_worker(1, 0)
    harness.kill_worker(1, 1)
    newest = harness.machine.world
    assert newest is not None
    past = [each.world for each in harness.machine._regrouping.past.values()]
    assert len(past) == 2
    for before in past:
        for field in fields(newest):
            value = getattr(newest, field.name)
            assert value is not getattr(before, field.name) or not isinstance(value, list | dict | set), field.name


def test_only_a_death_by_a_signal_is_no_fault_that_a_replacement_would_repeat() -> None:
    assert Incident([BARE]).own_fault == ""
    assert Incident([structs.replace(BARE, exit_code=1)]).own_fault == "rank 2 exited"
    assert Incident([structs.replace(BARE, out_of_memory=True)]).own_fault == "rank 2 ran out of memory"
