"""`pip install` of the wheel into an empty environment, and what the import of its command loads there.

Nothing is compiled and nothing comes from a cache of pip: its home is empty, so it asks the index of this machine.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import HOLDFAST, BenchmarkError, Launcher, Metric, Row, Sample, environment

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
IMPORT = """
import sys, time
before, began = set(sys.modules), time.monotonic_ns()
import holdfast.cli
took_ns = time.monotonic_ns() - began
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(took_ns, len(names - sys.stdlib_module_names - {"holdfast"}))
"""


def measure(_: Launcher, folder: Path) -> Sample:
    source, wheels, python = folder / "source", folder / "wheels", folder / "env" / "bin" / "python"
    run(
        folder, "git", "clone", "-q", str(ROOT), str(source)
    )  # a build in the tree would take in what an older one left
    run(folder, sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(source))
    run(folder, sys.executable, "-m", "venv", str(folder / "env"))
    (wheel,) = wheels.glob("*.whl")
    began_ns = time.monotonic_ns()
    run(folder, str(python), "-m", "pip", "install", "-q", str(wheel))
    installed_ns = time.monotonic_ns()
    import_ns, third_party = map(int, run(folder, str(python), "-c", IMPORT).split())
    return {
        "install": (installed_ns - began_ns) / 1e9,
        "import of holdfast.cli": import_ns / 1e9,
        "third-party modules in it": third_party,
    }


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise BenchmarkError(f"{' '.join(command)}: {done.stderr[-300:]}")
    return done.stdout


ROW = Row(
    name="install",
    title="`pip install` of the wheel into an empty environment",
    metrics=(
        Metric("install", "s", value_max=10, digits=1),
        Metric("import of holdfast.cli", "s"),
        Metric("third-party modules in it", "", value_max=0, digits=0),
    ),
    measure=measure,
    repeat={HOLDFAST.name: 5},
)
