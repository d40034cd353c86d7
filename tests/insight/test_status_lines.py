"""What `holdfast status` prints of what the coordinator knows."""

from __future__ import annotations

import doctest

import msgspec

from holdfast import text
from holdfast.core.progress import JobView, NodeView, RankView, Stage, Standing
from holdfast.insight import status
from holdfast.insight.status import status_lines


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
    assert lines[1] == "step 119-120, 4 steps/s, last step 4.2 s ago, effective training time 75% of 3 min 20 s"


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
    assert "the generation before ended: b was lost" in lines
    assert lines[-1] == "rank 3 is slow"


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


def test_small_words() -> None:
    assert doctest.testmod(text).failed == 0
    assert doctest.testmod(status).failed == 0
