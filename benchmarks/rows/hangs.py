"""Jobs that stand still: is the rank named that holds up the others, and how soon? And jobs that only work for long: are they
left in peace?

torchrun says nothing of either.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import HOLDFAST, BenchmarkError, Launcher, Metric, Row, Sample, launched, tail

HANGS = {
    "sleep": 1, "spin": 2, "holds_interpreter": 0, "stopped": 1, "locks_in_turn": 2, "queue_without_producer": 0,
    "event_never_set": 1, "executor_waits_for_itself": 2, "asks_the_user": 0, "server_never_answers": 1,
    "server_asked_again_and_again": 2, "server_refuses": 0, "child_sleeps": 1, "child_stopped": 2,
    "child_waits_for_us": 0, "print_into_a_full_pipe": 1, "joined_process_sleeps": 2, "pool_lost_a_task": 0,
    "file_locked": 1, "database_locked": 2, "pipe_without_writer": 0, "polls_for_a_file": 1, "polls_in_functions": 2,
    "stale_lock_of_a_build": 0, "await_for_ever": 1, "waits_for_a_signal": 2, "barrier_of_one": 0, "object_of_one": 2, "barrier_in_finally": 1, "key_that_nobody_sets": 2,
    "key_that_is_waited_for": 0, "recv_without_send": 1, "new_group_of_all_by_one": 2, "loader_stopped": 0,
    "loader_deadlocked": 1, "first_batch_never_comes": 2, "no_group": 1, "barrier_before_the_first_step": 0,
    "mismatch_before_the_first_step": 2, "loop_without_optimizer": 1, "one_step_fewer": 2, "backward_left_out": 1,
    "monitored": 2, "save_into_a_pipe": 0, "after_evaluation": 1, "second_group": 0, "thread_at_the_end": 2,
    "exit_function_at_the_end": 1, "last_rank_at_the_end": 0,
}  # fmt: skip
"""What scripts/hangs.py does, and the rank that does it."""
QUIET = {
    "child_computes": 1, "child_writes": 0, "orphan_computes": 2, "numpy_in_one_call": 1, "torch_in_one_call": 0,
    "thread_computes": 2, "checkpoint": 0, "evaluation": 0, "download": 1, "download_into_a_file": 0, "tokenize": 2,
    "compilation": 1, "all_evaluate": 0, "long_steps": 0, "accumulation": 0, "warm_up": 0, "first_batch": 0,
}  # fmt: skip
"""The same of scripts/quiet_work.py."""
HOUR = (
    "evaluation", "checkpoint", "compilation", "download", "all_evaluate", "child_writes", "tokenize", "all_sleep",
    "download_into_a_file", "child_computes",
)  # fmt: skip

RANKS = 3
FLAGS = ["--standalone", f"--nproc-per-node={RANKS}"]
EARLY = ["--rdzv-conf", "hang_report=10", "--hang-timeout", "20"]
SIDE_BY_SIDE = 10
LIMIT_S = 150.0
"""From the begin of a hang, or of the work; and to get there."""
WORK_S, HOUR_S, HOUR_WORK_S = 75.0, 3600.0, 150.0
POLL_S = 0.2


@dataclass
class Seen:
    """What one job has shown."""

    code: int | None
    """Its exit code; None: it was ended by us."""
    begun_s: float = 0.0
    """When it began to hang."""
    hangs: list[dict[str, Any]] = field(default_factory=list)
    """As they were reported."""
    verdict: dict[str, Any] = field(default_factory=dict)
    said: str = ""

    @property
    def named(self) -> list[list[int]]:
        ended = [self.verdict["culprit"]["rank"]] if self.verdict.get("culprit") else []
        return [list(hang["culprits"]) for hang in self.hangs] + ([ended] if ended else [])

    def after_s(self, rank: int) -> float | None:
        """From the hang's begin until this rank, and no other, was reported."""
        times = [hang["time"] for hang in self.hangs if hang["culprits"] == [rank]]
        return times[0] - self.begun_s if times and self.begun_s else None

    def told(self) -> str:
        return " | ".join([hang["text"] for hang in self.hangs] + [self.verdict.get("cause", "")]) or self.said


def watched(launcher: Launcher, folder: Path, flags: list[str], script: str, *arguments: str, until: str = "") -> Seen:
    """A job until its end, or until a hang is reported (`until` = "report")."""
    limit_s = LIMIT_S if script == "hangs.py" else float(arguments[1]) + float(arguments[2]) + LIMIT_S
    begun = folder / "begun"
    with launched(launcher, [*FLAGS, *flags], script, folder, *arguments) as (process, _):
        deadline = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < deadline:
            if until == "report" and reports(folder):
                break
            if begun.exists():
                deadline = max(deadline, begun.stat().st_mtime - time.time() + time.monotonic() + limit_s)
            time.sleep(POLL_S)
        code = process.poll()
    seen = Seen(code, begun.stat().st_mtime if begun.exists() else 0.0, reports(folder), said=tail(folder))
    for path in folder.rglob("verdict.json"):
        seen.verdict = json.loads(path.read_text())["verdict"] or {}
    return seen


def reports(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.rglob("events.jsonl") for line in path.read_text().split("\n")[:-1]]
    return [event for event in map(json.loads, lines) if event["event"] == "coordinator.hang"]


def side_by_side(folder: Path, names: dict[str, int], run: Callable[[Path, str, int], Seen]) -> dict[str, Seen]:
    def one(name: str) -> Seen:
        with tempfile.TemporaryDirectory(dir=folder, prefix=name) as place:
            seen = run(Path(place), name, names[name])
        after_s = seen.after_s(names[name])
        after = "" if after_s is None else f" after {after_s:.1f} s"
        print(f"    {name}, rank {names[name]}: {seen.named}{after}, exit {seen.code}: {seen.told()}", flush=True)
        return seen

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


# --- hangs ------------------------------------------------------------------------------------------------------------


def measure_hangs(launcher: Launcher, folder: Path) -> Sample:
    """Until each job is ended for its hang."""
    seen = side_by_side(
        folder, HANGS, lambda place, name, rank: watched(launcher, place, EARLY, "hangs.py", name, str(rank))
    )
    return of_hangs(seen)


def measure_default(launcher: Launcher, folder: Path) -> Sample:
    """Until each hang is reported."""
    seen = side_by_side(
        folder,
        HANGS,
        lambda place, name, rank: watched(launcher, place, [], "hangs.py", name, str(rank), until="report"),
    )
    return of_hangs(seen)


def of_hangs(jobs: dict[str, Seen]) -> Sample:
    named = sum([HANGS[name]] in seen.named for name, seen in jobs.items())
    wrong = sum(any(each and each != [HANGS[name]] for each in seen.named) for name, seen in jobs.items())
    after = [after_s for name, seen in jobs.items() if (after_s := seen.after_s(HANGS[name])) is not None]
    sample = {"named": float(named), "wrong": float(wrong)}
    return {**sample, "median": median(after), "after": max(after)} if after else sample


# --- work that is no hang ---------------------------------------------------------------------------------------------


def measure_quiet(launcher: Launcher, folder: Path) -> Sample:
    seen = side_by_side(
        folder,
        QUIET,
        lambda place, name, rank: watched(launcher, place, EARLY, "quiet_work.py", str(rank), "0", str(WORK_S), name),
    )
    return of_quiet(seen)


def of_quiet(jobs: dict[str, Seen]) -> Sample:
    ended = sum(seen.code != 0 for seen in jobs.values())
    return {"ended": float(ended), "alarms": float(sum(len(seen.hangs) for seen in jobs.values()))}


def measure_hour(launcher: Launcher, folder: Path) -> Sample:
    seen = watched(launcher, folder, [], "quiet_work.py", "0", str(HOUR_S), str(HOUR_WORK_S), *HOUR)
    if seen.code is None:
        raise BenchmarkError(f"no end: {seen.said}")
    return of_quiet({"an hour": seen})


NAMED = (
    Metric("named", f"of {len(HANGS)}", value_min=len(HANGS) - 1, digits=0),
    Metric("wrong", "", value_max=0, digits=0),
)
ROWS = (
    Row(
        name="hangs",
        title=f"{len(HANGS)} kinds of hangs, hang_report=10 and --hang-timeout 20",
        metrics=(*NAMED, Metric("after", "s", digits=1, summary=max)),
        measure=measure_hangs,
        repeat={HOLDFAST.name: 1},
        group="diagnosis",
        strict=True,
    ),
    Row(
        name="hangs-default",
        title="the same by default, until they are reported",
        metrics=(*NAMED, Metric("median", "s", value_max=20.0, digits=1), Metric("after", "s", digits=1, summary=max)),
        measure=measure_default,
        repeat={HOLDFAST.name: 1},
        group="diagnosis",
        strict=True,
    ),
    Row(
        name="quiet",
        title=f"{len(QUIET)} kinds of work of {WORK_S:g} s, hang_report=10 and --hang-timeout 20",
        metrics=(Metric("ended", "", value_max=0, digits=0), Metric("alarms", "", digits=0)),
        measure=measure_quiet,
        repeat={HOLDFAST.name: 1},
        group="diagnosis",
        strict=True,
    ),
    Row(
        name="no-alarm",
        title=f"{HOUR_S / 60:.0f} minutes of training and other work, by default",
        metrics=(Metric("ended", "", value_max=0, digits=0), Metric("alarms", "", value_max=0, digits=0)),
        measure=measure_hour,
        repeat={HOLDFAST.name: 1},
        strict=True,
        by_name=True,
    ),
)
