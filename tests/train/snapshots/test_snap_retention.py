"""Which snapshots stay, and that no reader and no crash ever finds half of one that goes."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.protocol.errors import (
    RetentionError,
    SaverLostError,
    SnapshotDamagedError,
    SnapshotError,
    SnapshotGoneError,
)
from holdfast.train.snapshots import changes, folder, slots
from holdfast.train.snapshots import read_back as reading
from holdfast.train.snapshots.changes import Keep, Verified, prune
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.layout import Manifest, RankEntry, rank_file
from holdfast.train.snapshots.slots import SlotOwner, Slots
from tests.support.limits import limit_s, until
from tests.support.tables import tables
from tests.train.snapshots import saves
from tests.train.snapshots.saves import SIZE, Bench, content, is_whole, newest, put, save

TABLES = tables(__file__)


def made(step: int, saved_s: float = 0.0, **metrics: float) -> Snapshot:
    entry = RankEntry(0, 0, "")
    manifest = Manifest(step, 1, (entry,), {"metrics": metrics}, saved_s)
    return Snapshot(Path(manifest.key.name), manifest)


def kept_steps(keep: Keep, found: Sequence[Snapshot]) -> list[int]:
    return sorted(key.step for key in keep.choose(found))


def test_keep_last() -> None:
    assert kept_steps(Keep(last=2), [made(step) for step in (1, 5, 9)]) == [5, 9]
    assert kept_steps(Keep(last=5), [made(1)]) == [1]
    assert kept_steps(Keep(), []) == []


def test_keep_every_so_much_time() -> None:
    found = [made(step, saved_s=1000 + 1800 * step) for step in range(10)]
    assert kept_steps(Keep(last=1, every="1h"), found) == [0, 2, 4, 6, 8, 9]


def test_keep_every_so_many_steps() -> None:
    assert kept_steps(Keep(last=1, every_steps=100), [made(step) for step in range(0, 350, 30)]) == [0, 120, 240, 330]


def test_a_clock_set_back_keeps_more_not_less() -> None:
    found = [made(1, 10_000), made(2, 20_000), made(3, 500), made(4, 600), made(5, 20_500)]
    assert kept_steps(Keep(last=1, every="1h"), found) == [1, 2, 3, 5]


def test_keep_best() -> None:
    found = [made(1, loss=3.0), made(2, loss=1.0), made(3, loss=1.0), made(4), made(5, loss=2.0)]
    assert kept_steps(Keep(last=1, best=("loss", "min")), found) == [3, 5]
    assert kept_steps(Keep(last=1, best=("loss", "max", 2)), found) == [1, 5]
    assert kept_steps(Keep(last=1, best=("other", "min")), found) == [5]


def test_pruning_often_ends_with_what_pruning_once_keeps_or_more() -> None:
    """A snapshot that stays because of its distance never goes because another came."""
    chance = random.Random(6)
    for _ in range(100):
        keep = Keep(
            last=chance.randint(1, 3), every=chance.choice([None, "100s"]), every_steps=chance.choice([None, 7])
        )
        found: list[Snapshot] = []
        now, stayed = 0.0, set()
        for step in range(1, 60):
            now += chance.uniform(0, 60)
            found.append(made(step, now))
            stays = keep.choose(found)
            spaced = Keep(last=1, every=keep.every, every_steps=keep.every_steps).choose(found) - {found[-1].key}
            assert stayed <= spaced | {found[-1].key}, "what was kept for its distance went"
            stayed = spaced
            found = [snapshot for snapshot in found if snapshot.key in stays]
            assert found[-1].step == step


@pytest.mark.parametrize("wrong", TABLES["cannot_be_kept"])
def test_what_cannot_be_kept(wrong: dict[str, object]) -> None:
    with pytest.raises(RetentionError):
        Keep(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value"), [("90s", 90), ("30min", 1800), ("1.5h", 5400), ("1d", 86400), (20, 20), ("2 min", 120)]
)
def test_times(text: str | float, value: float) -> None:
    assert changes.seconds(text) == value


def test_prune_deletes_the_others_and_their_names(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, 1)
    would = prune(tmp_path, Keep(last=2), dry_run=True)
    assert len(os.listdir(tmp_path)) == 5
    done = prune(tmp_path, Keep(last=2))
    assert done == would
    assert [path.name for path in done.deleted] == [f"step_00000000{step}.0001" for step in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path)) == ["step_000000004.0001", "step_000000005.0001"]


def test_damaged_ones_do_not_count(tmp_path: Path) -> None:
    """With keep=1 and the newest damaged, the older ones are all there is."""
    for step in range(1, 5):
        save(tmp_path, step, 1)
    for step in (3, 4):
        with (tmp_path / f"step_00000000{step}.0001" / rank_file(0)).open("r+b") as file:
            file.seek(4096)
            file.write(bytes(64))
    done = prune(tmp_path, Keep(last=1))
    assert [snapshot.step for snapshot in done.kept] == [2]
    assert sorted(path.name for path, _ in done.damaged) == ["step_000000003.0001", "step_000000004.0001"]
    assert is_whole(newest(tmp_path))
    assert len(folder.survey(tmp_path).quarantined) == 2


def test_nothing_valid_nothing_deleted(tmp_path: Path) -> None:
    path = save(tmp_path, 1, 1)
    os.truncate(path / rank_file(0), 10)
    assert prune(tmp_path, Keep(last=1)).deleted == ()
    assert prune(tmp_path / "none", Keep(last=1)).kept == ()


def test_each_snapshot_is_read_back_once(tmp_path: Path) -> None:
    verified = Verified()
    save(tmp_path, 1, 1)
    prune(tmp_path, Keep(last=2), verified=verified)
    file = tmp_path / "step_000000001.0001" / rank_file(0)
    file.write_bytes(bytes(file.stat().st_size))
    assert prune(tmp_path, Keep(last=2), verified=verified).damaged == ()
    assert len(prune(tmp_path, Keep(last=2)).damaged) == 1, (
        "the damage is there: only the memory of it spared the reading"
    )


@pytest.mark.parametrize(("phase", "left"), [("aside", [1, 2, 3]), ("deleted", [2, 3])])
def test_a_crash_in_the_middle_of_deleting(tmp_path: Path, phase: str, left: list[int]) -> None:
    """Killed between the rename and the end of the deletion: only debris is left, which says what it is."""
    for step in range(1, 5):
        save(tmp_path, step, 1)
    script = """
import os, signal, sys
from holdfast.train.snapshots.changes import Keep, prune
prune(sys.argv[1], Keep(last=1), at=lambda phase: phase == sys.argv[2] and os.kill(os.getpid(), signal.SIGKILL))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), phase], timeout=limit_s(60))
    assert done.returncode == -signal.SIGKILL
    found = folder.survey(tmp_path)
    assert [snapshot.step for snapshot in found.committed] == [4]
    assert not found.problems
    assert [path.name for path in found.debris] == [f"gone.step_00000000{step}.0001" for step in left]
    folder.clear_debris(found)
    assert os.listdir(tmp_path) == ["step_000000004.0001"]


def test_a_reader_beside_retention_gets_all_or_is_told(tmp_path: Path) -> None:
    """Saves and prunes as fast as they can while others read the oldest: whole, or gone, and never damaged."""
    outcomes: dict[str, int] = {"whole": 0, "gone": 0}
    ending = threading.Event()

    def read() -> None:
        while not ending.is_set():
            found = folder.survey(tmp_path)
            assert not found.problems, found.problems
            for snapshot in found.committed[:2]:
                try:
                    for rank in range(snapshot.manifest.world):
                        with folder.RankFile(snapshot, rank) as file:
                            assert file.load() == content(snapshot.step, rank, 1000)
                except SnapshotGoneError:
                    outcomes["gone"] += 1
                except (SnapshotDamagedError, AssertionError) as error:
                    outcomes[str(error)] = 1
                else:
                    outcomes["whole"] += 1

    readers = [threading.Thread(target=read) for _ in range(2)]
    for each in readers:
        each.start()
    try:
        for step in range(1, 500):
            save(tmp_path, step, items=1000)
            prune(tmp_path, Keep(last=1))
            if outcomes["whole"] > 5 and outcomes["gone"] > 5:
                break
    finally:
        ending.set()
        for each in readers:
            each.join()
    assert set(outcomes) == {"whole", "gone"}, outcomes
    assert outcomes["whole"] > 5
    assert outcomes["gone"] > 5


# --- the saver reads committed snapshots back for retention, and gives way to whatever is more urgent -----------------


def test_it_reads_snapshots_back_for_retention(bench: Bench) -> None:
    for step in (1, 2):
        saves.save(bench.folder, step, 1)
    first, second = (bench.folder / f"step_{step:09d}.0001" for step in (1, 2))
    bench.read_back(first)
    file = second / "rank_00000.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(SnapshotDamagedError, match="are not what was saved"):
        bench.read_back(second)
    with pytest.raises(SnapshotGoneError):
        bench.read_back(bench.folder / "step_000000003.0001")
    bench.save(4)
    assert (bench.folder / "step_000000004.0001").is_dir()


def test_reading_back_by_a_saver_that_is_stopped_or_dies(bench: Bench) -> None:
    path = saves.save(bench.folder, 1, 1)
    saver = bench.saver
    os.kill(saver, signal.SIGSTOP)
    with pytest.raises(SnapshotError, match="is the saver stopped"):
        bench.read_back(path, 0.05)
    killing = threading.Timer(0.2, os.kill, (saver, signal.SIGKILL))
    killing.start()
    with pytest.raises(SaverLostError):
        bench.read_back(path)
    killing.join()
    with pytest.raises(SaverLostError):
        bench.read_back(path)
    until(lambda: bench.is_read_by_another(path), "another saver reads it")


def test_it_gives_way_to_a_rank_that_stages(bench: Bench) -> None:
    path = saves.save(bench.folder, 1, 1)
    assert not slots.is_any_staged(bench.place.folder, [0])
    for step in (2, 3):
        bench.stage(step)
    assert not slots.is_any_staged(bench.place.folder, [0])
    assert bench.slots.stage(4, SIZE) is not None
    assert slots.is_any_staged(bench.place.folder, [0])
    with pytest.raises(SnapshotError, match="is the saver stopped"):
        bench.read_back(path, 0.3)
    assert not slots.is_any_staged(bench.place.folder, [-1, 1, 2]), "others do not"
    bench.slots.commit()
    bench.read_back(path)


def test_what_a_dead_rank_had_begun_holds_up_nobody(bench: Bench) -> None:
    path = saves.save(bench.folder, 1, 1)
    other = Slots(bench.place.folder, SlotOwner(1))
    for step in (1, 2):
        put(other, step, bytes(SIZE))
    assert other.stage(3, SIZE) is not None
    other.close()  # as its death leaves it
    assert slots.is_any_staged(bench.place.folder, [1])
    bench.read_back(path)


def test_it_gives_way_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "GIVE_WAY_S_MAX", 0.05)
    asked: list[int] = []

    def always() -> bool:
        asked.append(1)
        return True

    give_way = reading.GiveWay(always)
    give_way()
    assert asked
    before = len(asked)
    give_way()
    assert len(asked) == before
    reading.GiveWay(lambda: False)()


def test_an_outage_of_the_disk_renames_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, 1)
    before = sorted(os.listdir(tmp_path))

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        done = prune(tmp_path, Keep(last=3))
    assert (done.kept, done.deleted, done.damaged) == ((), (), ())
    assert sorted(os.listdir(tmp_path)) == before
    assert len(prune(tmp_path, Keep(last=3)).kept) == 3
