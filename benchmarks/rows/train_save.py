"""A 473 MB training state saved and resumed, beside torch's own, in copies: what one warm copy of it takes in memory.

In torchrun's column: torch.distributed.checkpoint's async_save and save, torch.save and torch.load, on the same state.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import HOLDFAST, SCRIPTS, TORCHRUN, BenchmarkError, Launcher, Metric, Row, Sample, environment

LIMIT_S = 900
COMMITTED_WITHIN_S = 60
KILLS = 200
SEED = 1
POISONS = ("numbers", "silent", "error", "crash")


def script(name: str, *arguments: object, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *map(str, arguments)],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    line = done.stdout.strip().rpartition("\n")[2]
    if not line:
        raise BenchmarkError(f"{name}: {done.stderr[-300:]}")
    return line


def measure(launcher: Launcher, folder: Path) -> Sample:
    mode = "holdfast" if launcher is HOLDFAST else "torch"
    sample: Sample = json.loads(script("train_state.py", mode, folder / "state", folder=made(folder)))
    if sample.pop("mark", 0.0) != sample.pop("mark resumed", 0.0):
        raise BenchmarkError("what was resumed is not what was saved")
    return sample


def made(folder: Path) -> Path:
    (folder / "state").mkdir()
    return folder


def measure_killed(launcher: Launcher, folder: Path) -> Sample:
    """One trainer that is killed within 100 ms after its save returned: is the snapshot there in the end?"""
    ours = launcher is HOLDFAST
    script("train_state.py", "holdfast_killed" if ours else "torch_killed", folder / "state", folder=made(folder))
    pattern = "step_000000001.0001/MANIFEST.json" if ours else "async/.metadata"
    deadline = time.monotonic() + (COMMITTED_WITHIN_S if ours else 2)
    while not (saved := bool(list((folder / "state").glob(pattern)))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"saved": 100.0 * saved}


def measure_kills(_launcher: Launcher, folder: Path) -> Sample:
    found = json.loads(script("train_kills.py", folder / "runs", KILLS, SEED, folder=folder))
    if found["faults"]:
        raise BenchmarkError(f"{len(found['faults'])} faults; first: {found['faults'][0]}")
    return {"resumed as they should": 100.0 * sum(found["resumed"].values()) / (found["kills"] + 1)}


def measure_poisoned(launcher: Launcher, folder: Path) -> Sample:
    """Jobs whose saved state is poisoned, one of each kind: do they go on from an older one, to the same end?"""
    ends = {}
    for kind in ("calm", *POISONS):
        at = folder / kind
        at.mkdir(parents=True)
        line = [*launcher.command, "--standalone", "--nproc-per-node", "2", "--max-restarts", "8"]
        subprocess.run(
            [*line, str(SCRIPTS / "poison.py"), str(at), kind],
            env=environment(at),
            capture_output=True,
            timeout=LIMIT_S,
        )
        ends[kind] = (at / "end").read_text() if (at / "end").exists() else ""
    if not ends["calm"]:
        raise BenchmarkError("the calm job did not come to its end")
    return {"went on": 100.0 * sum(ends[kind] == ends["calm"] for kind in POISONS) / len(POISONS)}


def measure_copied(_launcher: Launcher, folder: Path) -> Sample:
    """Two nodes on loopback, and copies of each one's state on the other."""
    sample: Sample = json.loads(script("copied_state.py", folder / "state", folder=made(folder)))
    return sample


COPIES = "copies"

SAVE = Row(
    name="train-save",
    title="473 MB state",
    metrics=(
        Metric("stall, mean", COPIES, value_max=1.2, digits=2),
        Metric("stall, worst", COPIES, value_max=2.0, digits=2),
        Metric("first save", COPIES, value_max=4.0, digits=2),
        Metric("memory save, mean", COPIES, value_max=1.2, digits=2),
        Metric("memory save, worst", COPIES, value_max=2.0, digits=2),
        Metric("stall of torch.save", COPIES, digits=2),
        Metric("durable", COPIES, value_max=8.0, digits=2),
        Metric("durable by torch.save", COPIES, digits=2),
        Metric("resume", COPIES, value_max=2.0, digits=2),
        Metric("first step after it", COPIES, digits=2),
        Metric("first step of a fresh start", COPIES, digits=2),
        Metric("copy", "ms", digits=1),
    ),
    measure=measure,
    repeat={HOLDFAST.name: 5, TORCHRUN.name: 3},
    group="train",
    strict=True,
)
COPIED = Row(
    name="train-copied",
    title="473 MB state, and a copy on another node",
    metrics=(
        Metric("stall, relative", "x", value_max=1.05, digits=2),
        Metric("stall without", COPIES, digits=2),
        Metric("stall with", COPIES, digits=2),
        Metric("copy has arrived", COPIES, digits=1),
        Metric("resume of the newcomer", COPIES, value_max=6.0, digits=1),
        Metric("fetched before it", COPIES, digits=1),
        Metric("loss to resumed", "s", digits=2),
        Metric("bare transfer", COPIES, digits=1),
        Metric("copy", "ms", digits=1),
    ),
    measure=measure_copied,
    repeat={HOLDFAST.name: 5},
    group="train",
    strict=True,
)
KILLED = Row(
    name="train-killed",
    title="trainer killed 0 to 100 ms after the save returned",
    metrics=(Metric("saved", "%", value_min=100.0, digits=0),),
    measure=measure_killed,
    repeat={HOLDFAST.name: 8, TORCHRUN.name: 4},
    group="train",
    strict=True,
)
POISONED = Row(
    name="train-poisoned",
    title="the saved state is poisoned: the job goes on from an older one",
    metrics=(Metric("went on", "%", value_min=100.0, digits=0, summary=min),),
    measure=measure_poisoned,
    repeat={HOLDFAST.name: 5},
    group="train",
    strict=True,
)
KILLS_ROW = Row(
    name="train-kills",
    title=f"{KILLS} SIGKILLs, at random times and at each phase of a save",
    metrics=(Metric("resumed as they should", "%", value_min=100.0, digits=0),),
    measure=measure_kills,
    repeat={HOLDFAST.name: 1},
    group="train",
    strict=True,
)
ROWS = (SAVE, COPIED, KILLED, KILLS_ROW, POISONED)
