"""Each node reads back what it wrote, and rank 0's what is missing: no damage passes, and nothing waits for ever."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.protocol.errors import SnapshotDamagedError, SnapshotIncompleteError
from holdfast.train.snapshots import changes, folder
from holdfast.train.snapshots import read_back as reading
from holdfast.train.snapshots.changes import Keep, SaveRequest, Verified, prune
from holdfast.train.snapshots.folder import Snapshot
from holdfast.train.snapshots.in_process import InProcessStaging
from holdfast.train.snapshots.layout import rank_file
from holdfast.train.snapshots.read_back import READ_BACK, ReadBacks, Written, checked_file
from holdfast.train.snapshots.slots import SlotOwner, Slots
from tests.support.limits import limit_s, until
from tests.train.snapshots import saves
from tests.train.snapshots.saves import WAIT_S, Bench, content, is_whole, newest, put


def idle() -> bool:
    return False


def flip(file: Path) -> None:
    """One bit, in the second chunk if there is one."""
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - 4096)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))


def is_checked(snapshot: Snapshot, rank: int) -> bool:
    file = snapshot.path / checked_file(rank)
    return isinstance(file, Path) and file.exists() and file.read_text() == snapshot.manifest.ranks[rank].digest


def write(request: SaveRequest, data: bytes, slot: tuple[int, int] | None = None) -> Written:
    written = reading.write(request, memoryview(data), slot)
    assert written is not None
    return written


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Snapshot, list[Written]]]:
    """A snapshot of two ranks that were not read back yet, and their writers."""
    items = 1_500_000  # two chunks, the second one not of whole blocks
    number = changes.begin(tmp_path, 1)
    written = []
    with ExitStack() as opened:
        for rank in range(2):
            request = SaveRequest(str(tmp_path), 1, number, rank, 2, {READ_BACK: True})
            written.append(write(request, content(1, rank, items)))
            opened.callback(written[-1].close)
        assert not folder.is_being_written(request.attempt_path), "reading is not writing"
        changes.commit(SaveRequest(str(tmp_path), 1, number, 0, 2))
        yield newest(tmp_path), written


# --- two nodes with a saver each --------------------------------------------------------------------------------------


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Bench]]:
    (tmp_path / "snaps").mkdir()
    with ExitStack() as opened:
        benches = []
        for _ in range(2):
            benches.append(Bench(tmp_path / "snaps"))
            opened.callback(benches[-1].close)
        yield benches


def hand_over(nodes: list[Bench], step: int, *, staging: bool = False) -> Path:
    """Each node's rank saves this step, to be read back; returns when it is committed. `staging`: rank 1 stages the
    next one then, to which its saver gives way."""
    for each in (step - 2, step - 1):  # a slot that was never used does not look busy
        nodes[1].stage(each, 1000)
    number = changes.begin(nodes[0].folder, step)
    saver = nodes[1].saver
    os.kill(saver, signal.SIGSTOP)
    for rank, node in enumerate(nodes):
        data = content(step, rank)
        memory = node.client.stage(step, len(data))
        assert memory is not None
        memory[:] = data
        node.client.commit(None)
        node.client.persist(SaveRequest(str(node.folder), step, number, rank, 2, {READ_BACK: True}))
    if staging:
        assert nodes[1].slots.stage(step + 1, 1000) is not None
    os.kill(saver, signal.SIGCONT)
    for node in nodes:
        node.client.wait(WAIT_S)
    return nodes[0].folder / f"step_{step:09d}.{number:04d}"


def test_each_node_reads_its_own_file_and_none_the_others(nodes: list[Bench]) -> None:
    path = hand_over(nodes, 3)
    until(lambda: all(is_checked(newest(path.parent), rank) for rank in range(2)), "both were read back")
    assert is_whole(newest(path.parent))
    flip(path / rank_file(1))  # after its node has read it
    nodes[0].read_back(path)
    with pytest.raises(SnapshotDamagedError):
        folder.verify(newest(path.parent))


def test_rank_0s_node_waits_for_one_that_gives_way(nodes: list[Bench]) -> None:
    path = hand_over(nodes, 3, staging=True)
    asked = threading.Thread(target=nodes[0].read_back, args=(path,))
    asked.start()
    until(lambda: is_checked(newest(path.parent), 0), "its own is read")
    assert not is_checked(newest(path.parent), 1)
    assert asked.is_alive()
    nodes[1].slots.commit()
    asked.join(WAIT_S)
    assert not asked.is_alive()
    assert is_checked(newest(path.parent), 1)


def test_what_a_killed_saver_has_not_read_the_next_life_reads(nodes: list[Bench]) -> None:
    path = hand_over(nodes, 3, staging=True)
    until(lambda: is_checked(newest(path.parent), 0), "rank 0's is read")
    for node in reversed(nodes):
        os.kill(node.saver, signal.SIGKILL)
    until(lambda: nodes[0].is_read_by_another(path), "another saver reads it")
    assert not is_checked(newest(path.parent), 1)
    flip(path / rank_file(1))
    with pytest.raises(SnapshotDamagedError, match="are not what was saved"):
        nodes[0].read_back(path)
    until(lambda: _has_another_saver(nodes[1]), "rank 1 has a saver again, which removes its memory in the end")


def _has_another_saver(node: Bench) -> bool:
    node.client.check()
    return bool(saves.savers(node.place.folder))


# --- what a writer finds, and what rank 0 does with it ----------------------------------------------------------------


def test_a_good_file_is_marked_and_not_read_again(saved: tuple[Snapshot, list[Written]]) -> None:
    snapshot, written = saved
    for each in written:
        each.check(idle)
    assert is_checked(snapshot, 0)
    assert is_checked(snapshot, 1)
    flip(snapshot.path / rank_file(1))  # type: ignore[arg-type]
    ReadBacks(idle).rest(snapshot)
    assert prune(snapshot.path.parent, Keep(last=1), verified=Verified(ReadBacks(idle).rest)).damaged == ()  # type: ignore[arg-type]
    assert len(prune(snapshot.path.parent, Keep(last=1)).damaged) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("harm", [flip, lambda file: os.truncate(file, 5_000_000), os.unlink])
def test_a_writer_that_finds_damage_is_not_waited_for(
    saved: tuple[Snapshot, list[Written]], harm: Callable[[Path], None]
) -> None:
    snapshot, written = saved
    harm(snapshot.path / rank_file(1))  # type: ignore[arg-type]
    for each in written:
        each.check(idle)
    assert is_checked(snapshot, 0)
    assert not is_checked(snapshot, 1)
    assert (snapshot.path / checked_file(1)).read_text()  # type: ignore[union-attr]
    read_backs = ReadBacks(idle)
    read_backs.committed(snapshot.path)
    with pytest.raises(SnapshotDamagedError, match=rank_file(1)):
        read_backs.rest(snapshot)


@pytest.mark.parametrize("text", ["", "0" * 64])
def test_any_other_text_is_no_word_for_it(saved: tuple[Snapshot, list[Written]], text: str) -> None:
    snapshot, written = saved
    flip(snapshot.path / rank_file(1))  # type: ignore[arg-type]
    written[0].check(idle)
    (snapshot.path / checked_file(1)).write_text(text)  # type: ignore[union-attr]
    with pytest.raises(SnapshotDamagedError):
        ReadBacks(idle).rest(snapshot)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_lost_writer_is_awaited_for_so_long_and_no_longer(
    saved: tuple[Snapshot, list[Written]], damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "OTHERS_S", 0.1)
    snapshot, written = saved
    written[0].check(idle)
    read_backs = ReadBacks(idle)
    read_backs.committed(snapshot.path)
    if damaged:
        flip(snapshot.path / rank_file(1))  # type: ignore[arg-type]
        with pytest.raises(SnapshotDamagedError):
            read_backs.rest(snapshot)
    else:
        read_backs.rest(snapshot)


def test_nothing_old_goes_before_a_newer_one_is_read_back(
    saved: tuple[Snapshot, list[Written]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's node has not read its file yet: retention waits, and when the file turns out damaged, the older
    stays."""
    monkeypatch.setattr(reading, "POLL_S_MAX", 0.02)
    snapshot, _ = saved
    path = snapshot.path.parent
    assert isinstance(path, Path)
    newer = saves.save(path, 2)
    read_backs = ReadBacks(idle)
    read_backs.committed(newer)
    pruning = threading.Thread(target=prune, args=(path, Keep(last=1)), kwargs={"verified": Verified(read_backs.rest)})
    (newer / checked_file(0)).write_text(newest(path).manifest.ranks[0].digest)
    flip(newer / rank_file(1))
    pruning.start()
    assert snapshot.path.exists()  # type: ignore[union-attr]
    assert pruning.is_alive()
    (newer / checked_file(1)).write_text("bytes 0 to 4 are not what was saved")
    pruning.join(WAIT_S)
    assert not pruning.is_alive()
    assert newest(path).key == snapshot.key
    assert len(folder.survey(path).quarantined) == 1


def test_a_snapshot_that_goes_meanwhile(saved: tuple[Snapshot, list[Written]]) -> None:
    snapshot, written = saved
    shutil.rmtree(snapshot.path)  # type: ignore[arg-type]
    for each in written:
        each.check(idle)
        each.leave("anything")
    assert not snapshot.path.exists()


def test_killed_while_it_reads_back(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from holdfast.train.snapshots import changes
from holdfast.train.snapshots.read_back import READ_BACK, write
from tests.train.snapshots.saves import content
request = changes.SaveRequest(sys.argv[1], 1, changes.begin(sys.argv[1], 1), 0, 1, {READ_BACK: True})
written = write(request, memoryview(content(1, 0, 1_500_000)))
changes.commit(request)
looks = iter(range(int(sys.argv[2])))
written.check(lambda: next(looks, None) is None and os.kill(os.getpid(), signal.SIGKILL))
"""
    for chunks in (0, 1):
        at = tmp_path / str(chunks)
        done = subprocess.run([sys.executable, "-c", script, str(at), str(chunks)], timeout=limit_s(60))
        assert done.returncode == -signal.SIGKILL
        found = newest(at)
        assert not is_checked(found, 0)
        assert saves.load(found) == [content(1, 0, 1_500_000)]
        ReadBacks(idle).rest(found)  # the next life's


def test_a_save_in_process_that_is_not_committed_leaves_nothing_open(tmp_path: Path) -> None:
    own = SaveRequest(str(tmp_path), 1, changes.begin(tmp_path, 1), 0, 2, {READ_BACK: True})
    staging = InProcessStaging()
    assert staging.stage(1, 1000, wait=False) is not None
    changes.refuse(replace(own, rank=1), "its disk is full")
    staging.persist(own)
    with pytest.raises(SnapshotIncompleteError, match="its disk is full"):
        staging.wait()


# --- the memory that it was written from ------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", ["", "begun", "committed"])
@pytest.mark.parametrize("damaged", [False, True])
def test_it_is_compared_with_memory_while_that_holds_it(tmp_path: Path, staged: str, damaged: bool) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    slots = Slots(memory, SlotOwner(0))
    data, later = content(1, 0, 1_500_000), content(2, 0, 1_500_000)
    slot, _ = (put(slots, step, body) for step, body in ((1, data), (2, later)))  # the older one is used again
    slot_fd = os.open(memory / f"0.{slot.number}", os.O_RDONLY)
    request = SaveRequest(str(tmp_path / "snaps"), 1, changes.begin(tmp_path / "snaps", 1), 0, 1, {READ_BACK: True})
    written = write(request, data, (slot_fd, slot.sequence))
    os.close(slot_fd)
    original = written._original
    assert original is not None
    assert original.holds(4096, memoryview(data)[4096:9000])
    assert not original.holds(4096, memoryview(later)[4096:9000])
    if staged:
        room = slots.stage(3, len(data))
        assert room is not None
        room[:] = later
        if staged == "committed":
            slots.commit()
        assert not original.holds(4096, memoryview(later)[4096:9000]), "equal, but another state"
    path = changes.commit(request)
    if damaged:
        flip(path / rank_file(0))  # type: ignore[arg-type]
    written.check(idle)
    assert is_checked(newest(tmp_path / "snaps"), 0) == (not damaged)
    written.close()
    slots.close()


# --- one thread reads, the newest one of each rank --------------------------------------------------------------------


def test_saves_that_come_faster_than_they_are_read(tmp_path: Path) -> None:
    going, busy = threading.Event(), threading.Event()

    def is_busy() -> bool:
        busy.set()
        return not going.is_set()

    read_backs = ReadBacks(is_busy)
    threads = []
    for step in range(1, 4):
        request = SaveRequest(str(tmp_path), step, changes.begin(tmp_path, step), 0, 1, {READ_BACK: True})
        written = write(request, content(step, 0, 1000))
        changes.commit(request)
        threads.append(threading.Thread(target=read_backs.own, args=(written,)))
        threads[-1].start()
        if step == 1:
            assert busy.wait(WAIT_S)
        else:
            threads[-1].join(WAIT_S)
            assert not threads[-1].is_alive(), "only one thread reads"
    going.set()
    threads[0].join(WAIT_S)
    first, second, third = folder.survey(tmp_path).committed
    assert is_checked(first, 0)
    assert not is_checked(second, 0)
    assert is_checked(third, 0)
    read_backs.committed(second.path)
    read_backs.rest(second)  # at once
