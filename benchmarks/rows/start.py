"""From just before the launcher is started to the first line of a script that does not import torch, on both of 2 ranks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import BenchmarkError, Launcher, Metric, Row, Sample, launched, stamps, tail


def measure(launcher: Launcher, folder: Path) -> Sample:
    with launched(launcher, ["--standalone", "--nproc-per-node", "2"], "stamp.py", folder) as (process, began_ns):
        code = process.wait(60)
    found = stamps(folder, "main")
    if code != 0 or len(found) != 2:
        raise BenchmarkError(f"exit code {code}, {len(found)} of 2 ranks started: {tail(folder)}")
    return {"last rank": (max(found.values()) - began_ns) / 1e9, "first rank": (min(found.values()) - began_ns) / 1e9}


ROW = Row(
    name="start",
    title="start → first line of a torch-free script, 2 ranks",
    metrics=(Metric("last rank", "s", ratio_max=0.18), Metric("first rank", "s")),
    measure=measure,
    repeat={"holdfast": 9, "torchrun": 9},
)
