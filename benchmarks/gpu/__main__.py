"""The command: install what is missing, run the parts, write the results."""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import packages, results
from benchmarks.gpu.campaign import Ended, PartResult, run
from benchmarks.gpu.parts import ALL
from benchmarks.harness import end_on_signals

BUDGET_S = 520.0
"""Of the nine minutes, without the start of Python."""
OUT = Path("benchmarks/results")
REHEARSED = Path("build/gpu")
"""Where a rehearsal on the CPU leaves its results: they are no measurement."""
REHEARSAL_TIMES = 10.0
"""A rehearsal shows that the parts work, also on a machine that does other things: it has so many times the time."""


def main() -> int:
    end_on_signals()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="the campaign on one GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal [cuda]")
    parser.add_argument("--only", action="append", metavar="PART", choices=[part.name for part in ALL])
    parser.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help=f"time for all parts [{BUDGET_S:g}; cpu: {BUDGET_S * REHEARSAL_TIMES:g}]",
    )
    parser.add_argument("--wheels", type=Path, default=packages.ROOT / packages.WHEELS, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder of the results [{OUT}; cpu: {REHEARSED}]")
    options = parser.parse_args()
    began_s = time.monotonic()
    out = options.out or packages.ROOT / (OUT if options.device == "cuda" else REHEARSED)
    try:
        version = "{}.{}".format(*sys.version_info)
        installed = packages.install(options.wheels, packages.ROOT / "build" / "gpu" / f"site-{version}")
    except RuntimeError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    about = {"device": options.device, "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"}
    about |= {"commit": commit(), "installed": installed}

    def write(found: list[PartResult]) -> None:
        # The name is known when the first part has looked at the device.
        results.write(found, {**about, "seconds": f"{time.monotonic() - began_s:.0f}"}, out)

    times = 1.0 if options.device == "cuda" else REHEARSAL_TIMES
    parts = [
        replace(part, deadline_s=times * part.deadline_s)
        for part in ALL
        if not options.only or part.name in options.only
    ]
    budget_s = BUDGET_S * times if options.budget is None else options.budget
    left_s = budget_s - (time.monotonic() - began_s)
    os.chdir(packages.ROOT)
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-", ignore_cleanup_errors=True) as folder:
        found = run(parts, {"GPU_DEVICE": options.device}, Path(folder), left_s, write)
    print(results.page(found, {**about, "seconds": f"{time.monotonic() - began_s:.0f}"}))
    return 0 if all(each.ended in (Ended.DONE, Ended.NOT_HERE) for each in found) else 1


def commit() -> str:
    """The tree's commit; a copy of the tree may have none."""
    try:
        line = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(line, cwd=packages.ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
