from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.errors import ProtocolError
from holdfast.protocol.framing import (
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    PREAMBLE_BYTES,
    STORE_MAGIC,
    FrameReader,
    describe_stranger,
    frame,
    preamble,
    read_preamble,
)


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at these places (taken modulo its length)."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def test_the_preamble_is_fixed_for_all_versions() -> None:
    assert preamble(1) == b"HOLDFAST\x00\x01"
    assert len(preamble()) == PREAMBLE_BYTES


@given(st.integers(0, 65535), st.binary(max_size=8))
def test_preamble_is_read_back(version: int, rest: bytes) -> None:
    assert read_preamble(preamble(version) + rest) == version


@given(st.integers(0, PREAMBLE_BYTES - 1))
def test_a_part_of_a_preamble_waits(length: int) -> None:
    assert read_preamble(preamble()[:length]) is None


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", STORE_MAGIC, b"X", b"HOLDFASX", b"HOLX"])
def test_a_stranger_is_known_by_its_first_wrong_byte(first: bytes) -> None:
    with pytest.raises(ProtocolError, match="not the holdfast protocol"):
        read_preamble(first)


@pytest.mark.parametrize(
    ("first", "name"),
    [
        (b"GET / HTTP/1.1", "an HTTP request"),
        (b"HTTP/1.1 400 Bad", "an HTTP answer"),
        (b"\x16\x03\x01\x02\x00", "a TLS client"),
        (b"SSH-2.0-OpenSSH", "SSH"),
        (STORE_MAGIC + b"\r*", "a torch TCPStore client"),
        (b"\xff\n", "it begins with b'\\xff\\n'"),
    ],
)
def test_strangers_are_named(first: bytes, name: str) -> None:
    assert describe_stranger(first) == name


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(0, 3000), max_size=20))
def test_frames_come_back_whatever_the_chunks(payloads: list[bytes], cuts: list[int]) -> None:
    reader = FrameReader(HELLO_BYTES_MAX)
    found = [payload for chunk in chunks(b"".join(map(frame, payloads)), cuts) for payload in reader.feed(chunk)]
    assert found == payloads
    assert not reader.torn


@given(st.binary(max_size=500), st.lists(st.integers(0, 500), max_size=10))
def test_any_bytes_are_frames_or_a_protocol_error(data: bytes, cuts: list[int]) -> None:
    reader = FrameReader(100)
    try:
        for chunk in chunks(data, cuts):
            assert all(len(payload) <= 100 for payload in reader.feed(chunk))
    except ProtocolError:
        pass


def test_an_oversized_frame_is_refused_before_it_is_there() -> None:
    reader = FrameReader(HELLO_BYTES_MAX)
    with pytest.raises(ProtocolError, match="over the limit"):
        reader.feed((HELLO_BYTES_MAX + 1).to_bytes(4, "big"))


def test_the_limit_itself_is_allowed() -> None:
    assert FrameReader(10).feed(frame(b"0123456789")) == [b"0123456789"]


def test_the_limit_can_be_raised_between_two_frames_of_one_chunk() -> None:
    reader = FrameReader(4)
    reader.push(frame(b"abc") + frame(b"0123456789"))
    assert reader.pop() == b"abc"
    reader.limit_bytes_max = 10
    assert reader.pop() == b"0123456789"
    assert reader.pop() is None


def test_a_half_frame_is_torn() -> None:
    reader = FrameReader(100)
    assert reader.feed(frame(b"abc")[:-1]) == []
    assert reader.torn


def test_nothing_is_sent_that_no_peer_would_accept() -> None:
    with pytest.raises(ProtocolError):
        frame(bytes(FRAME_BYTES_MAX + 1))
