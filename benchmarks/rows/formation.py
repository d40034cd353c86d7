"""Many agents forming one c10d generation on one machine; and how holdfast's cost grows from 8 to 1,000 agents."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.harness import BenchmarkError, Launcher, Metric, Row, Sample, environment

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 150
SIZES = (8, 32, 64, 128)
COUNTS = (8, 32, 128, 512, 1000)
PROCESSES = 2
"""Among which the 1,000 connections are shared out: one per core of the reference machine."""


def python(arguments: list[str], folder: Path) -> str:
    # In the repository's root: the child imports this package. In a group of its own: it forks.
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as template:
        try:
            out, err = template.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"not done within {LIMIT_S} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(template.pid, signal.SIGKILL)
    if template.returncode != 0:
        said = [line for line in err.splitlines() if "Error" in line] or [err.strip()]
        raise BenchmarkError(f"{said[0][:300]} … {said[-1][:300]}")
    return out


def measure_processes(count: int, launcher: Launcher, folder: Path) -> Sample:
    return {"seconds": float(python(["-m", "benchmarks.forming", launcher.name, str(count)], folder))}


def measure_shared(_launcher: Launcher, folder: Path) -> Sample:
    sample: Sample = {}
    for count in COUNTS:
        code = f"from benchmarks.agents import form_many; print(form_many({count}, {min(PROCESSES, count)}))"
        seconds = float(python(["-c", code], folder))
        sample[f"{count} agents"] = seconds
        sample[f"per agent of {count}"] = 1000 * seconds / count
    return sample


def processes_row(count: int) -> Row:
    return Row(
        name=f"form{count}",
        title=f"{count} agents, a process each, form one c10d generation",
        metrics=(Metric("seconds", "s", ratio_max=0.08 if count == 128 else None),),
        measure=partial(measure_processes, count),
        # Beyond 32, torchrun needs both cores for many seconds.
        repeat={"holdfast": 3, "torchrun": 3 if count <= 32 else 1},
    )


SHARED = Row(
    name="form-shared",
    title=f"agent connections that share {PROCESSES} processes form one generation",
    metrics=(
        *(Metric(f"{n} agents", "s", value_max=5.0 if n == 1000 else None) for n in COUNTS),
        *(Metric(f"per agent of {n}", "ms") for n in COUNTS),
    ),
    measure=measure_shared,
    repeat={"holdfast": 3},
)

ROWS = (*(processes_row(count) for count in SIZES), SHARED)
