"""Messages with descriptors, short and long; what ends a conversation and what is refused."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest

from holdfast import seqpacket

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Neither end blocks."""
    ours, theirs = seqpacket.pair()
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_stay_with_their_messages_however_long_these_are(pair: Pair) -> None:
    ours, theirs = pair
    before = open_descriptors()
    out = seqpacket.Outbox()
    for number, (size, descriptors) in enumerate([(10, 1), (500_000, 2), (0, 0), (70_000, 1)]):
        fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(descriptors)]
        out.add({"number": number, "text": "x" * size}, fds)
        for fd in fds:
            os.close(fd)
    seen = []
    while out or len(seen) < 4:
        out.flush(ours)
        received = seqpacket.receive(theirs)
        assert received is not None
        message, fds = received
        seen.append((message["number"], len(message["text"]), len(fds)))
        for fd in fds:
            assert os.readlink(f"/proc/self/fd/{fd}") == "/dev/null"
            assert not os.get_inheritable(fd)
            os.close(fd)
    assert seen == [(0, 10, 1), (1, 500_000, 2), (2, 0, 0), (3, 70_000, 1)]
    assert open_descriptors() == before


def test_what_does_not_fit_now_is_sent_later_and_in_order(pair: Pair) -> None:
    ours, theirs = pair
    out = seqpacket.Outbox()
    for number in range(100):
        out.add({"number": number, "text": "x" * 30_000})
    out.flush(ours)
    assert out
    for number in range(100):
        out.flush(ours)
        received = seqpacket.receive(theirs)
        assert received is not None
        assert received[0]["number"] == number
    with pytest.raises(BlockingIOError):
        seqpacket.receive(theirs)


def test_what_was_sent_before_the_end_still_arrives(pair: Pair) -> None:
    """A side that ends without having read all resets the connection."""
    ours, theirs = pair
    seqpacket.send(ours, {"is": "never read"})
    seqpacket.send(theirs, {"is": "last"})
    theirs.close()
    assert seqpacket.receive(ours) == ({"is": "last"}, [])
    assert seqpacket.receive(ours) is None


def test_a_wait_may_be_longer_than_the_kernel_s_longest(pair: Pair) -> None:
    """Of a snapshot of 50 TB, which is read at 20 MB/s at least."""
    ours, theirs = pair
    seqpacket.send(theirs, {})
    assert seqpacket.is_readable(ours, 50e12 / 20e6)


def test_limits(pair: Pair) -> None:
    ours, _ = pair
    with pytest.raises(ValueError, match="above the limits"):
        seqpacket.send(ours, {"text": "x" * seqpacket.MESSAGE_BYTES_MAX})
    with pytest.raises(ValueError, match="above the limits"):
        seqpacket.Outbox().add({}, [0] * (seqpacket.DESCRIPTORS_MAX + 1))


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"[]", "no object"),
        (b"{", "Expecting"),
        (b"\xff", "invalid start byte"),
        (b"[" * 50_000, "nested"),
        (seqpacket.LONG, "without its descriptor"),
        (b"x" * (seqpacket.PACKET_BYTES_MAX + 1), "above the limits"),
    ],
)
def test_what_is_no_message_is_refused(pair: Pair, packet: bytes, why: str) -> None:
    ours, theirs = pair
    ours.send(packet)
    with pytest.raises(ValueError, match=why):
        seqpacket.receive(theirs)


def test_a_long_message_in_something_else_than_a_memory_file_is_refused(pair: Pair) -> None:
    ours, theirs = pair
    before = open_descriptors()
    read_end, write_end = os.pipe()
    for fd in (read_end, write_end):
        socket.send_fds(ours, [seqpacket.LONG], [fd])
        with pytest.raises(ValueError, match="cannot be read"):
            seqpacket.receive(theirs)
        os.close(fd)
    with open("/dev/zero", "rb") as endless:
        socket.send_fds(ours, [seqpacket.LONG], [endless.fileno()])
        with pytest.raises(ValueError, match="above the limits"):
            seqpacket.receive(theirs)
    assert open_descriptors() == before


def test_what_was_never_sent_is_closed() -> None:
    before = open_descriptors()
    out = seqpacket.Outbox()
    out.add({}, [0, 1])
    out.add({"text": json.dumps("x" * seqpacket.PACKET_BYTES_MAX)})
    assert open_descriptors() == before + 3
    out.clear()
    assert open_descriptors() == before
    assert not out
