"""Who is slow, and who is not: tables over pretend steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.coordinator.stragglers import Straggler, Stragglers
from holdfast.coordinator.throughput import Throughput
from holdfast.protocol.rank_progress import RankProgress, Stage

STEP_S = 0.1
Own = Callable[[int, float], float]
"""(Rank, seconds since the start) -> seconds of its own in a step."""


def run(own: Own, seconds: float, *, nodes: int = 2, nproc: int = 2, step_s: float = STEP_S) -> list[Straggler]:
    """All that is told of a world whose ranks make a step every step_s together; told once a second."""
    world = Throughput([(f"n{n}#1", f"n{n}", range(nproc)) for n in range(nodes)], 0.0, 60.0)
    stragglers = Stragglers(5.0)
    spent = [0.0] * (nodes * nproc)
    told: list[Straggler] = []
    made = 0
    for second in range(1, int(seconds) + 1):
        fresh = int(second / step_s) - made
        made += fresh
        for rank in range(len(spent)):
            spent[rank] += fresh * own(rank, float(second))
        for n in range(nodes):
            ranks = [
                RankProgress(local, Stage.STEPPING, made, second - made * step_s, spent[n * nproc + local])
                for local in range(nproc)
            ]
            if not world.heard(f"n{n}#1", ranks, float(second)):
                continue
            for pace in world.of_member(f"n{n}#1"):
                stragglers.heard(pace)
            told += stragglers.news()
    return told


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (lambda rank, s: 0.05, "all alike"),
        (lambda rank, s: 0.05 + 0.02 * (rank == 1), "1.4 times the others"),
        (lambda rank, s: 0.002 + 0.002 * (rank == 1), "twice the others, by 2 ms of a step of 100"),
        (lambda rank, s: 0.05 + 0.04 * (rank == 1 and s < 10), "for two windows only"),
        (lambda rank, s: 0.05 + 0.04 * (rank == int(s / 6) % 4), "each in its turn"),
        (lambda rank, s: 0.0, "nobody calls backward"),
    ],
)
def test_nobody_is_named(own: Own, why: str) -> None:
    assert run(own, 60.0) == [], why


def test_a_slow_rank_is_named_once_with_both_numbers() -> None:
    (told,) = run(lambda rank, s: 0.08 if rank == 2 else 0.05, 60.0)
    assert (told.code, told.host, told.ranks, told.over) == ("HF250", "n1", (2,), False)
    assert (told.own_s, told.peers_s, told.step_s) == pytest.approx((0.08, 0.05, 0.1))
    assert told.text == (
        "rank 2 on n1 is slow: 80 ms of its own in each step of 100 ms, the others 50 ms; everybody waits for it"
    )


def test_the_other_one_of_two_is_not_slow() -> None:
    (told,) = run(lambda rank, s: 0.08 if rank == 0 else 0.02, 60.0, nodes=1)
    assert told.ranks == (0,)


def test_three_windows_are_needed() -> None:
    assert run(lambda rank, s: 0.08 if rank == 2 else 0.05, 15.0) == []
    assert len(run(lambda rank, s: 0.08 if rank == 2 else 0.05, 20.0)) == 1


def test_slow_steps_are_compared_over_twenty_of_them() -> None:
    assert run(lambda rank, s: 1.6 if rank == 2 else 1.0, 110.0, step_s=2.0) == []
    (told,) = run(lambda rank, s: 1.6 if rank == 2 else 1.0, 150.0, step_s=2.0)
    assert told.ranks == (2,)


def test_a_small_excess_counts_where_steps_are_short() -> None:
    (told,) = run(lambda rank, s: 0.002 if rank == 3 else 0.001, 60.0, step_s=0.01)
    assert told.ranks == (3,)


def test_a_slow_node_is_named_as_a_whole() -> None:
    (told,) = run(lambda rank, s: 0.08 if rank in (2, 3) else 0.05, 60.0)
    assert (told.code, told.ranks) == ("HF251", (2, 3))
    assert told.text.startswith("node n1 is slow: 80 ms")


def test_a_rank_that_is_a_node_by_itself_is_named_as_a_rank() -> None:
    (told,) = run(lambda rank, s: 0.08 if rank == 2 else 0.05, 60.0, nodes=3, nproc=1)
    assert told.who == "rank 2 on n2"


def test_it_is_told_when_it_is_over_and_when_it_comes_again() -> None:
    told = run(lambda rank, s: 0.08 if rank == 2 and (s < 30 or s > 70) else 0.05, 120.0)
    assert [(each.ranks, each.over) for each in told] == [((2,), False), ((2,), True), ((2,), False)]
    assert told[1].text == "rank 2 on n1 is as fast as the others again"


def test_who_has_ended_is_not_waited_for() -> None:
    world = Throughput([("a#1", "a", range(3))], 0.0, 60.0)
    stragglers = Stragglers(5.0)
    told: list[Straggler] = []
    for second in range(1, 60):
        ranks = [RankProgress(0, Stage.STEPPING, second * 10, 0.0, second * 0.8)]
        ranks += [RankProgress(rank, Stage.STEPPING, min(second, 8) * 10, 0.0, second * 0.3) for rank in (1, 2)]
        world.heard("a#1", ranks[:2] if second > 8 else ranks, float(second))
        for pace in world.ranks:
            stragglers.heard(pace)
        if second == 9:
            stragglers.ended(2)
            ranks[1] = RankProgress(1, Stage.STEPPING, second * 10, 0.0, second * 0.3)
        told += stragglers.news()
    assert told == [], "rank 1 has closed no window since"
