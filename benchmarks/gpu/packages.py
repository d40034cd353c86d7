"""What the campaign needs beside torch, and how it comes to a machine without network: from a folder of wheels.

Only what is missing, or has another version than ours, is installed, into a folder of the build. holdfast itself is
built there from this tree, so that what runs is never older than the tree. torch stays what the machine has.

    python -m benchmarks.gpu.packages [FOLDER]      fill the folder, where there is a network (make gpu-wheels)
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ".gpu-wheels"
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
NEEDED = (
    "msgspec",
    "psutil",
    "nvidia-ml-py",
    "zlib-ng",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "execnet",
    "iniconfig",
    "packaging",
    "pluggy",
    "pygments",
    "hypothesis",
    "sortedcontainers",
)
BUILDS = ("setuptools",)
"""What builds holdfast there; the machine's own may be too old."""
BYTES_MAX = 60 << 20
"""Limit of the folder: with the tree it has to fit into what a machine is sent."""
INSTALL_S = 120.0


def pinned() -> Mapping[str, str]:
    """Our versions."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.lower(): version.strip() for name, version in found.items()}


def lacking() -> Iterator[str]:
    """What this Python lacks, as `name==version`."""
    versions = pinned()
    for name in NEEDED:
        try:
            there = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            there = ""
        wanted = versions.get(name, there)
        if not there or there != wanted:
            yield f"{name}=={wanted}" if wanted else name


def is_ours() -> bool:
    """Whether this Python's holdfast is this tree, as in an environment of a developer."""
    line = "import holdfast, os; print(os.path.realpath(holdfast.__file__))"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, cwd="/")
    return done.returncode == 0 and Path(done.stdout.strip()).is_relative_to(ROOT / "src")


def install(wheels: Path, site: Path) -> str:
    """Install what is missing into `site`, which comes first on the path of all that is started from now on. Returns
    a sentence that says what was done. Raises RuntimeError."""
    missing = list(lacking())
    said = []
    shutil.rmtree(site, ignore_errors=True)
    if missing:
        failed = _pip(wheels, site, *missing)
        if failed:
            raise RuntimeError(
                f"{', '.join(missing)}: not installed from {wheels}: run `make gpu-wheels` where there "
                f"is a network\n{failed}"
            )
        said.append(f"Installed: {', '.join(missing)}.")
    path = [str(site), str(ROOT)]
    if is_ours():
        said.append("holdfast is that of the environment.")
    elif failed := _pip(wheels, site, str(ROOT)):
        path.insert(1, str(ROOT / "src"))
        said.append(f"holdfast could not be built, so it ran without its compiled part: {failed[-300:]}.")
    else:
        said.append("holdfast was built from the tree.")
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    return " ".join(said)


def _pip(wheels: Path, site: Path, *what: str) -> str:
    """Install without a network. Returns pip's error; empty: there was none."""
    flags = ["--quiet", "--no-index", "--no-deps", "--upgrade", "--disable-pip-version-check", "--no-cache-dir"]
    line = [sys.executable, "-m", "pip", "install", *flags, "--find-links", str(wheels), "--target", str(site), *what]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        return f"no end within {INSTALL_S:g} s"
    return "" if done.returncode == 0 else done.stderr.strip() or f"pip ended with {done.returncode}"


def fill(folder: Path) -> int:
    """Download the wheels for a machine with Python 3.12. Returns their size in bytes."""
    versions = pinned()
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [flag for each in PLATFORMS for flag in ("--platform", each)]
    kind = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    wanted = [f"{name}=={versions[name]}" if name in versions else name for name in (*NEEDED, *BUILDS)]
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *kind, "-d", str(folder)]
    subprocess.run([*line, *wanted], check=True)
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    if size > BYTES_MAX:
        raise RuntimeError(f"{size >> 20} MiB of wheels, at most {BYTES_MAX >> 20} are allowed")
    return size


if __name__ == "__main__":
    where = ROOT / (sys.argv[1] if len(sys.argv) > 1 else WHEELS)
    size_bytes = fill(where)
    print(f"{where}: {len(list(where.glob('*.whl')))} wheels, {size_bytes / 2**20:.1f} MiB")
