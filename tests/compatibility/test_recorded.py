"""What earlier versions wrote is read by this one: run folders and snapshots. record.py makes the recordings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.version import __version__
from tests.compatibility.record import RECORDED, SNAPSHOT_ITEMS
from tests.support.documents import checked
from tests.train.snapshots import saves

VERSIONS = sorted(path.name for path in RECORDED.iterdir())


def test_this_version_is_recorded() -> None:
    assert __version__ in VERSIONS, "run: python -m tests.compatibility.record"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_folder_is_reported(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(RECORDED / version / "run")]) == 0
    shown = capsys.readouterr().out
    assert "the loss is nan" in shown
    assert "rank 1 on node0" in shown
    assert main(["report", "--json", str(RECORDED / version / "run")]) == 0
    assert checked("report", capsys.readouterr().out)


@pytest.mark.parametrize("version", VERSIONS)
def test_snapshots_are_whole(version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "snapshots"
    shutil.copytree(RECORDED / version / "snapshots", folder)
    newest = saves.newest(folder)
    assert newest.step == 20
    assert saves.load(newest) == [saves.content(20, rank, SNAPSHOT_ITEMS) for rank in range(2)]
    assert main(["snaps", "verify", str(folder)]) == 0, capsys.readouterr().err
