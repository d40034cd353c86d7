"""Snapshots in an object store, a real S3 server on this machine. The column torchrun: a plain `put` of fsspec."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import HOLDFAST, SCRIPTS, TORCHRUN, BenchmarkError, Launcher, Metric, Row, Sample, environment

KILLS = 200
SEED = 1
LIMIT_S = 3600


def script(name: str, *arguments: object, folder: Path) -> Any:
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    env = {**environment(folder), "PYTHONPATH": str(SCRIPTS.parents[1])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise BenchmarkError(f"{name}: {done.stderr[-300:]}")
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def measure_upload(launcher: Launcher, folder: Path) -> Sample:
    found: Sample = script("store_upload.py", "holdfast" if launcher is HOLDFAST else "fsspec", folder=folder)
    return found


def measure_kills(_launcher: Launcher, folder: Path) -> Sample:
    found = script("store_kills.py", KILLS, SEED, folder=folder)
    if found["faults"]:
        raise BenchmarkError("; ".join(found["faults"]))
    return {name: float(found[name]) for name in ("kills", "resumed correctly")}


ROWS = (
    Row(
        name="store-upload",
        title="256 MB from memory into S3",
        metrics=(Metric("upload", "s", ratio_max=1 / 0.9),),
        measure=measure_upload,
        repeat={HOLDFAST.name: 7, TORCHRUN.name: 7},
        group="store",
        by_name=True,
    ),
    Row(
        name="store-kills",
        title="200 kills in all phases of an upload to S3",
        metrics=(Metric("kills", "", digits=0), Metric("resumed correctly", "", value_min=KILLS, digits=0)),
        measure=measure_kills,
        repeat={HOLDFAST.name: 1},
        group="store",
        by_name=True,
    ),
)
