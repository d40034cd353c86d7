"""The snapshot tutorial as it is, again and again: does a script that has finished its training end, and with exit code 0?

Plain torch now and then hangs there: a gloo group is destructed while one of its threads waits for the interpreter's lock.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from benchmarks.harness import HOLDFAST, BenchmarkError, Launcher, Metric, Row, Sample, launched, tail

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "multigpu_torchrun.py"
RANKS, EPOCHS = 4, 2
FLAGS = ["--standalone", f"--nproc-per-node={RANKS}"]
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
LIMIT_S = 120.0
"""What takes longer hangs: a run takes some 4 s."""


def measure(launcher: Launcher, folder: Path) -> Sample:
    arguments = ("--epochs", str(EPOCHS), "--snapshot", str(folder / "snapshot.pt"))
    with launched(launcher, FLAGS, str(SCRIPT), folder, *arguments, extra=ON_CPU) as (process, began_ns):
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"hangs: {tail(folder)}") from None
        wall_s = (time.monotonic_ns() - began_ns) / 1e9
    if code:
        raise BenchmarkError(f"exit code {code}: {tail(folder)}")
    return {"wall": wall_s}


ROW = Row(
    name="tutorial",
    title=f"the snapshot tutorial, {RANKS} ranks, {EPOCHS} epochs: exit code 0 every time",
    metrics=(Metric("wall", "s", value_max=LIMIT_S, digits=1),),
    measure=measure,
    repeat={HOLDFAST.name: 100},
    strict=True,
)
