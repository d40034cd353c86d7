"""Slots per local rank in /dev/shm: the newest states of a worker, which outlive it and cost one memory copy.

    slots = Slots(folder, owner)
    for _ in slots.reserving(size_bytes): ...      # once: memory is taken and mapped, or SnapshotMemoryError
    memory = slots.stage(step, size_bytes)         # None: the saver still writes both slots out
    ...copy into memory...
    slot = slots.commit()                          # from here on a restarted worker finds it

A slot is a file: a header of HEADER_BYTES, then the bytes of the rank's snapshot file (layout.py). Its memory is taken
at once, so that a full /dev/shm is an error at that moment and never a SIGBUS later. It is mapped with its pages
present, and used again.

**A slot is valid** if its commit word is set. The word is zeroed before the first byte of a slot changes, and set to
the slot's sequence number after the last one. So the death of a process cannot make a torn slot look complete. The
commit word does not detect writes after `commit()`: a copy from a GPU that was not waited for, or a stray write. For
those the header has a CRC of itself and one of a sample: SAMPLES positions at equal distances, and the body's last
bytes. Damage to a hundredth of the body is always found, smaller damage by the digests of the snapshot on disk. A
checksum of all bytes would make a save several times as slow.

**Locks.** A process that stages a slot holds an exclusive lock (flock) on its file, one that writes it out a shared
lock. The lock travels with a descriptor through the saver's socket, so there is no gap during the handover, and the
kernel drops it when its holder dies. `stage` takes the older slot, unless it is being written out. So the newest
committed slot is overwritten only while the other one, also committed, is being saved. When both are being saved there
is none: the caller skips, or waits for the saver. A third slot, with copies on other nodes, keeps the state that all
of them have (`hold`). A second process with the same local rank (a launcher inside a worker passes its environment on)
is refused by a lock that belongs to one process.

Knows files, locks and bytes. Must not know tensors, or where snapshots go. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.linux import check_memory
from holdfast.memory_folder import (
    SLOT_COMMIT_WORD,
    SLOT_COUNT_MAX,
    SLOT_MAGIC,
    SLOT_MAGIC_WORD,
    SLOT_WORD_BYTES,
    commit_word,
    slot_path,
)
from holdfast.protocol.errors import SnapshotMemoryError
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.mapping import GrowingFile, Mappings
from holdfast.train.snapshots.saver_connection import claim, open_for_writing, unclaim

HEADER_BYTES = 64 * 1024
NOTE_BYTES_MAX = HEADER_BYTES - 4096
"""Room in a slot's header for JSON, which contains the request to save it."""
COUNT, COUNT_MAX = 2, SLOT_COUNT_MAX
"""The number of slots per local rank: without copies on other nodes, and with them, or after `Slots.add`."""
SAMPLES = 128
SAMPLE_BYTES = 1024
HUGE_PAUSE = 3.0
"""Pause until the next huge page is made, in multiples of the time that the last one took."""
STAGING_S = 0.02
"""The typical time of a copy."""

# The header's first words, of 8 bytes in the machine's own order; the JSON follows.
_MAGIC, _COMMIT, _SEQUENCE = SLOT_MAGIC_WORD, SLOT_COMMIT_WORD, 2
_NOTE = 3  # length of the JSON in the upper half, its CRC in the lower
_WORD_BYTES = SLOT_WORD_BYTES
_WORDS_BYTES = 4 * _WORD_BYTES


class Slot(NamedTuple):
    """A committed slot."""

    step: int
    data: memoryview
    """The bytes of the rank's snapshot file; valid until the slot is staged into again."""
    sequence: int
    """The number in the order of commits: the newest has the highest, whatever its step."""
    generation: int
    rank: int
    world: int
    local_rank: int
    request: SaveRequest | None
    """The request by which the saver writes it if the worker dies before its own request; None: it is not written."""
    path: Path | None = None
    """The slot's file, if it was committed here or read by its name."""
    unix_s: float = 0.0
    """The time of its commit (epoch s)."""

    @property
    def number(self) -> int:
        """The number of the slot among those of its local rank: 0, 1 or 2."""
        assert self.path is not None
        return int(self.path.suffix[1:])


class SlotOwner(NamedTuple):
    """The worker that stages: equal in every slot of one life of a worker."""

    local_rank: int
    rank: int = 0
    world: int = 1
    generation: int = 0


class Slots:
    """The slots of one local rank. Use it in one thread; a forked child must not use it."""

    def __init__(self, folder: Path, owner: SlotOwner, count: int = COUNT) -> None:
        """`folder`: the shared-memory folder. No file is made before the first `reserving`, `stage` or `writing`."""
        self._folder = folder
        self.owner = owner
        self._usual = count
        """The number of slots without an added one."""
        paths = [slot_path(folder, owner.local_rank, index) for index in range(COUNT_MAX)]
        # One that a previous worker has added belongs to them: its sequence number counts.
        self._files = [_File(path) for index, path in enumerate(paths) if index < count or path.exists()]
        self._sequence = max(file.sequence for file in self._files)
        """The highest sequence number so far."""
        self._staging: _Staging | None = None
        self._claim = -1
        """Descriptor of this process's claim (`claim`); -1: it has not staged yet."""
        self._unfinished: dict[int, tuple[int, int]] = {}
        """Files that `reserving` makes larger: by index, size and sequence number before."""
        self._held: list[int] = []
        """Descriptors that protect slots against staging (`hold`)."""

    @property
    def count(self) -> int:
        """The number of slots."""
        return len(self._files)

    def add(self) -> bool:
        """Add a slot, into which the next `stage` goes. Returns False if there are COUNT_MAX already."""
        if self.count == COUNT_MAX:
            return False
        self._files.append(_File(slot_path(self._folder, self.owner.local_rank, self.count)))
        return True

    def remove_added(self) -> bool:
        """Remove a slot that was added, by this worker or a previous one, and give back its memory, unless it has the
        newest state or is in use. Returns whether it was removed. Nobody may need its state, or map it to read."""
        if self.count <= self._usual or self._staging is not None:
            return False
        number = self.count - 1
        file = self._files[number]
        if file.sequence == max(each.sequence for each in self._files) or (held := self._lock(number)) is None:
            return False
        try:
            self._invalidate(number, held)
            file.remove()
        except OSError:
            return False  # it stays, as an empty slot
        finally:
            release(held)
        self._files.pop()
        self._unfinished.pop(number, None)
        return True

    def regroup(self, rank: int, world: int, generation: int) -> None:
        """Go on as this rank of another generation: it is written into the headers from now on."""
        self.owner = self.owner._replace(rank=rank, world=world, generation=generation)

    def reserving(self, size_bytes: int) -> Generator[int, None, None]:
        """Take and map memory for all slots, of this size, so that no `stage` has to; piece by piece, by any threads in
        turn. Yields the number of slots that have room; the first of them is the one that is staged next.

        `close` gives back memory that was not staged into. If this is called again, memory that was taken is used.
        Raises SnapshotMemoryError when there is too little memory."""
        with self._errors(size_bytes):
            need_bytes = sum(max(0, file.missing_bytes(size_bytes)) for file in self._files)
            check_memory(need_bytes)
            if need_bytes > _free_bytes(self._folder) > 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        for ready, index in enumerate(self._oldest_first()):
            file = self._files[index]
            # It was reserved for a larger state, and never staged into: the rest is given back.
            too_large = not file.sequence and file.missing_bytes(size_bytes) < 0
            held = self._lock(index) if too_large or file.room_bytes < size_bytes else None
            if held is not None:
                try:
                    self._unfinished.setdefault(index, (os.fstat(held).st_size, file.sequence))
                    if too_large:
                        file.shrink(file.whole_bytes(size_bytes))
                    with self._errors(size_bytes):
                        for _ in file.growing(size_bytes):
                            yield ready
                finally:
                    release(held)
            elif file.missing_bytes(size_bytes) <= 0:
                # The saver has locked it, which does not matter here: the file has its memory, and is only mapped.
                for _ in file.growing(size_bytes):
                    yield ready
            yield ready + 1
        self._unfinished.clear()

    def _give_back(self) -> None:
        """Give back the memory of files that `reserving` made larger, if they were not staged into."""
        for index, (before_bytes, sequence) in self._unfinished.items():
            file = self._files[index]
            unused = file.sequence == sequence and (self._staging is None or self._staging.number != index)
            if unused and (held := self._lock(index)) is not None:
                file.shrink(before_bytes)
                release(held)
        self._unfinished.clear()

    @property
    def has_room(self) -> bool:
        """Whether all slots are mapped."""
        return all(file.room_bytes for file in self._files)

    def _oldest_first(self) -> list[int]:
        """The indices of the files, the oldest slot first; a slot that was never committed comes before all others."""
        return sorted(range(len(self._files)), key=lambda each: self._files[each].sequence)

    def make_huge(self, stop: threading.Event) -> None:
        """Turn the slots' pages into huge ones, slowly, until `stop` is set. It runs in a thread of its own."""
        for file in self._files:
            for took_s in () if file.mapped is None else file.mapped.make_huge():
                if stop.wait(HUGE_PAUSE * took_s):
                    return
                while self._staging is not None:  # a copy into the slots must not wait for this thread
                    if stop.wait(STAGING_S):
                        return

    def stage(self, step: int, size_bytes: int) -> memoryview | None:
        """Memory for the rank's next snapshot, which is valid only after `commit`; None: the saver is still writing out
        all slots. A snapshot that was staged and not committed is dropped. Raises SnapshotMemoryError when the slot has
        to grow and cannot."""
        number, held = self._lock_next()
        if held is None:
            return None
        file = self._files[number]
        try:
            with self._errors(size_bytes):
                for _ in file.growing(size_bytes):
                    pass
        except BaseException:  # also the interruption of agent_channel.py: otherwise the slot would stay locked
            release(held)
            raise
        self._invalidate(number, held)
        self._staging = _Staging(number, held, step, size_bytes)
        return file.body(size_bytes)

    @contextlib.contextmanager
    def writing(self, step: int, size_bytes: int) -> Iterator[Callable[[int, memoryview], None]]:
        """Stage a snapshot whose bytes come from elsewhere, into a slot whose memory need not be mapped yet.

        Yields a function that writes bytes at their position, which any thread may call. The caller commits after the
        block. Raises SnapshotMemoryError, also when the saver is still writing out all slots. After an error in the
        block the slot is empty."""
        number, held = self._lock_next()
        if held is None:
            raise SnapshotMemoryError("the memory slots are in use.")
        try:
            self._invalidate(number, held)
            with self._errors(size_bytes), self._files[number].filling(size_bytes) as write:
                yield write
        except BaseException:
            release(held)
            raise
        self._staging = _Staging(number, held, step, size_bytes)

    def _lock_next(self) -> tuple[int, int | None]:
        """The index of the file that is staged into next, and its lock; None: the saver has locked all of them."""
        self.abandon()
        for number in self._oldest_first():
            held = self._lock(number)
            if held is not None or not self._files[number].sequence:
                break
        return number, held

    def _invalidate(self, number: int, held: int) -> None:
        """Clear the commit word: this is done before the first byte of a slot changes, or to drop it. `held`: a
        descriptor of its file."""
        os.pwrite(held, bytes(_WORD_BYTES), _COMMIT * _WORD_BYTES)
        self._files[number].slot = None

    def commit(self, request: SaveRequest | None = None) -> Slot:
        """Make the staged bytes valid. All copies into the slot must be complete.

        `request`: how the saver writes it if this worker dies before a newer state is on the disk; None: it does not.
        If its parts for the search for values that are not finite do not fit into the header, they are left out. Raises
        ValueError when the request exceeds NOTE_BYTES_MAX.
        """
        staging = self._staging
        if staging is None:
            raise RuntimeError("commit() without stage()")
        file = self._files[staging.number]
        data = file.memory[HEADER_BYTES : HEADER_BYTES + staging.size_bytes]
        note = {
            "step": staging.step,
            "size_bytes": staging.size_bytes,
            "sample": sample(data),
            "unix_s": time.time(),
            **self.owner._asdict(),
            "request": None if request is None else request.to_json(),
        }
        encoded = json.dumps(note).encode()
        if len(encoded) > NOTE_BYTES_MAX and request is not None and request.trained:
            note["request"] = replace(request, trained=None).to_json()
            encoded = json.dumps(note).encode()
        if len(encoded) > NOTE_BYTES_MAX:
            raise ValueError(f"the request takes {len(encoded)} bytes, at most {NOTE_BYTES_MAX} are allowed")

        self._sequence = sequence = self._sequence + 1
        file.memory[_WORDS_BYTES : _WORDS_BYTES + len(encoded)] = encoded
        words = file.memory[:_WORDS_BYTES].cast("Q")
        words[_MAGIC] = SLOT_MAGIC
        words[_SEQUENCE] = sequence
        words[_NOTE] = len(encoded) << 32 | zlib.crc32(encoded, sequence & 0xFFFFFFFF)
        words[_COMMIT] = sequence  # comes last: from here on the slot is valid

        self.abandon()  # releases the lock; the committed bytes stay
        slot = _slot_of(note, data.toreadonly(), sequence, file.path)
        file.slot = _without_data(slot)
        return slot

    def abandon(self) -> None:
        """Drop the staged bytes that were not committed."""
        if self._staging is not None:
            release(self._staging.lock)
            self._staging = None

    def mapped(self, number: int) -> Slot | None:
        """This slot, from the mapping through which this process writes, whose pages are present; None: there is no
        such mapping, or the slot is invalid. Any thread may call it."""
        file = self._files[number]
        return read(file.memory, lambda: file.memory, file.path) if len(file.memory) > HEADER_BYTES else None

    def hold(self, *states: tuple[int, int, int] | None) -> None:
        """Protect the states of these identities (SaveRequest) against staging, and release those that were protected
        before."""
        for fd in self._held:
            release(fd)
        self._held = []
        # What is known of the slots is enough: to read the files would cost 2 to 5 ms in every save.
        for slot in (file.slot for file in self._files):
            if slot is not None and slot.request is not None and slot.request.identity in states:
                with contextlib.suppress(ValueError):
                    self._held.append(lend(slot))

    def committed(self) -> list[Slot]:
        """All valid slots of this and of previous workers, newest first."""
        self.abandon()
        return committed_slots(self._folder, self.owner.local_rank)

    def forget(self, *, above_step: int, locked: bool = False) -> None:
        """Drop slots of later steps: the ranks agreed to continue from this step. `locked`: also those that the saver
        has locked, and those that `hold` protects, which a copy is sent from: their bytes stay as they are."""
        for slot in self.committed():
            if slot.step <= above_step:
                continue
            held = self._lock(slot.number)
            if held is None and locked:  # only the commit word changes: the bytes that are being read stay
                held = open_for_writing(self._files[slot.number].path)
            if held is not None:
                self._invalidate(slot.number, held)
                release(held)

    def discard(self) -> None:
        """Remove the files. A process that has mapped them keeps the memory."""
        self.abandon()
        for file in self._files:
            file.close()
            file.path.unlink(missing_ok=True)
            file.slot = None

    def close(self) -> None:
        """Release files and memory; removes nothing."""
        self.abandon()
        self.hold()
        self._give_back()
        for file in self._files:
            file.close()
        if self._claim >= 0:
            unclaim(self._folder, self.owner.local_rank, self._claim)
            self._claim = -1

    def _lock(self, index: int) -> int | None:
        """A descriptor with an exclusive lock on this file; None: the saver has locked it. Raises SnapshotMemoryError.

        Each call opens a new descriptor, which is unlocked after use: a forked data loader that inherits one must not
        hold the lock for ever.
        """
        try:
            if self._claim < 0:
                self._claim = claim(self._folder, self.owner.local_rank)
            fd = open_for_writing(self._files[index].path)
        except OSError as error:
            raise SnapshotMemoryError(f"{self._folder} cannot be used: {error.strerror}.") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    @contextlib.contextmanager
    def _errors(self, size_bytes: int) -> Iterator[None]:
        """Turn an OSError in the block into a SnapshotMemoryError."""
        try:
            yield
        except OSError as error:
            free_bytes = _free_bytes(self._folder)
            raise SnapshotMemoryError(
                f"{self._folder.parent} has no room for a copy of {size_bytes / 1e6:.0f} MB: {error.strerror} "
                f"({free_bytes / 1e6:.0f} MB free)."
            ) from error


class _Staging(NamedTuple):
    """A slot that is staged and not committed."""

    number: int
    lock: int
    """The descriptor with the exclusive lock."""
    step: int
    size_bytes: int


class _File(GrowingFile):
    """One slot's file, mapped for writing."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, HEADER_BYTES)
        slot = read_file(path)
        self.slot = None if slot is None else _without_data(slot)
        """The committed slot in this file, without its bytes; None: there is none."""

    @property
    def sequence(self) -> int:
        """The sequence number of the committed bytes; 0: there are none."""
        return 0 if self.slot is None else self.slot.sequence


def _without_data(slot: Slot) -> Slot:
    """The same slot without its bytes: it keeps no memory in use."""
    return slot._replace(data=memoryview(b""))


def lend(slot: Slot) -> int:
    """A descriptor that protects the slot against staging while it is open, here or in a process that receives it; see
    `release`.

    `slot`: as it was committed, or read by its name. Raises ValueError when it has been staged into since.
    """
    assert slot.path is not None
    try:
        fd = os.open(slot.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise ValueError(f"the slot of step {slot.step} is gone") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        committed = committed_sequence(fd)
    except BlockingIOError:
        committed = 0
    if committed != slot.sequence:
        release(fd)
        raise ValueError(f"the slot of step {slot.step} was staged into since")
    return fd


def committed_sequence(fd: int) -> int:
    """The sequence number of the committed bytes in this slot's file; 0: none, or they are being replaced. OSError."""
    return int.from_bytes(os.pread(fd, _WORD_BYTES, _COMMIT * _WORD_BYTES), sys.byteorder)


def release(fd: int) -> None:
    """Unlock and close this descriptor. Closing is not enough: a mapping keeps the file open, and so does a forked
    child."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def committed_slots(folder: Path, local_rank: int) -> list[Slot]:
    """All valid slots of one local rank, newest first; for processes other than its worker."""
    found = [read_file(slot_path(folder, local_rank, index)) for index in range(COUNT_MAX)]
    return sorted((slot for slot in found if slot is not None), key=lambda slot: -slot.sequence)


def is_any_staged(folder: Path, local_ranks: Iterable[int]) -> bool:
    """Whether one of these local ranks is staging a state now; a worker that died while staging looks the same."""
    return any(commit_word(folder, rank, index) == 0 for rank in local_ranks for index in range(COUNT))


def read_file(path: Path) -> Slot | None:
    """The slot in this file; None when there is none, or it is invalid."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return read_descriptor(fd, path=path)
    finally:
        os.close(fd)


def read_descriptor(fd: int, mappings: Mappings | None = None, path: Path | None = None) -> Slot | None:
    """The slot in this open file; None when it is invalid. The caller keeps the descriptor."""
    with contextlib.suppress(OSError):
        # Not from a mapping: a worker that ends makes the files of slots that it never committed shorter, and to read
        # behind the end of a file would be a SIGBUS. Committed bytes stay.
        header = memoryview(os.pread(fd, HEADER_BYTES, 0))
        if len(header) == HEADER_BYTES:
            return read(header, lambda: (mappings or Mappings()).of(fd).memory, path)
    return None


def read(header: memoryview, whole: Callable[[], memoryview], path: Path | None) -> Slot | None:
    """The slot with this header; None when it is invalid. `whole`: the memory of its file, asked for if the header is
    valid. OSError."""
    words = header[:_WORDS_BYTES].cast("Q")
    sequence, length, crc = words[_SEQUENCE], words[_NOTE] >> 32, words[_NOTE] & 0xFFFFFFFF
    if words[_MAGIC] != SLOT_MAGIC or not sequence or words[_COMMIT] != sequence or length > NOTE_BYTES_MAX:
        return None
    encoded = bytes(header[_WORDS_BYTES : _WORDS_BYTES + length])
    if zlib.crc32(encoded, sequence & 0xFFFFFFFF) != crc:
        return None
    note = json.loads(encoded)
    try:
        data = whole()[HEADER_BYTES : HEADER_BYTES + note["size_bytes"]].toreadonly()
        if len(data) != note["size_bytes"] or sample(data) != note["sample"]:
            return None
        return _slot_of(note, data, sequence, path)
    except (KeyError, ValueError):  # of another version of holdfast: any job of this host may be listed
        return None


def _slot_of(note: Mapping[str, Any], data: memoryview, sequence: int, path: Path | None) -> Slot:
    request = note["request"]
    return Slot(
        note["step"],
        data,
        sequence,
        note["generation"],
        note["rank"],
        note["world"],
        note["local_rank"],
        None if request is None else SaveRequest.from_json(request),
        path,
        note.get("unix_s", 0.0),
    )


def sample(data: memoryview) -> int:
    """CRC of the last bytes and of the bytes at SAMPLES positions. Each position costs a microsecond, whatever the
    size of the data."""
    crc = zlib.crc32(data[-SAMPLE_BYTES:])
    for start in range(0, len(data), max(SAMPLE_BYTES, -(-len(data) // SAMPLES))):
        crc = zlib.crc32(data[start : start + SAMPLE_BYTES], crc)
    return crc


def _free_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0
