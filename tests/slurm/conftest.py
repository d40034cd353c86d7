"""One Slurm for all these tests, and a place for their jobs. Without root or Slurm they are skipped and say so."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.processes.conftest import WAIT_S, JobFolder, Note
from tests.slurm.cluster import Cluster, why_not
from tests.support.limits import until

HOLDFAST = (sys.executable, "-m", "holdfast")
JOB_S = 60.0


class Jobs(JobFolder):
    """Batch scripts, and what their tasks noted."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.numbers: list[str] = []

    @property
    def variables(self) -> dict[str, str]:
        return {"TRAIL": str(self.folder / "trail.jsonl"), "PET_LOG_DIR": str(self.folder / "logs")}

    def batch(self, text: str, *options: str, env: Mapping[str, str] | None = None) -> str:
        """Submit it; its number. `holdfast` in the text is the one under test."""
        path = self.folder / f"batch{len(self.numbers)}.sh"
        path.write_text(
            f'#!/bin/bash\nholdfast() {{ "{HOLDFAST[0]}" -m holdfast "$@"; }}\nH="{" ".join(HOLDFAST)}"\n{text}\n'
        )
        line = ["sbatch", "--parsable", "--output=job-%A_%a.txt", "--open-mode=append", *options, str(path)]
        number = self.cluster.call(*line, env={**self.variables, **(env or {})}, cwd=self.folder)
        self.numbers.append(number)
        return number

    def submit(self, *options: str) -> None:
        """`holdfast submit --slurm` with these options."""
        line = (*HOLDFAST, "submit", "--slurm", "--no-follow", *options, "train.py")
        self.cluster.call(*line, env=self.variables, cwd=self.folder)

    def wait(self, count: int, event: str, limit_s: float = WAIT_S, **wanted: Any) -> list[Note]:
        """Wait for so many notes."""
        until(lambda: len(self.trail(event, **wanted)) >= count, lambda: f"{count} × {event}: {self.told()}", limit_s)
        return self.trail(event, **wanted)

    def ended(self, number: str) -> str:
        """Wait for its end; Slurm's word for it."""
        until(lambda: self.cluster.is_over(number), lambda: self.told(number), JOB_S)
        return self.cluster.job(number)["JobState"]

    def told(self, number: str = "") -> str:
        """All there is to know."""
        logs = "\n".join(
            f"--- {path.name}\n{path.read_text()}"
            for path in sorted([*self.folder.glob("job-*.txt"), *self.folder.glob("slurm-*.out")])
        )
        return f"{self.cluster.job(number) if number else ''}\n{self.trail()}\n{logs}\n{self.cluster.story()}"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if why := why_not():
        pytest.skip(why)
    made = Cluster()
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    yield Jobs(tmp_path, cluster)
    cluster.whole()


@pytest.fixture
def job_folder(tmp_path: Path) -> Iterator[JobFolder]:
    made = JobFolder(tmp_path)
    yield made
    made.close()
