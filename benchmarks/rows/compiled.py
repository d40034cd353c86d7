"""Compiled models: what kept kernels save at a start, and how many processes compile for the ranks of one node."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from benchmarks.descendants import descendants
from benchmarks.harness import HOLDFAST, POLL_S, BenchmarkError, Launcher, Metric, Row, Sample, launched, stamps, tail

RANKS = 8
LIMIT_S = 600.0
WORKER = b"compile_worker"
"""In the command lines of torch's processes that compile, and of the one of each rank that starts them."""
COMPILER, COMPILER_WITHIN = b"cc1plus", 100
"""The name of the program that compiles C++ for g++, at the begin of its command line."""


def measure_caches(launcher: Launcher, folder: Path) -> Sample:
    """Two starts with one folder of kernels, which is empty at the first."""
    taken = []
    for name in ("empty", "kept"):
        job = folder / name
        job.mkdir()
        flags = ["--standalone", "--nproc-per-node", "1", "--cache-dir", str(folder / "kernels")]
        with launched(launcher, flags, "compiled_steps.py", job) as (process, began_ns):
            code = process.wait(LIMIT_S)
        third = stamps(job, "third")
        if code != 0 or not third:
            raise BenchmarkError(f"exit code {code}, {len(third)} of 1 ranks: {tail(job)}")
        taken.append((third[0] - began_ns) / 1e9)
    return {"kept beside empty": taken[1] / taken[0], "empty": taken[0], "kept": taken[1]}


def measure_processes(launcher: Launcher, folder: Path) -> Sample:
    """The most processes that compile at one moment: torch's own, and compilers of C++."""
    workers = compilers = 0
    own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "kernels"), "OMP_NUM_THREADS": "1"}
    flags = ["--standalone", "--nproc-per-node", str(RANKS)]
    with launched(launcher, flags, "compiled_steps.py", folder, extra=own) as (process, _):
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            lines = [line for line in map(_command, descendants(process.pid)) if line]
            workers = max(workers, sum(WORKER in line for line in lines))
            compilers = max(compilers, sum(COMPILER in line[:COMPILER_WITHIN] for line in lines))
            time.sleep(5 * POLL_S)
    if process.returncode != 0 or len(stamps(folder, "third")) != RANKS:
        raise BenchmarkError(f"exit code {process.returncode}: {tail(folder)}")
    return {"of torch": float(workers), "compilers": float(compilers)}


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


ROWS = (
    Row(
        name="compiled-start",
        title="a compiled model: start → third step with kept kernels, beside an empty folder",
        metrics=(
            Metric("kept beside empty", "×", value_max=0.5, digits=2),
            Metric("empty", "s", digits=1),
            Metric("kept", "s", digits=1),
        ),
        measure=measure_caches,
        repeat={HOLDFAST.name: 3},
        group="compiled",
    ),
    Row(
        name="compile-processes",
        title=f"{RANKS} ranks compile on one node: processes that compile",
        metrics=(
            Metric("of torch", "", value_max=8, digits=0, summary=max),
            Metric("compilers", "", value_max=8, digits=0, summary=max),
        ),
        measure=measure_processes,
        repeat={HOLDFAST.name: 1, "torchrun": 1},
        group="compiled",
    ),
)
