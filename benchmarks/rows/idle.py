"""What a launcher costs while its 2 workers sleep: memory (PSS) and CPU over 20 seconds, of all but the workers."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.harness import Launcher, Metric, Row, Sample, cpu_s, launched, wait_for_stamps

SETTLE_S = 3.0
WATCH_S = 20.0


def descendants(pid: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def pss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"no Pss of {pid}")


def measure(launcher: Launcher, folder: Path) -> Sample:
    flags = ["--standalone", "--nproc-per-node", "2"]
    with launched(launcher, flags, "stamp.py", folder, extra={"BENCH_MODE": "sleep"}) as (process, _):
        wait_for_stamps(folder, "main", 2, process)
        workers = set(wait_for_stamps(folder, "pid", 2, process).values())
        time.sleep(SETTLE_S)
        helpers = [pid for pid in descendants(process.pid) if pid not in workers]
        before = sum(cpu_s(pid) for pid in [process.pid, *helpers])
        time.sleep(WATCH_S)
        spent = sum(cpu_s(pid) for pid in [process.pid, *helpers]) - before
        return {
            "agent": pss_mb(process.pid),
            "helpers": sum(pss_mb(pid) for pid in helpers),
            "processes": 1 + len(helpers),
            "idle cpu": 100 * spent / WATCH_S,
        }


ROW = Row(
    name="idle",
    title="agent with 2 sleeping workers",
    metrics=(
        Metric("agent", "MB PSS", value_max=35.0, digits=1),
        Metric("helpers", "MB PSS", digits=1),
        Metric("processes", "", digits=0),
        Metric("idle cpu", "%", value_max=0.2),
    ),
    measure=measure,
    repeat={"holdfast": 3, "torchrun": 3},
)
