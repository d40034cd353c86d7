"""What processes have sent and received over TCP, as the kernel counts it. Bounded; knows nothing of workers.

recv() and send() are not counted as input and output in /proc/PID/io: a download into memory shows here alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Mapping

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
REQUEST_OF_ALL = 0x301
"""NLM_F_REQUEST | NLM_F_DUMP"""
NLMSG_ERROR, NLMSG_DONE = 2, 3
INET_DIAG_INFO = 2
CONNECTED = 1 << 1
"""The state ESTABLISHED."""

HEAD = struct.Struct("=IHHII")
"""nlmsghdr: length, type …"""
QUESTION = struct.Struct("=BBBBI48x")
"""inet_diag_req_v2: family, protocol, what else is wanted, padding, states; any address."""
INODE_AT, ANSWER_BYTES = 68, 72
"""In inet_diag_msg."""
ATTRIBUTE = struct.Struct("=HH")
MOVED = struct.Struct("=QQ")
MOVED_AT = 120
"""In tcp_info: bytes that the other side has acknowledged, and that were received."""

ANSWERS_MAX = 1024
"""Packets, each of some dozens of sockets."""
ANSWER_BYTES_MAX = 1 << 16
WAIT_S_MAX = 0.2
FILES_MAX = 4096
"""Open files of one process."""


def moved_bytes() -> dict[int, int]:
    """Sent and received by each connection of this machine, by the inode of its socket. Empty where that may not be known."""
    found: dict[int, int] = {}
    with (
        contextlib.suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as link,
    ):
        link.settimeout(WAIT_S_MAX)
        for family in (socket.AF_INET, socket.AF_INET6):
            question = QUESTION.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), 0, CONNECTED)
            link.send(HEAD.pack(HEAD.size + len(question), SOCK_DIAG_BY_FAMILY, REQUEST_OF_ALL, 0, 0) + question)
            for _ in range(ANSWERS_MAX):
                if _is_last(link.recv(ANSWER_BYTES_MAX), found):
                    break
    return found


def _is_last(packet: bytes, found: dict[int, int]) -> bool:
    at = 0
    while at + HEAD.size <= len(packet):
        length, kind, *_ = HEAD.unpack_from(packet, at)
        if kind in (NLMSG_ERROR, NLMSG_DONE) or length < HEAD.size:
            return True
        _note(packet[at + HEAD.size : at + length], found)
        at += _aligned(length)
    return False


def _note(answer: bytes, found: dict[int, int]) -> None:
    (inode,) = struct.unpack_from("=I", answer, INODE_AT)
    at = ANSWER_BYTES
    while at + ATTRIBUTE.size <= len(answer):
        length, kind = ATTRIBUTE.unpack_from(answer, at)
        if kind == INET_DIAG_INFO and length >= ATTRIBUTE.size + MOVED_AT + MOVED.size:
            found[inode] = sum(MOVED.unpack_from(answer, at + ATTRIBUTE.size + MOVED_AT))
        at += max(_aligned(length), ATTRIBUTE.size)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def of_processes(pids: Iterable[int], moved: Mapping[int, int]) -> dict[int, float]:
    """What each connection of these processes has moved, of what all have."""
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd")[:FILES_MAX]:
                with contextlib.suppress(OSError, ValueError):
                    kind, _, number = os.readlink(f"/proc/{pid}/fd/{name}").partition(":")
                    if kind == "socket":
                        inodes.add(int(number.strip("[]")))
    return {inode: moved[inode] for inode in inodes if inode in moved}
