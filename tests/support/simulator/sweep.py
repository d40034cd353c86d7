"""Many simulated jobs, one for each seed. Draws what each one suffers; decides nothing and fixes nothing.

    python -m tests.support.simulator.sweep 4711       one job and its whole story
    python -m tests.support.simulator.sweep 0:20000    many, on all cores; counts, and the seeds that broke a promise
    python -m tests.support.simulator.sweep succession 4711 | 0:20000    jobs whose nodes elect their coordinator
    python -m tests.support.simulator.sweep multiples 4711 | 0:20000     jobs that train on a multiple of some number of ranks
    python -m tests.support.simulator.sweep questions 4711 | 0:20000     the first ones, with questions of users
    python -m tests.support.simulator.sweep questions-succession …       the second ones, with questions of users

A seed stands for one history only together with one version of the code.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from msgspec import structs

from holdfast.protocol.exit_codes import EXIT_FAILURE, EXIT_USAGE
from holdfast.protocol.policy import Grow, Limits
from holdfast.protocol.train_contract import Survive
from tests.support.simulator.checkers import BrokenPromiseError
from tests.support.simulator.cluster import SimCluster, SimOptions
from tests.support.simulator.faults import FaultOptions
from tests.support.simulator.succession import SuccessionCluster, Weather

Build = Callable[..., SuccessionCluster]
CHUNK_SEEDS = 100
"""How many seeds a process takes at a time."""
FAILURES_SHOWN_MAX = 20


@dataclass(frozen=True)
class Draw:
    """What one seed stands for."""

    seed: int
    nodes: int
    options: SimOptions
    must_succeed: bool
    """Every host that goes comes back, and the budget is large: ending is not enough, the job must succeed."""


PLAIN, SUCCESSION, MULTIPLES, QUESTIONS, QUESTIONS_SUCCESSION = FAMILIES = (
    "plain",
    "succession",
    "multiples",
    "questions",
    "questions-succession",
)
"""Families of jobs: a seed stands for another one in each."""
QUESTIONS_ASKED = 40


@dataclass
class SweepResult:
    """What came of some seeds."""

    family: str = PLAIN
    jobs: int = 0
    events: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    """Questions of users."""
    failures: dict[int, str] = field(default_factory=dict)
    """Seed -> the first line of what went wrong."""

    def add(self, other: SweepResult) -> None:
        self.jobs += other.jobs
        self.events += other.events
        self.outcomes += other.outcomes
        self.asked += other.asked
        self.failures |= other.failures


def draw(seed: int) -> Draw:
    """The options of a seed. Its own Random: the cluster's draws the faults' times and places."""
    random = Random(seed * 7919 + 1)
    must_succeed = random.random() < 0.3
    nodes = random.randint(1, 8)
    fixed_ranks = random.random() < 0.2
    max_nodes = nodes if fixed_ranks else random.randint(1, nodes + 1)
    min_nodes = max_nodes if fixed_ranks else random.randint(1, min(max_nodes, nodes))
    lease_s, fence_s, ping_interval_s = random.choice([(6.0, 4.0, 1.0), (6.0, 4.0, 1.0), (3.0, 2.0, 0.5)])
    limits = Limits(
        join_s=240.0 if must_succeed else random.choice([120.0, 120.0, 15.0]),
        stop_grace_s=random.choice([5.0, 30.0]),
        lease_s=lease_s,
        fence_s=fence_s,
        ping_interval_s=ping_interval_s,
        drain_s=20.0,
    )
    options = SimOptions(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=100 if must_succeed else random.choice([0, 1, 3, 10]),
        fixed_ranks=fixed_ranks,
        work_s=random.choice([0.01, 1.0, 5.0, 30.0, 90.0]),
        delay_s_max=random.choice([0.005, 0.005, 0.05, 0.4]),
        limits=limits,
        faults=_faults(random, must_succeed=must_succeed),
        asks=random.random() < 0.5,
        grow=random.choice([Grow.DRAIN, Grow.DRAIN, Grow.NOW, Grow.NEVER]),
    )
    if random.random() < 0.3:
        options = _stalling(random, options)
    if random.random() < 0.6:
        options = _surviving(random, options)
    if random.random() < 0.25:
        options = _leaving(random, options, nodes)
    return Draw(seed, nodes, options, must_succeed)


def _stalling(random: Random, options: SimOptions) -> SimOptions:
    """The same job with agents that tell of steps, and with times in which there are none."""
    limits = structs.replace(options.limits, hang_report_s=10.0, hang_timeout_s=20.0, look_moving_s=5.0)
    hangs, pauses = random.choice([(0, 0), (2, 0), (0, 2), (4, 4)])
    others = FaultOptions() if random.random() < 0.5 else options.faults
    faults = replace(others, hangs=hangs, pauses=pauses, span_s=60.0, reboots=options.faults.reboots)
    return replace(options, steps=True, work_s=random.choice([20.0, 60.0]), limits=limits, faults=faults)


def _surviving(random: Random, options: SimOptions) -> SimOptions:
    """The same job with workers that run in `ht.survive`."""
    return replace(
        options,
        survives=True,
        survive=random.choice([Survive.SHRINK, Survive.SHRINK, Survive.WAIT, Survive.OFF]),
        min_ranks=random.choice([1, 1, 1, 3]),
        asks=options.asks or random.random() < 0.5,
        faults=replace(
            options.faults,
            worker_failures=random.choice([0, options.faults.worker_failures]),
            worker_kills=random.choice([1, 3, 5]),
            regroup_faults=random.random() < 0.5,
        ),
    )


def _leaving(random: Random, options: SimOptions, nodes: int) -> SimOptions:
    """The same job with survivors whose nodes leave on purpose, again and again."""
    return replace(
        options,
        min_nodes=random.choice([1, 1, 2]) if nodes > 1 else 1,
        max_nodes=nodes,
        fixed_ranks=False,
        work_s=random.choice([10.0, 30.0, 90.0]),
        survives=True,
        survive=random.choice([Survive.SHRINK, Survive.SHRINK, Survive.SHRINK, Survive.WAIT]),
        asks=True,
        faults=replace(
            options.faults,
            worker_failures=0,
            worker_kills=random.choice([0, 1]),
            agent_kills=random.choice([0, options.faults.agent_kills]),
            signals=random.choice([2, 4, 8]),
            near_leaves=random.random() < 0.6,
            regroup_faults=random.random() < 0.3,
        ),
    )


def draw_multiples(seed: int) -> Draw:
    """A job with a sharded model: each generation trains on a multiple of 2 or more ranks, and the others are spares."""
    random = Random(seed * 15_485_863 + 5)
    drawn = draw(seed)
    nodes = min(drawn.nodes, 4)
    few = random.choice([0, 0, 1])
    faults = FaultOptions(
        worker_failures=few,
        worker_kills=random.choice([1, 3, 5]),
        agent_kills=few,
        power_losses=random.choice([0, 0, 1]),
        partitions=random.choice([0, 0, 1]),
        signals=random.choice([0, 0, 2]),
        store_deaths=random.choice([0, 0, 1]),
        hangs=random.choice([0, 0, 2]),
        pauses=random.choice([0, 0, 2]),
        regroup_faults=random.random() < 0.3,
        reboots=drawn.options.faults.reboots,
    )
    options = replace(
        drawn.options,
        min_nodes=1,
        max_nodes=nodes,
        nproc_max=random.choice([1, 2]),
        multiple=random.choice([2, 2, 3, 4]),
        fixed_ranks=False,
        work_s=random.choice([20.0, 60.0]),
        steps=True,
        asks=random.random() < 0.7,
        survives=True,
        survive=random.choice([Survive.SHRINK, Survive.SHRINK, Survive.WAIT]),
        min_ranks=1,
        limits=structs.replace(drawn.options.limits, hang_report_s=10.0, hang_timeout_s=20.0, look_moving_s=5.0),
        faults=faults,
    )
    return Draw(seed, nodes, options, drawn.must_succeed)


def _faults(random: Random, *, must_succeed: bool) -> FaultOptions:
    return FaultOptions(
        span_s=random.choice([5.0, 60.0, 60.0]),
        worker_failures=random.choice([0, 0, 1, 3, 6]),
        agent_kills=random.choice([0, 0, 1, 2]),
        power_losses=random.choice([0, 0, 1, 2]),
        link_resets=random.choice([0, 0, 1, 3]),
        partitions=random.choice([0, 0, 1, 2]),
        signals=random.choice([0, 0, 0, 1, 2]),
        store_deaths=random.choice([0, 0, 0, 1, 3]),
        requeues=0 if must_succeed else random.choice([0, 0, 0, 0, 1]),
        coordinator_pauses=random.choice([0, 0, 0, 1, 2]),
        coordinator_deaths=random.choice([0, 0, 0, 1, 2]),
        reboots=must_succeed or random.random() < 0.8,
    )


def draw_succession(seed: int, *, story_lines_max: int | None, build: Build = SuccessionCluster) -> SuccessionCluster:
    """A job of 3 to 7 nodes that suffers most from what concerns coordinators. Every host that goes comes back."""
    random = Random(seed * 104_729 + 3)
    nodes = random.randint(3, 7)
    lease_s, fence_s, ping_interval_s = random.choice([(6.0, 4.0, 1.0), (6.0, 4.0, 1.0), (3.0, 2.0, 0.5)])
    few = random.choice([0, 0, 1, 2])
    faults = FaultOptions(
        span_s=random.choice([10.0, 40.0, 90.0]),
        worker_failures=random.choice([0, 0, 1, 3]),
        worker_kills=random.choice([0, 0, 2]),
        agent_kills=few,
        power_losses=random.choice([0, 0, 1, 2]),
        link_resets=random.choice([0, 0, 1, 3]),
        signals=random.choice([0, 0, 1, 3]),
        leader_crashes=random.choice([0, 1, 1, 2, 4]),
        leader_moments=random.choice([0, 10, 30]),
        leader_cuts=random.choice([0, 0, 1, 2]),
        cuts=random.choice([0, 0, 1, 2]),
        freezes=random.choice([0, 0, 1, 3]),
        lags=random.choice([0, 0, 1, 2]),
        regroup_faults=random.random() < 0.3,
        near_leaves=random.random() < 0.3,
    )
    options = SimOptions(
        min_nodes=nodes // 2 + 1,
        max_nodes=nodes,
        nproc_max=2,
        max_restarts=100,
        work_s=random.choice([20.0, 60.0, 120.0]),
        survives=random.random() < 0.5,
        asks=random.random() < 0.5,
        delay_s_max=random.choice([0.005, 0.005, 0.05, 0.2]),
        limits=Limits(
            join_s=240.0,
            last_call_s=10.0,
            stop_grace_s=5.0,
            lease_s=lease_s,
            fence_s=fence_s,
            ping_interval_s=ping_interval_s,
            drain_s=10.0,
        ),
        grow=random.choice([Grow.DRAIN, Grow.DRAIN, Grow.NOW]),
        faults=faults,
    )
    weather = random.choice([Weather(), Weather(), Weather(loss=0.1, twice=0.3), Weather(loss=0.3)])
    return build(
        seed,
        nodes,
        options,
        endpoints=random.choice([1, 1, 2, 3]),
        witnesses=random.choice([0, 0, 0, 1, 2]),
        fixed_ports=random.random() < 0.5,
        weather=weather,
        story_lines_max=story_lines_max,
    )


def run_succession(
    seed: int, *, story_lines_max: int | None = 0, build: Build = SuccessionCluster
) -> SuccessionCluster:
    """One such job to its end. Raises BrokenPromiseError."""
    cluster = draw_succession(seed, story_lines_max=story_lines_max, build=build)
    cluster.run()
    if not cluster.succeeded():
        raise BrokenPromiseError(cluster.tell("every host came back and the budget was large, yet nobody succeeded"))
    return cluster


def run_seed(seed: int, *, story_lines_max: int | None = 0) -> SimCluster:
    """One job to its end.

    Raises BrokenPromiseError when a promise did not hold, success included where it was demanded.
    """
    return _run(draw(seed), story_lines_max)


def run_multiples(seed: int, *, story_lines_max: int | None = 0) -> SimCluster:
    """One job of draw_multiples to its end. Raises BrokenPromiseError."""
    return _run(draw_multiples(seed), story_lines_max)


def _run(drawn: Draw, story_lines_max: int | None) -> SimCluster:
    cluster = SimCluster(drawn.seed, drawn.nodes, drawn.options, story_lines_max=story_lines_max)
    cluster.run()
    if drawn.must_succeed and not cluster.succeeded():
        raise BrokenPromiseError(cluster.tell("every host came back and the budget was large, yet nobody succeeded"))
    return cluster


def run_asked(seed: int, *, story_lines_max: int | None = 0) -> SimCluster:
    """The job of this seed, with questions of users. Where it must succeed, none of them ends it."""
    drawn = draw(seed)
    return _run(replace(drawn, options=_asked(drawn.options, harmless=drawn.must_succeed)), story_lines_max)


def run_asked_succession(seed: int, *, story_lines_max: int | None = 0) -> SuccessionCluster:
    """The same of a job whose nodes elect their coordinator."""

    def build(seed: int, nodes: int, options: SimOptions, **more: Any) -> SuccessionCluster:
        return SuccessionCluster(seed, nodes, _asked(options, harmless=True), **more)

    return run_succession(seed, story_lines_max=story_lines_max, build=build)


def _asked(options: SimOptions, *, harmless: bool) -> SimOptions:
    return replace(options, faults=replace(options.faults, questions=QUESTIONS_ASKED, harmless=harmless))


RUN: dict[str, Callable[..., SimCluster]] = {
    PLAIN: run_seed,
    SUCCESSION: run_succession,
    MULTIPLES: run_multiples,
    QUESTIONS: run_asked,
    QUESTIONS_SUCCESSION: run_asked_succession,
}


def run_seeds(first: int, end: int, family: str = PLAIN) -> SweepResult:
    """The seeds first to end-1, one after another."""
    run = RUN[family]
    tally = SweepResult(family)
    for seed in range(first, end):
        tally.jobs += 1
        try:
            cluster = run(seed)
        except BrokenPromiseError as error:
            tally.failures[seed] = str(error).partition("\n")[0]
        else:
            tally.events += cluster.events
            tally.asked += cluster.asked
            tally.outcomes.update(kind.value for kind in cluster.kinds.elements())
    return tally


def report(tally: SweepResult) -> str:
    """The failing seeds, each with the command that tells its story."""
    lines = [
        f"{text}\n  python -m tests.support.simulator.sweep {tally.family} {seed}"
        for seed, text in sorted(tally.failures.items())[:FAILURES_SHOWN_MAX]
    ]
    return "\n".join([f"{len(tally.failures)} of {tally.jobs} simulated jobs broke a promise", *lines])


def parse_seeds(text: str) -> tuple[int, int]:
    """`first:end` (end is not run); raises ValueError.

    >>> parse_seeds("0:2000")
    (0, 2000)
    """
    first, colon, end = text.partition(":")
    if not colon or not int(first) < int(end):
        raise ValueError(f"seeds are given as first:end, not {text!r}")
    return int(first), int(end)


def _tell_story(seed: int, family: str) -> int:
    if family in (PLAIN, QUESTIONS, MULTIPLES):
        sys.stdout.write(f"{(draw_multiples if family == MULTIPLES else draw)(seed)}\n")
    else:
        drawn = draw_succession(seed, story_lines_max=0)
        where = f"endpoints {drawn.endpoints}, witnesses {drawn.witnesses}"
        sys.stdout.write(f"{drawn.options} {len(drawn.hosts)} nodes, {where}, {drawn.weather}\n")
    run = RUN[family]
    try:
        cluster = run(seed, story_lines_max=None)
    except BrokenPromiseError as error:
        sys.stdout.write(f"{error}\n")
        return EXIT_FAILURE
    ends = ", ".join(f"{host} {outcome.kind.value}" for host, outcome in cluster.outcomes.items())
    sys.stdout.write(cluster.tell(f"every promise held: {ends}") + "\n")
    return 0


def _sweep(first: int, end: int, family: str) -> int:
    began_s = time.monotonic()
    total = SweepResult(family)
    starts = range(first, end, CHUNK_SEEDS)
    ends = [min(start + CHUNK_SEEDS, end) for start in starts]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for tally in pool.map(run_seeds, starts, ends, [family] * len(starts)):
            total.add(tally)
    outcomes = ", ".join(f"{count} {kind}" for kind, count in total.outcomes.most_common())
    sys.stdout.write(f"{total.jobs} jobs, {total.events} events, {time.monotonic() - began_s:.0f} s: {outcomes}\n")
    if total.failures:
        sys.stdout.write(report(total) + "\n")
    return EXIT_FAILURE if total.failures else 0


def main(arguments: Sequence[str]) -> int:
    try:
        *families, text = arguments
        family = FAMILIES[FAMILIES.index(families[0])] if families else PLAIN
        if ":" in text:
            return _sweep(*parse_seeds(text), family)
        return _tell_story(int(text), family)
    except ValueError as error:
        sys.stderr.write(f"usage: python -m tests.support.simulator.sweep [FAMILY] SEED | FIRST:END ({error})\n")
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
