"""What `--preflight quick` takes on this machine, and by how much it delays the start of a script that does not import
torch: two starts with it between two without."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

from benchmarks.harness import HOLDFAST, BenchmarkError, Launcher, Metric, Row, Sample, launched, stamps, tail

RANKS = 2
ORDER = ("off", "quick", "quick", "off")


def start_s(launcher: Launcher, how: str, folder: Path) -> float:
    """From just before the launcher is started to the first line of the last rank."""
    folder.mkdir()
    flags = ["--standalone", "--nproc-per-node", str(RANKS), "--preflight", how]
    with launched(launcher, flags, "stamp.py", folder) as (process, began_ns):
        code = process.wait(60)
    found = stamps(folder, "main")
    if code != 0 or len(found) != RANKS:
        raise BenchmarkError(f"exit code {code}, {len(found)} of {RANKS} ranks started: {tail(folder)}")
    return (max(found.values()) - began_ns) / 1e9


def check_s(folder: Path) -> float:
    """The duration of the check, as the job has written it down."""
    for path in folder.rglob("events.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["event"] == "preflight":
                return float(event["seconds"])
    raise BenchmarkError("the job has written no event `preflight`")


def measure(launcher: Launcher, folder: Path) -> Sample:
    took: dict[str, list[float]] = {"off": [], "quick": []}
    checks = []
    for number, how in enumerate(ORDER):
        place = folder / str(number)
        took[how].append(start_s(launcher, how, place))
        if how == "quick":
            checks.append(check_s(place))
    without, with_it = mean(took["off"]), mean(took["quick"])
    return {"check": mean(checks), "start without": without, "start later by": 100 * (with_it / without - 1)}


ROW = Row(
    name="preflight",
    title=f"`--preflight quick` here, {RANKS} ranks of a torch-free script",
    metrics=(
        Metric("check", "s", value_max=0.3),
        Metric("start without", "s"),
        Metric("start later by", "%", value_max=5.0, digits=1),
    ),
    measure=measure,
    repeat={HOLDFAST.name: 9},
)
