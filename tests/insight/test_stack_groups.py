"""What `holdfast stacks` makes of the samples of all ranks."""

from __future__ import annotations

from typing import Any

from holdfast.core.stacks import Frame, RankSample
from holdfast.insight.status import group, stack_lines
from holdfast.runtime.answers import stacks_view

TORCH = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
WAITS = (Frame(TORCH, 2815, "all_reduce"), Frame("/job/train.py", 42, "step"), Frame("/job/train.py", 80, "<module>"))
READS = (Frame("/job/data.py", 17, "fetch"), Frame("/job/train.py", 40, "step"))


WAIT = "ranks 0-2, 4-7 on 2 nodes wait in all_reduce at train.py:42"


def seen(rank: int, frames: tuple[Frame, ...], **more: Any) -> tuple[str, int, RankSample]:
    host = "a" if rank < 4 else "b"
    state = more.pop("state", "S")
    return (host, rank, RankSample(rank % 4, 1000 + rank, state, 1.5, frames, **more))


def view(*samples: tuple[str, int, RankSample], silent: tuple[str, ...] = ()):
    return stacks_view("bert", 2, 8, list(samples), silent)


def test_equal_stacks_are_told_once() -> None:
    told = view(*(seen(rank, READS if rank == 3 else WAITS) for rank in (7, 6, 5, 4, 3, 2, 1, 0)))
    assert len(told.stacks) == 2
    assert [rank.rank for rank in told.ranks] == list(range(8))
    lines = stack_lines(told)
    assert lines[0] == "run bert, generation 2: 8 ranks at 2 places"
    assert WAIT in lines
    assert "rank 3 on a is in fetch at data.py:17" in lines
    assert lines.index("rank 3 on a is in fetch at data.py:17") < lines.index(WAIT), "who does not wait comes first"
    assert sum("all_reduce  " in line for line in lines) == 1


def test_frames_of_libraries_are_for_those_who_ask() -> None:
    deep = (Frame(TORCH, 1, "wait"), Frame(TORCH, 2, "work"), *WAITS)
    short, full = stack_lines(view(seen(0, deep))), stack_lines(view(seen(0, deep)), full=True)
    assert not any("work  " in line for line in short)
    assert any("2 frames of libraries not shown" in line for line in short)
    assert any("work  " in line for line in full)


def test_who_does_not_answer_is_a_group_of_its_own() -> None:
    told = view(seen(0, WAITS), seen(1, (), state="T"), seen(2, (), state="Z"), silent=("b",))
    assert [[rank.rank for rank in each.ranks] for each in group(told)] == [[1], [2], [0]]
    lines = stack_lines(told)
    assert lines[0].startswith("run bert, generation 2: 3 ranks of 8 at 3 places")
    assert "rank 1 on a is stopped by a signal (kill -CONT 1001 lets it go on)" in lines
    assert lines[-1] == "no answer in time from b"


def test_notes_and_the_line_that_runs() -> None:
    lines = stack_lines(view(seen(0, READS, note="its loader is stopped", source="batch = next(it)")))
    assert "    rank 0: its loader is stopped" in lines
    assert "    > batch = next(it)" in lines


def test_nobody_runs() -> None:
    assert stack_lines(view()) == ["run bert, generation 2: no worker runs now"]


def test_full_shows_the_other_threads_of_the_program() -> None:
    saves = (Frame("/job/save.py", 9, "saver"), Frame("/usr/lib/python3.11/threading.py", 982, "run"))
    told = view(seen(0, READS, threads=(saves,)))
    assert "saver  /job/save.py:9" not in "\n".join(stack_lines(told))
    lines = stack_lines(told, full=True)
    at = lines.index("    rank 0, other thread 1:")
    assert lines[at + 1] == "        saver  /job/save.py:9"
