"""Lines of workers' logs: which of them are errors, when they were written, and the order in which a page gets them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.dashboard.feed import LINES_MAX, MARKS_MAX, LogLines, LogSizes
from holdfast.dashboard.log_text import Levels, LineLevel, times, without_controls
from holdfast.supervisor.log_fold import LINE_BYTES_MAX
from tests.dashboard.test_dashboard_server import log_job

TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()

torch.OutOfMemoryError: CUDA out of memory.
"""
CHAINED = f"{TRACEBACK}\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: no",
        "KeyboardInterrupt",
        "2026-11-25 10:00:00,123 ERROR root: no",
        "ERROR:root:no",
        "\x1b[31mCRITICAL\x1b[0m no",
        "[rank3]:[E1122 10:03:24.117 ProcessGroupNCCL.cpp:629] timeout",
        "[rank3]: RuntimeError: no",
        "Fatal Python error: Segmentation fault",
        "gcc: error: no such file",
        "terminate called after throwing an instance of 'c10::Error'",
        '{"time": 1, "level": "error", "text": "no"}',
    ],
)
def test_a_line_that_says_so_is_an_error(line: str) -> None:
    assert Levels().next(line) is LineLevel.ERROR


@pytest.mark.parametrize(
    "line",
    ["train.py:3: UserWarning: old", "WARNING:root:old", "[W1122 10:03:24.117 socket.cpp:767] no IPv6", "WARN old"],
)
def test_a_warning_is_no_error(line: str) -> None:
    assert Levels().next(line) is LineLevel.WARNING


@pytest.mark.parametrize(
    "line",
    ["", "epoch 1: 45%|####  | 3/7", "error=0.25", "0 errors", "  loss 3", "INFO root: error rate 0.1", "terror: 1"],
)
def test_another_line_of_stderr_is_neither(line: str) -> None:
    assert Levels().next(line) is LineLevel.OTHER


@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "[3]: "])
def test_a_traceback_is_one_error_from_its_first_line_to_its_last(prefix: str) -> None:
    levels = Levels()
    assert {levels.next(prefix + line) for line in TRACEBACK.splitlines()} == {LineLevel.ERROR}
    assert levels.next(prefix + "goes on") is LineLevel.OTHER
    both = [levels.next(prefix + line) for line in CHAINED.splitlines()]
    assert [place for place, level in enumerate(both) if level is not LineLevel.ERROR] == [5, 7], (
        "the blank lines between"
    )


def test_control_sequences_other_than_colours_are_removed() -> None:
    link = "\x1b]8;;http://x\x1b\\here\x1b]8;;\x07"
    assert (
        without_controls(f"\x1b[2J\x1b[1;31mred\x1b[0m {link}\x1b[1A\x1b7\x00\x9b\x1b") == "\x1b[1;31mred\x1b[0m here"
    )
    assert without_controls("tab\tand é stay") == "tab\tand é stay"


def test_a_line_without_a_time_has_the_one_before_it() -> None:
    first, second, third, fourth, fifth = times(
        ["begins", "2026-11-25T10:00:00Z a", "  of a", "2026-11-25 10:00:05.500+00:00 b", "the end"],
        [1_800_000_000.0] * 5,
    )
    assert first == second == third == fourth - 5.5
    assert fifth == 1_800_000_000.0, "the last change of the file"
    assert times(["a", "b"], [7.0, 7.0]) == [7.0, 7.0]
    assert times(["2026-13-45 99:00:00 no date"], [7.0]) == [7.0]
    own = times(["[W1122 10:03:24.117 a.cpp:1] x", "[rank0]:[E1122 10:03:25.117 a.cpp:1] y"], [1_800_000_000.0] * 2)
    assert own[1] - own[0] == pytest.approx(1.0)
    backwards = times(["2026-11-25T10:00:05Z a", "2026-11-25T10:00:00Z b"], [0.0] * 2)
    assert backwards[0] == backwards[1], "the order of a file stays"


def test_the_first_page_of_the_logs_is_in_order_of_time(tmp_path: Path) -> None:
    source = log_job(tmp_path)
    for rank in range(2):
        lines = [f"2026-11-25 10:00:{2 * step + rank:02} rank {rank} step {step}\n" for step in range(3)]
        (tmp_path / "attempt_0" / str(rank) / "stdout.log").write_text("".join(lines))
    died = tmp_path / "attempt_0" / "0" / "stderr.log"
    died.write_text(TRACEBACK)
    told = LogLines(source, frozenset(), 0, "").read()
    assert told is not None
    shown = [(rank, text) for rank, _, text, level in told["lines"] if not level]
    assert shown == [
        (4 + rank, f"2026-11-25 10:00:{2 * step + rank:02} rank {rank} step {step}")
        for step in range(3)
        for rank in range(2)
    ]
    assert [text for *_, text, level in told["lines"] if level] == TRACEBACK.splitlines(), "a traceback stays together"


def test_lines_without_times_are_ordered_by_when_the_feed_first_saw_them(tmp_path: Path) -> None:
    source, sizes = log_job(tmp_path), LogSizes()
    for turn in range(3):
        for rank in (1, 0):
            out = tmp_path / "attempt_0" / str(rank) / "stdout.log"
            with out.open("a") as file:
                file.write(f"rank {rank} turn {turn}\n" + "x" * turn)
            os.utime(out, (0.0, 1_000.0 + 10 * turn - rank))
        sizes.note(source.log_files())
    told = LogLines(source, frozenset(), 0, "turn", sizes).read()
    assert told is not None
    assert [line[2].lstrip("x") for line in told["lines"]] == [
        f"rank {rank} turn {turn}" for turn in range(3) for rank in (1, 0)
    ]
    for size in range(3 * MARKS_MAX):
        with (tmp_path / "attempt_0" / "0" / "stdout.log").open("a") as file:
            file.write(f"{size}\n")
        sizes.note(source.log_files())
    assert max(map(len, sizes._marks.values())) <= MARKS_MAX


def test_a_line_that_is_too_long_is_cut_and_the_others_keep_their_times(tmp_path: Path) -> None:
    source = log_job(tmp_path)
    lines = LogLines(source, frozenset(), 0, "x")
    (tmp_path / "attempt_0" / "0" / "stdout.log").write_bytes(b"x" * 3 * LINE_BYTES_MAX)
    assert lines.read() is not None
    with (tmp_path / "attempt_0" / "0" / "stdout.log").open("a") as file:
        file.write("y\nx\n")
    told = lines.read()
    assert told is not None
    assert told["lines"][-1][2] == "x"


def test_what_was_written_last_is_shown_whatever_its_rank(tmp_path: Path) -> None:
    source = log_job(tmp_path)
    for rank, when in ((0, 2_000.0), (1, 1_000.0)):
        out = tmp_path / "attempt_0" / str(rank) / "stdout.log"
        out.write_text(f"rank {rank}\n" * LINES_MAX)
        os.utime(out, (when, when))
    told = LogLines(source, frozenset(), 0, "").read()
    assert told is not None
    assert ({rank for rank, *_ in told["lines"]}, told["left_out"]) == ({4}, LINES_MAX)


def test_a_search_does_not_see_colours(tmp_path: Path) -> None:
    source = log_job(tmp_path)
    (tmp_path / "attempt_0" / "0" / "stderr.log").write_text("a \x1b[32mgreen\x1b[0m word\nanother\n")
    told = LogLines(source, frozenset(), 0, "A Green Word").read()
    assert told is not None
    assert told["lines"] == [(4, "stderr", "a \x1b[32mgreen\x1b[0m word", "")]
