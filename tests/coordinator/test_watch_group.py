"""When a process group does not come to stand: who is suspected, and what is told."""

from __future__ import annotations

from holdfast.coordinator.hang_detector import HangOver
from holdfast.protocol.rank_progress import HangKind, Stage
from tests.coordinator.watch_desk import MOVING, PAUSED, STUCK, Hall


def test_a_process_group_that_does_not_come_to_stand_is_told_with_who_has_not_come() -> None:
    hall = Hall(finding=STUCK, timeout_s=0.0)
    hall.now = 20.0
    hall.progress(Stage.MEETING, ranks="a")
    assert hall.wait(59.0) == []
    report = hall.report(10.0)
    assert hall.store, "the nodes try to reach the store"
    assert report.text.splitlines()[0] == "rank 0 waits in init_process_group for 64 s; rank 1 on b has not come"
    assert (report.finding.code, report.finding.culprits, report.finding.kind) == ("HF245", (1,), HangKind.HUNG)


def test_the_node_that_cannot_reach_the_store_is_told() -> None:
    hall = Hall(finding=STUCK, reach=("b cannot reach a:29500: timed out",))
    hall.progress(Stage.MEETING)
    report = hall.report(70.0)
    assert report.text.splitlines()[:2] == [
        "ranks 0, 1 wait in init_process_group for 64 s",
        "b cannot reach a:29500: timed out (firewall? wrong address?)",
    ]
    assert report.finding.code == "HF245"


def test_who_works_before_it_comes_is_left_in_peace() -> None:
    """Rank 1 unpacks a data set before it asks for the process group."""
    hall = Hall(finding=MOVING)
    hall.progress(Stage.MEETING, ranks="a")
    assert hall.wait(3000.0) == []


def test_a_rank_that_comes_further_is_progress() -> None:
    hall = Hall(finding=STUCK)
    hall.progress(Stage.MEETING)
    hall.wait(50.0)
    hall.progress(Stage.GROUPING, ranks="a")
    hall.wait(50.0)
    assert hall.looks == []
    hall.progress(Stage.READY)
    hall.wait(59.0)
    assert hall.looks == [], "before the first step there is no hurry"


def test_who_is_waited_for_and_pauses_may_be_slow() -> None:
    hall = Hall(finding=PAUSED, report_s=15.0)
    hall.progress(Stage.MEETING, ranks="a")
    assert hall.wait(59.0) == []
    hall.report(8.0)


def test_the_group_stands_at_last() -> None:
    hall = Hall(finding=STUCK)
    hall.progress(Stage.GROUPING)
    hall.wait(100.0)
    hall.progress(Stage.READY)
    assert isinstance(hall.orders[-1], HangOver)
