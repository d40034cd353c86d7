"""What `make dist` has built, installed as on a machine that has nothing: no compiler, no network, an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.version import __version__
from tests.support.limits import limit_s

ROOT = Path(__file__).parent.parent.parent
NEEDED = ["msgspec", "nvidia-ml-py", "psutil", "setuptools>=77"]
"""By the package, and for the sdist to be built."""
SCRIPT = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The only place from which packages are installed."""
    folder = tmp_path_factory.mktemp("index")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "-d", folder, *NEEDED], check=True, timeout=limit_s(60)
    )
    return folder


@pytest.fixture
def install(tmp_path: Path, index: Path) -> Callable[[Path], Path]:
    environment = {
        "HOME": str(tmp_path),
        "PATH": str(tmp_path),
        "CC": "/bin/false",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }

    def installed(file: Path) -> Path:
        """Returns the folder of the commands."""
        venv.create(tmp_path / "env", with_pip=True)
        commands = tmp_path / "env" / "bin"
        pip = [str(commands / "python"), "-m", "pip", "install", "-q", "--no-index", "--find-links", str(index)]
        done = subprocess.run([*pip, file], env=environment, capture_output=True, text=True, timeout=limit_s(60))
        assert done.returncode == 0, done.stderr
        return commands

    return installed


@pytest.mark.parametrize("pattern", [f"holdfast-{__version__}.tar.gz", f"holdfast-{__version__}-*manylinux*.whl"])
def test_a_job_runs_where_it_is_installed(pattern: str, install: Callable[[Path], Path], tmp_path: Path) -> None:
    (file,) = (ROOT / "dist").glob(pattern)
    commands = install(file)
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
    explained = subprocess.run(
        [commands / "holdfast", "explain", "HF211"], env=environment, capture_output=True, text=True
    )
    assert "HF211" in explained.stdout, explained.stderr  # from a table that is shipped as a data file


def test_the_wheel_brings_the_compiled_part(install: Callable[[Path], Path]) -> None:
    (wheel,) = (ROOT / "dist").glob(f"holdfast-{__version__}-*manylinux*.whl")
    assert "-cp311-abi3-" in wheel.name
    package = next((install(wheel).parent / "lib").glob("python*/site-packages/holdfast"))
    assert list((package / "train").glob("_stream*.so"))
