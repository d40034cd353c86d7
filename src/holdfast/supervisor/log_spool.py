"""The output of workers on its way to their log files: written into memory, moved to the disk by a thread.

    worker ── write() ──► memory file ── sendfile() ──► stdout.log
                               └────────── read ──────► console

A worker's descriptors 1 and 2 are memory files (memfd). So no disk can make a worker's `print` fail or wait, whether it
is full, read-only, over quota, without inodes or stalled. What is on the disk is freed in memory.

While the disk takes nothing, the newest BACKLOG_BYTES_MAX of each stream stay in memory; they are written as soon as
the disk takes them, and a line in the file says how many bytes before them are missing.

A console that is behind its worker reads what was freed from the file. A disk that breaks cannot be read any more, so
the newest KEPT_BYTES_MAX stay in memory although they are on the disk.

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
from holdfast.supervisor.move_bytes import move_bytes

BACKLOG_BYTES_MAX = 16 << 20
"""Memory of one stream while its disk takes nothing (bytes)."""
BACKLOG_MOVING_BYTES_MAX = 256 << 20
"""Memory of one stream while its disk is slower than its worker (bytes). The worker is not slowed down: what is above
the limit is dropped."""
BACKLOG_ENDED_BYTES_MAX = 64 << 20
"""Memory of all streams together whose workers have ended (bytes): a job may restart often while its disk takes
nothing."""
CHUNK_BYTES_MAX = 1 << 20
FREE_BYTES_MIN = 256 << 10
"""Least size of a piece of memory that is freed (bytes)."""
KEPT_BYTES_MAX = 512 << 10
"""Memory of one stream for bytes that are on the disk, and that its console may not have shown (bytes)."""
RETRY_S = 1.0
"""Time after which a disk that takes nothing is tried again (s)."""
STALLED_S = 2.0
"""Time without progress and without an error after which a disk counts as stalled (s)."""
CALM_S = 0.01
"""Shortest time between two turns of the mover (s): a busy worker changes its file all the time."""
CLOSE_S_MAX = 1.0
SAY_AGAIN_S = 600.0
"""Shortest time between two reports about a disk that takes nothing (s)."""
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
        """Offset in memory up to which the bytes are on the disk."""
        self.began_s: float | None = None
        """The time at which the disk got the present piece (monotonic s); None: it has taken it."""
        self.trouble: OSError | None = None
        """The reason why the disk takes nothing; None: it does."""
        self._file_fd = -1
        self._made = False
        """The file was made."""
        self._lock = threading.Lock()
        self._freed_bytes = 0
        """Offset before which nothing is in memory any more."""
        self._same_offsets = True
        """Offsets in memory and in the file are equal: nothing is missing in the file."""
        self._gap: tuple[int, int] | None = None
        """Offsets of the beginning and the end of bytes that were dropped, and that the mover has not reached yet."""
        self._missing_bytes = 0
        """Number of bytes that were dropped and are not yet noted in the file."""
        self.emptied = False
        """The worker has truncated its output: what was not moved before is lost."""
        self._note_emptied = False
        """This is not yet noted in the file. It is noted once."""
        self._users = 1
        """Number of readers and movers; the last one closes the descriptors."""

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
        """The path by which an inotify watch finds the memory file."""
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

    @property
    def done(self) -> bool:
        """All is on the disk, or noted there as missing."""
        return not self.waiting_bytes and not self._missing_bytes

    def read(self, begin: int, bytes_max: int) -> tuple[bytes, int]:
        """Bytes from this offset on, and the offset after them. Bytes that were dropped, or that the disk does not give
        back, are passed over. OSError: nothing can be read."""
        with self._lock:
            if begin >= self._freed_bytes:
                if self._gap is not None and begin < self._gap[1]:
                    bytes_max = min(bytes_max, max(self._gap[0] - begin, 0))
                    if not bytes_max:
                        return b"", self._gap[1]
                data = os.pread(self.memory_fd, bytes_max, begin)
                return data, begin + len(data)
            if not self._same_offsets:  # where these bytes are in the file is not known
                return b"", self._freed_bytes
            bytes_max = min(bytes_max, self._freed_bytes - begin)
        # Outside the lock: the disk may stall.
        try:
            with self.path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), bytes_max, begin)
        except OSError:  # the disk broke after it had taken them: what is in memory can be read all the same
            data = b""
        return data, begin + len(data) if data else self._freed_bytes

    def last(self, bytes_max: int) -> tuple[bytes, int]:
        """The newest bytes, and how many there were in all. OSError."""
        if self.memory_fd < 0:  # all users have left: everything is on the disk
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
                self._same_offsets = False
                self._note_emptied, self.emptied = not self.emptied, True
        self.began_s = time.monotonic()
        try:
            self._move(size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _move(self, size: int) -> None:
        if not self._made:
            os.close(create(self.path))
            self._made = True
        if size == self.moved_bytes and not (self._missing_bytes or self._note_emptied):
            return
        file = self._opened()
        if self._note_emptied:
            self._write_note(file, emptied_note(self.path))
            self._note_emptied = False
        while self.moved_bytes < size:
            self.began_s = time.monotonic()
            if (gap := self._gap) is not None and self.moved_bytes >= gap[0]:
                self._pass_over(gap)
                continue
            if self._missing_bytes:
                self._note_missing(file)
            end = size if gap is None else min(size, gap[0])
            move_bytes(self.memory_fd, file, min(end - self.moved_bytes, CHUNK_BYTES_MAX))
            before, self.moved_bytes = self.moved_bytes, os.lseek(self.memory_fd, 0, os.SEEK_CUR)
            if self.moved_bytes == before:
                return  # truncated meanwhile
            self._free()
        if self._missing_bytes:  # up to the end
            self._note_missing(file)

    def _opened(self) -> int:
        """The log file, open at its end. Without O_APPEND, which sendfile refuses: nobody else writes. OSError."""
        if self._file_fd < 0:
            file = create(self.path)
            os.lseek(file, 0, os.SEEK_END)
            self._file_fd = file
        return self._file_fd

    def _pass_over(self, gap: tuple[int, int]) -> None:
        """Go on behind bytes that were dropped."""
        with self._lock:
            gap = self._gap or gap  # it may have grown meanwhile
            os.lseek(self.memory_fd, gap[1], os.SEEK_SET)
            self._missing_bytes += gap[1] - self.moved_bytes
            self.moved_bytes = self._freed_bytes = gap[1]
            self._gap, self._same_offsets = None, False

    def _note_missing(self, file: int) -> None:
        """Write into the file how many bytes are missing there. OSError."""
        self._write_note(file, missing_note(self._missing_bytes))
        self._missing_bytes = 0

    def _write_note(self, file: int, note: bytes) -> None:
        """OSError; then half a note is removed."""
        begin = os.lseek(file, 0, os.SEEK_CUR)
        try:
            while note:
                note = note[os.write(file, note) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, begin)
                os.lseek(file, begin, os.SEEK_SET)
            raise

    def _free(self) -> None:
        """Free the memory of what is on the disk."""
        page_bytes = os.sysconf("SC_PAGESIZE")
        with self._lock:
            end = self.moved_bytes - KEPT_BYTES_MAX
            end -= end % page_bytes
            if end - self._freed_bytes >= FREE_BYTES_MIN:
                _punch(self.memory_fd, self._freed_bytes, end)
                self._freed_bytes = end

    def shed(self, bytes_max: int) -> None:
        """Drop the oldest bytes that wait for the disk if they are more than this. OSError.

        The piece that is being moved stays: sendfile may be reading it. Half of the limit is dropped at once, so that
        this happens rarely.
        """
        with self._lock:
            size = self.size_bytes
            page_bytes = os.sysconf("SC_PAGESIZE")
            # A whole page: what is zeroed in a part of one could not be told from output (`move_rest`).
            first = -(-(self.moved_bytes + CHUNK_BYTES_MAX) // page_bytes) * page_bytes
            begin, kept_from = self._gap or (first, self.moved_bytes)
            if size - kept_from <= max(bytes_max, page_bytes):
                return
            end = size - bytes_max // 2
            end -= end % page_bytes
            if end > begin:
                _punch(self.memory_fd, begin, end)
                self._gap = begin, end


def missing_note(count: int) -> bytes:
    """The line in a log file where so many bytes were dropped."""
    return f"\nholdfast: {count} bytes of output are missing here: this disk took nothing\n".encode()


def emptied_note(path: Path) -> bytes:
    """The line in a log file whose worker has truncated its output."""
    return f"\nholdfast: the worker emptied its output here, and lines may be missing: {append_advice(path)}\n".encode()


def append_advice(path: Path) -> str:
    """What to write in a shell script so that this stream is not truncated."""
    device = f"/dev/{path.stem}"
    return f"in a shell script use >> {device} and tee -a {device}"


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
    """The content of the stdout file, or what it will be."""
    stderr: Spool | None = None
    """The same for stderr."""


class LogMover:
    """Moves the spools of one agent, by two threads that start with the first spool.

    One waits for changes and keeps the limits of memory. The other writes, and may wait for the disk for ever.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._news = threading.Condition()
        """Guards the state that both threads and the callers share. Notified when there may be something to move, and
        after each turn of the writing thread."""
        self._spools: tuple[Spool, ...] = ()
        self._retired: set[Spool] = set()
        """Spools whose writers have ended."""
        self._wake_fd = -1
        """Wakes the observing thread; -1: there are no threads."""
        self._threads: list[threading.Thread] = []
        """The observing thread and the writing thread."""
        self._dirty = False
        """There may be something to move."""
        self._turns = 0
        """Number of turns in which the writing thread has tried all spools."""
        self._closed = False
        self._reported_s = -SAY_AGAIN_S
        """The time of the newest report of a problem (monotonic s)."""
        self._reported = False
        """The present problem was reported."""
        self._emptied_reported = False
        """It was reported that a worker has emptied its output."""

    def add(self, spools: Sequence[Spool]) -> None:
        """Move these, too, and make their files now, as far as the disk allows. OSError: no descriptors are left."""
        if self._wake_fd < 0 and spools:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # Daemons: a stalled disk must not delay the agent's exit.
            for name, work in (("holdfast-logs", self._observe), ("holdfast-log-files", self._write)):
                self._threads.append(threading.Thread(target=work, name=name, daemon=True))
                self._threads[-1].start()
        with self._news:
            self._spools += tuple(spools)
        self._wake()

    def retire(self, spools: Iterable[Spool]) -> None:
        """Let these go as soon as they are on the disk: their writers have ended."""
        with self._news:  # the last ones come from other threads, while this is closed
            self._retired.update(spools)
            self._wake()

    def finish(self, stalled_s_max: float) -> bool:
        """Wait until all is on the disk. Returns False, after a message, if the disk refuses it or has taken nothing
        for `stalled_s_max`."""
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

    def await_files(self, stalled_s_max: float) -> None:
        """Wait until the file of each spool was made, or the disk has refused it; not for a disk that stalls."""
        with self._news:
            if self._threads:
                self._await_turns(2, stalled_s_max)  # one may have begun without the newest spools

    def _await_turns(self, count: int, stalled_s_max: float) -> bool:
        """Wait for this number of turns of the writing thread. Returns False if one takes longer than `stalled_s_max`.
        Call it with the lock."""
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
            writer.join(CLOSE_S_MAX)  # it takes longer only if the disk stalls
            with self._news:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _waiting_bytes(self) -> int:
        return sum(spool.waiting_bytes for spool in self._spools)

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _observe(self) -> None:
        """Wait for changes, pass them on to the writing thread, and keep the limits. Runs in a thread of its own."""
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
                # Not a plain sleep: `close` waits for this thread, and so would the end of every job.
                self._news.wait_for(lambda: self._closed, CALM_S)
        watch.close()

    def _keep_limits(self, spools: Sequence[Spool]) -> None:
        now = time.monotonic()
        # A disk that is slow but moves gets more memory than one that takes nothing.
        stuck = any(each.trouble or (each.began_s is not None and now > each.began_s + STALLED_S) for each in spools)
        of_ended = BACKLOG_ENDED_BYTES_MAX
        for spool in reversed(spools):
            bytes_max = BACKLOG_BYTES_MAX if stuck else BACKLOG_MOVING_BYTES_MAX
            if spool in self._retired:  # the newest first, so that the oldest output is dropped
                bytes_max = min(bytes_max, of_ended)
                of_ended -= min(spool.waiting_bytes, bytes_max)
            with contextlib.suppress(OSError):
                spool.shed(bytes_max)

    def _write(self) -> None:
        """Move what there is to move, turn by turn. Runs in a thread of its own."""
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
                done = [spool for spool in self._retired if spool.done]
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
        """Show a message once when the disk takes nothing, and once when it does again."""
        emptied = next((spool for spool in spools if spool.emptied), None)
        if emptied is not None and not self._emptied_reported:
            self._emptied_reported = True
            advice = append_advice(emptied.path)
            self._say(f"a worker emptied its output ({emptied.path}), and lines may be missing: {advice}")
        found = next((spool for spool in spools if spool.trouble is not None), None)
        if found is None:
            if self._reported:
                self._reported = False
                self._say("the log files of this run are written again")
        elif not self._reported and time.monotonic() > self._reported_s + SAY_AGAIN_S:
            self._reported, self._reported_s = True, time.monotonic()
            self._say(
                f"the log files of this run cannot be written: {text_of(found.trouble)}. The job goes on. Its output "
                f"stays in memory, the newest {BACKLOG_BYTES_MAX >> 20} MiB of each stream, until they can be written."
            )


def text_of(error: OSError | None) -> str:
    """The file and the reason of an error, in words; empty: there is no error."""
    return f"{error.filename or 'a log file'}: {error.strerror}" if error is not None else ""
