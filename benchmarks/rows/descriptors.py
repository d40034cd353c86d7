"""220 workers where a process may have 1024 open files and no more; and where the hard limit is too low for them."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import BenchmarkError, Launcher, Metric, Row, Sample, end, launched, stamps, tail

WORKERS = 220
LIMIT, TOO_LOW = 1024, 512
LIMIT_S = 240.0
FLAGS = ["--standalone", "--nproc-per-node", str(WORKERS)]


def under(limit: int, launcher: Launcher) -> Launcher:
    """The launcher after `ulimit -n LIMIT`, which sets the soft and the hard limit."""
    shell = ("bash", "-c", f'ulimit -n {limit} && exec "$@"', "bash")
    return replace(launcher, command=(*shell, *launcher.command))


def run(launcher: Launcher, folder: Path) -> tuple[int | None, float]:
    """Exit code (None: it did not end in time) and seconds."""
    with launched(launcher, FLAGS, "stamp.py", folder) as (process, began_ns):
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
            end(process)
    return code, (time.monotonic_ns() - began_ns) / 1e9


def measure(launcher: Launcher, folder: Path) -> Sample:
    enough, low = folder / "enough", folder / "low"
    for each in (enough, low):
        each.mkdir()
    code, seconds = run(under(LIMIT, launcher), enough)
    ended = len(stamps(enough, "main"))
    if code != 0:
        raise BenchmarkError(f"exit code {code}, {ended} of {WORKERS} workers ran: {tail(enough)}")
    refused, _ = run(under(TOO_LOW, launcher), low)
    return {
        "workers that ran (worst)": ended,
        "until all have ended with 0": seconds,
        "hard limit too low: exit code": float("nan") if refused is None else refused,
        "… lines on stderr": len((low / "stderr.txt").read_text(errors="replace").splitlines()),
        "… workers that ran": len(stamps(low, "main")),
    }


ROW = Row(
    name="descriptors",
    title=f"{WORKERS} workers, 1024 open files, no torch",
    metrics=(
        Metric("workers that ran (worst)", "", value_min=WORKERS, digits=0, summary=min),
        Metric("until all have ended with 0", "s"),
        Metric("hard limit too low: exit code", "", value_min=2, value_max=2, digits=0),
        Metric("… lines on stderr", "", value_max=1, digits=0, summary=max),
        Metric("… workers that ran", "", value_max=0, digits=0, summary=max),
    ),
    measure=measure,
    repeat={"holdfast": 3, "torchrun": 2},
)
