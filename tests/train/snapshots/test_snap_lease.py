"""One job per folder, without any clock: a moving counter is a live owner, one that stands still is not."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.protocol.errors import SnapshotBusyError, SnapshotError, SnapshotFolderError, SnapshotWriteError
from holdfast.train.snapshots import changes, disk, folder, lease
from holdfast.train.snapshots.lease import FolderLease, LeaseOwner, acquire
from tests.support.limits import limit_s, until

ELSEWHERE = LeaseOwner("other", "far", 4711, "another boot", "1")
OF_JOB = replace(ELSEWHERE, job_uid="node7#1")
HERE = LeaseOwner.me("other", "")
HOLD = """
import sys, time
from holdfast.train.snapshots import lease
held = lease.acquire(sys.argv[1], sys.argv[2], beat_s=0.05)
print("held", flush=True)
time.sleep(600)
"""


def write(path: Path, number: int, owner: LeaseOwner, counter: int | str) -> None:
    """A lease as somebody on another machine would have it."""
    file = path / f"lease.{number:06d}"
    file.write_text(
        json.dumps(asdict(owner)) + "\n" + (counter if isinstance(counter, str) else lease.COUNTER.format(counter))
    )


class Waits:
    """Stands in for time.sleep: counts, and lets something happen meanwhile."""

    def __init__(self, meanwhile: Callable[[int], object] = lambda _: None) -> None:
        self.count = 0
        self._meanwhile = meanwhile

    def __call__(self, _: float) -> None:
        self.count += 1
        self._meanwhile(self.count)


def numbers(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.startswith("lease"))


def test_a_free_folder_is_taken_at_once_and_given_back(tmp_path: Path) -> None:
    waits = Waits()
    identities: set[str] = set()
    for number in (1, 2, 3):
        with acquire(tmp_path / "runs", "a", wait=waits) as held:
            held.check()
            found = lease.owner(tmp_path / "runs")
            assert found == replace(LeaseOwner.me("a", ""), folder_id=held.folder_id)
            identities.add(held.folder_id)
            assert numbers(tmp_path / "runs") == [f"lease.{number:06d}"]
        assert lease.owner(tmp_path / "runs") is None
    assert waits.count == 0
    assert folder.survey(tmp_path / "runs").fresh
    (identity,) = identities
    assert not lease.is_of_another_folder(tmp_path / "runs", identity)
    shutil.rmtree(tmp_path / "runs")
    assert lease.is_of_another_folder(tmp_path / "runs", identity)
    (tmp_path / "runs").mkdir()
    assert lease.is_of_another_folder(tmp_path / "runs", identity)
    with acquire(tmp_path / "runs", "a", wait=waits) as held:
        assert lease.is_of_another_folder(tmp_path / "runs", identity)
        assert not lease.is_of_another_folder(tmp_path / "runs", held.folder_id)


def test_a_live_owner_elsewhere_is_named(tmp_path: Path) -> None:
    write(tmp_path, 7, ELSEWHERE, 1)
    waits = Waits(lambda count: count == 3 and write(tmp_path, 7, ELSEWHERE, 2))
    with pytest.raises(SnapshotBusyError, match=r"job 'other' \(process 4711 on far\)"):
        acquire(tmp_path, "mine", wait=waits)
    assert waits.count == 3
    assert numbers(tmp_path) == ["lease.000007"]


@pytest.mark.parametrize(
    ("owner", "run_id", "more", "polls"),
    [
        pytest.param(ELSEWHERE, "mine", {}, lease.POLLS, id="dead or stopped"),
        pytest.param(ELSEWHERE, "mine", {"lost": 7}, 0, id="known to be lost"),
        pytest.param(ELSEWHERE, "mine", {"lost": 6}, lease.POLLS, id="another job has taken it since"),
        # holdfast starts a generation when none of the others is left.
        pytest.param(OF_JOB, "mine", {"job_uid": "node7#1"}, 0, id="an earlier generation of the same job"),
        pytest.param(OF_JOB, "mine", {"job_uid": "node7#2"}, lease.POLLS, id="of another job"),
        pytest.param(replace(ELSEWHERE, run_id=""), "", {}, lease.POLLS, id="a run id that is none"),
        pytest.param(replace(ELSEWHERE, run_id="none"), "none", {}, lease.POLLS, id="a run id that everybody has"),
        pytest.param(replace(HERE, pid=2**22 + 1), "other", {}, 0, id="dead on this machine"),
        pytest.param(replace(HERE, started="1"), "mine", {}, 0, id="a pid that is used again"),
    ],
)
def test_an_owner_that_does_not_beat_is_waited_for(
    tmp_path: Path, owner: LeaseOwner, run_id: str, more: dict[str, Any], polls: int
) -> None:
    write(tmp_path, 7, owner, 1)
    waits = Waits()
    with acquire(tmp_path, run_id, wait=waits, **more) as held:
        assert (held.number, waits.count, numbers(tmp_path)) == (8, polls, ["lease.000008"])


def test_a_lease_of_another_version_names_its_owner(tmp_path: Path) -> None:
    known = {"run_id": "old", "host": "far", "pid": 4711, "machine": "another boot", "started": "1"}
    for number, more in ((1, {}), (2, {"job_uid": "node7#1", "of_a_later_version": 3})):
        (tmp_path / f"lease.{number:06d}").write_text(json.dumps({**known, **more}) + "\n" + lease.COUNTER.format(1))
        assert str(lease.owner(tmp_path)) == "job 'old' (process 4711 on far)"


def test_the_same_run_takes_over_sooner(tmp_path: Path) -> None:
    """A restart on another node, whose previous leader's node was lost. One late sign of that is no life."""
    write(tmp_path, 7, ELSEWHERE, 1)
    waits = Waits(lambda count: count == 2 and write(tmp_path, 7, ELSEWHERE, 2))
    with acquire(tmp_path, "other", wait=waits):
        assert waits.count == 2 + lease.POLLS_SAME_RUN


def test_the_same_run_does_not_rob_who_beats(tmp_path: Path) -> None:
    """Two jobs with one --rdzv-id."""
    write(tmp_path, 7, ELSEWHERE, 1)
    waits = Waits(lambda count: write(tmp_path, 7, ELSEWHERE, 1 + count))
    with pytest.raises(SnapshotBusyError, match=r"job 'other' \(process 4711 on far\), another .* same --rdzv-id"):
        acquire(tmp_path, "other", wait=waits)
    assert waits.count == lease.MOVES_SAME_RUN
    assert numbers(tmp_path) == ["lease.000007"]


@pytest.mark.parametrize("run_id", ["mine", "other"])
def test_a_living_process_of_this_machine_is_not_robbed(tmp_path: Path, run_id: str) -> None:
    """Stopped, it beats no more, and would write where another does when it goes on."""
    write(tmp_path, 7, LeaseOwner.me("mine", "node7#1"), 1)
    with pytest.raises(SnapshotBusyError, match=f"process {os.getpid()} on"):
        acquire(tmp_path, run_id, job_uid="node7#1", wait=Waits())
    assert numbers(tmp_path) == ["lease.000007"]


def test_a_live_and_then_killed_owner_on_this_machine(tmp_path: Path) -> None:
    """Really another process: busy while it lives; free at once when it was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "a"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            with pytest.raises(SnapshotBusyError, match=f"process {process.pid} on"):
                acquire(tmp_path, "b", poll_s=0.2, polls=20)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    waits = Waits()
    with acquire(tmp_path, "b", wait=waits):
        assert waits.count == 0


def test_twice_in_one_process(tmp_path: Path) -> None:
    with acquire(tmp_path, "none", beat_s=0.02), pytest.raises(SnapshotBusyError, match="a job without a name"):
        acquire(tmp_path, "none", poll_s=0.2, polls=50)


def test_who_lost_the_lease_is_told_and_takes_nothing_back(tmp_path: Path) -> None:
    held = acquire(tmp_path, "a", beat_s=0.02)
    try:
        write(tmp_path, 2, ELSEWHERE, 1)
        held._thread.join(limit_s(30))
        with pytest.raises(SnapshotBusyError, match="taken over by job 'other'"):
            held.check()
    finally:
        held.release()
    assert lease.owner(tmp_path) == ELSEWHERE
    held.release()


def trouble(held: FolderLease) -> SnapshotError | None:
    try:
        held.check()
    except SnapshotError as error:
        return error
    return None


@pytest.mark.parametrize("how", ["removed", "emptied", "replaced", "renamed"])
def test_a_folder_that_vanishes_is_reported_until_it_is_back(tmp_path: Path, how: str) -> None:
    runs = tmp_path / "runs"
    with acquire(runs, "a", beat_s=0.02) as held:
        held.confirm()
        runs.rename(tmp_path / "aside")
        if how != "renamed":
            (runs / "more").mkdir(parents=True)
        if how == "replaced":
            write(runs, 1, ELSEWHERE, 1)
        if how == "removed":
            (runs / "more").rmdir()
            runs.rmdir()
        with pytest.raises(SnapshotFolderError, match="runs has vanished"):
            held.confirm()
        until(lambda: isinstance(trouble(held), SnapshotFolderError), "the folder is gone")
        with pytest.raises(SnapshotFolderError):
            changes.begin(tmp_path / "gone", 1, make=False)
        assert runs.exists() == (how in ("emptied", "replaced"))
        if runs.exists():
            runs.rename(tmp_path / "other")
        (tmp_path / "aside").rename(runs)  # mounted again
        until(lambda: trouble(held) is None, "the lease is good again")
        held.confirm()


def test_one_failed_beat_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []

    def fails(*_: object) -> None:
        beats.append(1)
        raise OSError(errno.EIO, "Input/output error")

    with acquire(tmp_path, "a", beat_s=0.02) as held:
        with monkeypatch.context() as patch:
            patch.setattr(lease._LeaseFile, "put", fails)
            until(lambda: len(beats) >= 1, "a beat")
            assert trouble(held) is None or len(beats) >= lease.BEATS_MISSED_MAX
            until(lambda: len(beats) > lease.BEATS_MISSED_MAX, "too few beats")
            assert isinstance(trouble(held), SnapshotWriteError)
        until(lambda: trouble(held) is None, "the lease is good again")


def test_the_parents_of_a_new_folder_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(disk, "sync_folder", synced.append)
    disk.make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path / "a", tmp_path]
    disk.make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


@pytest.mark.parametrize("text", ["", "{", "[]\n", '{"unknown": 1}\n', "\xff\n\n", "null\nfree"])
def test_a_lease_that_cannot_be_read_is_somebodys(tmp_path: Path, text: str) -> None:
    """It may be half written. It is waited for like any other."""
    (tmp_path / "lease.000001").write_text(text, encoding="latin1")
    waits = Waits()
    with acquire(tmp_path, "a", wait=waits):
        assert waits.count == lease.POLLS


def test_of_several_contenders_one_wins(tmp_path: Path) -> None:
    """Twenty rounds of six threads that all see the lease given back."""
    barrier = threading.Barrier(6)

    def contend(_: int) -> FolderLease | None:
        barrier.wait()
        with contextlib.suppress(SnapshotBusyError):
            return acquire(tmp_path, "", beat_s=0.005, poll_s=0.04, polls=100)
        return None

    for number in range(20):
        for name in numbers(tmp_path):
            (tmp_path / name).unlink()
        write(tmp_path, number + 1, ELSEWHERE, lease.FREE)
        with ThreadPoolExecutor(6) as threads:
            (won,) = filter(None, threads.map(contend, range(6)))
        won.release()
