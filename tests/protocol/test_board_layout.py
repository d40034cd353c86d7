"""The name of the channel, which agent and worker compute on their own."""

from __future__ import annotations

from pathlib import Path

from holdfast.protocol.train_contract import channel_name
from holdfast.supervisor.board import Board


def test_each_board_has_its_own_socket_and_worker_and_agent_name_the_same() -> None:
    """Also if two containers with one network give their agents the same process id and the same descriptor."""
    boards = [Board(2), Board(2)]
    try:
        by_agent = [channel_name(board.inode) for board in boards]
        paths = [board.address(1).rpartition("@")[0] for board in boards]
        assert [channel_name(Path(path).stat().st_ino) for path in paths] == by_agent
        assert len(set(by_agent)) == 2
        assert all(name.startswith(b"\0") for name in by_agent)
    finally:
        for board in boards:
            board.close()
