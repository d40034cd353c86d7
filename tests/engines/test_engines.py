"""The lines of docs/engines.md, run by the real torchx and Ray where they are installed: `make test-engines`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.protocol.exit_codes import EXIT_REQUEUE
from tests.support.limits import limit_s

ROOT = Path(__file__).parent.parent.parent
BIN = ROOT / ".venv-engines" / "bin"
PAGE = (ROOT / "docs" / "engines.md").read_text()
SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
sys.exit(int(os.environ.get("CODE", "0")))
"""
pytestmark = [
    pytest.mark.xdist_group("engines"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not BIN.is_dir(), reason="torchx and Ray are not installed: make test-engines"),
]


def line(beginning: str) -> str:
    """The line of the page that begins so."""
    (found,) = re.findall(rf"^{re.escape(beginning)}.*$", PAGE, re.MULTILINE)
    return found


def run(text: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **environment}
    return subprocess.run(
        ["bash", "-c", text], cwd=folder, env=environ, capture_output=True, text=True, timeout=limit_s(100)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def ranks(text: str) -> list[str]:
    return sorted(re.findall(r"rank (\d of 2)", text))


def test_torchx_starts_holdfast_and_reports_how_it_ended(folder: Path) -> None:
    text = line("torchx run --scheduler local_cwd utils.sh")
    done = run(text, folder)
    assert (done.returncode, ranks(done.stdout + done.stderr)) == (0, ["0 of 2", "1 of 2"]), done.stderr
    failed = run(text, folder, CODE=str(EXIT_REQUEUE))
    assert failed.returncode == 1
    assert "FAILED" in failed.stderr


def test_torchx_own_component_starts_holdfast_by_the_shim(folder: Path) -> None:
    done = run(f"{line('holdfast shim bin')} && {line('PATH=$PWD/bin:$PATH torchx')}", folder)
    text = done.stdout + done.stderr
    assert (done.returncode, ranks(text)) == (0, ["0 of 2", "1 of 2"]), text
    assert "torchrun: holdfast runs this line" in text


@pytest.fixture
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray of one node on loopback. It ends with this test."""
    place = Path("/tmp") / f"hf-ray-{os.getpid()}"  # Ray's sockets need a short path
    command = (
        "ray start --head --block --include-dashboard=true --dashboard-host 127.0.0.1 --node-ip-address 127.0.0.1 --num-cpus 2 "
        f"--disable-usage-stats --object-store-memory 100000000 --temp-dir {place}"
    )
    environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    with subprocess.Popen(command.split(), env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as ray:
        try:
            yield
        finally:
            ray.terminate()
            ray.wait(limit_s(60))
            shutil.rmtree(place, ignore_errors=True)


def test_a_ray_job_is_holdfast_and_its_message_has_the_exit_code(folder: Path, head: None) -> None:
    text = f"until curl -sf http://127.0.0.1:8265/api/version; do sleep 0.5; done; {line('ray job submit')}"
    done = run(text, folder)
    assert (done.returncode, ranks(done.stdout + done.stderr)) == (0, ["0 of 2", "1 of 2"]), done.stdout + done.stderr
    (folder / "train.py").write_text(SCRIPT.replace('"0"', f'"{EXIT_REQUEUE}"'))
    failed = run(text, folder)
    assert failed.returncode == 1
    assert f"exit code {EXIT_REQUEUE}" in failed.stdout + failed.stderr
