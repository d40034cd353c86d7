"""Folders and names of a run's logs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.protocol.errors import LogDirError
from holdfast.protocol.options import LogOptions
from holdfast.run_folder import RunFolder, default_log_dir
from holdfast.text import spoken
from tests.support.second_user import OTHER_UID, everybodys_folder, needs_root


def test_a_run_folder_is_private_and_new_each_time(tmp_path: Path) -> None:
    options = LogOptions(log_dir=str(tmp_path / "a" / "b"))
    first, second = RunFolder.create(options, "job"), RunFolder.create(options, "job")
    assert first.path is not None
    assert second.path is not None
    assert first.path != second.path
    assert first.path.parent == tmp_path / "a" / "b"
    assert first.path.name.startswith("job_")
    assert len(first.path.name) == len("job_") + 8
    assert first.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("run_id", ["a/b", "../../up", "x\0y", "line\nbreak", "é" * 300, "\udcff", " "])
def test_any_run_id_makes_one_folder(tmp_path: Path, run_id: str) -> None:
    folder = RunFolder.create(LogOptions(log_dir=str(tmp_path)), run_id)
    assert folder.path is not None
    assert os.listdir(tmp_path) == [folder.path.name]


def test_a_membership_change_keeps_the_first_logs(tmp_path: Path) -> None:
    folder = RunFolder.create(LogOptions(log_dir=str(tmp_path)), "job")
    names = [path.name for path in map(folder.attempt, (1, 2, 3, 1), (0, 0, 1, 0)) if path]
    assert names == ["attempt_0", "attempt_0_generation_2", "attempt_1", "attempt_0"]


def test_dev_null_has_no_folders() -> None:
    folder = RunFolder.create(LogOptions(log_dir=None), "job")
    assert folder.path is None
    assert folder.attempt(1, 0) is None


@pytest.mark.parametrize("below", ["", "sub", "sub/sub"])
def test_a_file_in_the_way_is_named_in_one_line(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(LogDirError) as caught:
        RunFolder.create(LogOptions(log_dir=str(file / below)), "job")
    assert f"{file} is a file" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(LogDirError, match="cannot be written"):
        RunFolder.create(LogOptions(log_dir="/proc/no"), "job")


def test_a_default_folder_that_cannot_be_made_is_replaced_and_a_named_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    other = tmp_path / f"holdfast-runs-{os.geteuid()}"
    folder = RunFolder.create(LogOptions(log_dir="/proc/no", log_dir_named=False), "job")
    assert folder.path is not None
    assert folder.path.parent == other
    assert folder.notice.startswith("the log folder /proc/no cannot be written")
    assert f"go to {other}." in folder.notice
    with pytest.raises(LogDirError):
        RunFolder.create(LogOptions(log_dir="/proc/no"), "job")
    monkeypatch.setattr("holdfast.run_folder.temporary_log_dir", lambda: "/proc/neither")
    folder = RunFolder.create(LogOptions(log_dir="/proc/no", log_dir_named=False), "job")
    assert folder.path is None
    assert "This run has no log files" in folder.notice


def test_default_is_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_log_dir() == str(tmp_path / "state/holdfast/runs")
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_log_dir() == str(tmp_path / ".local/state/holdfast/runs")


def test_default_is_a_temporary_folder_when_nothing_else_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(gone)
    gone.rmdir()
    folder = Path(default_log_dir())
    assert folder.parent == tmp_path
    assert RunFolder.create(LogOptions(log_dir=str(folder)), "job").path is not None
    assert default_log_dir() == str(folder), "commands find it again"
    folder.chmod(0o777)
    assert default_log_dir() != str(folder), "what others may write is not used"


@pytest.mark.parametrize("home", ["file", "/proc/nothing", "/sys"])
def test_default_is_here_when_there_is_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / home))
    monkeypatch.chdir(tmp_path)
    assert default_log_dir() == str(tmp_path / "holdfast/runs")


@needs_root
def test_what_another_user_put_into_a_common_folder_gets_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns a folder above the run folder can exchange it, and have this user write anywhere."""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/dev/null")
    with everybodys_folder() as common:
        monkeypatch.setenv("TMPDIR", str(common))
        monkeypatch.chdir(common)
        assert default_log_dir() == str(common / "holdfast/runs")
        (common / "holdfast").mkdir()
        os.chown(common / "holdfast", OTHER_UID, OTHER_UID)
        temporary = default_log_dir()
        assert temporary == str(common / f"holdfast-runs-{os.geteuid()}")
        os.rename(common / "holdfast", temporary)  # another user makes it after the look at it
        folder = RunFolder.create(LogOptions(log_dir=temporary), "job")
        assert folder.path is not None
        assert list(Path(temporary).iterdir()) == []
        assert folder.path.parent.parent == common
        assert (folder.path.parent.stat().st_uid, folder.path.parent.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
        monkeypatch.chdir("/")


def test_a_job_that_nobody_named_has_a_folder_that_can_be_said(tmp_path: Path) -> None:
    folder = RunFolder.create(LogOptions(log_dir=str(tmp_path)), "1b4e28ba-2fa1-41d2-883f-0016d3cca427")
    assert folder.path is not None
    assert folder.path.name.startswith(spoken("1b4e28ba-2fa1-41d2-883f-0016d3cca427") + "_")
    assert "1b4e28ba" not in folder.path.name
