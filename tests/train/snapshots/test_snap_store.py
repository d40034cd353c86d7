"""Snapshots in a real S3 server: whole or not at all, however the writer ends and whatever the network does."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.protocol.errors import (
    MissingPackageError,
    SnapshotBusyError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotGoneError,
    SnapshotIncompleteError,
    SnapshotURLError,
    SnapshotWriteError,
)
from holdfast.train.snapshots import changes, flush, folder, lease, lives, remote
from holdfast.train.snapshots.changes import Keep, SaveRequest, prune
from holdfast.train.snapshots.folder import RankFile
from holdfast.train.snapshots.layout import Key, rank_file
from holdfast.train.snapshots.lives import JobHistory, LifeFailure
from holdfast.train.snapshots.remote import RemotePath, location_of
from tests.support.limits import limit_s, until
from tests.support.object_store import (
    BUCKET,
    SECRET,
    FaultyProxy,
    ObjectStore,
    Saves,
    emulator,
    forget_connections,
    running_store,
    variables,
)
from tests.train.snapshots import saves
from tests.train.snapshots.saves import Bench, content, is_whole, load, newest, save

pytestmark = [
    pytest.mark.xdist_group("object_store"),
    pytest.mark.allow_threads("fsspecIO", "asyncio_"),  # fsspec's, one for each process
]
PARTS = 3_000_000
"""Items of a file that is uploaded in several parts, once remote.PART_BYTES is small."""
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with running_store() as started:
        yield started


@pytest.fixture
def url(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A new snapshot folder."""
    monkeypatch.setattr(remote, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(remote, "PAUSE_S_MIN", 0.01)
    with variables(store.environ()):
        yield f"s3://{BUCKET}/run-{next(NUMBERS)}"
        forget_connections()


@pytest.fixture
def proxy(store: ObjectStore, url: str) -> Iterator[FaultyProxy]:
    """Between this process and the server."""
    forget_connections()
    made = FaultyProxy(store)
    with variables(store.environ(made.port)):
        yield made
        forget_connections()
    made.close()


def uploads(url: str) -> list[str]:
    """Keys of unfinished multipart uploads."""
    fs = remote.filesystem(url)
    return [each["Key"] for each in fs.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads") or []]


def download(path: remote.Location, to: Path) -> Path:
    """A committed prefix, as any tool copies it."""
    assert isinstance(path, RemotePath)
    (to / path.name).mkdir(parents=True)
    for name in path.sizes():
        (to / path.name / name).write_bytes((path / name).read(0, 1 << 30))
    return to


def test_is_read_as_it_was_saved_and_is_a_plain_folder_when_copied(url: str, tmp_path: Path) -> None:
    assert folder.survey(url).fresh
    for step, items in ((5, 300_000), (7, PARTS), (7, 300_000)):
        save(location_of(url), step, items=items)
    found = folder.survey(url)
    assert [each.key for each in found.committed] == [(5, 1), (7, 1), (7, 2)]
    assert load(found.committed[1]) == [content(7, rank, PARTS) for rank in range(2)]
    assert is_whole(newest(url))
    with RankFile(found.committed[1], 1) as file:
        assert bytes(file.load(["step"])[file.image.spans["step"]]) == content(7, 1, PARTS)[file.image.spans["step"]]
    copied = download(found.committed[2].path, tmp_path)
    assert is_whole(newest(copied))
    assert uploads(url) == []


def test_attempts_are_numbered_and_never_shared(url: str) -> None:
    with ThreadPoolExecutor(6) as threads:
        assert sorted(threads.map(lambda _: changes.begin(url, 5), range(6))) == list(range(1, 7))


def test_either_the_commit_or_the_end_of_an_attempt_wins(url: str) -> None:
    for step in range(1, 4):
        request = SaveRequest(url, step, changes.begin(url, step), 0, 1)
        changes.write_rank(request, content(step, 0))
        with ThreadPoolExecutor() as threads:
            racing = threads.submit(changes.commit, request)
            time.sleep(random.uniform(0, 0.1))
            changes.abandon(request)
        given_up = racing.exception()
        assert given_up is None or isinstance(given_up, SnapshotIncompleteError)
        committed = [each.step for each in folder.survey(url).committed]
        assert (step in committed) == (given_up is None)
        if step in committed:
            folder.verify(newest(url))


def test_a_writer_that_is_late_leaves_nothing_that_is_read(url: str) -> None:
    """The next life has given its attempt up, and cleared twice."""
    first, second = (SaveRequest(url, 4, changes.begin(url, 4), rank, 2) for rank in range(2))
    second = SaveRequest(url, 4, first.attempt, 1, 2)
    changes.write_rank(first, content(4, 0))
    folder.clear_debris(folder.survey(url))
    with pytest.raises(SnapshotIncompleteError):
        changes.write_rank(second, content(4, 1))
    with pytest.raises(SnapshotIncompleteError):
        changes.commit(first, patience=0.1)
    folder.clear_debris(folder.survey(url))
    assert folder.survey(url).fresh


def test_a_committed_attempt_is_never_written_again(url: str) -> None:
    save(url, 3)
    with pytest.raises(SnapshotIncompleteError):
        changes.write_rank(SaveRequest(url, 3, 1, 0, 2), content(9, 0))
    assert is_whole(newest(url))


def test_what_unfinished_uploads_leave_is_removed_and_others_are_kept(url: str) -> None:
    fs = remote.filesystem(url)
    ours = f"{url.partition(f'{BUCKET}/')[2]}/step_000000001.0001/{rank_file(0)}"
    for key in (ours, "other/file"):
        fs.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)
    folder.clear_debris(folder.survey(url))
    assert uploads(url) == ["other/file"]


def test_killed_in_every_phase(url: str, store: ObjectStore) -> None:
    """And at random moments; `python -m benchmarks store-kills` has 200 of them."""
    phases = ["begun", "part 1", "part 2", "written", "recorded", "gathered", "durable"]
    killing = Saves(store.environ())
    try:
        step = 0
        for phase, after_s in [*((each, 0.0) for each in phases), *(("", random.uniform(0.05, 0.5)) for _ in range(3))]:
            step += 1
            before = [each.key for each in folder.survey(url).committed]
            status = killing.run(url, step, phase, items=PARTS, after_s=after_s)
            found = folder.survey(url)
            assert status == -9 or after_s, phase
            assert [each.key for each in found.committed][: len(before)] == before
            assert not found.problems
            if phase == "durable":
                assert newest(url).step == step
            folder.clear_debris(found)
            assert uploads(url) == [] or "other" in uploads(url)[0]
        assert killing.run(url, step + 1) == 0
        assert is_whole(newest(url))
        for each in folder.survey(url).committed:
            folder.verify(each)
    finally:
        killing.close()


def test_lives_leave_marks_history_and_failures(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (20, 40, 60):
        save(url, step)
    place = location_of(url)
    lives.mark(place, [Key(60, 1)], "because")
    found = folder.survey(url)
    assert [[each.step for each in some] for some in (found.committed, found.suspects)] == [[20, 40], [60]]
    assert flush.newest_on_disk(url) == 40
    assert [path.name for path in prune(url, Keep(last=1)).deleted] == ["step_000000020.0001"]
    history = JobHistory(life="a", origin=Key(60, 1), best=75)
    history.save(place)
    assert JobHistory.load(place) == history
    for life in ("a", "b"):
        lives.note_failure(place, LifeFailure("ValueError: 1", 61, life))
    assert lives.noted_failure(place) == LifeFailure("ValueError: 1", 61, "a")  # the first one
    lives.forget_failure(place)
    assert lives.noted_failure(place) is None
    assert main(["snaps", "ls", url]) == 0
    assert "suspect      step_000000060.0001  because" in capsys.readouterr().out
    assert main(["snaps", "unmark", url]) == 0
    assert [each.step for each in folder.survey(url).committed] == [40, 60]


def test_a_failed_rank_does_not_wait_for_the_store(url: str, proxy: FaultyProxy) -> None:
    location_of(url).sizes()
    proxy.fault, proxy.seen = lambda method, path: "cut", []
    lives.note_failure(location_of(url), LifeFailure("ValueError: 1", 61, "a"))
    assert 1 <= len(proxy.seen) <= 2  # aiohttp itself sends it again when an old connection was cut


@pytest.mark.parametrize("kind", ["slow down", "cut", "cut after", "slow"])
def test_a_save_survives(url: str, proxy: FaultyProxy, kind: str) -> None:
    """Every third request fails; a request whose answer is lost was carried out."""
    count = itertools.count()
    proxy.fault = lambda method, path: kind if next(count) % 3 == 1 else ""
    save(url, 1, items=PARTS)
    save(url, 2)
    with lease.acquire(url, "job"):
        assert is_whole(newest(url))
        assert len(prune(url, Keep(last=1)).deleted) == 1
    assert next(count) > 30


def test_a_store_that_stays_away_is_one_clear_error(
    url: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(url, 1)
    monkeypatch.setattr(remote, "RETRY_S", 0.5)
    proxy.fault = lambda method, path: "slow down" if method in ("PUT", "POST") else ""
    for items in (300_000, PARTS):
        with pytest.raises(SnapshotWriteError, match="reduce your request rate"):
            changes.write_rank(SaveRequest(url, 2, 1, 0, 1), content(2, 0, items))
    proxy.fault = lambda method, path: "cut"
    with pytest.raises(SnapshotError) as caught:
        folder.survey(url)
    assert not isinstance(caught.value, SnapshotDamagedError)
    proxy.fault = lambda method, path: ""
    assert is_whole(newest(url))
    assert uploads(url) in ([], ["other/file"])


def test_damage_is_found_and_set_aside(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3, 4):
        save(url, step)
    root = location_of(url)
    (root / "step_000000004.0001" / rank_file(1)).delete()
    flipped = bytearray(content(3, 0))
    flipped[5000] ^= 1
    (root / "step_000000003.0001" / rank_file(0)).put(bytes(flipped))
    found = folder.survey(url)
    assert [each.step for each in found.committed] == [1, 2, 3]
    assert [problem.damaged for problem in found.problems] == [True]
    assert main(["snaps", "verify", url, "--quarantine"]) == 1
    assert "step_000000003.0001  HF401" in capsys.readouterr().out
    found = folder.survey(url)
    assert ([each.step for each in found.committed], len(found.quarantined)) == ([1, 2], 2)
    assert main(["snaps", "prune", url, "--keep-last", "1", "--quarantined", "--debris"]) == 0
    assert main(["snaps", "ls", url]) == 0
    assert "1 step_" not in (told := capsys.readouterr().out)
    assert "quarantined" not in told.rpartition("STEP")[2]
    assert [name for name in root.sizes() if name.startswith("step")] == ["step_000000002.0001"]


def test_a_reader_beside_retention_gets_all_or_an_error(url: str) -> None:
    save(url, 1)
    save(url, 2)
    with RankFile(folder.survey(url).committed[0], 0) as file:
        prune(url, Keep(last=1))
        with pytest.raises(SnapshotGoneError):
            file.load()


LIFE = """
import os, sys
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else gcsfs asks the emulator by gRPC, for a minute
from holdfast.train.snapshots import changes, folder, lease
from holdfast.train.snapshots.changes import Keep
from tests.train.snapshots.saves import content, load, save
url = sys.argv[1]
for step, items in ((5, 1000), (5, 1000), (9, 12_000_000)):
    save(url, step, items=items)
with lease.acquire(url, "job"):
    changes.begin(url, 11)
    found = folder.survey(url)
    assert [each.key for each in found.committed] == [(5, 1), (5, 2), (9, 1)], found
    assert load(found.newest_valid) == [content(9, rank, 12_000_000) for rank in range(2)]
    for _ in range(2):
        folder.clear_debris(folder.survey(url))
    folder.quarantine(found.newest_valid.path, "rotten")
    assert len(changes.prune(url, Keep(last=1)).deleted) == 1
found = folder.survey(url)
assert [each.key for each in found.committed] == [(5, 2)], found
assert (len(found.quarantined), found.debris, found.problems) == (1, (), ()), found
assert lease.owner(url) is None
"""


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_the_life_of_a_folder_in_other_stores(protocol: str) -> None:
    with emulator(protocol) as given:
        command = [sys.executable, "-c", LIFE, f"{protocol}://{BUCKET}/run"]
        done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=limit_s(60))
        assert done.returncode == 0, done.stderr


# --- two writers ------------------------------------------------------------------------------------------------------


def test_one_of_many_contenders_gets_the_lease(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease.LeaseOwner, "is_here", lambda self: False)

    def contend(_: int) -> lease.FolderLease | None:
        with contextlib.suppress(SnapshotBusyError):
            return lease.acquire(url, "", beat_s=0.05, poll_s=limit_s(0.2))
        return None

    for number in range(1, 3):
        with ThreadPoolExecutor(3) as threads:
            (won,) = filter(None, threads.map(contend, range(3)))
        assert won.number >= number
        won.release()


def test_a_lease_that_another_job_has_taken_is_noticed(url: str) -> None:
    held = lease.acquire(url, "first", beat_s=0.05)
    seen = location_of(url) / "lease.000001"
    text = seen.read(0, 10_000).decode().replace("first", "second")
    seen.put(text.encode())  # as a store without conditional puts lets it

    def noticed() -> bool:
        try:
            held.check()
        except SnapshotBusyError as error:
            return "'second'" in str(error)
        return False

    until(noticed, "the owner has noticed")
    held.release()


# --- URLs, packages, secrets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        "s3://",
        "s3://user:topsecret@bucket/run",
        "s3://bucket/run?sig=topsecret",
        "s3://bucket//run",
        "s3://bucket/run#1",
        "S3://bucket/run",
        "http://host/x",
        "memory://x",
        "simplecache::s3://bucket/run",
        "nosuch://bucket/run",
    ],
)
def test_bad_urls_are_one_clear_message(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snaps", "ls", bad]) == 2
    told = capsys.readouterr().err
    assert "HF135" in told
    assert "topsecret" not in told
    with pytest.raises(SnapshotURLError):
        remote.filesystem(str(location_of(bad)))


def test_a_path_that_was_a_url_is_an_error_and_a_file_url_is_a_path(tmp_path: Path) -> None:
    with pytest.raises(SnapshotURLError, match="as a text"):
        location_of(Path("s3://bucket/run"))
    assert location_of(f"file://{tmp_path}") == tmp_path


def test_a_missing_package_is_one_line_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'holdfast\[remote\]'") as caught:
        remote.filesystem("gs://bucket/run")
    assert "\n" not in str(caught.value)


def test_secrets_are_taken_out_of_messages(store: ObjectStore) -> None:
    with variables(store.environ()):
        text = f"https://me:pw@host/x?sig=abc&se=1 said {SECRET}"
        assert remote.redacted(text) == "https://…@host/x?… said …"


# --- the saver --------------------------------------------------------------------------------------------------------


class RemoteBench(Bench):
    """Saves to an object store."""

    def __init__(self, url: str, stage: str = "") -> None:
        self.stage_folder = stage
        super().__init__(url)

    def connect(self) -> None:
        self.client = saves.SaverClient(self.place, remote=True, stage=self.stage_folder)
        self.slots = self.client.slots


@pytest.mark.parametrize("staged", [False, True])
def test_the_saver_uploads_what_a_worker_has_handed_over(
    url: str, proxy: FaultyProxy, tmp_path: Path, staged: bool
) -> None:
    """With a stage the slot is free before the upload has ended."""
    go = threading.Event()

    def held_back(method: str, path: str) -> str:
        if method in ("PUT", "POST") and rank_file(0) in path:
            go.wait(limit_s(60))
        return ""

    bench = RemoteBench(url, str(tmp_path) if staged else "")
    try:
        proxy.fault = held_back
        bench.persist(3)
        if staged:
            until(lambda: bench.client.check() or not bench.client.writing, "the slot is free")
            assert bench.client.busy
        bench.client.close()  # and the worker ends
        go.set()
        until(lambda: folder.survey(url).newest_valid is not None, "the saver has committed")
        folder.confirm(newest(url))
        assert os.listdir(tmp_path) == []
        line = Path(f"/proc/{bench.saver}/cmdline").read_bytes() if saves.savers(bench.place.folder) else b""
        assert SECRET.encode() not in line
    finally:
        go.set()
        bench.close()


def test_a_rank_that_cannot_stage_its_part_is_not_waited_for(url: str, tmp_path: Path) -> None:
    number = changes.begin(url, 3)
    first, second = (SaveRequest(url, 3, number, rank, 2) for rank in range(2))
    bench = RemoteBench(url, str(tmp_path / "gone"))
    try:
        bench.hand_over(second)
        changes.write_rank(first, content(3, 0))
        with pytest.raises(SnapshotIncompleteError, match=r"rank 1: .*gone"):
            changes.commit(first, patience=3600)
    finally:
        bench.close()


def test_a_killed_saver_leaves_an_attempt_that_the_next_life_clears(url: str, proxy: FaultyProxy) -> None:
    begun, killed = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> str:
        if method == "PUT" and rank_file(0) in path:
            begun.set()
            killed.wait(limit_s(60))
        return ""

    bench = RemoteBench(url)
    try:
        proxy.fault = hold
        bench.persist(2, 12 << 20)
        assert begun.wait(limit_s(60))
        os.kill(bench.saver, 9)
        killed.set()
        until(lambda: bench.client._receive() or not bench.client.busy, "its end is seen")
        with pytest.raises(SnapshotError):
            bench.client.check()
        proxy.fault = lambda method, path: ""
        folder.clear_debris(folder.survey(url))
        assert not folder.survey(url).committed
        assert uploads(url) in ([], ["other/file"])
        bench.persist(4)
        bench.client.wait()
        assert newest(url).step == 4
    finally:
        killed.set()
        bench.close()
