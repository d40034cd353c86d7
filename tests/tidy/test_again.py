"""`make again`: what failed once is run again by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ONCE = """
import pytest
def test_always(): raise SystemExit("wrong")
def test_never(): pass
@pytest.mark.parametrize("address", ["a@b"])
def test_with(address): pass
"""


def answer(folder: Path, *failed: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(ONCE)
    cache = folder / ".pytest_cache/v/cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
    return subprocess.run(
        [sys.executable, "-P", str(Path("tools/again.py").resolve())],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_what_passes_alone_is_named(tmp_path: Path) -> None:
    ended = answer(tmp_path, "test_it.py::test_never@a group", "test_it.py::test_with[a@b]@torch")
    assert ended.returncode == 0, ended.stdout
    assert "UNSTEADY" in ended.stdout
    assert ended.stdout.endswith("  test_it.py::test_never\n  test_it.py::test_with[a@b]\n")


@pytest.mark.parametrize(
    ("failed", "why"),
    [
        (["test_it.py::test_always"], "failed again: test_it.py::test_always"),
        (["test_it.py::test_never", "test_it.py::test_gone"], "failed again: test_it.py::test_gone"),
        ([], "0 tests failed"),
        ([f"test_it.py::test_{number}" for number in range(4)], "4 tests failed"),
    ],
)
def test_what_repeats_or_is_unknown_is_refused(tmp_path: Path, failed: list[str], why: str) -> None:
    ended = answer(tmp_path, *failed)
    assert ended.returncode == 1
    assert why in ended.stdout
