"""Which ranks and nodes are named as stragglers: tables over pretend steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.doctor.machine_state import GpuState, MachineState, Slowdown
from holdfast.extensions.stragglers.coordinator import Straggler, Stragglers
from holdfast.extensions.stragglers.messages import GpuClocks, ReadClocks
from holdfast.extensions.stragglers.node import OnNode
from holdfast.protocol.rank_progress import RankProgress, Stage
from holdfast.protocol.throughput import Throughput
from tests.coordinator.coordinator_harness import running, steps

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
        "rank 2 on n1 is slow: 80 ms of its own in each step of 100 ms, the others 50 ms; all other ranks wait for it"
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
        own_s = (0.8, 0.3, 0.3) if second < 9 else (0.8, 0.3)
        world.heard(
            "a#1",
            [RankProgress(rank, Stage.STEPPING, second * 10, 0.0, second * each) for rank, each in enumerate(own_s)],
            float(second),
        )
        if second == 9:
            world.enter(world.ranks[2], Stage.DONE, 9.0)
            stragglers.forget_done()
        for pace in world.alive():
            stragglers.heard(pace)
        told += stragglers.news()
    assert [each.ranks for each in told] == [(0,)]


# --- in a job ---------------------------------------------------------------------------------------------------------


def test_a_straggler_is_told_and_stands_in_the_view() -> None:
    harness = running()
    for number in range(1, 40):
        harness.wait(1.0)
        for link in (1, 2):
            steps(harness, number * 10, own_s=0.08 if link == 2 else 0.05, links=(link,))
    (text,) = harness.notices(1)
    assert text.startswith("rank 1 on n2 is slow: 80 ms of its own in each step of 100 ms, the others 50 ms")
    (note,) = harness.noted("straggler")
    assert (note["code"], note["host"], note["ranks"]) == ("HF250", "n2", [1])
    assert harness.machine.view(harness.now).notices == (text,)
    asked = harness.ordered(2, ReadClocks)
    assert asked.ranks == {1: 0}
    harness.extend(
        2, "stragglers", GpuClocks(asked.generation, 1, 0, "345 of 1980 MHz, 91 °C, hardware thermal slowdown")
    )
    harness.extend(2, "stragglers", GpuClocks(asked.generation - 1, 1, 0, "of a generation before"))
    (gpu,) = harness.noted("straggler_gpu")
    assert (gpu["host"], gpu["rank"], gpu["gpu"]) == ("n2", 1, 0)
    assert harness.notices(1)[-1].startswith("rank 1 on n2: its GPU 0 runs at 345 of 1980 MHz")


HOT = GpuState(index=1, sm_mhz=345, sm_mhz_max=1980, celsius=91, slowdowns=frozenset({Slowdown.HARDWARE_THERMAL}))


async def clocks(state: MachineState, ranks: dict[int, int]) -> list[GpuClocks]:
    """What a node with these GPUs answers."""
    sent: list[Any] = []
    work: list[Any] = []
    node: Any = SimpleNamespace(start=lambda name, task: work.append(task))
    OnNode(node, sent.append, lambda: state, lambda: bool(state.gpus)).heard(ReadClocks(3, ranks))
    for each in work:
        await each
    return sent


async def test_a_node_answers_with_the_clocks_of_the_gpus_of_these_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    state = MachineState(gpus=(GpuState(index=0, error="GPU is lost"), HOT))
    assert await clocks(state, {8: 0, 9: 1, 10: 2}) == [
        GpuClocks(3, 8, 1, "345 of 1980 MHz, 91 °C, hardware thermal slowdown"),
        GpuClocks(3, 9, 0, "GPU is lost"),
    ]


async def test_a_node_without_gpus_answers_nothing() -> None:
    assert await clocks(MachineState(), {0: 0}) == []
