"""What `holdfast status` prints of what the coordinator knows."""

from __future__ import annotations

import doctest
from typing import Any

import msgspec

from holdfast import text
from holdfast.diagnosis import screen
from holdfast.diagnosis.screen import group, stack_lines, status_lines
from holdfast.extensions.stacks.messages import view_of
from holdfast.protocol.rank_progress import Frame, JobView, NodeView, RankSample, RankView, Stage, Standing


def rank(number: int, steps: int = 120, *, stage: Stage = Stage.STEPPING, age_s: float = 0.1) -> RankView:
    return RankView(rank=number, local_rank=number % 2, stage=stage, steps=steps, step_s=0.25, own_s=0.01, age_s=age_s)


def node(host: str, place: int | None, *ranks: RankView, state: str = "running") -> NodeView:
    return NodeView(member=f"{host}#1", host=host, group_rank=place, state=state, heard_s=0.5, ranks=ranks)


def view(*nodes: NodeView, **more: object) -> JobView:
    plain = JobView(
        run_id="bert",
        phase="running",
        generation=3,
        restarts=1,
        restarts_max=3,
        world_size=sum(len(each.ranks) for each in nodes),
        since_s=75,
        job_s=200,
        training_s=150,
        nodes=nodes,
    )
    return msgspec.structs.replace(plain, **more)


TWO_NODES = view(
    node("a", 0, rank(0), rank(1)), node("b", 1, rank(2, 119), rank(3, age_s=4.2)), node("c", None, state="spare")
)


def test_the_whole_in_two_lines() -> None:
    lines = status_lines(TWO_NODES)
    assert lines[0] == "run bert: running for 75 s, generation 3, 4 ranks on 2 nodes, restarts 1 of 3"
    rest = "4 steps/s, last step 4.2 s ago, effective training time 75% of 3 min 20 s"
    assert lines[1] == f"step 119-120 since the start of generation 3, {rest}"
    first = status_lines(msgspec.structs.replace(TWO_NODES, generation=1))
    assert first[1] == f"step 119-120, {rest}"
    of_job = msgspec.structs.replace(rank(0), counts_job=True)
    assert status_lines(view(node("a", 0, of_job), generation=3))[1].startswith("step 120, ")


def test_a_job_with_too_few_nodes_says_how_many_it_needs() -> None:
    gathering = view(node("a", None, state="arriving"), phase="gathering", nodes_min=4, nodes_max=8, world_size=16)
    assert status_lines(gathering)[0] == "run bert: gathering for 75 s, generation 3, restarts 1 of 3"
    assert status_lines(gathering)[2] == "1 of at least 4 nodes have joined"
    assert "it can use up to 8 nodes" in status_lines(msgspec.structs.replace(TWO_NODES, nodes_min=1, nodes_max=8))
    whole = status_lines(msgspec.structs.replace(TWO_NODES, nodes_min=1, nodes_max=2))
    assert not [line for line in whole if "up to" in line]


def test_the_time_that_is_left_where_the_script_says_how_many_steps_there_are() -> None:
    line = status_lines(msgspec.structs.replace(TWO_NODES, job_step=4120, job_steps=10_000, left_s=1470))[1]
    assert line.startswith("step 4120 of 10000, 4 steps/s, last step 4.2 s ago, about 24 min 30 s left, effective")


def test_a_line_for_each_node() -> None:
    lines = status_lines(TWO_NODES)
    assert lines[3].split("  ")[0] == "NODE"
    assert lines[5].split() == ["b", "1", "running", "2-3", "119-120", "4", "4.2", "s", "ago", "0.5", "s", "ago"]
    assert lines[6].split() == ["c", "spare", "0.5", "s", "ago"]


def test_ranks_are_told_where_there_are_few_or_they_are_asked_for() -> None:
    assert any(line.startswith("RANK") for line in status_lines(TWO_NODES))
    assert not any(line.startswith("RANK") for line in status_lines(TWO_NODES, ranks=False))
    many = view(node("a", 0, *(rank(number) for number in range(40))))
    assert not any(line.startswith("RANK") for line in status_lines(many))
    assert len(status_lines(many, ranks=True)) == len(status_lines(many)) + 42


def test_before_the_first_step_and_after_the_last() -> None:
    early = view(node("a", 0, rank(0, 0, stage=Stage.GROUPING)))
    assert status_lines(early)[1].startswith("no step yet")
    assert "LAST STEP" not in "".join(status_lines(early)), "its age is that of the worker"
    done = view(node("a", 0, rank(0, stage=Stage.DONE, age_s=900), rank(1)))
    assert "last step 0.1 s ago" in status_lines(done)[1]


def test_why_and_notices() -> None:
    lines = status_lines(view(node("a", 0, rank(0)), why="b was lost", notices=("rank 3 is slow",)))
    assert "previous generation ended: b was lost" in lines
    assert lines[-1] == "rank 3 is slow"


def test_a_spare_has_no_step_and_a_line_says_why_it_waits() -> None:
    lines = status_lines(
        view(node("a", 0, rank(0), rank(1, 7, stage=Stage.SPARE)), spares=(1,), spares_why="it is one")
    )
    assert lines[1].startswith("step 120 since")
    assert "it is one" in lines
    assert lines[-1].split()[:5] == ["1", "a", "1", "spare", "250"]


def test_ranks_of_a_hang_are_not_stepping() -> None:
    """The coordinator says what each does in it; a rate of steps is none of now."""
    waits = msgspec.structs.replace(rank(0), standing=Standing.WAITING, place="waits in all_reduce at train.py:42")
    hung = msgspec.structs.replace(rank(1), standing=Standing.HUNG, place="is in sleep at data.py:17")
    lines = status_lines(view(node("a", 0, waits, hung)))
    assert "steps/s" not in lines[1]
    assert lines[-2].split()[:4] == ["0", "a", "0", "waiting"]
    assert lines[-2].endswith("  waits in all_reduce at train.py:42")
    assert lines[-1].split()[3] == "hung"


def test_nobody_there_yet() -> None:
    lines = status_lines(view(phase="gathering", generation=0, job_s=0.0))
    assert lines[0] == "run bert: gathering for 75 s, generation 0, restarts 1 of 3"


def test_the_process_of_each_rank() -> None:
    lines = status_lines(view(node("a", 0, msgspec.structs.replace(rank(0), pid=4711))))
    assert lines[-2].split()[:4] == ["RANK", "NODE", "LOCAL", "PID"]
    assert lines[-1].split()[:4] == ["0", "a", "0", "4711"]


def test_small_words() -> None:
    assert doctest.testmod(text).failed == 0
    assert doctest.testmod(screen).failed == 0


# --- what `holdfast stacks` makes of the samples of all ranks ---------------------------------------------------------


TORCH = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
WAITS = (Frame(TORCH, 2815, "all_reduce"), Frame("/job/train.py", 42, "step"), Frame("/job/train.py", 80, "<module>"))
READS = (Frame("/job/data.py", 17, "fetch"), Frame("/job/train.py", 40, "step"))


WAIT = "ranks 0-2, 4-7 on 2 nodes wait in all_reduce at train.py:42"


def seen(rank: int, frames: tuple[Frame, ...], **more: Any) -> tuple[str, int, RankSample]:
    host = "a" if rank < 4 else "b"
    state = more.pop("state", "S")
    return (host, rank, RankSample(rank % 4, 1000 + rank, state, 1.5, frames, **more))


def sampled(*samples: tuple[str, int, RankSample], silent: tuple[str, ...] = ()):
    return view_of("bert", 2, 8, list(samples), silent)


def test_equal_stacks_are_told_once() -> None:
    told = sampled(*(seen(rank, READS if rank == 3 else WAITS) for rank in (7, 6, 5, 4, 3, 2, 1, 0)))
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
    short, full = stack_lines(sampled(seen(0, deep))), stack_lines(sampled(seen(0, deep)), full=True)
    assert not any("work  " in line for line in short)
    assert any("2 frames of libraries not shown" in line for line in short)
    assert any("work  " in line for line in full)


def test_who_does_not_answer_is_a_group_of_its_own() -> None:
    told = sampled(seen(0, WAITS), seen(1, (), state="T"), seen(2, (), state="Z"), silent=("b",))
    assert [[rank.rank for rank in each.ranks] for each in group(told)] == [[1], [2], [0]]
    lines = stack_lines(told)
    assert lines[0].startswith("run bert, generation 2: 3 ranks of 8 at 3 places")
    assert "rank 1 on a is stopped by a signal (kill -CONT 1001 lets it go on)" in lines
    assert lines[-1] == "no answer in time from b"


def test_notes_and_the_line_that_runs() -> None:
    lines = stack_lines(sampled(seen(0, READS, note="its loader is stopped", source="batch = next(it)")))
    assert "    rank 0: its loader is stopped" in lines
    assert "    > batch = next(it)" in lines


def test_nobody_runs() -> None:
    assert stack_lines(sampled()) == ["run bert, generation 2: no worker runs now"]


def test_full_shows_the_other_threads_of_the_program() -> None:
    saves = (Frame("/job/save.py", 9, "saver"), Frame("/usr/lib/python3.11/threading.py", 982, "run"))
    told = sampled(seen(0, READS, threads=(saves,)))
    assert "saver  /job/save.py:9" not in "\n".join(stack_lines(told))
    lines = stack_lines(told, full=True)
    at = lines.index("    rank 0, other thread 1:")
    assert lines[at + 1] == "        saver  /job/save.py:9"


def test_each_rank_of_a_group_without_a_stack_has_its_own_process() -> None:
    stopped = [seen(number, (), state="T") for number in (2, 3, 4)]
    lines = stack_lines(sampled(*stopped))
    assert lines[2:] == [
        "ranks 2-4 on 2 nodes are stopped by a signal (kill -CONT PID lets it go on)",
        "    rank 2: process 1002 on a",
        "    rank 3: process 1003 on a",
        "    rank 4: process 1004 on b",
    ]
    assert "rank 3 on a is stopped by a signal (kill -CONT 1003 lets it go on)" in stack_lines(sampled(stopped[1]))
    many = [("a", rank, RankSample(rank, 1000 + rank, "T", 1.5, ())) for rank in range(40)]
    assert stack_lines(sampled(*many))[-1] == "    … 24 ranks more (--full)"
    assert len(stack_lines(sampled(*many), full=True)) == 2 + 1 + 40
