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

from holdfast.snapshots import mapping
from holdfast.snapshots.mapping import MappedFile, Mappings, huge_page_bytes
from holdfast.snapshots.slots import SlotOwner, Slots

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
    assert list(written.populate())
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
    assert list(mapping.populate())
    before = huge_kib()
    assert len(list(mapping.make_huge())) == 3
    assert huge_kib() == before + 3 * 2048


def test_the_mapping_goes_with_its_last_view(fd: int) -> None:
    inode = str(os.fstat(fd).st_ino)
    mapping = MappedFile(fd, SIZE_BYTES, writable=True)
    view = mapping.memory[4096:]
    del mapping
    assert inode in Path("/proc/self/maps").read_text()
    view[:4] = b"good"
    del view
    assert inode not in Path("/proc/self/maps").read_text()


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
    slots = Slots(folder, SlotOwner(0))
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "_COLLAPSE", NO_ADVICE)
        assert list(slots.reserving(SIZE_BYTES))[-1] == 2
    before = huge_kib()
    stop = threading.Event()
    stop.set()
    slots.make_huge(stop)
    assert huge_kib() == before + 2048, "one page, then it is asked to stop"
    slots.make_huge(threading.Event())
    assert huge_kib() >= before + 2 * 3 * 2048
    slots.close()


@pytest.mark.parametrize("advice", [mapping._COLLAPSE, NO_ADVICE])
def test_all_memory_is_taken_in_huge_pages_and_in_small_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    monkeypatch.setattr(mapping, "_COLLAPSE", advice)
    before = huge_kib()
    slots = Slots(folder, SlotOwner(0))
    assert list(slots.reserving(SIZE_BYTES))[-1] == 2
    for path in folder.glob("0.[01]"):
        assert path.stat().st_blocks * 512 >= SIZE_BYTES
    if advice == NO_ADVICE or not collapses():
        assert huge_kib() == before
    else:
        assert huge_kib() >= before + 2 * 2048, "the first page of each slot"
    slots.close()
