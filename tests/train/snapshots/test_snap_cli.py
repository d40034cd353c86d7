"""`holdfast snaps`, as it is typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.train.snapshots import changes, lease
from holdfast.train.snapshots.layout import MANIFEST, rank_file
from tests.support.documents import checked
from tests.support.limits import limit_s
from tests.support.tables import tables
from tests.train.snapshots.saves import save

TABLES = tables(__file__)


def out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return checked("snaps", out(capsys))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Steps 1 to 4, of which 3 is damaged inside and 4 at its end, and debris."""
    for step in range(1, 5):
        save(tmp_path, step, metadata={"metrics": {"loss": 1 / step}})
    with (tmp_path / "step_000000003.0001" / rank_file(1)).open("r+b") as file:
        file.seek(9999)
        file.write(b"damage")
    os.truncate(tmp_path / "step_000000004.0001" / rank_file(0), 100)
    changes.begin(tmp_path, 5)
    return tmp_path


def test_ls(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snaps", "ls", str(runs)]) == 0
    text = out(capsys)
    lines = text.splitlines()
    assert lines[0].split() == ["STEP", "ATTEMPT", "RANKS", "SIZE", "SAVED", "METRICS"]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert "loss=0.5" in lines[2]
    assert "not valid    step_000000004.0001  HF401" in text
    assert "unfinished   attempt.step_000000005.0001" in text
    assert main(["snaps", "ls", "--json", str(runs)]) == 0
    found = as_json(capsys)
    assert [each["step"] for each in found["committed"]] == [1, 2, 3]
    assert found["committed"][1]["metrics"] == {"loss": 0.5}
    assert [each["name"] for each in found["problems"]] == ["step_000000004.0001"]
    assert found["debris"] == ["attempt.step_000000005.0001"]
    assert found["lease"] is None


def test_verify(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snaps", "verify", str(runs)]) == 1
    lines = out(capsys).splitlines()
    assert lines[0] == "step_000000001.0001  valid"
    assert "are not what was saved" in lines[2]
    assert "has 100 bytes" in lines[3]
    assert main(["snaps", "verify", str(runs), "--step", "2", "--json"]) == 0
    assert as_json(capsys)["verified"] == [
        {"name": "step_000000002.0001", "valid": True, "error": None, "finite": None}
    ]
    assert main(["snaps", "verify", str(runs), "--step", "9"]) == 1
    assert "HF400" in capsys.readouterr().err
    assert main(["snaps", "verify", str(runs), "--quarantine"]) == 1
    assert len(list(runs.glob("bad.*"))) == 2
    assert main(["snaps", "verify", str(runs)]) == 0


def test_prune(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--keep-last", "1", "--keep-best", "loss:max", "--debris", "--quarantined"]
    before = sorted(os.listdir(runs))
    assert main(["snaps", "prune", str(runs), *options, "--dry-run", "--json"]) == 1
    assert sorted(os.listdir(runs)) == before
    would = as_json(capsys)
    assert would["kept"] == ["step_000000001.0001", "step_000000002.0001"]
    assert [each["name"] for each in would["damaged"]] == ["step_000000003.0001"]
    assert would["deleted"] == ["attempt.step_000000005.0001"]
    assert main(["snaps", "prune", str(runs), *options]) == 1
    assert "deleted  attempt.step_000000005.0001" in out(capsys)
    assert sorted(path.name for path in runs.glob("*step*")) == [
        "step_000000001.0001",
        "step_000000002.0001",
        "step_000000004.0001",
    ]
    assert main(["snaps", "prune", str(runs), "--keep-last", "1"]) == 0
    assert [path.name for path in runs.glob("step*[12].0001")] == ["step_000000002.0001"]


def test_prune_beside_a_job_is_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with lease.acquire(runs, "busy", beat_s=0.05):
        assert main(["snaps", "prune", str(runs), "--debris"]) == 1
        assert "HF403" in capsys.readouterr().err
        assert main(["snaps", "ls", str(runs)]) == 0
        assert "last used by job 'busy'" in out(capsys)
    assert (runs / "attempt.step_000000005.0001").exists()


@pytest.mark.parametrize("arguments", TABLES["bad_lines"])
def test_bad_lines_are_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["snaps", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("holdfast: HF1")
    assert said.count("\n") == 1


def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snaps", "ls", str(tmp_path / "none")]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["snaps", "--help"])
    assert ended.value.code == 0
    text = out(capsys)
    assert all(name in text for name in ("ls", "verify", "prune", "export"))
    with pytest.raises(SystemExit):
        main(["snaps", "prune", "--help"])
    assert "--keep-best" in out(capsys)


def test_values_that_are_not_finite_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, metadata in enumerate(({}, {"finite": True}, {"finite": False})):
        save(tmp_path, step, metadata=metadata)
    for command in ("ls", "verify"):
        assert main(["snaps", command, str(tmp_path)]) == 0
        said = [line for line in out(capsys).splitlines() if "not finite" in line]
        assert len(said) == 1
        assert "has values that are not finite" in said[0]
        assert main(["snaps", command, "--json", str(tmp_path)]) == 0
        found = as_json(capsys)
        assert [each["finite"] for each in found["committed" if command == "ls" else "verified"]] == [None, True, False]


def test_export_of_nothing_valid_starts_no_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snaps", "export", str(tmp_path), "--to", str(tmp_path / "x"), "--format", "torch"]) == 1
    assert "no snapshot" in capsys.readouterr().err


def test_an_export_says_which_step_was_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the process that has torch can look into snapshots whose writer did not look for values that are not finite."""
    for step in (1, 2):
        save(tmp_path, step)
    lines: list[list[str]] = []

    def export(line: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        lines.append(line)
        return subprocess.CompletedProcess(line, 0, stdout="step_000000001.0001 -> x\n")

    monkeypatch.setattr(subprocess, "run", export)
    assert main(["snaps", "export", "--json", str(tmp_path), "--to", "x", "--format", "torch"]) == 0
    assert as_json(capsys)["step"] == 1
    assert "--step" not in lines[0]
    assert main(["snaps", "export", str(tmp_path), "--step", "2", "--to", "x", "--format", "torch"]) == 0
    assert lines[1][-2:] == ["--step", "2"]


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    script = """
import sys
from holdfast.cli import main
main(["snaps", "ls", sys.argv[1]])
print([each for each in ("torch", "numpy", "asyncio", "msgspec") if each in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=limit_s(60)
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_snapshot_is_not_the_folder_it_is_in(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "verify"):
        assert main(["snaps", command, str(runs / "step_000000001.0001")]) == 1
        assert f"is one snapshot; give its folder, {runs.resolve()}" in capsys.readouterr().err


def test_debris_that_is_no_folder_goes_too(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "attempt.step_000000007.0001").write_text("x")
    (runs / "gone.step_000000008.0001").symlink_to(runs / "step_000000001.0001")
    assert main(["snaps", "prune", str(runs), "--debris"]) == 0
    capsys.readouterr()
    assert sorted(path.name for path in runs.glob("*.step_*")) == []
    assert (runs / "step_000000001.0001" / MANIFEST).exists()


def test_a_folder_without_snapshots_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snaps", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} holds no snapshot\n"
