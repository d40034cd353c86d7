"""Bytes into lines: the pure part of showing logs."""

from __future__ import annotations

import random

import pytest

from holdfast.runtime.workers.log_fold import LINE_BYTES_MAX, LineCutter, add_prefix, keep_matching, tame


@pytest.mark.parametrize(
    ("written", "lines", "progress", "newest"),
    [
        (b"a\n", b"a\n", b"", b""),
        (b"a", b"", b"", b"a"),
        (b"a\nb", b"a\n", b"", b"b"),
        (b"\n\n", b"\n\n", b"", b""),
        (b"a\rb\rc\n", b"c\n", b"", b""),
        (b"a\r\nb\r\n", b"a\nb\n", b"", b""),
        (b"a\r\r\nb\n", b"a\nb\n", b"", b""),
        (b"\r10%\r20%\r30%\n", b"30%\n", b"", b""),
        (b"10%\r20%\r\n", b"20%\n", b"", b""),
        (b"\r\n", b"\n", b"", b""),
        (b"10%\r20%\r", b"", b"20%", b"20%"),
        (b"10%\r20%", b"", b"10%", b"20%"),
        (b"\r20%", b"", b"", b"20%"),
        (b"plain\n10%\r20%\nplain\n", b"plain\n20%\nplain\n", b"", b""),
        (b"x\n1\r2\r", b"x\n", b"2", b"2"),
        (b"bar\r   \rdone\n", b"done\n", b"", b""),
        (b"\xff\xfe\n", b"\xff\xfe\n", b"", b""),
    ],
)
def test_lines_and_states(written: bytes, lines: bytes, progress: bytes, newest: bytes) -> None:
    cutter = LineCutter()
    assert cutter.feed(written) == lines
    assert cutter.progress == progress
    assert cutter.newest == newest


def test_any_cut_gives_the_same_lines() -> None:
    rng = random.Random(7)
    text = b"".join(rng.choice((b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xc3\xa9")) for _ in range(400))
    whole = LineCutter()
    expected = whole.feed(text) + whole.flush()
    for _ in range(200):
        cutter, got, at = LineCutter(), b"", 0
        while at < len(text):
            step = rng.randint(1, 9)
            got += cutter.feed(text[at : at + step])
            at += step
        assert got + cutter.flush() == expected


def test_a_line_without_end_is_bounded() -> None:
    cutter = LineCutter()
    got = b""
    for _ in range(40):
        got += cutter.feed(b"x" * (LINE_BYTES_MAX // 16))
        assert len(cutter.partial) <= LINE_BYTES_MAX
    got += cutter.flush()
    assert got.replace(b"\n", b"") == b"x" * (40 * (LINE_BYTES_MAX // 16))
    assert got.count(b"\n") == 3


def test_endless_overwriting_is_bounded() -> None:
    cutter = LineCutter()
    for step in range(5000):
        cutter.feed(b"\r%d%%" % step)
    assert len(cutter.partial) < 100
    assert cutter.feed(b"\n") == b"4999%\n"


def test_prefix_before_every_line_and_nothing_else() -> None:
    assert add_prefix(b"", b"p ") == b""
    assert add_prefix(b"a\n\nb\n", b"p ") == b"p a\np \np b\n"
    assert add_prefix(b"a\n", b"") == b"a\n"


def test_only_lines_with_any_needle() -> None:
    lines = b"loss=1\nwarn\nstep\nloss=2\n"
    assert keep_matching(lines, (b"loss", b"warn")) == b"loss=1\nwarn\nloss=2\n"
    assert keep_matching(lines, (b"none",)) == b""


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"plain\n", b"plain\n"),
        (b"\x1b[31mred\x1b[0m\n", b"\x1b[31mred\x1b[0m\x1b[0m\n"),
        (b"\x1b[2K\x1b[1Aup\n\x1b[?25lhidden\n", b"up\nhidden\n"),
        (b"\x1b[31mred\nplain\n", b"\x1b[31mred\x1b[0m\nplain\n"),
    ],
)
def test_on_a_shared_terminal_colours_stay_and_movements_go(written: bytes, shown: bytes) -> None:
    assert tame(written) == shown
