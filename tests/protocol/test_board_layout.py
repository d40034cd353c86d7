"""The name of the channel, which agent and worker compute on their own."""

from __future__ import annotations

from holdfast.protocol.board_layout import channel_name


def test_all_workers_of_a_board_name_the_same_abstract_socket() -> None:
    names = {channel_name(f"/proc/71/fd/{9}@{slot}") for slot in (16, 32)}
    assert names == {b"\0holdfast/proc/71/fd/9"}


def test_each_board_has_its_own_socket() -> None:
    assert channel_name("/proc/71/fd/9@16") != channel_name("/proc/71/fd/10@16")
