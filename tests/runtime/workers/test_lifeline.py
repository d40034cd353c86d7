"""Frames with descriptors over a stream that is cut anywhere."""

from __future__ import annotations

import os
import socket

import pytest

from holdfast.runtime.workers import lifeline


def test_descriptors_stay_with_their_frames_however_large_the_frames_are() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        out, inbox = lifeline.Outbox(), lifeline.Inbox()
        for number, (size, riders) in enumerate([(10, 1), (500_000, 2), (0, 0), (70_000, 1)]):
            fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(riders)]
            out.add({"number": number, "text": "x" * size}, fds)
            for fd in fds:
                os.close(fd)
        seen = []
        while out or len(seen) < 4:
            out.flush(ours)
            for message, fds in inbox.receive(theirs) or []:
                seen.append((message["number"], len(message["text"]), len(fds)))
                for fd in fds:
                    assert os.readlink(f"/proc/self/fd/{fd}") == "/dev/null"
                    assert not os.get_inheritable(fd)
                    os.close(fd)
    assert seen == [(0, 10, 1), (1, 500_000, 2), (2, 0, 0), (3, 70_000, 1)]


def test_the_end_of_the_other_side() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.send(b"\0\0")
        ours.close()
        inbox = lifeline.Inbox()
        assert inbox.receive(theirs) == []
        assert inbox.receive(theirs) is None


def test_limits() -> None:
    out = lifeline.Outbox()
    with pytest.raises(ValueError, match="above the limits"):
        out.add({"text": "x" * lifeline.FRAME_BYTES_MAX})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(b"\xff\xff\xff\xff")
        with pytest.raises(ValueError, match="above the limit"):
            lifeline.Inbox().receive(theirs)


def test_what_was_never_sent_is_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    out = lifeline.Outbox()
    out.add({}, [0, 1])
    assert len(os.listdir("/proc/self/fd")) == before + 2
    out.clear()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not out
