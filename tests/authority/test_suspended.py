"""A successor of a silent coordinator lets suspended workers continue, without the nodes that have not come."""

from __future__ import annotations

from msgspec import structs

from holdfast.coordinator.coordinator_events import Heard, LinkClosed
from holdfast.coordinator.world import Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.charter import Charter, LedFrom, Succession
from tests.authority.test_voters import VotersHarness, charter_of, node
from tests.coordinator.coordinator_harness import LIMITS

SHORT_S = LIMITS.short_lease_of(LIMITS.suspend_of(4))
SILENT_S = 2.4
"""For how long the old coordinator has been silent when its successor begins."""
HALFWAY_S = (SHORT_S + LIMITS.lease_s - LIMITS.renew_interval_s) / 2


def suspended(*, short_lease_s: float = SHORT_S) -> Charter:
    """Four nodes of one rank each; the old coordinator is on the first."""
    nodes = ("n1#1", "n2#1", "n3#1", "n4#1")
    led = LedFrom(node(1), 0, (0,))
    return structs.replace(
        charter_of(), nodes=nodes, sizes=(1, 1, 1, 1), led_from=led, leader="n1#1", short_lease_s=short_lease_s
    )


def successor(charter: Charter, *, least: int = 1) -> VotersHarness:
    """On n2. Nobody can prove that the old coordinator's process has ended."""
    harness = VotersHarness(Succession(2, charter, silent_s=SILENT_S), least=least, most=4, own=2)
    harness.gone.clear()
    return harness


def comes(harness: VotersHarness, *links: int, can_go_on: bool = True) -> None:
    for link in links:
        running = msg.Running(4, link - 1, 4, 1, (), None, (0,) if can_go_on else ())
        harness.join(link, last=4, running=running)


def past(harness: VotersHarness, age_s: float) -> None:
    """Until the old coordinator has been silent for so long."""
    harness.wait(100.0 + age_s - SILENT_S - harness.now)


def test_without_the_old_coordinators_node_they_continue_when_it_must_be_suspended() -> None:
    harness = successor(suspended())
    comes(harness, 2, 3, 4)
    past(harness, SHORT_S - 0.01)
    assert harness.machine.phase is Phase.GATHERING
    past(harness, SHORT_S + 0.01)
    assert harness.machine.phase is Phase.REGROUPING
    assert [harness.to(link, msg.Resume) for link in (2, 3, 4)] == [[msg.Resume(4)]] * 3
    (regroup,) = harness.to(3, msg.Regroup)
    assert isinstance(regroup, msg.Regroup)
    assert (regroup.assign.generation, regroup.assign.world_size) == (5, 3)
    assert regroup.text == "n1 was lost: it stopped answering together with the coordinator; 3 ranks go on"


def test_for_another_node_that_is_missing_they_wait_until_halfway_to_their_own_end() -> None:
    harness = successor(suspended())
    comes(harness, 2, 3)
    past(harness, HALFWAY_S - 0.01)
    assert harness.machine.phase is Phase.GATHERING
    past(harness, HALFWAY_S + 0.01)
    assert harness.machine.phase is Phase.REGROUPING
    (regroup,) = harness.to(3, msg.Regroup)
    assert isinstance(regroup, msg.Regroup)
    assert regroup.assign.world_size == 2


def test_one_that_comes_later_has_to_stop_what_it_runs() -> None:
    harness = successor(suspended())
    comes(harness, 2, 3)
    past(harness, HALFWAY_S + 0.01)
    comes(harness, 4)
    assert harness.to(4, msg.Abandon) == [msg.Abandon(4)]


def test_the_old_coordinators_node_may_come_in_time() -> None:
    harness = successor(suspended())
    comes(harness, 2, 3, 4)
    comes(harness, 1)
    assert harness.machine.phase is Phase.RUNNING
    assert not harness.to(3, msg.Regroup)


def test_a_silent_coordinator_is_given_its_fence() -> None:
    harness = VotersHarness(Succession(2, charter_of(), silent_s=1.0), least=2, own=2)
    harness.join(2, 3, last=4)
    harness.wait(LIMITS.fence_s + LIMITS.kill_s - 1.0 - 0.1)
    assert harness.machine.phase is Phase.GATHERING
    harness.wait(0.2)
    assert harness.machine.phase is Phase.PREPARING


def test_where_not_all_are_suspended_the_fence_is_waited_for() -> None:
    harness = successor(suspended(short_lease_s=0.0))
    comes(harness, 2, 3, 4)
    past(harness, LIMITS.fence_s + 0.4)
    assert harness.machine.phase is Phase.GATHERING
    assert not harness.to(3, msg.Resume)


def test_a_part_that_has_ended_meanwhile_cannot_continue() -> None:
    harness = successor(suspended())
    comes(harness, 2, 3)
    harness.join(4, last=4)
    past(harness, LIMITS.fence_s)
    assert harness.machine.phase is Phase.GATHERING
    assert harness.to(3, msg.Abandon) == [msg.Abandon(4)]


def test_too_few_that_are_left_wait_for_the_others() -> None:
    """The old coordinator may only have stood still."""
    harness = successor(suspended(), least=4)
    comes(harness, 2, 3, 4)
    past(harness, LIMITS.fence_s)
    assert harness.machine.phase is Phase.GATHERING
    assert not harness.to(3, msg.Stop)
    comes(harness, 1)
    assert harness.machine.phase is Phase.RUNNING


def test_workers_that_have_left_ht_survive_do_not_go_on() -> None:
    harness = successor(suspended())
    comes(harness, 2, 3)
    comes(harness, 4, can_go_on=False)
    past(harness, LIMITS.fence_s)
    assert harness.machine.phase is Phase.GATHERING


def test_the_charter_says_when_all_workers_would_be_suspended() -> None:
    harness = VotersHarness(most=3).started(1, 2, 3)
    assert harness.voters.charter.sizes == (1, 1, 1)
    assert harness.voters.charter.short_lease_s == 0.0
    for link in (1, 2, 3):
        harness.give(Heard(link, msg.CanGoOn(1, (0,))))
    assert harness.voters.charter.short_lease_s == SHORT_S
    harness.give(LinkClosed(3, "lost"))
    assert harness.machine.phase is Phase.REGROUPING
    assert harness.voters.charter.short_lease_s == 0.0, "the workers leave the generation in which they were suspended"
