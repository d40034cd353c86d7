"""The saver reads committed snapshots back for retention, and gives way to whatever is more urgent."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from holdfast.core.errors import SaverLostError, SnapshotDamagedError, SnapshotError, SnapshotGoneError
from holdfast.snapshots import saving, slots
from holdfast.snapshots.saver_client import read_back
from holdfast.snapshots.slots import SlotOwner, Slots
from tests.snapshots import saves
from tests.snapshots.saver_bench import SIZE, WAIT_S, Bench
from tests.support.limits import until


def test_it_reads_snapshots_back_for_retention(bench: Bench) -> None:
    for step in (1, 2):
        saves.save(bench.folder, step, 1)
    first, second = (bench.folder / f"step_{step:09d}.0001" for step in (1, 2))
    read_back(bench.place.folder, first, WAIT_S)
    file = second / "rank_00000.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(SnapshotDamagedError, match="are not what was saved"):
        read_back(bench.place.folder, second, WAIT_S)
    with pytest.raises(SnapshotGoneError):
        read_back(bench.place.folder, bench.folder / "step_000000003.0001", WAIT_S)
    bench.persist(4)
    bench.client.wait(WAIT_S)
    assert (bench.folder / "step_000000004.0001").is_dir()


def test_reading_back_by_a_saver_that_is_stopped_or_dies(bench: Bench) -> None:
    path = saves.save(bench.folder, 1, 1)
    saver = bench.saver
    os.kill(saver, signal.SIGSTOP)
    with pytest.raises(SnapshotError, match="is the saver stopped"):
        read_back(bench.place.folder, path, 0.05)
    killing = threading.Timer(0.2, os.kill, (saver, signal.SIGKILL))
    killing.start()
    with pytest.raises(SaverLostError):
        read_back(bench.place.folder, path, WAIT_S)
    killing.join()
    with pytest.raises(SaverLostError):
        read_back(bench.place.folder, path, WAIT_S)

    def is_read_by_another() -> bool:
        bench.client.check()  # notices that its saver is gone, and starts another one
        with contextlib.suppress(SaverLostError):
            read_back(bench.place.folder, path, WAIT_S)
            return True
        return False

    until(is_read_by_another, "another saver reads it")


def test_it_gives_way_to_a_rank_that_stages(bench: Bench) -> None:
    path = saves.save(bench.folder, 1, 1)
    assert not slots.is_any_staged(bench.place.folder, [0])
    for step in (2, 3):
        bench.stage(step)
    assert not slots.is_any_staged(bench.place.folder, [0])
    assert bench.slots.stage(4, SIZE) is not None
    assert slots.is_any_staged(bench.place.folder, [0])
    with pytest.raises(SnapshotError, match="is the saver stopped"):
        read_back(bench.place.folder, path, 0.3)
    assert not slots.is_any_staged(bench.place.folder, [-1, 1, 2]), "others do not"
    bench.slots.commit()
    read_back(bench.place.folder, path, WAIT_S)


def test_what_a_dead_rank_had_begun_holds_up_nobody(bench: Bench) -> None:
    path = saves.save(bench.folder, 1, 1)
    other = Slots(bench.place.folder, SlotOwner(1))
    for step in (1, 2):
        assert other.stage(step, SIZE) is not None
        other.commit()
    assert other.stage(3, SIZE) is not None
    other.close()  # as its death leaves it
    assert slots.is_any_staged(bench.place.folder, [1])
    read_back(bench.place.folder, path, WAIT_S)


def test_it_gives_way_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "GIVE_WAY_S_MAX", 0.05)
    asked: list[int] = []

    def always() -> bool:
        asked.append(1)
        return True

    give_way = saving.GiveWay(always)
    give_way()
    assert asked
    before = len(asked)
    give_way()
    assert len(asked) == before
    saving.GiveWay(lambda: False)()
