"""A job that stands still, by default settings: is the rank named that holds up the others, and how soon? And is a job
that only evaluates for minutes left in peace?

torchrun says nothing of either.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import HOLDFAST, POLL_S, BenchmarkError, Launcher, Metric, Row, Sample, launched, tail

KINDS = {
    "sleep": r"is in time\.sleep at hangs\.py:\d+ ",
    "spin": r"is in stuck at hangs\.py:\d+ .*using the processor",
    "stop": r"is stopped by a signal",
    "gil": r"is in (sleep|stuck) at hangs\.py:\d+ ",
    "loader": r"waits for its data loader at hangs\.py:\d+ .*its data loader's process \d+ is stopped",
}
"""What happens to one rank, and the words that must be said of it."""
RANKS = 3
FLAGS = ["--standalone", f"--nproc-per-node={RANKS}"]
LIMIT_S = 150.0
QUIET_S, EVALUATION_S = 1800.0, 300.0


def measure(launcher: Launcher, folder: Path) -> Sample:
    """One hang of each kind, side by side."""
    ranks = [int(folder.stat().st_ino + number) % RANKS for number in range(len(KINDS))]
    with ThreadPoolExecutor(len(KINDS)) as pool:
        took = list(pool.map(lambda kind, rank: named_after(launcher, folder, kind, rank), KINDS, ranks))
    named = [each for each in took if each is not None]
    sample = {"named": float(len(named))}
    return {**sample, "after": max(named)} if named else sample


def named_after(launcher: Launcher, folder: Path, kind: str, rank: int) -> float | None:
    """Seconds from the newest step until the right rank was named in the right words; None: it was not."""
    wanted = re.compile(rf"^holdfast: rank {rank} on \S+ {KINDS[kind]}", re.MULTILINE)
    with tempfile.TemporaryDirectory(dir=folder, prefix=kind) as place:
        where = Path(place)
        with launched(launcher, FLAGS, "hangs.py", where, kind, str(rank)) as (process, _):
            deadline = time.monotonic() + LIMIT_S
            while time.monotonic() < deadline and process.poll() is None:
                if wanted.search((where / "stderr.txt").read_text(errors="replace")):
                    return time.time() - (where / "stepped").stat().st_mtime
                time.sleep(POLL_S)
        print(f"    {kind}, rank {rank}: not named: {tail(where)}")
    return None


def measure_quiet(launcher: Launcher, folder: Path) -> Sample:
    arguments = (str(QUIET_S), str(EVALUATION_S))
    with launched(launcher, FLAGS, "evaluations.py", folder, *arguments) as (process, _):
        try:
            code = process.wait(QUIET_S + 2 * EVALUATION_S)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"no end: {tail(folder)}") from None
    said = (folder / "stderr.txt").read_text(errors="replace")
    if code:
        raise BenchmarkError(f"exit code {code}: {tail(folder)}")
    alarms = [line for line in said.splitlines() if " rank" in line]
    for line in alarms:
        print(f"    {line}")
    return {"alarms": float(len(alarms))}


HANGS = Row(
    name="hangs",
    title="five ranks that hang, each in its way",
    metrics=(
        Metric("named", "of 5", value_min=5, digits=0),
        Metric("after", "s since the last step, at worst", value_max=75.0, digits=1, summary=max),
    ),
    measure=measure,
    repeat={HOLDFAST.name: 4},
    group="insight",
    strict=True,
)
QUIET = Row(
    name="no-alarm",
    title=f"{QUIET_S / 60:.0f} minutes with evaluations of {EVALUATION_S / 60:.0f} minutes each",
    metrics=(Metric("alarms", "", value_max=0, digits=0),),
    measure=measure_quiet,
    repeat={HOLDFAST.name: 1},
    group="insight",
    strict=True,
)
ROWS = (HANGS, QUIET)
