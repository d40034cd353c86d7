"""The pipe of the board: what workers report, and what anything else writes there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from holdfast.core import board as layout
from holdfast.runtime.workers.board import Board


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board(3)
    yield board
    board.close()


def write(board: Board, raw: bytes) -> None:
    """As a worker does: by the number that the board holds."""
    path = board.address(0).rpartition("@")[0]
    with open(path, "rb") as file:
        number = int.from_bytes(os.pread(file.fileno(), 8, layout.RAISED * layout.WORD_BYTES), "little")
    with open(f"{os.path.dirname(path)}/{number}", "wb", buffering=0) as pipe:
        pipe.write(raw)


def report(local_rank: int) -> bytes:
    return layout.slot(local_rank).to_bytes(layout.REPORT_BYTES, "little")


def test_each_report_is_read_once(board: Board) -> None:
    assert board.raised() == set()
    write(board, report(2) + report(0) + report(2))
    assert board.raised() == {0, 2}
    assert board.raised() == set()


@pytest.mark.parametrize("raw", [b"\0" * 4, b"\xff" * 4, report(3), b"!", b"#" * 60_000])
def test_what_is_no_slot_of_a_worker_is_ignored(board: Board, raw: bytes) -> None:
    write(board, raw)
    seen = set[int]()
    for _ in range(1_000):
        seen |= board.raised()
    assert seen == set()
    write(board, report(1))
    assert board.raised() == {1}
