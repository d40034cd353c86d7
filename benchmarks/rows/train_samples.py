"""Samples lost and repeated in one shuffled epoch whose world goes 4 → 3 → 5. The column torchrun: what torch and torchdata offer for it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import HOLDFAST, SCRIPTS, TORCHRUN, BenchmarkError, Launcher, Metric, Row, Sample, environment

OTHERS = {
    "elastic": "ElasticDistributedSampler, start_index",
    "skip": "DistributedSampler, batches skipped",
    "torchdata": "torchdata StatefulDataLoader",
}
WHAT = ("lost", "repeated")


def result(name: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, str(SCRIPTS / "train_samples.py"), name]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise BenchmarkError(f"{name}: exit code {done.returncode}: {done.stderr[-300:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(launcher: Launcher, folder: Path) -> Sample:
    if launcher is HOLDFAST:
        return result("holdfast", folder)
    # torchdata is no dependency of ours, not even for development: measured where it is installed.
    names = [name for name in OTHERS if name != "torchdata" or importlib.util.find_spec("torchdata")]
    found = {name: result(name, folder) for name in names}
    return {f"{what}, {OTHERS[name]}": found[name][what] for name in names for what in WHAT}


ROW = Row(
    name="train-samples",
    title="one shuffled epoch on 4 → 3 → 5 ranks",
    metrics=(
        *(Metric(what, "%", value_max=0.0, digits=1) for what in WHAT),
        *(Metric(f"{what}, {other}", "%", digits=1) for other in OTHERS.values() for what in WHAT),
    ),
    measure=measure,
    repeat={HOLDFAST.name: 1, TORCHRUN.name: 1},
    group="train",
)
