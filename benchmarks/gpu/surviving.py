"""A job of scripts/survive.py, and the steps of its ranks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.measuring import Job, launched

RANKS = 3
WARM_STEPS = 20

Step = dict[str, Any]


class SurvivingJob:
    """The job, by what its ranks write down."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def steps(self) -> list[Step]:
        path = self.job.folder / "steps.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def await_training(self, since_s: float, besides: int = 0) -> float:
        """Wait until all ranks do steps in a whole world after this time, without the process `besides`. Returns the
        time of the last rank's first such step."""

        def look() -> float | None:
            first: dict[int, float] = {}
            for step in self.steps():
                if step["now"] > since_s and step["world"] == RANKS and step["pid"] != besides:
                    first.setdefault(step["rank"], step["now"])
            return max(first.values()) if len(first) == RANKS else None

        return self.job.until(look, "all ranks train")

    def await_warm(self) -> dict[int, int]:
        """Wait until all have done a few steps. Returns the process of each rank."""
        self.job.until(lambda: len([s for s in self.steps() if s["step"] >= WARM_STEPS]) >= RANKS, "the first steps")
        return self.processes()

    def processes(self) -> dict[int, int]:
        """The newest process of each rank of a whole world."""
        return {step["rank"]: step["pid"] for step in self.steps() if step["world"] == RANKS}

    def next_step_s(self, since_s: float, besides: int) -> float:
        """The time of the first step of another process after this time."""

        def look() -> float | None:
            return min((s["now"] for s in self.steps() if s["now"] > since_s and s["pid"] != besides), default=None)

        return self.job.until(look, "the next step of the others")

    def stop(self) -> None:
        """End the job. Raises RuntimeError unless all ranks have the same weights."""
        (self.job.folder / "stop").touch()
        self.job.end()
        sums = self.job.stamps("sums")
        if len(sums) != RANKS or len(set(sums.values())) != 1:
            raise RuntimeError(f"the ranks' weights differ: {sums}")


@contextlib.contextmanager
def surviving() -> Iterator[SurvivingJob]:
    flags = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "2"]
    with launched("holdfast", flags, "survive.py", extra={"GPU_RANKS": str(RANKS)}) as job:
        yield SurvivingJob(job)
