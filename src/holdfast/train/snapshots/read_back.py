"""Reading back: the process that wrote a rank's file compares it with what was saved; retention counts on that.

    rank_00003.checked        a note beside rank 3's file, with its digest: its writer has read the file back from the
                              disk, not from the page cache

So each node reads what it wrote, and no node reads everything. It begins when the file and its record are durable,
lets everything that stages or writes a state on this node go first, and delays no commit. A chunk is compared with the
memory slot from which it was written, as long as the slot still has the state: that costs a third of a digest. After
that it is compared with its digest.

Rank 0's process needs the notes of all ranks before retention counts the snapshot. It waits for those of a snapshot
that it has committed itself; a file whose note has not come in time (its node was lost), or says anything else than the
digest, it reads itself. No process that loads a snapshot reads these notes, and no other file comes into a folder after
its commit.

Knows the snapshot's files and bytes, and the header of slots. Must not know why a snapshot is kept or deleted. Standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.protocol.errors import SnapshotError
from holdfast.train.snapshots import changes, disk, slots
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.disk import CHUNK_BYTES
from holdfast.train.snapshots.folder import RankFile, Snapshot, being_written, confirm, unreadable
from holdfast.train.snapshots.layout import RankRecord, rank_file
from holdfast.train.snapshots.remote import Location, RemotePath

READ_BACK = "read_back"
"""Name in the note of a request to save: the writer shall read its file back, since retention will ask for that."""
GIVE_WAY_S_MAX = 60.0
"""Limit of the time for which one read-back waits for more urgent work in all."""
OTHERS_S = 60.0
"""Limit of rank 0's wait for the next rank that has read its file back. All ranks read equally much."""
UNANNOUNCED_S = 15.0
"""A writer that will read its file back reserves room for its note as soon as the file is complete. If there is no such
room after this time (NFS may take a part of it), the disk took none, and no note will come."""
POLL_S_MIN, POLL_S_MAX = 0.02, 1.0
"""Pause between two looks for notes; it doubles from the first to the second (s)."""
CHECKED_BYTES_MAX = 4096
"""Room for a note."""
NOTE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
"""Flags to open a note. Others may write to a folder that a team shares: a link of theirs is not followed."""


def checked_file(rank: int) -> str:
    """Name of the file that says that this rank's file was read back."""
    return f"rank_{rank:05d}.checked"


class GiveWay:
    """Lets urgent work go first. It is called before each piece of background work, and returns when no rank of this
    node stages or writes a state.

    It waits at most GIVE_WAY_S_MAX in all, because a worker that died while staging leaves a slot that looks busy.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._left_s = GIVE_WAY_S_MAX

    def __call__(self) -> None:
        while self._left_s > 0 and self._is_busy():
            time.sleep(POLL_S_MIN)
            self._left_s -= POLL_S_MIN


class Original:
    """The bytes of a memory slot, as long as it has the state with this sequence number."""

    def __init__(self, slot_fd: int, sequence: int) -> None:
        """`slot_fd` stays the caller's. Its lock is not needed: the slot may be staged into at any time."""
        self._fd, self._sequence = os.dup(slot_fd), sequence
        self._buffer = bytearray(CHUNK_BYTES)

    def holds(self, begin: int, data: memoryview) -> bool:
        """Whether these bytes of the file are in the slot. False also when the state is not there any more."""
        buffer = memoryview(self._buffer)[: len(data)]
        with contextlib.suppress(OSError):
            # The file is read, not mapped: it may be made smaller meanwhile, and an access would be a SIGBUS. The
            # number is checked after the bytes, too: a worker that stages clears it before the first byte changes.
            # `startswith` is memcmp.
            return (
                self._is_there()
                and os.preadv(self._fd, [buffer], slots.HEADER_BYTES + begin) == len(data)
                and self._is_there()
                and self._buffer.startswith(data)
            )
        return False

    def _is_there(self) -> bool:
        return slots.committed_sequence(self._fd) == self._sequence

    def close(self) -> None:
        os.close(self._fd)


class OwnFile(RankFile):
    """A rank's file that this process wrote. It is compared with the memory slot where that is possible."""

    def __init__(self, folder: Path, record: RankRecord, original: Original | None) -> None:
        """`folder`: a path that stays valid when the folder is renamed. Raises OSError."""
        self.path = folder / rank_file(record.rank)
        self.size_bytes, self.record = record.size_bytes, record
        self._original = original
        self._file = disk.OpenFile(self.path)

    def _is_saved(self, number: int, data: memoryview) -> bool:
        if self._original is not None and self._original.holds(number * CHUNK_BYTES, data):
            return True
        return super()._is_saved(number, data)


class Written:
    """A file that was just written, to be read back; the folder may be renamed meanwhile, which commits it."""

    def __init__(self, folder_fd: int, record: RankRecord, original: Original | None = None) -> None:
        """`folder_fd` stays the caller's; `original` is closed with this. Raises OSError."""
        self.record = record
        self._original = original
        # Opened again: a duplicate of `folder_fd` would share its lock, which says that the file is being written.
        self._folder_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder_fd)
        self._folder = Path(f"/proc/self/fd/{self._folder_fd}")  # follows renames
        self._note = self._folder / f"{checked_file(record.rank)}{disk.PART}"
        with contextlib.suppress(OSError):
            # Room for the note is reserved now. If the disk were full later, rank 0 would wait for a note that cannot
            # be written, which would delay the very deletion that makes room.
            note = os.open(self._note, NOTE_FLAGS, 0o666)
            try:
                os.write(note, b" " * CHECKED_BYTES_MAX)
            finally:
                os.close(note)

    def check(self, give_way: Callable[[], object]) -> None:
        """Read the file, and leave the note that it is what was saved. A note with a problem instead makes rank 0's
        process read the file itself."""
        text = self.record.digest
        try:
            with OwnFile(self._folder, self.record, self._original) as file:
                file.check(give_way)
        except (SnapshotError, OSError) as error:
            text = str(error)[: CHECKED_BYTES_MAX // 4]
        self.leave(text)

    def leave(self, text: str) -> None:
        """Leave a note with this text, if the folder still exists."""
        with contextlib.suppress(OSError):
            note = os.open(self._note, NOTE_FLAGS, 0o666)
            try:
                data = text.encode()
                os.pwrite(note, data, 0)
                os.ftruncate(note, len(data))
                os.fsync(note)
            finally:
                os.close(note)
            self._note.rename(self._folder / checked_file(self.record.rank))

    def close(self) -> None:
        """Release everything; room for a note that was not left is given back."""
        with contextlib.suppress(OSError):
            self._note.unlink(missing_ok=True)
        os.close(self._folder_fd)
        if self._original is not None:
            self._original.close()


def write(request: SaveRequest, data: memoryview, slot: tuple[int, int] | None = None) -> Written | None:
    """Write this rank's file as `changes.write_rank` does, with its errors. Returns what shall be read back; None: the
    request does not ask for that, or there is no folder (in an object store).

    `slot`: the descriptor and the sequence number of the memory slot that holds the data."""
    with being_written(request.attempt_path) as folder_fd:
        record = changes.write_rank(request, data)
        if READ_BACK in request.note and folder_fd >= 0:
            with contextlib.suppress(OSError):  # then rank 0's process reads it
                return Written(folder_fd, record, None if slot is None else Original(*slot))
    return None


class ReadBacks:
    """All reading back of one process. Methods may be called by any thread."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        """`is_busy`: whether a state is being staged or written."""
        self._is_busy = is_busy
        self._lock = threading.Lock()
        self._due: dict[int, Written] = {}
        """Files to be read back, by rank: only the newest of each rank, since saves may come faster than they can be
        read."""
        self._reading = False
        """Whether a thread reads the files that are due."""
        self._committed: set[Location] = set()
        """Snapshots that this process has committed and not checked yet: the other ranks' writers read them, too."""

    def committed(self, path: Location) -> None:
        """Remember a snapshot that this process has just committed: all ranks' writers read their files back."""
        self._committed.add(path)

    def own(self, written: Written) -> None:
        """Read this file back, and close it; if another thread is reading, leave it to that one. So one thread reads,
        whatever the number of ranks."""
        with self._lock:
            before = self._due.pop(written.record.rank, None)
            self._due[written.record.rank] = written
            other_reads, self._reading = self._reading, True
        if before is not None:
            with contextlib.closing(before):
                before.leave("not read: a newer one came first")
        for each in () if other_reads else self._each_due():
            with contextlib.closing(each):
                each.check(GiveWay(self._is_busy))

    def _each_due(self) -> Iterator[Written]:
        while True:
            with self._lock:
                if not self._due:
                    self._reading = False
                    return
                written = self._due.pop(next(iter(self._due)))
            yield written

    def rest(self, snapshot: Snapshot) -> None:
        """Wait for all ranks' read-backs of a committed snapshot, and read the files that have none. There is no wait
        for a snapshot that another process has committed. Raises SnapshotDamagedError, which names the file;
        SnapshotGoneError; SnapshotError."""
        if isinstance(snapshot.path, RemotePath):
            return confirm(snapshot)
        awaited = snapshot.path in self._committed
        self._committed.discard(snapshot.path)
        checked = _checked(snapshot, OTHERS_S if awaited else 0.0)
        for rank in range(snapshot.manifest.world):
            with RankFile(snapshot, rank) as file:
                if rank not in checked:
                    file.check(GiveWay(self._is_busy))
        return None


def _checked(snapshot: Snapshot, patience_s: float) -> set[int]:
    """The ranks whose files were found good by their writers. It waits up to `patience_s` for each next one. Raises
    SnapshotError."""
    entries, found, bad = snapshot.manifest.ranks, set[int](), set[int]()
    began_s = time.monotonic()
    pause_s, deadline = POLL_S_MIN, began_s + patience_s
    while True:
        try:
            names = set(disk.names(snapshot.path))
            new = [each for each in entries if each.rank not in found | bad and checked_file(each.rank) in names]
            for entry in new:
                text = disk.read_text(snapshot.path / checked_file(entry.rank), CHECKED_BYTES_MAX)
                (found if text == entry.digest else bad).add(entry.rank)
        except OSError as error:
            raise unreadable(snapshot.path, error) from error

        left = [checked_file(each.rank) for each in entries if each.rank not in found | bad]
        announced = any(f"{name}{disk.PART}" in names for name in left)
        if not left or (not announced and time.monotonic() > began_s + UNANNOUNCED_S):
            return found
        if new:
            pause_s, deadline = POLL_S_MIN, time.monotonic() + patience_s
        if time.monotonic() >= deadline:
            return found
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S_MAX)
