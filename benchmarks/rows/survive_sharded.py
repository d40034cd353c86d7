"""A rank or a node is killed while a sharded model is trained in `ht.survive`: FSDP2 and HSDP on gloo.

As survive.py, with scripts/survive_sharded_steps.py: each of the others leaves its training function and calls it again in
the same process, and takes the state from memory. torchrun runs the same script, which then restarts.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.elastic import job, why_not
from benchmarks.harness import (
    HOLDFAST,
    TORCHRUN,
    BenchmarkError,
    HalfwayError,
    Launcher,
    Metric,
    Row,
    Sample,
    measured_by,
)
from benchmarks.rows import survive
from benchmarks.rows.survive import (
    KILLS,
    LIMIT_S,
    NODES,
    RANDOM_KILLS,
    RANKS,
    SEED,
    TRAIN_S,
    Exact,
    in_one,
    kill,
    life,
    measure_random,
    training,
)

SCRIPT = "survive_sharded_steps.py"
COST = "survive_sharded_cost.py"
START_S = 20.0
JOBS = 10
MEMORY_EVERY = 20
"""Steps from one state in memory to the next, in the script."""
NEXT_STEP_S, ALL_S, NODE_S = 1.5, 2.0, 3.0
"""Beside these, two copies of the state, which is small here."""


def measure(kind: str, how: str, launcher: Launcher, folder: Path) -> Sample:
    """KILLS, one after the other, in one job."""
    rng = Random(f"{SEED} {kind} {how} {folder}")
    flags = ("--survive", how) if launcher is HOLDFAST else ()
    kills: list[Sample] = []
    with training(launcher, folder, START_S, *flags, script=SCRIPT, more=(kind,)) as trail:
        try:
            for _ in range(KILLS):
                trail.watch(rng.uniform(*TRAIN_S))
                kills.append(kill(trail, rng.randrange(RANKS), START_S))
        except BenchmarkError as error:
            raise HalfwayError(str(error), in_one(kills)) from error
    return in_one(kills)


def measure_compiled(launcher: Launcher, folder: Path) -> Sample:
    """The first step of the ranks that go on after a kill, and of processes that all restart after one: from the call of
    the training function to the end of the step. Both find what the first compilation has left on the disk."""
    took_s = {}
    for how in ("shrink", "off"):
        (folder / how).mkdir()
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / how / "compiled")}
        flags = ("--survive", how)
        with training(launcher, folder / how, 0.0, *flags, script=SCRIPT, more=("compiled",), extra=cache) as trail:
            trail.watch(TRAIN_S[0])
            before = {local: life(steps[-1]) for local, steps in trail.steps.items()}
            kill(trail, 1, 0.0)
        took_s[how] = median(first_step_s(trail.steps[local], before[local]) for local in before if local != 1)
    return {
        "first step after a regroup": took_s["shrink"],
        "first step of a new process": took_s["off"],
        "one of the other": took_s["shrink"] / took_s["off"],
    }


def first_step_s(steps: list[dict[str, Any]], before: tuple[int, int]) -> float:
    """Of the life after this one."""
    last = max(number for number, step in enumerate(steps) if life(step) == before)
    first = steps[last + 1]
    return float(first["now"] - first["called"])


def measure_node(launcher: Launcher, folder: Path) -> Sample:
    """A rank on each of three hosts; one host is lost, and another has the copy of its state. Nothing is on the disk."""
    with job(launcher, folder, f"1:{NODES}", hosts=NODES, script=SCRIPT, arguments=("0", "copied")) as running:
        since_s = running.start(1)
        for number in range(2, NODES + 1):
            running.start(number)
        running.trains(NODES, since_s, LIMIT_S)
        time.sleep(TRAIN_S[1])
        since_s = time.monotonic()
        running.hosts[NODES].kill()
        running.forget(NODES)
        next_s = running.trains(NODES - 1, since_s, LIMIT_S).step_s
        lost = [event["steps_lost"] for _, event in running.events("worker.went_on")]
        return {"next step of the others": next_s, **({"steps lost": max(lost)} if lost else {})}


def measure_cost(kind: str, launcher: Launcher, folder: Path) -> Sample:
    found = measured_by(COST, launcher, RANKS, folder, LIMIT_S, extra={"OMP_NUM_THREADS": "1", "KIND": kind})
    return {"added": found["added"], "part of a step": 100.0 * found["added"] / found["wall"], "step": found["wall"]}


EXACT = Exact(
    survive.EXACT.with_name("sharded.py"),
    # Many steps: with few of them a job would end after three kills, and most of the time go into starts.
    {"memory": 5, "epochs": 200},
    {"wait": ("step", "rates", "losses", "parameters", "weights", "random"), "shrink": ("step", "rates")},
)


def of_kills(name: str, title: str, kind: str, how: str, *metrics: Metric, torchrun: bool = True) -> Row:
    """KILLS in each of JOBS jobs."""
    return Row(
        name=name,
        title=f"kill -9 of one of {RANKS} ranks, {title}, script that needs {START_S:g} s to start",
        metrics=(*metrics, Metric("processes kept", "%", value_min=100.0, digits=0, summary=min)),
        measure=partial(measure, kind, how),
        repeat={HOLDFAST.name: JOBS, **({TORCHRUN.name: 1} if torchrun else {})},
        group="survive-sharded",
        by_name=True,
    )


ALL_TRAIN = Metric("all train, less the start", "s")
ALL_AT_MOST = Metric("all train, at most", "s", value_max=ALL_S, summary=max)

ROWS = (
    of_kills(
        "survive-sharded-kill",
        "FSDP2",
        "fsdp",
        "shrink",
        Metric("next step of the others", "s"),
        Metric("… at most", "s", value_max=NEXT_STEP_S, summary=max),
        ALL_TRAIN,
        ALL_AT_MOST,
        Metric("steps lost", "", value_max=float(MEMORY_EVERY), digits=0, summary=max),
    ),
    of_kills(
        "survive-sharded-wait",
        "FSDP2, `--survive wait`",
        "fsdp",
        "wait",
        ALL_TRAIN,
        ALL_AT_MOST,
        Metric("steps lost", "", value_max=float(MEMORY_EVERY), digits=0, summary=max),
        torchrun=False,
    ),
    of_kills(
        "survive-sharded-hsdp",
        "HSDP 2×2, `--survive wait`",
        "hsdp",
        "wait",
        Metric("steps lost", "", value_max=0.0, digits=0, summary=max),
        ALL_TRAIN,
        ALL_AT_MOST,
    ),
    Row(
        name="survive-sharded-node",
        title=f"SIGKILL of one of {NODES} nodes, FSDP2, `copies=1`",
        metrics=(
            Metric("next step of the others", "s", value_max=NODE_S),
            Metric("steps lost", "", digits=0, summary=max),
        ),
        measure=measure_node,
        repeat={HOLDFAST.name: 10, TORCHRUN.name: 1},
        group="survive-sharded",
        strict=True,
        by_name=True,
        why_not=why_not,
    ),
    Row(
        name="survive-sharded-random",
        title=f"{RANDOM_KILLS} random kills, FSDP2: each step done, and with `--survive wait` the bits of an undisturbed job",
        metrics=(
            Metric("kills", "", value_min=float(RANDOM_KILLS), digits=0),
            Metric("jobs", "", digits=0),
            Metric("restarts of all", "", digits=0),
        ),
        measure=partial(measure_random, EXACT),
        repeat={HOLDFAST.name: 1},
        group="survive-sharded",
        strict=True,
        by_name=True,
    ),
    Row(
        name="survive-sharded-compiled",
        title="kill -9 of one of 4 ranks, FSDP2 compiled in the function",
        metrics=(
            Metric("one of the other", "", value_max=0.5),
            Metric("first step after a regroup", "s"),
            Metric("first step of a new process", "s"),
        ),
        measure=measure_compiled,
        repeat={HOLDFAST.name: 5},
        group="survive-sharded",
        by_name=True,
    ),
    *(
        Row(
            name=f"survive-sharded-cost-{kind}",
            title=f"`ht.survive` in a training step of {name}",
            metrics=(
                Metric("part of a step", "%", value_max=0.5),
                Metric("added", "µs", digits=1),
                Metric("step", "µs", digits=0),
            ),
            measure=partial(measure_cost, kind),
            repeat={HOLDFAST.name: 15},
            group="survive-sharded",
            by_name=True,
        )
        for kind, name in (("fsdp", "FSDP2, 4 ranks"), ("hsdp", "HSDP 2×2"))
    ),
)
