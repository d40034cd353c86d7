"""Failed saves are counted once each and end the job only when there are too many in a row."""

from __future__ import annotations

from holdfast.core.errors import (
    SnapshotBusyError,
    SnapshotFolderError,
    SnapshotIncompleteError,
    SnapshotWriteError,
)
from holdfast.train.agreement import FailedSaves, RankFailure

NOTHING: list[list[str]] = []
FULL = [[SnapshotWriteError.code, "No space left"]]
NOT_COME = [[SnapshotIncompleteError.code, "rank 1: No space left"]]


def fail(saves: FailedSaves) -> RankFailure | None:
    saves.handed_over()
    return saves.reported([NOTHING, FULL], busy=True)


def test_so_many_in_a_row_are_fatal() -> None:
    saves = FailedSaves(3)
    said = [fail(saves) for _ in range(3)]
    assert [each is not None and each.fatal for each in said] == [False, False, True]
    assert said[0] is not None
    assert said[0].message == "rank 1: No space left\n1 of 3 failed saves in a row (failures_max=); training goes on."


def test_a_save_that_succeeds_ends_the_row() -> None:
    saves = FailedSaves(2)
    for _ in range(3):
        assert fail(saves) is not None
        saves.handed_over()
        assert saves.reported([NOTHING, NOTHING], busy=True) is None  # it may still fail
        assert saves.reported([NOTHING, NOTHING], busy=False) is None
    saves.handed_over()
    saves.reported([FULL, NOTHING], busy=False)
    last = fail(saves)
    assert last is not None
    assert last.fatal


def test_a_failure_that_rank_0_notices_later_counts_once() -> None:
    saves = FailedSaves(2)
    assert fail(saves) is not None
    assert saves.reported([NOT_COME, NOTHING], busy=False) is None
    saves.handed_over()
    both = saves.reported([NOT_COME, FULL], busy=False)
    assert both is not None
    assert both.code == SnapshotWriteError.code  # the cause, not what follows of it
    assert both.fatal


def test_ranks_that_never_came_are_a_failure_of_their_own() -> None:
    saves = FailedSaves(1)
    saves.handed_over()
    told = saves.reported([NOT_COME, NOTHING], busy=False)
    assert told is not None
    assert told.fatal


def test_trouble_between_saves_is_a_warning_and_another_job_is_the_end() -> None:
    saves = FailedSaves(1)
    between = saves.reported([FULL, NOTHING], busy=False)
    assert between is not None
    assert not between.fatal
    busy = FailedSaves(9).reported([[*FULL, [SnapshotBusyError.code, "taken over"]], NOTHING], busy=False)
    assert busy == RankFailure(SnapshotBusyError.code, "taken over", fatal=True)


def test_a_save_that_cannot_begin_counts() -> None:
    saves = FailedSaves(2)
    assert not saves.not_begun(SnapshotFolderError("vanished")).fatal
    assert saves.not_begun(SnapshotFolderError("vanished")).fatal
    assert FailedSaves(9).not_begun(SnapshotBusyError("taken over")).fatal
