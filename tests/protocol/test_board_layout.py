"""The name of the channel, which agent and worker compute on their own."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.protocol import board_layout
from holdfast.protocol.board_layout import channel_name
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


def test_each_word_of_a_slot_has_one_meaning() -> None:
    """Two changes on two branches may take the same free word, and no line of theirs conflicts."""
    text = Path(board_layout.__file__).read_text().partition("# A slot's words")[2]
    others = ("_FD", "_SIGNAL", "_BYTES", "_MAX")  # no words of a slot
    found = [(int(number), name) for name, number in re.findall(r"^([A-Z_]+) = (\d+)$", text, re.MULTILINE)]
    words = [each for each in found if not each[1].endswith(others)]
    assert len({number for number, _ in words}) == len(words) > 20, sorted(words)
    assert max(words)[0] < board_layout.SLOT_WORDS
