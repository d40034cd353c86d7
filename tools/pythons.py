"""Run the tests of the launcher where torch is not installed, under every Python that holdfast supports and this machine has.

    python -m tools.pythons [3.11 3.12 …]

Looks in PATH and in pyenv's versions. Each gets an environment of its own, `.venv-python-3.12`, with what the tests need,
which is not torch: a test that needs it without saying so (a group "torch …", `importorskip`) fails here.
tests/tidy/test_launcher_tests.py finds the imports among them in a second. Exit code 1 when a suite fails, or when no
Python was found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUPPORTED = ("3.11", "3.12", "3.13")
LAUNCHER = [
    "agent",
    "benchmarks",
    "cli",
    "coordinator",
    "corpus",
    "dashboard",
    "diagnosis",
    "doctor",
    "launching",
    "processes",
    "protocol",
    "rendezvous",
    "runtime",
    "scenarios",
    "simulation",
    "supervisor",
    "third_party",
    "train/snapshots",
    "worker",
]
"""Folders of tests: everything but what the training script uses, whose snapshots alone need no torch either."""


def main() -> int:
    wanted = sys.argv[1:] or SUPPORTED
    results = {version: run(version) for version in wanted}
    for version, result in results.items():
        print(f"Python {version}: {result}")
    return 0 if set(results.values()) - {"not found"} == {"passed"} else 1


def find(version: str) -> Path | None:
    """The newest of this minor version that starts: pyenv's commands in PATH refuse versions that are not selected."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    in_pyenv = sorted(
        pyenv.glob(f"{version}.*/bin/python"),
        key=lambda path: [int(part) for part in path.parts[-3].split(".") if part.isdigit()],
    )
    in_path = shutil.which(f"python{version}")
    for candidate in [*reversed(in_pyenv), *([Path(in_path)] if in_path else [])]:
        done = subprocess.run([candidate, "-c", "import venv, ssl"], capture_output=True, check=False)
        if done.returncode == 0:
            return candidate
    return None


def run(version: str) -> str:
    python = find(version)
    if python is None:
        return "not found"
    environment = ROOT / f".venv-python-{version}"
    command = environment / "bin/python"
    stamp = environment / ".ready"
    if not stamp.exists() or stamp.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        print(f"installing what the tests need for {python} into {environment.name} (once) ...", flush=True)
        subprocess.run([python, "-m", "venv", environment], check=True)
        pip = [command, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", "constraints.txt"]
        subprocess.run([*pip, "-e", ".[test]"], cwd=ROOT, check=True)
        stamp.touch()
    has = subprocess.run([command, "-c", "import torch"], capture_output=True, check=False).returncode == 0
    if has:
        return f"failed: torch is installed in {environment.name}; remove that folder"
    tests = [f"tests/{folder}" for folder in LAUNCHER]
    pytest = [command, "-m", "pytest", *tests, "-q", "-n", "4", "--dist", "loadgroup"]
    print(f"--- Python {version}: {python}", flush=True)
    done = subprocess.run(pytest, cwd=ROOT, check=False)
    return "passed" if done.returncode == 0 else f"failed, exit code {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
