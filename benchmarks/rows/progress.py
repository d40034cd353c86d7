"""What a training step pays for being counted and timed: the hook of the optimizer's step and what is around backward. And
how long a profile takes beyond the steps that it is of."""

from __future__ import annotations

import json
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.harness import (
    HOLDFAST,
    BenchmarkError,
    Launcher,
    Metric,
    Row,
    Sample,
    environment,
    launched,
    measured_by,
    tail,
)

LIMIT_S = 120.0


def measure(launcher: Launcher, folder: Path) -> Sample:
    found = measured_by("step_cost.py", launcher, 1, folder, LIMIT_S)
    return {"step without": found["without"] / 1000, "added": found["with"] - found["without"]}


PROFILED_RANKS, PROFILED_STEPS = 4, 5


def measure_profile(launcher: Launcher, folder: Path) -> Sample:
    """From the command until it returns, when all files are written; the first profile of the job, then the second."""
    trail = folder / "steps.jsonl"
    flags = ["--standalone", "--nproc-per-node", str(PROFILED_RANKS)]
    command = [launcher.command[0], "profile", f"0-{PROFILED_RANKS - 1}", "--steps", str(PROFILED_STEPS), "--json"]
    extra = {"HOLDFAST_RUNTIME_DIR": str(folder / "running")}
    with launched(launcher, flags, "ddp_steps.py", folder, extra=extra) as (process, _):
        deadline = time.monotonic() + LIMIT_S
        while not (trail.exists() and trail.read_bytes().count(b"\n") > 50 * PROFILED_RANKS):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"no steps: {tail(folder)}")
            time.sleep(0.1)
        took_s = []
        for _ in range(2):
            began_s = time.monotonic()
            done = subprocess.run(
                command, env=environment(folder, extra), capture_output=True, text=True, timeout=LIMIT_S
            )
            took_s.append(time.monotonic() - began_s)
            if done.returncode != 0:
                raise BenchmarkError(done.stderr or done.stdout)
            for rank in json.loads(done.stdout)["ranks"]:
                json.loads(next(Path(path) for path in rank["files"] if path.endswith("trace.json")).read_bytes())
    moments = [line["now"] for line in map(json.loads, trail.read_text().split("\n")[:-1]) if line["rank"] == 0]
    step_s = median(after - before for before, after in pairwise(moments[:50]))
    first, second = (each - PROFILED_STEPS * step_s for each in took_s)
    return {"first": first, "second": second, "step": step_s * 1000}


ROW = Row(
    name="progress",
    title="one training step, counted and timed",
    metrics=(
        Metric("added", "ns", value_max=1000.0, digits=0),
        Metric("step without", "µs", digits=1),
    ),
    measure=measure,
    repeat={HOLDFAST.name: 5},
)
PROFILE = Row(
    name="profile",
    title=f"a profile of {PROFILED_STEPS} steps of {PROFILED_RANKS} DDP ranks: command until files, without the steps",
    metrics=(
        Metric("first", "s", value_max=5.0, digits=2),
        Metric("second", "s", value_max=5.0, digits=2),
        Metric("step", "ms", digits=1),
    ),
    measure=measure_profile,
    repeat={HOLDFAST.name: 5},
)
