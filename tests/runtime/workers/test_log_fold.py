"""What a console shows once: lines that ranks print alike, and tracebacks that are told elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.runtime.workers.log_fold import FOLD_BYTES_MAX, FOLD_S, HELD_BYTES_MAX, HOLD_S, HeldTraceback, LineFold

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
