"""What `make dist` and `make release` have built: twice the same bytes, right for its machine, and installed as on a machine that has nothing:
no compiler, no network, an empty environment, under each Python that is supported and found here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

from holdfast.version import __version__
from tests.support.limits import limit_s
from tools.dist import ELF_MACHINES
from tools.pythons import SUPPORTED, find

ROOT = Path(__file__).parent.parent.parent
NEEDED = ["msgspec", "nvidia-ml-py", "psutil", "setuptools>=77"]
"""By the package, and for the sdist to be built."""
SCRIPT = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""
SDIST, WHEEL = (
    f"holdfast-{__version__}.tar.gz",
    f"holdfast-{__version__}-cp311-abi3-manylinux_*_{os.uname().machine}.whl",
)


def built(pattern: str) -> Path:
    (file,) = (ROOT / "dist").glob(pattern)
    return file


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """By Python: the only place from which packages are installed."""
    folders: dict[Path, Path] = {}

    def downloaded(python: Path) -> Path:
        if python not in folders:
            folders[python] = tmp_path_factory.mktemp("index")
            command = [python, "-m", "pip", "download", "-q", "-d", folders[python], *NEEDED]
            subprocess.run(command, check=True, timeout=limit_s(60))
        return folders[python]

    return downloaded


@pytest.fixture
def install(tmp_path: Path, index: Callable[[Path], Path]) -> Callable[[Path, Path], Path]:
    environment = {
        "HOME": str(tmp_path),
        "PATH": str(tmp_path),
        "CC": "/bin/false",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }

    def installed(python: Path, file: Path) -> Path:
        """Returns the folder of the commands."""
        subprocess.run([python, "-m", "venv", tmp_path / "env"], check=True, timeout=limit_s(60))
        commands = tmp_path / "env" / "bin"
        pip = [commands / "python", "-m", "pip", "install", "-q", "--no-index", "--find-links", index(python)]
        done = subprocess.run([*pip, file], env=environment, capture_output=True, text=True, timeout=limit_s(60))
        assert done.returncode == 0, done.stderr
        return commands

    return installed


def python_of(version: str) -> Path:
    python = find(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    return python


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("pattern", [SDIST, WHEEL], ids=["sdist", "wheel"])
def test_a_job_runs_where_it_is_installed(
    pattern: str, version: str, install: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    commands = install(python_of(version), built(pattern))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [commands / "holdfast", "run", "--standalone", "--nproc-per-node", "2", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s(30),
    )
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} of 2" in done.stdout for rank in range(2))
    shown = subprocess.run(
        [commands / "holdfast", "--version", "--verbose"], env=environment, capture_output=True, text=True
    )
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert f"commit {head}" in shown.stdout
    assert f"Python {version}." in shown.stdout
    explained = subprocess.run(
        [commands / "holdfast", "explain", "HF211"], env=environment, capture_output=True, text=True
    )
    assert "HF211" in explained.stdout, explained.stderr  # from a table that is shipped as a data file
    if pattern == WHEEL:
        code = "import holdfast.train._stream as stream; print(stream.__file__)"
        loaded = subprocess.run([commands / "python", "-c", code], env=environment, capture_output=True, text=True)
        assert loaded.stdout.strip().endswith("_stream.abi3.so"), loaded.stderr


def test_another_build_of_the_commit_has_the_same_bytes(tmp_path: Path) -> None:
    """In another folder, with another umask, in another time zone and language."""
    files = sorted((ROOT / "dist").glob(f"holdfast-{__version__}*"))
    machines = [machine for machine in ELF_MACHINES if any(machine in file.name for file in files)]
    environment = {**os.environ, "TZ": "Asia/Tokyo", "LC_ALL": "C", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tools.dist", tmp_path / "again", "--machines", ",".join(machines)]
    command += ["--repository", repository(built(WHEEL))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, umask=0o077, capture_output=True, text=True, timeout=limit_s(100)
    )
    assert done.returncode == 0, done.stderr
    again = sorted((tmp_path / "again").iterdir())
    assert [file.name for file in again] == [file.name for file in files]
    differing = [file.name for file, other in zip(files, again, strict=True) if file.read_bytes() != other.read_bytes()]
    assert differing == []


def repository(wheel: Path) -> str:
    """The address that it was built with; empty: none."""
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    urls = dict(each.split(", ", 1) for each in Parser().parsestr(about).get_all("Project-URL", []))
    return urls.get("Repository", "")


@pytest.mark.parametrize("machine", ELF_MACHINES)
def test_a_wheel_is_for_its_machine_and_says_so(machine: str) -> None:
    files = list((ROOT / "dist").glob(f"*_{machine}.whl"))
    if not files:
        pytest.skip(f"no wheel for {machine} was built: make release builds all")
    with zipfile.ZipFile(files[0]) as archive:
        (library,) = (archive.read(name) for name in archive.namelist() if name.endswith("_stream.abi3.so"))
        (about,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/WHEEL"))
    assert int.from_bytes(library[18:20], "little") == ELF_MACHINES[machine]
    assert Parser().parsestr(about)["Tag"] == files[0].stem.removeprefix(f"holdfast-{__version__}-")
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", files[0]], capture_output=True, text=True, timeout=limit_s(60)
    )
    said = " ".join(shown.stdout.split())
    assert f"{files[0].name} is consistent with the following platform tag" in said, shown.stdout + shown.stderr


def test_the_index_accepts_the_metadata() -> None:
    files = sorted((ROOT / "dist").glob(f"holdfast-{__version__}*"))
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s(60))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_linted_and_takes_the_version_that_is_built() -> None:
    """It cannot be built here: that needs a container engine."""
    file = ROOT / "examples" / "Dockerfile"
    lint = [Path(sys.executable).parent / "hadolint", "--no-fail", "--format", "tty", file]
    done = subprocess.run(lint, capture_output=True, text=True, timeout=limit_s(60))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    text = file.read_text()
    assert f"ARG HOLDFAST={__version__}\n" in text
    (chosen,) = re.findall(r"set -- (.+?) &&", text)
    script = f"set -- {chosen.replace('/dist/', f'{ROOT}/dist/')} && echo $# $1"
    done = subprocess.run(
        ["sh", "-c", script], env={**os.environ, "HOLDFAST": __version__}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["1", str(built(WHEEL))]
