"""Bytes into lines: the pure part of showing logs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from holdfast.supervisor.log_fold import (
    FOLD_BYTES_MAX,
    FOLD_S,
    HELD_BYTES_MAX,
    HOLD_S,
    LINE_BYTES_MAX,
    HeldTraceback,
    LineCutter,
    LineFold,
    add_prefix,
    keep_matching,
    tame,
)


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


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_a_line_without_end_is_cut_between_characters(character: str) -> None:
    cutter = LineCutter()
    size = len(character.encode())
    for shift in range(size):
        text = b"x" * shift + character.encode() * (LINE_BYTES_MAX // size + 2)
        lines = cutter.feed(text[: LINE_BYTES_MAX + 1]) + cutter.feed(text[LINE_BYTES_MAX + 1 :]) + cutter.flush()
        first, second, _ = lines.split(b"\n")
        assert first.decode() + second.decode() == text.decode()


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
        (b"\x1bcreset \x1b(0lines \x0eout \x1bMup \x1b7\x1b8saved\n", b"reset lines out up saved\n"),
        (b"\x1b]0;title\x07a\x1b]0;open\nb \x1bP+q544e\x1b\\c\n", b"a\nb c\n"),
        (b"\b\b\b\brank 7| \x1b[>4;2mall\x7f\n", b"rank 7| all\n"),
        ("\x9b2Jé\tÂ\n".encode(), "2Jé\tÂ\n".encode()),
        (b"\xc2\x00\x9b2J|\xc2\x1b[K\x9bA|\xc2\xc2\x9b\x9bB|\xc2\xa0\xc2\n", b"\x9b2J|\x9bA|\x9bB|\xc2\xa0\n"),
    ],
)
def test_on_a_shared_terminal_colours_stay_and_movements_go(written: bytes, shown: bytes) -> None:
    assert tame(written) == shown


# --- what a console shows once: lines that ranks print alike, and tracebacks that are told elsewhere ------------------


TRACE = (
    b'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    fail()\nValueError: bad shape\n'
)
OWN = TRACE.decode()


def folded(*streams: tuple[int, bytes]) -> list[str]:
    """What is shown of these blocks of whole lines, each of one rank."""
    fold = LineFold(lambda ranks: f"{','.join(map(str, ranks))}| ".encode())
    for rank, lines in streams:
        fold.add(rank, rank, lines, now=0.0)
    return fold.take().decode().splitlines()


def test_a_line_that_all_ranks_print_is_shown_once_with_their_number() -> None:
    assert folded(*((rank, b"loading\n") for rank in range(8))) == ["0,1,2,3,4,5,6,7| loading (×8)"]


def test_each_rank_keeps_the_order_of_its_own_lines() -> None:
    assert folded(*((rank, b"loading\nrank %d is up\ntraining\n" % rank) for rank in range(3))) == [
        "0,1,2| loading (×3)",
        "0| rank 0 is up",
        "1| rank 1 is up",
        "2| rank 2 is up",
        "0,1,2| training (×3)",
    ]


def test_the_order_of_each_rank_stays_whatever_they_print() -> None:
    assert folded((0, b"saved\n"), (2, b"saved\nloading\n"), (1, b"loading\nsaved\n")) == [
        "1| loading",
        "0,1,2| saved (×3)",
        "2| loading",
    ]
    for seed in range(300):
        draw = random.Random(seed)
        said = [(draw.randrange(4), draw.choice("xyz")) for _ in range(draw.randint(2, 20))]
        shown = folded(*((rank, f"{text}\n".encode()) for rank, text in said))
        for rank in range(4):
            texts = [line.split()[1] for line in shown if str(rank) in line.partition("|")[0].split(",")]
            assert texts == [text for teller, text in said if teller == rank], f"seed {seed}, rank {rank}"


def test_a_line_that_comes_later_elsewhere_is_not_drawn_forward() -> None:
    shown = folded((0, b"a\nb\n"), (1, b"b\na\n"))
    assert [line for line in shown if line.startswith(("0|", "0,1|"))] in (
        ["0| a", "0,1| b (×2)"],
        ["0,1| a (×2)", "0| b"],
    )
    assert sum(2 if "×2" in line else 1 for line in shown) == 4


def test_what_one_rank_says_twice_stays_twice() -> None:
    assert folded((0, b"again\nagain\n"), (1, b"again\nagain\n")) == ["0,1| again (×2)", "0,1| again (×2)"]


def test_a_warning_of_torchs_is_the_same_whatever_its_rank_and_time() -> None:
    says = (
        b"[W1122 10:03:2%d.117 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n"
    )
    shown = folded((0, b"[rank0]:" + says % 4), (1, b"[rank1]:" + says % 5), (2, says % 6))
    assert len(shown) == 1
    assert shown[0].endswith("cannot be retrieved. err=-3 (×3)")


def test_empty_lines_get_no_number() -> None:
    assert folded((0, b"\n"), (1, b"\n")) == ["0,1| "]


def test_lines_wait_for_a_moment_only() -> None:
    fold = LineFold(lambda _: b"")
    assert fold.due is None
    fold.add(0, 0, b"x\n", now=5.0)
    assert fold.due == 5.0 + FOLD_S
    fold.add(1, 1, b"y\n", now=5.1)
    assert fold.due == 5.0 + FOLD_S
    assert fold.take() == b"x\ny\n"
    assert fold.due is None


def test_it_is_full_before_it_costs_anything() -> None:
    fold = LineFold(lambda _: b"")
    fold.add(0, 0, b"x" * FOLD_BYTES_MAX + b"\n", now=0.0)
    assert fold.full


@pytest.mark.parametrize(
    ("lines", "shown", "rest"),
    [
        ([b"a\n", TRACE], b"a\n", b""),
        ([b"a\n" + TRACE[:40], TRACE[40:]], b"a\n", b""),
        ([b"a\n" + TRACE + b"b\n"], b"a\n", b"b\n"),
        ([b"".join(b"[rank3]: " + line for line in TRACE.splitlines(keepends=True))], b"", b""),
        ([TRACE.replace(b"bad shape", b"another"), TRACE], b"", TRACE.replace(b"bad shape", b"another")),
    ],
)
def test_a_traceback_that_is_told_elsewhere_is_not_shown_again(
    lines: Sequence[bytes], shown: bytes, rest: bytes
) -> None:
    held = HeldTraceback()
    assert b"".join(held.feed(block, 1.0) for block in lines) == shown
    assert held.due == 1.0 + HOLD_S
    assert held.release(without=OWN) == rest
    assert held.due is None


SYNTAX = '  File "/x/bad.py", line 2\n    y = = 2\n        ^\nSyntaxError: invalid syntax\n'


@pytest.mark.parametrize("head", ["", "[rank1]: "])
def test_a_script_with_a_syntax_error_is_not_shown_again(head: str) -> None:
    """Its error has no frames, and so Python writes no "Traceback" before it."""
    held = HeldTraceback()
    text = "".join(head + line for line in SYNTAX.splitlines(keepends=True)).encode()
    assert held.feed(b"a\n" + text, 1.0) == b"a\n"
    assert held.release(without=SYNTAX) == b""


def test_a_line_of_a_stack_begins_no_traceback() -> None:
    line = b'  File "/x/a.py", line 2, in main\n'
    assert HeldTraceback().feed(line, 1.0) == line


def test_a_traceback_that_nobody_tells_is_shown_whole() -> None:
    held = HeldTraceback()
    held.feed(TRACE + b"b\n", 1.0)
    assert held.release() == TRACE + b"b\n"


def test_another_text_is_taken_from_nothing() -> None:
    held = HeldTraceback()
    held.feed(TRACE, 1.0)
    assert held.release(without=OWN.replace("bad", "good")) == TRACE


def test_no_end_of_lines_is_held() -> None:
    held = HeldTraceback()
    held.feed(TRACE, 1.0)
    flood = b"x\n" * HELD_BYTES_MAX
    assert held.feed(flood, 1.1) == TRACE + flood
    assert held.due is None
