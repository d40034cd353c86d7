"""From the death of one of 2 ranks to main() of the restarted script, on both ranks; no torch."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import BenchmarkError, Launcher, Metric, Row, Sample, launched, stamps, tail


def measure(launcher: Launcher, folder: Path) -> Sample:
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    with launched(launcher, flags, "stamp.py", folder, extra={"BENCH_MODE": "crash"}) as (process, _):
        code = process.wait(60)
    crash, again = stamps(folder, "crash"), stamps(folder, "main")
    if code != 0 or len(crash) != 1 or len(again) != 2:
        raise BenchmarkError(f"exit code {code}, {len(again)} of 2 ranks restarted: {tail(folder)}")
    return {"last rank": (max(again.values()) - crash[1]) / 1e9}


ROW = Row(
    name="restart",
    title="crash → main() of the restarted script, no torch",
    metrics=(Metric("last rank", "s", ratio_max=0.3),),
    measure=measure,
    repeat={"holdfast": 9, "torchrun": 9},
)
