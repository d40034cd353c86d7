"""Packages that offer rendezvous backends, installed as pip leaves them: a module and a .dist-info folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes.conftest import JobFolder

Install = Callable[..., Path]
"""`install(dist, source, NAME="module:object", …)` makes one more installed package; returns the folder for PYTHONPATH."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    packages = tmp_path / "site-packages"

    def made(dist: str, source: str, **offers: str) -> Path:
        info = packages / f"{dist}-1.0.dist-info"
        info.mkdir(parents=True)
        (packages / f"{dist}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in offers.items())
        (info / "entry_points.txt").write_text(f"[holdfast.rendezvous]\n{lines}")
        return packages

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), *os.environ.get("PYTHONPATH", "").split()]))
    return made


@pytest.fixture
def job_folder(tmp_path: Path) -> Iterator[JobFolder]:
    made = JobFolder(tmp_path)
    yield made
    made.close()
