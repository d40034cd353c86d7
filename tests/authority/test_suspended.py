"""A successor of a silent coordinator lets suspended workers continue, without the nodes that have not come."""

from __future__ import annotations

from msgspec import structs

from holdfast.coordinator.coordinator_state import Heard, LinkClosed, Phase
from holdfast.protocol import messages as msg
from holdfast.protocol.charter import Charter, LedFrom, Succession
from tests.authority.test_voters import Desk, charter_of, node
from tests.coordinator.coordinator_desk import LIMITS

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


def successor(charter: Charter, *, least: int = 1) -> Desk:
    """On n2. Nobody can prove that the old coordinator's process has ended."""
    desk = Desk(Succession(2, charter, silent_s=SILENT_S), least=least, most=4, own=2)
    desk.gone.clear()
    return desk


def comes(desk: Desk, *links: int, able: bool = True) -> None:
    for link in links:
        running = msg.Running(4, link - 1, 4, 1, (), None, (0,) if able else ())
        desk.join(link, last=4, running=running)


def past(desk: Desk, age_s: float) -> None:
    """Until the old coordinator has been silent for so long."""
    desk.wait(100.0 + age_s - SILENT_S - desk.now)


def test_without_the_old_coordinators_node_they_continue_when_it_must_be_suspended() -> None:
    desk = successor(suspended())
    comes(desk, 2, 3, 4)
    past(desk, SHORT_S - 0.01)
    assert desk.machine.phase is Phase.GATHERING
    past(desk, SHORT_S + 0.01)
    assert desk.machine.phase is Phase.REGROUPING
    assert [desk.to(link, msg.Resume) for link in (2, 3, 4)] == [[msg.Resume(4)]] * 3
    (regroup,) = desk.to(3, msg.Regroup)
    assert isinstance(regroup, msg.Regroup)
    assert (regroup.assign.generation, regroup.assign.world_size) == (5, 3)
    assert regroup.text == "n1 was lost: it stopped answering together with the coordinator; 3 ranks go on"


def test_for_another_node_that_is_missing_they_wait_until_halfway_to_their_own_end() -> None:
    desk = successor(suspended())
    comes(desk, 2, 3)
    past(desk, HALFWAY_S - 0.01)
    assert desk.machine.phase is Phase.GATHERING
    past(desk, HALFWAY_S + 0.01)
    assert desk.machine.phase is Phase.REGROUPING
    (regroup,) = desk.to(3, msg.Regroup)
    assert isinstance(regroup, msg.Regroup)
    assert regroup.assign.world_size == 2


def test_one_that_comes_later_has_to_stop_what_it_runs() -> None:
    desk = successor(suspended())
    comes(desk, 2, 3)
    past(desk, HALFWAY_S + 0.01)
    comes(desk, 4)
    assert desk.to(4, msg.Abandon) == [msg.Abandon(4)]


def test_the_old_coordinators_node_may_come_in_time() -> None:
    desk = successor(suspended())
    comes(desk, 2, 3, 4)
    comes(desk, 1)
    assert desk.machine.phase is Phase.RUNNING
    assert not desk.to(3, msg.Regroup)


def test_a_silent_coordinator_is_given_its_fence() -> None:
    desk = Desk(Succession(2, charter_of(), silent_s=1.0), least=2, own=2)
    desk.join(2, 3, last=4)
    desk.wait(LIMITS.fence_s + LIMITS.kill_s - 1.0 - 0.1)
    assert desk.machine.phase is Phase.GATHERING
    desk.wait(0.2)
    assert desk.machine.phase is Phase.PREPARING


def test_where_not_all_are_suspended_the_fence_is_waited_for() -> None:
    desk = successor(suspended(short_lease_s=0.0))
    comes(desk, 2, 3, 4)
    past(desk, LIMITS.fence_s + 0.4)
    assert desk.machine.phase is Phase.GATHERING
    assert not desk.to(3, msg.Resume)


def test_a_part_that_has_ended_meanwhile_cannot_continue() -> None:
    desk = successor(suspended())
    comes(desk, 2, 3)
    desk.join(4, last=4)
    past(desk, LIMITS.fence_s)
    assert desk.machine.phase is Phase.GATHERING
    assert desk.to(3, msg.Abandon) == [msg.Abandon(4)]


def test_too_few_that_are_left_wait_for_the_others() -> None:
    """The old coordinator may only have stood still."""
    desk = successor(suspended(), least=4)
    comes(desk, 2, 3, 4)
    past(desk, LIMITS.fence_s)
    assert desk.machine.phase is Phase.GATHERING
    assert not desk.to(3, msg.Stop)
    comes(desk, 1)
    assert desk.machine.phase is Phase.RUNNING


def test_workers_that_have_left_ht_survive_do_not_go_on() -> None:
    desk = successor(suspended())
    comes(desk, 2, 3)
    comes(desk, 4, able=False)
    past(desk, LIMITS.fence_s)
    assert desk.machine.phase is Phase.GATHERING


def test_the_charter_says_when_all_workers_would_be_suspended() -> None:
    desk = Desk(most=3).started(1, 2, 3)
    assert desk.voters.charter.sizes == (1, 1, 1)
    assert desk.voters.charter.short_lease_s == 0.0
    for link in (1, 2, 3):
        desk.give(Heard(link, msg.Able(1, (0,))))
    assert desk.voters.charter.short_lease_s == SHORT_S
    desk.give(LinkClosed(3, "lost"))
    assert desk.machine.phase is Phase.REGROUPING
    assert desk.voters.charter.short_lease_s == 0.0, "the workers leave the generation in which they were suspended"
