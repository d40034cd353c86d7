"""2 ranks × 200,000 lines of 100 bytes through `--tee 3` into a pipe that is read: seconds, and whether all of it came."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from benchmarks.harness import BenchmarkError, Launcher, Metric, Row, Sample, launched, tail

LINES = 200_000
RANKS = 2
CHUNK_BYTES = 1 << 20
LINE = re.compile(rb"line (\d) (\d{8}) x+$", re.MULTILINE)


def complete(text: bytes) -> int:
    """Whole lines of all ranks, each counted once."""
    return len(set(LINE.findall(text)))


def measure(launcher: Launcher, folder: Path) -> Sample:
    flags = ["--standalone", "--nproc-per-node", str(RANKS), "--tee", "3", "--log-dir", str(folder / "logs")]
    extra = {"BENCH_LINES": str(LINES)}
    with launched(launcher, flags, "lines.py", folder, stdout=subprocess.PIPE, extra=extra) as (process, began_ns):
        assert process.stdout is not None
        chunks = []
        while chunk := process.stdout.read1(CHUNK_BYTES):  # type: ignore[attr-defined]
            chunks.append(chunk)
        process.stdout.close()
        code = process.wait(60)
        seconds = (time.monotonic_ns() - began_ns) / 1e9
    if code != 0:
        raise BenchmarkError(f"exit code {code}: {tail(folder)}")
    files = sum(complete(path.read_bytes()) for path in (folder / "logs").rglob("[0-9]/stdout.log"))
    return {"seconds": seconds, "console (worst)": complete(b"".join(chunks)), "files (worst)": files}


ROW = Row(
    name="tee",
    title="2 × 200,000 lines of 100 bytes, `--tee 3`",
    metrics=(
        Metric("seconds", "s", ratio_max=1.0),
        Metric("console (worst)", "lines", value_min=RANKS * LINES, digits=0, summary=min),
        Metric("files (worst)", "lines", value_min=RANKS * LINES, digits=0, summary=min),
    ),
    measure=measure,
    repeat={"holdfast": 5, "torchrun": 5},
)
