"""Disks that take nothing, not even a note: no other rank, no retention and no restart waits for what cannot come.

The disk is a small tmpfs in a mount namespace of the test's own; on no other is the number of inodes so easily limited.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from math import inf
from pathlib import Path

import pytest

from holdfast.protocol.errors import SnapshotIncompleteError, SnapshotWriteError
from holdfast.train.snapshots import lease, read_back
from holdfast.train.snapshots.changes import SaveRequest, abandon, begin, commit, refuse, write_rank
from holdfast.train.snapshots.flush import (
    MEETING_BELOW,
    Inventory,
    PendingFlush,
    Save,
    StepInMemory,
    carry_out,
    rescue_attempt,
)
from holdfast.train.snapshots.layout import FolderKind, Key
from holdfast.train.snapshots.mapping import Mappings
from holdfast.train.snapshots.read_back import ReadBacks
from holdfast.train.snapshots.refusals import Refusals
from holdfast.train.snapshots.saver_connection import Packet
from holdfast.train.snapshots.slots import SlotOwner, Slots, lend
from tests.supervisor.conftest import no_threads
from tests.support.breaking_disks import BreakingDisk, over_quota
from tests.support.limits import limit_s
from tests.train.snapshots.saves import Memory, newest, put, save

HEAD = """
import os, subprocess, sys
from contextlib import suppress
from pathlib import Path
from holdfast.protocol.errors import *
from holdfast.train.snapshots import changes, folder, lease, read_back
from holdfast.train.snapshots.changes import SaveRequest
from tests.train.snapshots.saves import content, is_whole, newest, save

disk = Path(sys.argv[1])
path = disk / "runs"
def fill():
    with suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
def take_inodes():
    with suppress(OSError):
        for number in range(1000):
            (disk / f"inode{number}").touch()
def read_only():
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
"""


def on_small_disk(place: Path, body: str) -> str:
    """What this Python prints."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare for a mount namespace of its own")
    mount = 'mount -t tmpfs -o size=12m,nr_inodes=200 tmpfs "$0" && exec "$@"'
    program = HEAD + textwrap.dedent(body)
    line = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, str(place), sys.executable]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [*line, "-c", program, str(place)], env=environment, capture_output=True, text=True, timeout=limit_s(60)
    )
    if done.returncode and ("unshare:" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"this machine mounts nothing: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


LACKS = {
    "no blocks": "fill()",
    "no inodes": "take_inodes()",
    "neither": "fill(); take_inodes()",
    "read-only": "read_only()",
}


@pytest.mark.parametrize("lack", LACKS)
def test_rank_0_does_not_wait_for_a_rank_that_can_leave_no_note(tmp_path: Path, lack: str) -> None:
    said = on_small_disk(
        tmp_path,
        f"""
        save(path, 1)
        number = changes.begin(path, 2)
        changes.write_rank(SaveRequest(str(path), 2, number, 0, 2), content(2, 0))
        {LACKS[lack]}
        try:
            changes.write_rank(SaveRequest(str(path), 2, number, 1, 2), content(2, 1))
        except SnapshotWriteError as error:
            print(error)
        try:
            changes.commit(SaveRequest(str(path), 2, number, 0, 2), patience=600)
        except (SnapshotIncompleteError, SnapshotWriteError) as error:
            print(error)
        else:
            raise SystemExit("it was committed")
        assert newest(path).step == 1 and is_whole(newest(path))
        """,
    )
    written, committed = said.splitlines()[0], said.splitlines()[-1]
    assert ("Read-only file system" if lack == "read-only" else "No space left on device") in written
    assert "step 2" in committed or "Read-only file system" in committed
    assert "after 600 s" not in said


@pytest.mark.parametrize("lack", ["no blocks", "no inodes", "neither"])
def test_the_note_for_retention_has_its_room_before_the_disk_is_full(tmp_path: Path, lack: str) -> None:
    on_small_disk(
        tmp_path,
        f"""
        number = changes.begin(path, 1)
        written = []
        for rank in (1, 0):
            request = SaveRequest(str(path), 1, number, rank, 2, note={{read_back.READ_BACK: True}})
            written.append(read_back.write(request, content(1, rank)))
        committed = changes.commit(SaveRequest(str(path), 1, number, 0, 2))
        {LACKS[lack]}
        for each in written:
            each.check(lambda: None)
            each.close()
        for rank in range(2):
            digest = newest(path).manifest.ranks[rank].digest
            assert (committed / read_back.checked_file(rank)).read_text() == digest
        assert not list(committed.glob("*.part"))
        """,
    )


def refused_by(disk: BreakingDisk) -> tuple[list[SaveRequest], str]:
    """Both ranks' requests, and why rank 1 could not write its part: the disk failed behind that of rank 0."""
    number = begin(disk.path / "runs", 2)
    ranks = [SaveRequest(str(disk.path / "runs"), 2, number, rank, 2) for rank in range(2)]
    write_rank(ranks[0], bytes(4096))
    disk.fails()
    with pytest.raises(SnapshotWriteError, match=disk.reason) as failed:
        write_rank(ranks[1], bytes(4096))
    return ranks, str(failed.value)


def test_rank_0_does_not_wait_where_a_quota_forbids_notes_and_renames(tmp_path: Path) -> None:
    """As that of a btrfs subvolume does."""
    with over_quota(tmp_path) as disk:
        ranks, _ = refused_by(disk)
        with pytest.raises(SnapshotWriteError, match=disk.reason):
            commit(ranks[0], patience=600)


def test_a_refusal_that_a_quota_forbids_is_left_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 begins to wait when the quota is raised already: it sees nothing wrong with the disk."""
    with over_quota(tmp_path) as disk:
        ranks, why = refused_by(disk)
        refusals = Refusals()
        with no_threads(monkeypatch):
            refusals.insist(ranks[1], why)
        refusals.insist(ranks[1], why)
        assert ranks[0].attempt_path.exists()
        disk.recovers()
        with pytest.raises(SnapshotIncompleteError, match=rf"(?s)rank 1: .*{disk.reason}"):
            commit(ranks[0], patience=600)


@pytest.mark.parametrize("known", ["its part", "its refusal", "no attempt"])
def test_nothing_is_left_for_a_rank_0_that_does_not_wait(tmp_path: Path, known: str) -> None:
    number = begin(tmp_path, 2)
    request = SaveRequest(str(tmp_path), 2, number, 1, 2)
    if known == "its part":
        write_rank(request, bytes(4096))
    elif known == "its refusal":
        refuse(request, "the first one")
    elif known == "no attempt":
        abandon(request)
    Refusals().insist(request, "the second one")
    assert not any(thread.name == "holdfast-refusals" for thread in threading.enumerate())


def test_retention_does_not_wait_for_a_note_that_no_writer_has_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_back, "UNANNOUNCED_S", 0.1)
    monkeypatch.setattr(read_back, "OTHERS_S", inf)
    backs = ReadBacks(lambda: False)
    backs.committed(save(tmp_path / "runs", 1))
    backs.rest(newest(tmp_path / "runs"))


def test_a_lease_can_be_taken_on_a_full_disk(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
        first = lease.acquire(path, "a")
        first.release()
        fill()
        second = lease.acquire(path, "a")
        assert second.number == first.number + 1
        assert [each.name for each in path.glob("lease.*")] == [f"lease.{second.number:06d}"]
        assert lease.owner(path).pid == os.getpid()
        second.confirm()
        try:
            lease.acquire(path, "b", poll_s=0.01)
        except SnapshotBusyError:
            pass
        else:
            raise SystemExit("two have it")
        second.release()
        """,
    )


# --- after a crash: rank 0 cannot write what is in memory --------------------------------------------------------------


@pytest.mark.parametrize("nodes", ["one node", "two nodes"])
def test_a_rank_does_not_wait_for_an_attempt_that_rank_0_has_given_up(
    tmp_path: Path, memory: Memory, nodes: str
) -> None:
    """It waits 600 s for one that may still come."""
    folder, number = tmp_path / "snaps", rescue_attempt()
    folder.mkdir()
    own = Slots(memory.path, SlotOwner(1, 1, 2, 3))
    slot = put(own, 40, bytes(4096), SaveRequest(str(folder), 40, number, 1, 2, {"save": 1}))
    assert slot.request is not None
    step = StepInMemory(40, 1)
    over = threading.Event()
    flush = PendingFlush({step: (slot, slot.request)}, Inventory((step,), -1, -1), step, over)
    meeting = folder / Key(40, number - MEETING_BELOW).named(FolderKind.ATTEMPT)
    if nodes == "two nodes":  # this one has met rank 0, whose saver has removed the meeting place
        flush = PendingFlush(flush.held, flush.inventory, None, over)
        flush.__dict__["meet"] = lambda *_: step
        assert not meeting.exists()
    else:
        over.set()
    told: list[Packet] = []
    save = Save(lend(slot), slot.sequence, slot.request, 600.0, 1, Mappings(), Refusals(), flush)
    carry_out(save, ReadBacks(lambda: False), told.append)
    assert [(each["is"], each["code"]) for each in told] == [("failed", SnapshotIncompleteError.code)]
    assert "rank 0 could not save it" in told[0]["text"]
    own.close()


# --- one folder for all ranks ------------------------------------------------------------------------------------------


def test_a_lease_is_seen_by_who_has_the_same_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with lease.acquire(here, "a") as mine, lease.acquire(there, "b"):  # of the same number
        assert lease.is_seen(here, mine.number, mine.line, 0.0)
        assert not lease.is_seen(there, mine.number, mine.line, 0.2)
        assert not lease.is_seen(tmp_path / "missing", mine.number, mine.line, 0.2)


def test_a_full_disk_is_still_an_error_for_who_has_no_lease_to_reuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, 1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SnapshotWriteError, match="No space left"):
        lease.acquire(tmp_path, "a")
    assert not list(tmp_path.glob("lease.*"))
