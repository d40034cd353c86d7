"""Workers forked from one import per node: start and restart until torch works, and the memory of many ranks.

torchrun's restarts are measured with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: with the store that it shares by default most
of them never work (see the row `recovery`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.harness import (
    HOLDFAST,
    BenchmarkError,
    Launcher,
    Metric,
    Row,
    Sample,
    launched,
    stamps,
    tail,
    wait_for_stamps,
)
from benchmarks.rows.idle import descendants, pss_mb

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
EXECUTED = {"HOLDFAST_PRELOAD": "none"}
EARLY_S, LATE_S = 0.3, 3.0
"""Crashes so long after the first work: before and after the standbys are there."""
IMPORTING_S = 1.0
"""And while a second fork server imports what only restarts need."""
SETTLE_S = 4.0
LIMIT_S = 120.0

Measure = Callable[[Launcher, Path], Sample]


def flags(ranks: int, *more: str) -> list[str]:
    return ["--standalone", "--nproc-per-node", str(ranks), *more]


def start_s(work: str, ranks: int, extra: dict[str, str], launcher: Launcher, folder: Path) -> float:
    """From the launcher's start until the last rank has done its first work."""
    environ = {**ONE_THREAD, **extra}
    with launched(launcher, flags(ranks), f"warm_{work}.py", folder, extra=environ) as (process, began_ns):
        code = process.wait(LIMIT_S)
    done = stamps(folder, "done")
    if code != 0 or len(done) != ranks:
        raise BenchmarkError(f"exit code {code}, {len(done)} of {ranks} ranks worked: {tail(folder)}")
    return (max(done.values()) - began_ns) / 1e9


def restart_s(work: str, ranks: int, crash_s: float, extra: dict[str, str], launcher: Launcher, folder: Path) -> float:
    """From the death of rank 1 until the last rank of the restarted group has done its first work."""
    environ = {**ONE_THREAD, **extra, "WARM_CRASH_S": str(crash_s)}
    if launcher is not HOLDFAST:
        environ |= OWN_STORE
    line = flags(ranks, "--max-restarts", "1")
    with launched(launcher, line, f"warm_{work}.py", folder, extra=environ) as (process, _):
        code = process.wait(LIMIT_S)
    crash, done = stamps(folder, "crash"), stamps(folder, "done")
    if code != 0 or len(crash) != 1 or len(done) != ranks:
        raise BenchmarkError(f"exit code {code}, {len(done)} of {ranks} ranks worked again: {tail(folder)}")
    return (max(done.values()) - crash[1]) / 1e9


def starts(work: str, *ranks: int, extra: dict[str, str]) -> Measure:
    def measure(launcher: Launcher, folder: Path) -> Sample:
        return {f"{n} ranks": start_s(work, n, extra, launcher, _fresh(folder, str(n))) for n in ranks}

    return measure


def restarts(work: str, ranks: int, *crashes_s: float, extra: dict[str, str]) -> Measure:
    def measure(launcher: Launcher, folder: Path) -> Sample:
        each = partial(restart_s, work, ranks, extra=extra, launcher=launcher)
        return {crashed(after_s): each(after_s, folder=_fresh(folder, str(after_s))) for after_s in crashes_s}

    return measure


def crashed(after_s: float) -> str:
    return f"{after_s:g} s after the first work"


def memory(launcher: Launcher, folder: Path) -> Sample:
    """torchrun's workers alone; of holdfast everything, launcher, supervisor, fork server, standbys and store included."""
    environ = {**ONE_THREAD, "WARM_IDLE": "1"}
    with launched(launcher, flags(8, "--max-restarts", "1"), "warm_reduce.py", folder, extra=environ) as (process, _):
        workers = wait_for_stamps(folder, "pid", 8, process, LIMIT_S).values()
        wait_for_stamps(folder, "done", 8, process, LIMIT_S)
        time.sleep(SETTLE_S)
        counted = [process.pid, *descendants(process.pid)] if launcher is HOLDFAST else workers
        return {"sum of PSS": sum(pss_mb(pid) for pid in counted)}


def _fresh(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made


def row(name: str, title: str, measure: Measure, repeat: int, **ratios: float) -> Row:
    """`ratios`: the bound of each metric, by its name."""
    metrics = tuple(Metric(metric, "s", ratio_max=ratio) for metric, ratio in ratios.items())
    return Row(name, title, metrics, measure, {"holdfast": repeat, "torchrun": repeat}, group="warm")


ROWS = (
    row(
        "warm-reduce",
        "start → first all-reduce",
        starts("reduce", 2, 8, extra={}),
        7,
        **{"2 ranks": 0.65, "8 ranks": 0.3},
    ),
    row(
        "warm-ddp",
        "start → third DDP step",
        starts("ddp", 2, 4, 8, extra={}),
        5,
        **{"2 ranks": 0.8, "4 ranks": 0.5, "8 ranks": 0.3},
    ),
    row(
        "warm-restart-reduce",
        "crash → first all-reduce, 2 ranks",
        restarts("reduce", 2, EARLY_S, LATE_S, extra={}),
        9,
        **{crashed(EARLY_S): 0.2, crashed(LATE_S): 0.2},
    ),
    row(
        "warm-restart-importing",
        "crash while a fork server imports for restarts → first all-reduce, 2 ranks",
        restarts("reduce", 2, IMPORTING_S, extra={}),
        5,
        **{crashed(IMPORTING_S): 0.1},
    ),
    row(
        "warm-restart-ddp",
        "crash → third DDP step, 4 ranks",
        restarts("ddp", 4, EARLY_S, LATE_S, extra={}),
        5,
        **{crashed(EARLY_S): 0.12, crashed(LATE_S): 0.12},
    ),
    Row(
        "warm-memory",
        "8 idle torch ranks",
        (Metric("sum of PSS", "MB", ratio_max=0.5, digits=0),),
        memory,
        {"holdfast": 3, "torchrun": 3},
        group="warm",
    ),
    row(
        "executed-reduce",
        "--preload none: start → first all-reduce",
        starts("reduce", 2, 8, extra=EXECUTED),
        5,
        **{"2 ranks": 1.0, "8 ranks": 1.0},
    ),
    row(
        "executed-ddp",
        "--preload none: start → third DDP step",
        starts("ddp", 2, 4, extra=EXECUTED),
        5,
        **{"2 ranks": 1.0, "4 ranks": 1.0},
    ),
    row(
        "executed-restart",
        "--preload none: crash → first all-reduce, 2 ranks",
        restarts("reduce", 2, EARLY_S, extra=EXECUTED),
        7,
        **{crashed(EARLY_S): 1.0},
    ),
)
