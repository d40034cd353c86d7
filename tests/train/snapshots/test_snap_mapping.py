"""Files in memory: huge pages where the kernel has them, and the same bytes whatever happens meanwhile."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.protocol.errors import SnapshotMemoryError
from holdfast.train.snapshots import mapping, slots
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.mapping import MappedFile, Mappings, huge_page_bytes
from holdfast.train.snapshots.slots import SlotOwner, Slots
from tests.train.snapshots.saves import put

SIZE_BYTES = 3 * (2 << 20) + 5 * mmap.PAGESIZE


@pytest.fixture
def fd() -> Iterator[int]:
    path = Path("/dev/shm") / f"holdfast-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    path.unlink()
    os.posix_fallocate(fd, 0, SIZE_BYTES)
    yield fd
    os.close(fd)


def huge_kib() -> int:
    """Of the files that this process has mapped."""
    return sum(map(int, re.findall(r"^ShmemPmdMapped: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.MULTILINE)))


def collapses() -> bool:
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return release is not None and (int(release[1]), int(release[2])) >= (6, 1) and huge_page_bytes() == 2 << 20


def test_what_one_writes_the_other_reads(fd: int) -> None:
    written, read = MappedFile(fd, SIZE_BYTES, writable=True), MappedFile(fd, SIZE_BYTES, writable=False)
    assert list(written.populate(SIZE_BYTES))
    text = os.urandom(SIZE_BYTES)
    written.memory[:] = text
    assert bytes(read.memory) == text == os.pread(fd, SIZE_BYTES, 0)
    with pytest.raises(TypeError):
        read.memory[0] = 1


def test_huge_pages_have_the_same_bytes_while_others_write(fd: int) -> None:
    written, read = MappedFile(fd, SIZE_BYTES, writable=True), Mappings().of(fd)
    text = os.urandom(SIZE_BYTES)
    written.memory[:] = text
    over = threading.Event()
    rounds = 0

    def write() -> None:
        nonlocal rounds
        while not over.is_set():
            rounds += 1
            for at in range(0, SIZE_BYTES, mmap.PAGESIZE):
                written.memory[at : at + 8] = rounds.to_bytes(8, "little")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            assert all(took_s >= 0 for took_s in read.make_huge())
    finally:
        over.set()
        writer.join()
    expected = bytearray(text)
    for at in range(0, SIZE_BYTES, mmap.PAGESIZE):
        expected[at : at + 8] = rounds.to_bytes(8, "little")
    assert bytes(read.memory) == expected == os.pread(fd, SIZE_BYTES, 0)


@pytest.mark.skipif(not collapses(), reason="this kernel makes no huge pages on request")
def test_pages_become_huge(fd: int) -> None:
    mapping = MappedFile(fd, SIZE_BYTES, writable=True)
    assert list(mapping.populate(SIZE_BYTES))
    before = huge_kib()
    assert len(list(mapping.make_huge())) == 3
    assert huge_kib() == before + 3 * 2048


def test_the_mapping_goes_with_its_last_view(fd: int) -> None:
    inode = str(os.fstat(fd).st_ino)

    def mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return any(line.split()[4] == inode and "holdfast-test" in line for line in lines)

    mapping = MappedFile(fd, SIZE_BYTES, writable=True)
    view = mapping.memory[4096:]
    del mapping
    assert mapped()
    view[:4] = b"good"
    del view
    assert not mapped()


def test_a_file_that_has_grown_is_mapped_anew(fd: int) -> None:
    mappings = Mappings()
    first = mappings.of(fd)
    assert mappings.of(fd) is first
    os.ftruncate(fd, 2 * SIZE_BYTES)
    assert len(mappings.of(fd).memory) == 2 * SIZE_BYTES


def test_no_file_no_mapping() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        MappedFile(-1, 4096, writable=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


NO_ADVICE = 99


@pytest.mark.skipif(not collapses(), reason="this kernel makes no huge pages on request")
def test_slots_become_huge_and_nobody_waits_for_it_to_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Slots(folder, SlotOwner(0))
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "_COLLAPSE", NO_ADVICE)
        assert list(own.reserving(SIZE_BYTES))[-1] == 2
    before = huge_kib()
    stop = threading.Event()
    stop.set()
    own.make_huge(stop)
    assert huge_kib() == before + 2048, "one page, then it is asked to stop"
    own.make_huge(threading.Event())
    assert huge_kib() >= before + 2 * 3 * 2048
    own.close()


@pytest.mark.parametrize("advice", [mapping._COLLAPSE, NO_ADVICE])
def test_all_memory_is_taken_in_huge_pages_and_in_small_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    monkeypatch.setattr(mapping, "_COLLAPSE", advice)
    before = huge_kib()
    own = Slots(folder, SlotOwner(0))
    assert list(own.reserving(SIZE_BYTES))[-1] == 2
    for path in folder.glob("0.[01]"):
        assert path.stat().st_blocks * 512 >= SIZE_BYTES
    if advice == NO_ADVICE or not collapses():
        assert huge_kib() == before
    else:
        assert huge_kib() >= before + 2 * 2048, "the first page of each slot"
    own.close()


# --- a slot that is written before its memory is mapped ---------------------------------------------------------------


SIZE = 1 << 20
LARGE = (9 << 20) + 1


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Slots]:
    """The slots of local rank 0, with two steps."""
    own = Slots(tmp_path, SlotOwner(0))
    for step in (1, 2):
        put(own, step, bytes([step]) * SIZE)
    yield own
    own.close()


def test_bytes_can_be_written_in_any_order_and_are_valid_at_the_end(tmp_path: Path, own: Slots) -> None:
    begins = [*range(0, LARGE, SIZE)]
    with own.writing(3, LARGE) as write:
        for at in reversed(begins):
            assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [2], "not valid from the beginning on"
            write(at, memoryview(bytes([at // SIZE])) if at == begins[-1] else memoryview(bytes([at // SIZE]) * SIZE))
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [2], "not valid before it is committed"
    own.commit()
    newest, other = slots.committed_slots(tmp_path, 0)
    assert bytes(newest.data) == b"".join(bytes([number]) * SIZE for number in range(9)) + bytes([9])
    assert (newest.step, other.step) == (3, 2)
    put(own, 4, bytes([4]) * SIZE)
    put(own, 5, bytes([5]) * LARGE)
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [5, 4], "it is staged into as any other"


def test_what_was_not_written_to_its_end_leaves_no_valid_slot(tmp_path: Path, own: Slots) -> None:
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("0.[01]"))]

    def interrupted() -> None:
        with own.writing(3, LARGE) as write:
            write(SIZE, memoryview(bytes(SIZE)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [2]
    assert [path.stat().st_size for path in sorted(tmp_path.glob("0.[01]"))] == sizes
    with pytest.raises(RuntimeError, match="without stage"):
        own.commit()
    put(own, 4, bytes([4]) * LARGE)  # nothing is locked
    assert [slot.step for slot in slots.committed_slots(tmp_path, 0)] == [4, 2]


def test_where_all_slots_are_in_use_nothing_is_written(tmp_path: Path, own: Slots) -> None:
    lent = [slots.lend(slot) for slot in own.committed()]
    with pytest.raises(SnapshotMemoryError, match="in use"), own.writing(3, SIZE):
        raise AssertionError
    assert [slot.step for slot in own.committed()] == [2, 1]
    for fd in lent:
        slots.release(fd)


def test_pages_of_a_slot_that_is_held_are_mapped_all_the_same(tmp_path: Path) -> None:
    """It was written past the mapping, or comes from an earlier process."""
    own = Slots(tmp_path, SlotOwner(0))
    with own.writing(3, LARGE) as write:
        write(0, memoryview(bytes([3]) * LARGE))
    own.commit(SaveRequest("/runs", 3, 7, 0, 1, {"save": 3}))
    own.hold((3, 7, 3))
    assert not own.has_room
    assert list(own.reserving(LARGE))[-1] == 2
    assert own.has_room
    put(own, 4, bytes([4]) * LARGE)
    put(own, 5, bytes([5]) * LARGE)
    assert sorted(slot.step for slot in slots.committed_slots(tmp_path, 0)) == [3, 5], "and it stays held"
    own.close()
