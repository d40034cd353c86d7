"""Disks that refuse: full, read-only, limited, and what is left of the snapshots then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from holdfast.protocol.errors import SnapshotError, SnapshotWriteError
from holdfast.train.snapshots import changes, folder
from soak.disk import why_not
from tests.support.limits import limit_s
from tests.train.snapshots.saves import is_whole, newest, save

HEAD = """
import os, subprocess, sys
from pathlib import Path
from holdfast.protocol.errors import *
from holdfast.train.snapshots import changes, folder, lease
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.layout import rank_file
from soak.disk import mounted
from tests.train.snapshots.saves import content, is_whole, newest, save

with mounted(Path.cwd(), 16) as disk:
    path = disk.path / "runs"
"""


def reason() -> str:
    """Why this machine cannot do it; empty when it can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "needs root and unshare for a mount namespace of its own"
    if why_not():
        return why_not()
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return f"no mount namespace here: {tried.stderr.strip()}" if tried.returncode else ""


def run_with_disk(folder: Path, body: str) -> str:
    """What this Python prints in a mount namespace of its own. It finds `disk`, a small ext4 disk at $PWD/disk, and
    `path`, a snapshot folder on it."""
    if why := reason():
        print(f"skipped: {why}")
        pytest.skip(why)
    script = HEAD + textwrap.indent(textwrap.dedent(body), "    ")
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s(60), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_costs_the_save_and_nothing_else(tmp_path: Path) -> None:
    """Full before the save, full in the middle of a file; once there is space again, all goes on."""
    said = run_with_disk(
        tmp_path,
        """
        save(path, 1)
        disk.fill()
        for step in (2, 3):
            try:
                save(path, step)
            except SnapshotWriteError as error:
                print(error)
            else:
                raise SystemExit("it was saved on a full disk")
            assert is_whole(newest(path)) and newest(path).step == 1
            assert [each.name for each in path.iterdir() if each.name.startswith("step")] == ["step_000000001.0001"]
            # Half of what the two ranks need.
            os.truncate(disk.path / "filler" / "bytes", os.stat(disk.path / "filler" / "bytes").st_size - 1_300_000)
        disk.empty()
        folder.clear_debris(folder.survey(path))
        save(path, 4)
        assert newest(path).step == 4 and is_whole(newest(path))
        """,
    )
    assert said.count("No space left on device") == 2
    assert "MB are free there" in said


def test_a_rank_that_finds_the_disk_full_gives_its_space_back_and_says_so(tmp_path: Path) -> None:
    run_with_disk(
        tmp_path,
        """
        save(path, 1)
        number = changes.begin(path, 2)
        disk.fill()
        free = 700_000
        file = disk.path / "filler" / "bytes"
        os.truncate(file, os.stat(file).st_size - free)
        before = os.statvfs(disk.path).f_bfree
        assert before > 0
        try:
            changes.write_rank(SaveRequest(str(path), 2, number, 1, 2), content(2, 1))
        except SnapshotWriteError as error:
            assert "it needs 1 MB" in str(error), error
        else:
            raise SystemExit("it was written")
        assert os.statvfs(disk.path).f_bfree >= before - 2
        try:
            changes.commit(SaveRequest(str(path), 2, number, 0, 2), patience=60)
        except SnapshotIncompleteError as error:
            assert "rank 1" in str(error) and "No space" in str(error), error
        else:
            raise SystemExit("it was committed")
        assert newest(path).step == 1
        """,
    )


def test_a_read_only_disk_is_read_and_not_written(tmp_path: Path) -> None:
    run_with_disk(
        tmp_path,
        """
        save(path, 1)
        bad = save(path, 2)
        changes.begin(path, 3)
        with (bad / rank_file(0)).open("r+b") as file:
            file.write(bytes(64))
        subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True)
        for refused in (lambda: changes.begin(path, 3), lambda: lease.acquire(path, "x")):
            try:
                refused()
            except SnapshotWriteError as error:
                assert "Read-only file system" in str(error), error
            else:
                raise SystemExit("it was written")
        try:
            folder.verify(newest(path))
        except SnapshotDamagedError as error:
            assert folder.quarantine(newest(path).path, str(error)) is None
        else:
            raise SystemExit("damage was not seen")
        older = folder.survey(path).committed[0]
        assert older.step == 1 and is_whole(older)
        # Nothing can be deleted, and nothing is said to be.
        assert folder.clear_debris(folder.survey(path)) == []
        assert len(folder.survey(path).debris) == 1
        assert changes.prune(path, changes.Keep(last=1)).deleted == ()
        subprocess.run(["mount", "-o", "remount,rw", str(disk.path)], check=True)
        """,
    )


@pytest.mark.parametrize("limit_bytes", [4096, 1_000_000, 1_199_000])
def test_a_limit_on_file_sizes(tmp_path: Path, limit_bytes: int) -> None:
    """EFBIG, as `ulimit -f` gives it: at the first block, in the middle, in the last block."""
    save(tmp_path, 1)
    script = f"""
import resource, sys
from holdfast.protocol.errors import SnapshotWriteError
from tests.train.snapshots.saves import save
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes}))
try:
    save(Path(sys.argv[1]), 2)
except SnapshotWriteError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=limit_s(60)
    )
    assert "File too large; is there a limit on file sizes (ulimit -f)?" in done.stdout, done.stderr
    assert newest(tmp_path).step == 1
    assert is_whole(newest(tmp_path))
    assert folder.survey(tmp_path).debris == (), "rank 0 gives up what it cannot write, with what others have written"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to what is read-only; see the read-only disk above")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    save(tmp_path, 1)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SnapshotWriteError, match="Permission denied"):
            changes.begin(tmp_path, 2)
        assert is_whole(newest(tmp_path))
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(SnapshotError, match="Not a directory"):
        folder.survey(tmp_path / "runs")
    with pytest.raises(SnapshotWriteError, match="exists"):
        changes.begin(tmp_path / "runs", 1)


def test_what_was_read_is_memory_of_its_own(tmp_path: Path) -> None:
    """What is written into it changes no snapshot, and it stays valid when the snapshot is deleted."""
    save(tmp_path, 1, 1)
    with folder.RankFile(newest(tmp_path), 0) as file:
        before = file.load()
        before[file.image.spans["bias"]] = bytes(6)
    assert is_whole(newest(tmp_path))
    kept = bytes(before)
    for each in newest(tmp_path).path.iterdir():
        each.unlink()
    assert before == kept


def test_the_free_space_is_that_of_the_disk_itself(tmp_path: Path) -> None:
    said = run_with_disk(
        tmp_path,
        """
        disk.fill()
        from holdfast.train.snapshots.disk import write_error
        print(write_error(OSError(28, "No space left on device"), disk.path))
        """,
    )
    assert "; 0 MB are free there" in said
