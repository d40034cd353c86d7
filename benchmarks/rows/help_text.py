"""`--help`: wall time and largest resident memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.harness import BenchmarkError, Launcher, Metric, Row, Sample, environment

# A process counts the memory of whoever forked it as its own peak: a small one has to do that, not this harness.
WRAPPER = """
import os, sys, time
began = time.monotonic_ns()
quiet = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
_, status, usage = os.wait4(pid, 0)
print(time.monotonic_ns() - began, usage.ru_maxrss, status)
"""


def measure(launcher: Launcher, folder: Path) -> Sample:
    command = [sys.executable, "-I", "-S", "-c", WRAPPER, *launcher.command, "--help"]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=True, timeout=60)
    wall_ns, peak_kib, status = map(int, done.stdout.split())
    if status != 0:
        raise BenchmarkError(f"--help ended with wait status {status}: {done.stderr[-300:]}")
    return {"wall": wall_ns / 1e9, "memory": peak_kib / 1024}


ROW = Row(
    name="help",
    title="`--help`",
    metrics=(Metric("wall", "s", ratio_max=0.06), Metric("memory", "MB", ratio_max=0.06, digits=1)),
    measure=measure,
    repeat={"holdfast": 9, "torchrun": 9},
)
