"""The output of workers on its way to their log files: written into memory, moved to the disk by a thread.

    worker ── write() ──► memory file ── sendfile() ──► stdout.log
                               └────────── read ──────► console

A worker's descriptors 1 and 2 are memory files (memfd). So no disk can make a worker's `print` fail or wait: not one
that is full, read-only, over quota, without inodes or that stands still. What is on the disk is freed in memory.

While the disk takes nothing, the newest BACKLOG_BYTES_MAX of each stream stay in memory; they are written as soon as
the disk takes them, and a line in the file says how many bytes before them are missing.

The memory file's read offset says how much was moved. The supervisor has the same open file: when the agent is killed,
the supervisor moves the rest.

Knows files and descriptors. Must not know ranks, options or lines.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.supervisor.log_tail import POLL_S, ChangeWatch

BACKLOG_BYTES_MAX = 16 << 20
"""Of one stream: so much stays in memory while its disk takes nothing."""
BACKLOG_MOVING_BYTES_MAX = 256 << 20
"""Of one stream, while its disk is slower than the worker. A worker that prints without a pause is not slowed down."""
CHUNK_BYTES_MAX = 1 << 20
FREE_BYTES_MIN = 256 << 10
"""Memory is freed in pieces of at least this size."""
RETRY_S = 1.0
"""A disk that takes nothing is tried again after this time."""
STALLED_S = 2.0
"""A disk that has taken nothing for this long, and reported no error, stands still."""
CALM_S = 0.01
"""A busy worker wakes the mover at most this often."""
CLOSE_S_MAX = 1.0
SAY_AGAIN_S = 600.0
"""A disk that is full again is reported again after this time at the earliest."""
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class StreamFds(NamedTuple):
    """The worker's descriptors 1 and 2; None: it inherits the agent's own."""

    stdout: int | None
    stderr: int | None


class Spool:
    """One stream. For any thread; only one thread moves."""

    def __init__(self, path: Path) -> None:
        """`path`: of the log file. OSError: no descriptor or no memory is left."""
        self.path = path
        self.memory_fd = os.memfd_create(path.name, os.MFD_CLOEXEC)
        self.moved_bytes = 0
        """Where the bytes begin in memory that are not on the disk."""
        self.began_s: float | None = None
        """When the disk was asked to take the present piece; None: it has."""
        self.trouble: OSError | None = None
        """Why the disk takes nothing."""
        self._file_fd = -1
        self._made = False
        """The file was made."""
        self._lock = threading.Lock()
        self._freed_bytes = 0
        """Before this offset nothing is in memory."""
        self._same = True
        """Offsets in memory and in the file are equal: nothing is missing in the file."""
        self._gap: tuple[int, int] | None = None
        """Offsets of bytes that were dropped and that the mover has not come to."""
        self._missing_bytes = 0
        """Dropped, and not yet noted in the file."""
        self._users = 1
        """Those who read or move; the last one closes the descriptors."""

    def writer(self) -> int:
        """A descriptor for the worker. O_APPEND: its children write at the end, too. OSError."""
        return os.open(f"/proc/self/fd/{self.memory_fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def use(self) -> None:
        """One more user; see `leave`."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """This user is done. The last one closes the descriptors."""
        with self._lock:
            self._users -= 1
            if not self._users:
                os.close(self.memory_fd)
                self.memory_fd = -1
                if self._file_fd >= 0:
                    with contextlib.suppress(OSError):  # a network disk may report here that it was full
                        os.close(self._file_fd)

    @property
    def memory_path(self) -> Path:
        """For an inotify watch."""
        return Path(f"/proc/self/fd/{self.memory_fd}")

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes that the worker has written. OSError after the last `leave`."""
        return os.fstat(self.memory_fd).st_size

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are not on the disk."""
        try:
            size = self.size_bytes
        except OSError:
            return 0
        return size - self.moved_bytes if size >= self.moved_bytes else size  # else it was truncated

    def read(self, begin: int, bytes_max: int) -> tuple[bytes, int]:
        """Bytes from this offset on, and the offset after them. What was dropped is passed over. OSError."""
        with self._lock:
            if begin >= self._freed_bytes:
                if self._gap is not None and begin < self._gap[1]:
                    bytes_max = min(bytes_max, max(self._gap[0] - begin, 0))
                    if not bytes_max:
                        return b"", self._gap[1]
                data = os.pread(self.memory_fd, bytes_max, begin)
                return data, begin + len(data)
            if not self._same:
                return b"", self._freed_bytes
            bytes_max = min(bytes_max, self._freed_bytes - begin)
        # Outside the lock: the disk may stand still.
        with self.path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), bytes_max, begin)
        return data, begin + len(data) if data else self._freed_bytes

    def last(self, bytes_max: int) -> tuple[bytes, int]:
        """The newest bytes, and how many there were in all. OSError."""
        if self.memory_fd < 0:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - bytes_max))
                return file.read(bytes_max), size
        size = self.size_bytes
        begin, pieces = max(0, size - bytes_max), list[bytes]()
        while begin < size:
            piece, after = self.read(begin, size - begin)
            if after == begin:
                break
            pieces.append(piece)
            begin = after
        return b"".join(pieces), size

    # --- moving -------------------------------------------------------------------------------------------------------

    def move(self) -> None:
        """Make the file, and move all that is there to the disk. OSError, with the file's name: it takes nothing more
        at the moment."""
        size = self.size_bytes
        if size < self.moved_bytes:  # the worker has truncated its output: what was moved stays in the file
            with self._lock:
                os.lseek(self.memory_fd, 0, os.SEEK_SET)
                self.moved_bytes = self._freed_bytes = 0
                self._same = False
        self.began_s = time.monotonic()
        try:
            self._move(size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _move(self, size: int) -> None:
        if not self._made:
            os.close(create(self.path))
            self._made = True
        if size == self.moved_bytes:
            return
        file = self._opened()
        while self.moved_bytes < size:
            self.began_s = time.monotonic()
            if (gap := self._gap) is not None and self.moved_bytes >= gap[0]:
                self._pass_over(gap)
                continue
            if self._missing_bytes:
                self._note_missing(file)
            end = size if gap is None else min(size, gap[0])
            os.sendfile(file, self.memory_fd, None, min(end - self.moved_bytes, CHUNK_BYTES_MAX))
            before, self.moved_bytes = self.moved_bytes, os.lseek(self.memory_fd, 0, os.SEEK_CUR)
            if self.moved_bytes == before:
                break  # truncated meanwhile
            self._free()

    def _opened(self) -> int:
        """The log file, open at its end. Without O_APPEND, which sendfile refuses: nobody else writes. OSError."""
        if self._file_fd < 0:
            file = create(self.path)
            os.lseek(file, 0, os.SEEK_END)
            self._file_fd = file
        return self._file_fd

    def _pass_over(self, gap: tuple[int, int]) -> None:
        with self._lock:
            gap = self._gap or gap
            os.lseek(self.memory_fd, gap[1], os.SEEK_SET)
            self._missing_bytes += gap[1] - self.moved_bytes
            self.moved_bytes = self._freed_bytes = gap[1]
            self._gap, self._same = None, False

    def _note_missing(self, file: int) -> None:
        """OSError; half a note is taken back."""
        note = f"\nholdfast: {self._missing_bytes} bytes of output are missing here: this disk took nothing\n".encode()
        begin = os.lseek(file, 0, os.SEEK_CUR)
        try:
            while note:
                note = note[os.write(file, note) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, begin)
                os.lseek(file, begin, os.SEEK_SET)
            raise
        self._missing_bytes = 0

    def _free(self) -> None:
        """Free the memory of what is on the disk."""
        page_bytes = os.sysconf("SC_PAGESIZE")
        with self._lock:
            end = self.moved_bytes - self.moved_bytes % page_bytes
            if end - self._freed_bytes >= FREE_BYTES_MIN:
                _punch(self.memory_fd, self._freed_bytes, end)
                self._freed_bytes = end

    def shed(self, bytes_max: int) -> None:
        """If more than this waits for the disk, drop the oldest of it. The piece that is being moved stays. OSError."""
        with self._lock:
            size = self.size_bytes
            begin, kept_from = self._gap or (self.moved_bytes + CHUNK_BYTES_MAX, self.moved_bytes)
            if size - kept_from <= bytes_max:
                return
            end = size - bytes_max // 2
            end -= end % os.sysconf("SC_PAGESIZE")
            if end > begin:
                _punch(self.memory_fd, begin, end)
                self._gap = begin, end


def create(path: Path) -> int:
    """Open a log file for writing, with its folder if that is missing. OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        make_folder(path.parent)
    return os.open(path, flags, 0o666)


def make_folder(folder: Path) -> None:
    """Make a worker's folder, and that of its attempt. Not the run folder: its owner alone may read it. OSError."""
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)


def _punch(memory_fd: int, begin: int, end: int) -> None:
    """Give the memory of these bytes back to the system; they read as zeros. An error costs memory alone."""
    import ctypes  # lazily, as in log_tail.py

    ctypes.CDLL(None).fallocate(memory_fd, _PUNCH_HOLE, ctypes.c_long(begin), ctypes.c_long(end - begin))


class WorkerStreams(NamedTuple):
    """Paths of one worker's output and error file. Files are None with `--log-dir /dev/null`."""

    fds: StreamFds
    stdout_file: Path | None
    stderr_file: Path | None
    error_file: Path | None
    stdout: Spool | None = None
    """What is in the file, or will be."""
    stderr: Spool | None = None


class LogMover:
    """Moves the spools of one agent, by two threads that start with the first one: one waits for news and sees to the
    limits, the other writes, and may wait for the disk for ever."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._news = threading.Condition()
        """Guards the state that both threads and the callers share. Notified when there may be something to move, and
        when all was tried."""
        self._spools: tuple[Spool, ...] = ()
        self._retired: set[Spool] = set()
        """Nobody writes into them any more."""
        self._wake_fd = -1
        self._threads: list[threading.Thread] = []
        """Who observes, and who writes."""
        self._dirty = False
        self._turns = 0
        self._closed = False
        self._said_s = -SAY_AGAIN_S
        self._reported = False
        """The present trouble was reported."""

    def add(self, spools: Sequence[Spool]) -> None:
        """Move these, too, and make their files now, as far as the disk allows. OSError: no descriptors are left."""
        if self._wake_fd < 0 and spools:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # Daemons: a disk that stands still must not delay the agent's exit.
            for name, work in (("holdfast-logs", self._observe), ("holdfast-log-files", self._write)):
                self._threads.append(threading.Thread(target=work, name=name, daemon=True))
                self._threads[-1].start()
        with self._news:
            self._spools += tuple(spools)
        self._wake()

    def retire(self, spools: Iterable[Spool]) -> None:
        """Nobody writes into these any more: let them go as soon as they are on the disk."""
        with self._news:
            self._retired.update(spools)
        self._wake()

    def finish(self, stalled_s_max: float) -> bool:
        """Wait until all is on the disk. False, after a message: the disk has refused it, or taken nothing for so
        long."""
        with self._news:
            left = self._waiting_bytes()
            while left:
                before = left
                # Two turns: one may have begun before the last byte was written.
                tried = self._await_turns(2, stalled_s_max)
                left = self._waiting_bytes()
                if left >= before and (not tried or any(spool.trouble for spool in self._spools)):
                    why = next(
                        (text_of(each.trouble) for each in self._spools if each.trouble), "the disk stands still"
                    )
                    self._say(f"{left} bytes of output are not in the log files: {why}")
                    return False
        return True

    def _await_turns(self, count: int, stalled_s_max: float) -> bool:
        """Whether the disk is tried so often before the time is over. Call it with the lock."""
        for _ in range(count):
            turns, self._dirty = self._turns, True
            self._news.notify_all()
            deadline = time.monotonic() + stalled_s_max
            while self._turns == turns:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._news.wait(left_s)
        return True

    def close(self) -> None:
        """End the threads. What is not on the disk by now is lost. Calling it again does nothing."""
        with self._news:
            if self._closed:
                return
            self._closed = True
            self._news.notify_all()
        if self._threads:
            self._wake()
            observer, writer = self._threads
            observer.join()
            writer.join(CLOSE_S_MAX)  # longer only where the disk stands still
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _waiting_bytes(self) -> int:
        return sum(spool.waiting_bytes for spool in self._spools)

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _observe(self) -> None:
        """In a thread: pass on that there is something to move, and keep the limits."""
        watch = ChangeWatch()
        handles: dict[Spool, int] = {}
        while not self._closed:
            poller = select.poll()
            poller.register(self._wake_fd, select.POLLIN)
            if watch.fd >= 0:
                poller.register(watch.fd, select.POLLIN)
            poller.poll(None if watch.reliable else POLL_S * 1000)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            watch.drain()
            with self._news:
                spools = self._spools
                for spool in spools:
                    if spool not in handles:
                        handles[spool] = watch.add(spool.memory_path)
                for spool in [each for each in handles if each not in spools]:
                    watch.remove(handles.pop(spool))
                self._keep_limits(spools)
                self._dirty = True
                self._news.notify_all()
            time.sleep(CALM_S)
        watch.close()

    def _keep_limits(self, spools: Sequence[Spool]) -> None:
        now = time.monotonic()
        stuck = any(each.trouble or (each.began_s is not None and now > each.began_s + STALLED_S) for each in spools)
        for spool in spools:
            with contextlib.suppress(OSError):
                spool.shed(BACKLOG_BYTES_MAX if stuck else BACKLOG_MOVING_BYTES_MAX)

    def _write(self) -> None:
        """In a thread: move."""
        while True:
            with self._news:
                trouble = any(spool.trouble for spool in self._spools)
                self._news.wait_for(lambda: self._dirty or self._closed, RETRY_S if trouble else None)
                if self._closed:
                    break
                self._dirty, spools = False, self._spools
            for spool in spools:
                self._move(spool)
            self._report(spools)
            with self._news:
                done = [spool for spool in self._retired if not spool.waiting_bytes]
                self._spools = tuple(spool for spool in self._spools if spool not in done)
                self._retired.difference_update(done)
                self._turns += 1
                self._news.notify_all()
            for spool in done:
                spool.leave()
        for spool in self._spools:
            spool.leave()

    def _move(self, spool: Spool) -> None:
        try:
            spool.move()
        except OSError as error:
            spool.trouble = error
        else:
            spool.trouble = None
        finally:
            spool.began_s = None

    def _report(self, spools: Sequence[Spool]) -> None:
        """Say once that the disk takes nothing, and once that it does again."""
        found = next((spool for spool in spools if spool.trouble is not None), None)
        if found is None:
            if self._reported:
                self._reported = False
                self._say("the log files of this run are written again")
        elif not self._reported and time.monotonic() > self._said_s + SAY_AGAIN_S:
            self._reported, self._said_s = True, time.monotonic()
            self._say(
                f"the log files of this run cannot be written: {text_of(found.trouble)}. The job goes on. Its output "
                f"stays in memory, the newest {BACKLOG_BYTES_MAX >> 20} MiB of each stream, until they can be written."
            )


def text_of(error: OSError | None) -> str:
    """Of an error of a log file: which file, and why."""
    return f"{error.filename or 'a log file'}: {error.strerror}" if error is not None else ""
