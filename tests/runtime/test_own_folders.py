"""Folders where another user may write too: nothing of a third place is removed, read or written, whatever is exchanged."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import memory_folder, own_folders
from holdfast.train.snapshots import changes, disk, read_back
from tests.support.second_user import OTHER_UID, as_other, everybodys_folder, exchanging, needs_root

ROUNDS = 300


@pytest.fixture
def common() -> Iterator[Path]:
    with everybodys_folder() as folder:
        yield folder


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder of this user with what must not be lost."""
    folder = tmp_path / "precious"
    (folder / "below").mkdir(parents=True)
    (folder / "file").write_text("mine")
    (folder / "below" / "file").write_text("mine")
    return folder


def is_whole(precious: Path) -> bool:
    return [(path / "file").read_text() for path in (precious, precious / "below")] == ["mine", "mine"]


PLANT = """
folder, target = sys.argv[1:3]
for name in (folder + "/sub", folder + "/link"):  # as an exchange has left them
    os.path.islink(name) and os.unlink(name)
os.makedirs(folder + "/sub", mode=0o700, exist_ok=True)
os.path.lexists(folder + "/link") or os.symlink(target, folder + "/link")
open(folder + "/sub/bait", "w").close()
"""


def planted(folder: Path, target: Path) -> Path:
    """A folder of the other user: sub is a folder, link leads elsewhere."""
    done = as_other(PLANT, folder, target)
    assert done.returncode == 0, done.stderr
    return folder


# --- removing ---------------------------------------------------------------------------------------------------------


@needs_root
def test_cleaning_up_looks_at_no_folder_of_another_user(common: Path, precious: Path) -> None:
    """Its name says that it is ours, and while it is walked a folder in it becomes a link."""
    foreign = planted(common / f"{memory_folder.prefix()}x-0123", precious)
    with exchanging(foreign / "sub", foreign / "link"):
        for _ in range(ROUNDS):
            assert memory_folder.clean(common) == []
    assert sorted(path.name for path in foreign.iterdir()) == ["link", "sub"]
    assert is_whole(precious)


@needs_root
def test_what_is_exchanged_while_it_is_removed_leads_nowhere(common: Path, precious: Path) -> None:
    """As in a snapshot folder of a group: what another user has put there is removed, and nothing else."""
    foreign = common / "step_00000001.gone"
    for _ in range(ROUNDS // 10):
        planted(foreign, precious)
        with exchanging(foreign / "sub", foreign / "link"):
            disk.remove(foreign)
        assert is_whole(precious)


@pytest.mark.parametrize("nested", ["sub", "sub/deep"])
def test_a_folder_that_becomes_a_link_after_the_look_is_not_entered(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch, nested: str
) -> None:
    doomed = tmp_path / "doomed"
    (doomed / nested).mkdir(parents=True)
    victim = doomed / nested
    really = os.unlink

    def exchange(name: str, *, dir_fd: int) -> None:
        try:
            really(name, dir_fd=dir_fd)
        finally:  # the look said that it is a folder
            if name == victim.name and not victim.is_symlink():
                victim.rmdir()
                victim.symlink_to(precious)

    monkeypatch.setattr(os, "unlink", exchange)
    with pytest.raises(NotADirectoryError):
        own_folders.remove(doomed)
    assert is_whole(precious)


def test_all_that_can_be_removed_is_removed(tmp_path: Path, precious: Path) -> None:
    doomed = tmp_path / "doomed"
    (doomed / "a" / "b").mkdir(parents=True)
    (doomed / "a" / "b" / "file").touch()
    (doomed / "a" / "link").symlink_to(precious)
    (doomed / "dangling").symlink_to("nowhere")
    os.mkfifo(doomed / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(doomed / "s"))
    own_folders.remove(doomed)
    assert not doomed.exists()
    assert is_whole(precious)


@pytest.mark.parametrize("remove", [own_folders.remove, own_folders.remove_private])
def test_a_link_is_no_folder(tmp_path: Path, precious: Path, remove: type) -> None:
    precious.chmod(0o700)
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(NotADirectoryError):
        remove(tmp_path / "link")
    assert is_whole(precious)


def test_very_deep_folders_are_an_error_and_no_end_of_descriptors(tmp_path: Path) -> None:
    deep = tmp_path / "doomed"
    deep.joinpath(*["d"] * (own_folders.DEPTH_MAX + 5)).mkdir(parents=True)
    with pytest.raises(OSError, match="too many folders"):
        own_folders.remove(deep)
    disk.remove(deep)  # as far as possible
    assert deep.exists()


# --- whose it is ------------------------------------------------------------------------------------------------------


@needs_root
def test_a_folder_of_another_user_is_not_private(common: Path) -> None:
    (common / "x").mkdir(mode=0o700)
    os.chown(common / "x", OTHER_UID, OTHER_UID)
    with pytest.raises(PermissionError, match="is not this user's alone"), own_folders.private(common / "x"):
        pass
    with pytest.raises(PermissionError):
        own_folders.remove_private(common / "x")


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_with_rights_for_others_is_not_private(tmp_path: Path, mode: int) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(mode)
    with pytest.raises(PermissionError):
        own_folders.remove_private(tmp_path / "x")
    assert (tmp_path / "x").exists()


@needs_root
def test_states_that_another_user_put_there_are_not_shown(common: Path) -> None:
    (common / f"{memory_folder.prefix()}x-0123").mkdir(mode=0o700)
    os.chown(common / f"{memory_folder.prefix()}x-0123", OTHER_UID, OTHER_UID)
    own = memory_folder.MemoryFolder.make("own", common)
    assert [path for path, _ in memory_folder.private_folders(common)] == [own.path]
    own.remove()


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_file_in_the_place_of_a_link_replaces_it(tmp_path: Path, precious: Path) -> None:
    place = tmp_path / "run.sbatch"
    place.symlink_to(precious / "file")
    own_folders.write_new(place, b"new", 0o755)
    assert not place.is_symlink()
    assert place.read_text() == "new"
    assert stat.S_IMODE(place.stat().st_mode) == 0o755
    assert is_whole(precious)
    assert [path.name for path in tmp_path.iterdir()] == ["precious", "run.sbatch"]


@needs_root
def test_a_file_of_another_user_is_not_written_into(common: Path) -> None:
    """Who owns it could change it afterwards."""
    done = as_other("open(sys.argv[1], 'w').close()", common / "run.sbatch")
    assert done.returncode == 0, done.stderr
    own_folders.write_new(common / "run.sbatch", b"#!/bin/sh\n", 0o755)
    assert (common / "run.sbatch").stat().st_uid == os.geteuid()


def test_a_link_beside_a_snapshot_file_is_not_written_through(tmp_path: Path, precious: Path) -> None:
    """Another user of a shared snapshot folder knows the temporary names."""
    (tmp_path / "MANIFEST.json.part").symlink_to(precious / "file")
    disk.write_atomically(tmp_path / "MANIFEST.json", "{}")
    assert (tmp_path / "MANIFEST.json").read_text() == "{}"
    assert is_whole(precious)


# --- records that a replacement reads ---------------------------------------------------------------------------------


@needs_root
def test_a_file_of_a_record_is_opened_only_in_a_folder_of_ones_own_and_through_no_link(
    common: Path, precious: Path
) -> None:
    """As the states of a rank in /dev/shm, which its replacement reads."""
    theirs = planted(common / "theirs", precious / "file")
    with pytest.raises(PermissionError, match="not this user's alone"):
        own_folders.open_file(theirs / "0.objects.0")
    (common / "open").mkdir(mode=0o777)
    (common / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="not this user's alone"):
        own_folders.open_file(common / "open" / "0.objects.0")
    own = common / "own"
    own.mkdir(mode=0o700)
    (own / "0.objects.0").symlink_to(precious / "file")
    with pytest.raises(PermissionError, match="is a link"):
        own_folders.open_file(own / "0.objects.0")
    (common / "linked").symlink_to(own)
    with pytest.raises(NotADirectoryError):
        own_folders.open_file(common / "linked" / "0.objects.1")
    os.close(own_folders.open_file(own / "0.objects.1"))
    assert stat.S_IMODE((own / "0.objects.1").stat().st_mode) == 0o600
    assert is_whole(precious)


def test_what_a_writer_notes_in_a_shared_snapshot_folder_follows_no_link(tmp_path: Path, precious: Path) -> None:
    number = changes.begin(tmp_path / "runs", 1)
    request = changes.SaveRequest(str(tmp_path / "runs"), 1, number, 0, 1, note={read_back.READ_BACK: True})
    note = request.attempt_path / f"{read_back.checked_file(0)}.part"
    note.symlink_to(precious / "file")
    written = read_back.write(request, bytes(4096))
    assert written is not None
    written.check(lambda: None)
    written.close()
    assert is_whole(precious)


def test_the_folder_for_temporary_files_is_the_first_one_that_exists(tmp_path: Path) -> None:
    def found(**environ: str) -> str:
        return own_folders.temporary(environ)

    there = str(tmp_path)
    assert found(TMPDIR=there, TMP="/") == found(TMPDIR=f"{there}/missing", TEMP=there) == found(TMP=there) == there
    assert found() == found(TMPDIR="") == found(TMPDIR=".") == "/tmp"
