"""A rank or a node is killed while the others train in `ht.survive`: until they do their next step, and until all train again.

One job, and one kill after the other: a random rank at a random time, once all train. Each sample is a job; beside its
figures it has those of each kill. What counts is decided by the steps that the ranks wrote down (scripts/survive_steps.py):
a rank trains again when it has done a step in another call of its training function, or in another process. torchrun
runs the same script, which then restarts.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, median
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
    launched,
    measured_by,
    tail,
)

SCRIPT = "survive_steps.py"
RANKS = 4
NODES = 3
KILLS = 5
"""In one job."""
TRAIN_S = (0.5, 3.0)
"""From the first step of all ranks to the next kill."""
GROWN_S = 1.0
"""After all train again: whether steps are long because of it is watched for so long."""
NEXT_STEP_S = 0.3
LIMIT_S = 90.0
POLL_S = 0.01
SEED = 16
EXACT = Path(__file__).parents[2] / "tests" / "train" / "scripts" / "survivor.py"
"""The script whose jobs end, and whose ranks write down what they have then."""
EPOCHS = 60
RANDOM_KILLS, JOB_KILLS = 200, 25
"""In all jobs, and at most in one."""
RANDOM_S, SOON = 1.0, 0.3
"""A kill comes up to so long after all train, or, this share of them, after the kill before: in its regroup, or while its
replacement starts."""
END_S = 600.0
"""For the steps after the last kill of a job."""
about = partial(math.isclose, rel_tol=1e-3)
STEPS = ("step", "counts", "rates")
ROUNDED = ("weights", "parameters")
SAME = {"wait": (*STEPS, *ROUNDED, "random"), "shrink": STEPS}
"""What each rank has at the end as in an undisturbed job. `counts`: each sample was trained once in each epoch. What rank
0's batches did to the averages of batch normalization is in its memory alone. After a restart of all, as after a second
loss in a regroup, DDP sums the first gradients in another order: what is computed is the same but for rounding."""

Life = tuple[int, int]
"""A process, and which call of its training function."""


@dataclass
class Trail:
    """The steps of all ranks of a job on one node, as they write them down."""

    folder: Path
    process: subprocess.Popen[bytes]
    steps: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: {local: [] for local in range(RANKS)})
    """By local rank."""
    _read_bytes: int = 0

    def look(self) -> None:
        path = self.folder / "steps.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._read_bytes += whole
        for line in text[:whole].splitlines():
            step = json.loads(line)
            self.steps[step["local"]].append(step)

    def watch(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.look()
            time.sleep(POLL_S)

    def all_train(self, since_s: float, before: dict[int, Life]) -> float:
        """Wait until all ranks of a full world do a step in other lives than these; when."""
        while time.monotonic() < since_s + LIMIT_S:
            self.look()
            full = [fresh(self.steps[local], before.get(local), since_s, RANKS) for local in range(RANKS)]
            if all(full):
                return float(max(steps[0]["now"] for steps in full))
            if self.process.poll() is not None:
                raise BenchmarkError(f"ended with {self.process.returncode}: {tail(self.folder)}")
            time.sleep(POLL_S)
        raise BenchmarkError(f"not within {LIMIT_S:g} s: all ranks in training: {tail(self.folder)}")


def life(step: dict[str, Any]) -> Life:
    return step["pid"], step["call"]


def fresh(steps: list[dict[str, Any]], before: Life | None, since_s: float, world: int = 0) -> list[dict[str, Any]]:
    """The steps after this time in another life; `world`: in worlds of this size only."""
    found = []
    for step in reversed(steps):
        if step["now"] <= since_s:
            break
        if life(step) != before and world in {0, step["world"]}:
            found.append(step)
    return found[::-1]


@contextmanager
def training(
    launcher: Launcher,
    folder: Path,
    start_s: float,
    *flags: str,
    script: str = SCRIPT,
    more: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
) -> Iterator[Trail]:
    """A job whose ranks all train. `more`: arguments of the script; `extra`: of its environment."""
    line = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "1000", *flags]
    environment = {"OMP_NUM_THREADS": "1", **(extra or {})}
    with launched(launcher, line, script, folder, str(start_s), *more, extra=environment) as (process, _):
        trail = Trail(folder, process)
        trail.all_train(time.monotonic(), {})
        yield trail


def kill(trail: Trail, victim: int, start_s: float) -> Sample:
    """One kill, and what follows."""
    trail.look()
    before = {local: life(steps[-1]) for local, steps in trail.steps.items()}
    killed_s = time.monotonic()
    os.kill(before[victim][0], signal.SIGKILL)
    all_s = trail.all_train(killed_s, before)
    trail.watch(GROWN_S)
    others = [local for local in range(RANKS) if local != victim]
    found = {local: fresh(trail.steps[local], before[local], killed_s) for local in others}
    old = [step for local, steps in trail.steps.items() for step in steps if life(step) == before[local]]
    first = min(steps[0]["step"] for steps in found.values())
    return {
        "next step of the others": max(steps[0]["now"] for steps in found.values()) - killed_s,
        "all train, less the start": all_s - killed_s - start_s,
        # Nobody did two steps in that time: one takes longer (a slow machine under load).
        "longest step of the others": max(
            (b["now"] - a["now"] for steps in found.values() for a, b in pairwise(steps)), default=GROWN_S
        ),
        "steps lost": max(0, max(step["step"] for step in old) + 1 - first),
        "processes kept": 100.0 * mean(steps[-1]["pid"] == before[local][0] for local, steps in found.items()),
    }


def in_one(kills: list[Sample]) -> Sample:
    """The figures of a job, and those of each kill."""
    if not kills:
        return {}
    others = [each["next step of the others"] for each in kills]
    every = [each["all train, less the start"] for each in kills]
    return {
        "kills": len(kills),
        "next step of the others": median(others),
        "… at most": max(others),
        f"… within {NEXT_STEP_S:g} s": 100.0 * mean(each <= NEXT_STEP_S for each in others),
        "all train, less the start": median(every),
        "all train, at most": max(every),
        "longest step of the others": max(each["longest step of the others"] for each in kills),
        "steps lost": max(each["steps lost"] for each in kills),
        "processes kept": min(each["processes kept"] for each in kills),
        **{f"kill {number}: {name}": value for number, each in enumerate(kills) for name, value in each.items()},
    }


def measure(start_s: float, launcher: Launcher, folder: Path) -> Sample:
    rng = Random(f"{SEED} {folder}")
    kills: list[Sample] = []
    with training(launcher, folder, start_s) as trail:
        try:
            for _ in range(KILLS):
                trail.watch(rng.uniform(*TRAIN_S))
                kills.append(kill(trail, rng.randrange(RANKS), start_s))
        except BenchmarkError as error:
            raise HalfwayError(str(error), in_one(kills)) from error
    return in_one(kills)


def measure_quick(launcher: Launcher, folder: Path) -> Sample:
    """A script that starts at once: with survivors, and with a restart of all."""
    sample: Sample = {}
    for how in ("off", "shrink"):
        (folder / how).mkdir()
        with training(launcher, folder / how, 0.0, "--survive", how) as trail:
            trail.watch(TRAIN_S[0])
            found = kill(trail, 1, 0.0)
        sample[f"{how}: all train"] = found["all train, less the start"]
        sample[f"{how}: next step of the others"] = found["next step of the others"]
    return sample


def measure_node(launcher: Launcher, folder: Path) -> Sample:
    with job(launcher, folder, f"1:{NODES}", hosts=NODES, script=SCRIPT) as running:
        since_s = running.start(1)
        for number in range(2, NODES + 1):
            running.start(number)
        running.trains(NODES, since_s, LIMIT_S)
        time.sleep(TRAIN_S[0])
        since_s = time.monotonic()
        running.hosts[NODES].kill()
        running.forget(NODES)
        return {"next step of the others": running.trains(NODES - 1, since_s, LIMIT_S).step_s}


@dataclass(frozen=True)
class Exact:
    """A script whose jobs end, and what each rank has at the end as in an undisturbed job."""

    script: Path
    case: Mapping[str, Any]
    same: Mapping[str, Sequence[str]]


def measure_random(exact: Exact, launcher: Launcher, folder: Path) -> Sample:
    """Jobs to their ends, while ranks are killed at random: when all train, in a regroup, in a save, while replacements
    start. The survivors wait for the replacements, or go on without them, in turn."""
    rng = Random(f"{SEED} {RANDOM_KILLS}")
    undisturbed, _ = ended(exact, launcher, folder / "undisturbed", "off", Random(0), 0)
    sample: Sample = {"kills": 0, "jobs": 0, "restarts of all": 0}
    for number in itertools.count(1):
        how = ("wait", "shrink")[number % 2]
        left = min(JOB_KILLS, RANDOM_KILLS - int(sample["kills"]))
        site = folder / f"{number}-{how}"
        ranks, kills = ended(exact, launcher, site, how, rng, left)
        sample["kills"] += kills
        sample["jobs"] += 1
        restarts = len([*site.rglob("attempt_*")]) - 1
        sample["restarts of all"] += restarts
        for local, end in ranks.items():
            expected = undisturbed[local]
            wrong = [
                name for name in exact.same[how] if end[name] != expected[name] and not (restarts and name in ROUNDED)
            ]
            if how == "wait" and not all(map(about, end["weights"], expected["weights"])):
                wrong.append("weights")
            if wrong:
                found = {name: (end[name], expected[name]) for name in wrong}
                raise HalfwayError(f"{site.name}, local rank {local}: {found}", sample)
        if len({str(end["parameters"]) for end in ranks.values()}) > 1:
            raise HalfwayError(f"{site.name}: the ranks have different weights", sample)
        if sample["kills"] >= RANDOM_KILLS:
            return sample
    raise AssertionError


def ended(
    exact: Exact, launcher: Launcher, folder: Path, how: str, rng: Random, kills_max: int
) -> tuple[dict[int, Any], int]:
    """What the local ranks of a job have at its end, and how often one of them was killed."""
    folder.mkdir()
    line = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "100000", "--survive", how]
    case = json.dumps({"epochs": EPOCHS, "disk": 40, **exact.case})
    kills, soon = 0, False
    with launched(launcher, line, str(exact.script), folder, str(folder), case) as (process, _):
        while process.poll() is None and kills < kills_max:
            killed_s = time.monotonic()
            while not (soon or all_can_go_on(folder, killed_s) or process.poll() is not None):
                if time.monotonic() > killed_s + LIMIT_S:
                    raise BenchmarkError(f"{folder.name}: all ranks do not train within {LIMIT_S:g} s: {tail(folder)}")
                time.sleep(5 * POLL_S)  # it reads all events
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.0, RANDOM_S))
            if pids := workers(folder):
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)
                    kills += 1
            soon = not soon and rng.random() < SOON
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"{folder.name}: no end within {END_S:g} s: {tail(folder)}") from error
    if process.returncode:
        raise BenchmarkError(f"{folder.name}: exit code {process.returncode} after {kills} kills: {tail(folder)}")
    ends = {local: folder / f"end.{local}" for local in range(RANKS)}
    left = {local: json.loads(path.read_text()) for local, path in ends.items() if path.exists()}
    if not left or (how != "shrink" and len(left) < RANKS):
        raise BenchmarkError(f"{folder.name}: only the local ranks {list(left)} came to the end")
    return left, kills


def all_can_go_on(folder: Path, since_s: float) -> bool:
    """Whether all ranks of a full world have come to train since then."""
    for path in folder.rglob("events.jsonl"):
        for line in reversed(path.read_bytes().splitlines()):
            event = json.loads(line) if line.endswith(b"}") else {}
            if event.get("event") == "can_go_on":
                return float(event["monotonic"]) > since_s and len(event["local_ranks"]) == RANKS
    return False


def workers(folder: Path) -> list[int]:
    """The processes of the ranks, also those that are starting."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if f"BENCH_OUT={folder}".encode() in variables and any(each.startswith(b"RANK=") for each in variables):
                found.append(int(process.name))
    return sorted(found)


def measure_cost(launcher: Launcher, folder: Path) -> Sample:
    found = measured_by("survive_cost.py", launcher, 1, folder, LIMIT_S)
    return {"added": found["added"], "step without": found["without"]}


def of_kills(name: str, start_s: float, *, jobs: int, by_name: bool) -> Row:
    """KILLS in each of so many jobs."""
    return Row(
        name=name,
        title=f"kill -9 of one of {RANKS} ranks, script that needs {start_s:g} s to start",
        metrics=(
            Metric("next step of the others", "s"),
            Metric("… at most", "s", summary=max),
            Metric(f"… within {NEXT_STEP_S:g} s", "%", value_min=100.0, digits=0, summary=mean),
            Metric("all train, less the start", "s"),
            Metric("all train, at most", "s", value_max=1.0, summary=max),
            Metric("longest step of the others", "s", value_max=0.5, summary=max),
            Metric("steps lost", "", value_max=0.0, digits=0, summary=max),
            Metric("processes kept", "%", value_min=100.0, digits=0, summary=min),
        ),
        measure=partial(measure, start_s),
        repeat={HOLDFAST.name: jobs, TORCHRUN.name: 1},
        group="survive",
        by_name=by_name,
    )


ROWS = (
    of_kills("survive-kill", 5.0, jobs=5, by_name=False),
    of_kills("survive-kill-slow-start", 20.0, jobs=10, by_name=True),
    Row(
        name="survive-quick",
        title="the same, script that starts at once, `--survive shrink` and `off`",
        metrics=(
            Metric("shrink: all train", "s"),
            Metric("off: all train", "s"),
            Metric("shrink: next step of the others", "s"),
        ),
        measure=measure_quick,
        repeat={HOLDFAST.name: 9},
        group="survive",
    ),
    Row(
        name="survive-node",
        title=f"SIGKILL of one of {NODES} nodes",
        metrics=(Metric("next step of the others", "s", value_max=0.5),),
        measure=measure_node,
        repeat={HOLDFAST.name: 10, TORCHRUN.name: 1},
        group="survive",
        strict=True,
        why_not=why_not,
    ),
    Row(
        name="survive-random",
        title=f"{RANDOM_KILLS} random kills: each sample trained once, and the weights of an undisturbed job",
        metrics=(
            Metric("kills", "", value_min=float(RANDOM_KILLS), digits=0),
            Metric("jobs", "", digits=0),
            Metric("restarts of all", "", digits=0),
        ),
        measure=partial(measure_random, Exact(EXACT, {}, SAME)),
        repeat={HOLDFAST.name: 1},
        group="survive",
        strict=True,
        by_name=True,
    ),
    Row(
        name="survive-cost",
        title="`ht.survive` in a training step of 5 ms",
        metrics=(Metric("added", "µs", value_max=25.0, digits=1), Metric("step without", "µs", digits=0)),
        measure=measure_cost,
        repeat={HOLDFAST.name: 3},
        group="survive",
    ),
)
