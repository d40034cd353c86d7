"""The agent's own terminal, pipe or file behind descriptors 1 and 2, written by one thread; and the pseudo-terminals
of its workers.

The console writes without blocking the agent, keeps a transient last line on a terminal, and shows the launcher's own
lines. It must not know workers, ranks or files: a part that has lines to show attaches a Source, and the console's
thread asks it for more whenever a destination has room. So a blocked console blocks nothing but itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from holdfast.text import visible

PIECE_BYTES_MAX = 4096
"""PIPE_BUF: a pipe or terminal that polls as writable takes this much without blocking."""
OWN_LINES_MAX = 10_000
"""Number of the launcher's own lines that wait for a blocked console. Later ones are counted and dropped."""
CALM_S = 0.01
"""Shortest time between two turns for changes of files (s): a busy worker changes its file all the time. A line after
silence is shown at once."""
CLOSE_S_MAX = 1.0

SAY_PREFIX = "holdfast: "
ERASE = b"\r\x1b[K"
CLIP, UNCLIP = b"\x1b[?7l", b"\x1b[?7h"
"""Automatic wrap off and on: without it, a long transient line stays on one row, so that ERASE removes all of it."""
RESET = b"\x1b[0m"


class Source(Protocol):
    """Supplies lines for console streams on request; called only in the console's thread."""

    def fileno(self) -> int | None:
        """A descriptor that is readable when there may be news."""

    def pump(self, now: float) -> float | None:
        """Put the lines that are ready into free streams. Returns the monotonic time of the next call; None: call it
        when the descriptor is readable, or when a stream has room again."""

    @property
    def progress(self) -> int:
        """A counter that grows whenever lines were written."""


class ConsoleStream:
    """One destination. The descriptor stays in blocking mode, because other processes share it; we only write where
    poll reports room."""

    def __init__(self, fd: int, *, dumb: bool, no_colour: bool) -> None:
        self.fd = fd
        self.broken = False
        """The reader is gone (EPIPE, hang-up): all output is dropped."""
        self.written_bytes = 0
        """Bytes that this destination has taken so far."""
        self.identity: tuple[int, int, int] | None = None
        """Numbers that are equal for two descriptors of one file or terminal; None: this one is closed."""
        self._pending = memoryview(b"")
        """Bytes that it has not taken yet. New lines are asked for when this is empty."""
        self._transient = b""
        """The transient last line; empty: there is none."""
        self._drawn = False
        """The transient line is on the screen, below all other lines."""
        self._row_is_open = False
        """The last row shows a prompt, and perhaps the typed answer."""
        self._in_line = False
        """The byte that was written last is no newline."""
        self._torn = False
        """The rest of the line that was being written is lost (a full disk): the next one begins on its own."""
        self._piece_bytes_max: int | None = None
        try:
            status = os.fstat(fd)
        except OSError:  # started with this descriptor closed
            self.broken = True
            self.is_terminal = self.live = self.colour = False
            return
        self.identity = (status.st_dev, status.st_ino, status.st_rdev)
        self.is_terminal = os.isatty(fd)
        self.live = self.is_terminal and not dumb
        """Whether it shows a transient last line."""
        self.colour = self.live and not no_colour
        if not stat.S_ISREG(status.st_mode):
            self._piece_bytes_max = PIECE_BYTES_MAX
        self._room = select.poll()
        self._room.register(fd, select.POLLOUT)

    @property
    def free(self) -> bool:
        return not self._pending

    def put(self, lines: bytes, transient: bytes | None = None) -> None:
        """Write whole lines, as far as there is room now; the rest is kept for `flush`.

        `transient` is the new unfinished last line on a live terminal: None keeps the present one, b"" removes it.
        """
        if self.broken:
            return
        if self._torn and lines:
            lines, self._torn = b"\n" + lines, False
        data = self._with_transient(lines, transient) if self.live else lines
        self._pending = memoryview(data if self.free else bytes(self._pending) + data)
        self.flush()

    def put_prompt(self, text: bytes) -> None:
        """Show a question on a live terminal; its answer is typed after it. It stays, and the next line begins on a row
        of its own."""
        if not self.broken:
            before = self._with_transient(self._fresh_row(), b"")
            self._pending = memoryview(bytes(self._pending) + before + text + RESET)
            self._row_is_open = True
            self.flush()

    def flush(self) -> None:
        while self._pending:
            if not self._room.poll(0):
                return
            try:
                count = os.write(self.fd, self._pending[: self._piece_bytes_max])
            except BlockingIOError:  # another process made the shared description non-blocking
                return
            except OSError as error:
                # `run … > file` on a full disk: these lines are lost, and later ones are shown if there is room then.
                self.broken = error.errno not in (errno.ENOSPC, errno.EDQUOT)
                self._pending = memoryview(b"")
                self._torn = self._in_line
                return
            self.written_bytes += count
            if count:
                self._in_line = self._pending[count - 1] != ord("\n")
            self._pending = self._pending[count:]

    def _fresh_row(self) -> bytes:
        """The bytes that lead to the beginning of an empty row, whether Enter has left the prompt's row or not: blanks
        for a whole row but one move to the next row only from within a row."""
        if not self._row_is_open:
            return b""
        self._row_is_open = False
        try:
            columns = os.get_terminal_size(self.fd).columns
        except OSError:
            columns = 0
        return b" " * (columns - 1) + ERASE if columns > 1 else b"\n"

    def _with_transient(self, lines: bytes, transient: bytes | None) -> bytes:
        if transient is not None:
            self._transient = transient
        if lines or self._transient:
            lines = self._fresh_row() + lines
        erase = ERASE if self._drawn else b""
        self._drawn = bool(self._transient)
        draw = b"".join((CLIP, ERASE, self._transient, RESET, UNCLIP)) if self._drawn else b""
        return erase + lines + draw


class Console:
    """Descriptors 1 and 2 and the one thread that writes to them. The thread starts with the first use."""

    def __init__(self, stdout_fd: int = 1, stderr_fd: int = 2, *, no_colour: bool | None = None) -> None:
        if no_colour is None:
            no_colour = bool(os.environ.get("NO_COLOR"))
        dumb = os.environ.get("TERM") == "dumb"
        self.out = ConsoleStream(stdout_fd, dumb=dumb, no_colour=no_colour)
        self.err = ConsoleStream(stderr_fd, dumb=dumb, no_colour=no_colour)
        if self.out.identity is not None and self.out.identity == self.err.identity:
            # `2>&1` or a terminal: only one queue keeps lines whole and erases transient lines.
            self.err = self.out
        self._streams = {self.out, self.err}
        self._lost = self.out.broken
        """The loss of stdout's reader is reported already, or there never was one."""
        self._sources: tuple[Source, ...] = ()
        self._own_lines: deque[bytes] = deque()
        """The launcher's own lines that are not written yet."""
        self._writing = False
        """Own lines were taken from the queue, and are being written."""
        self._dropped = 0
        """Number of own lines that did not fit into the queue and are not reported yet."""
        self._news = threading.Condition()
        """Guards the state that callers and the thread share; notified after each turn of the thread."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._calm_until = 0.0

    def say(self, text: str, *, prefix: str = SAY_PREFIX) -> None:
        """Show lines of the launcher on stderr, each with the prefix and with visible control characters. Never blocks;
        ignored after `close`.

        Lines that do not fit into the queue because the console is blocked are dropped; their number is shown later.
        """
        lines = [f"{prefix}{line}\n".encode(errors="surrogateescape") for line in visible(text).splitlines()]
        with self._news:
            for line in lines:
                # A console that nobody reads must not fill the memory; what is dropped is counted.
                if len(self._own_lines) < OWN_LINES_MAX:
                    self._own_lines.append(line)
                else:
                    self._dropped += 1
            self._wake()

    def attach(self, source: Source) -> None:
        with self._news:
            self._sources = (*self._sources, source)
            self._wake()

    def detach(self, source: Source) -> None:
        with self._news:
            self._sources = tuple(other for other in self._sources if other is not source)
            self._wake()

    def wake(self) -> None:
        """Wake the console's thread: a source has news that its descriptor does not report."""
        with self._news:
            self._wake()

    def wait(self, is_done: Callable[[], bool], stalled_s_max: float) -> bool:
        """Wait until `is_done()` and everything is written; False when nothing moved for `stalled_s_max`. Blocks: do
        not call it on an event loop."""

        def all_done() -> bool:
            return is_done() and all(stream.free for stream in self._streams)

        def moved(before: int) -> bool:
            return all_done() or self._progress() != before

        with self._news:
            self._wake()
            while not all_done():
                if not self._news.wait_for(partial(moved, self._progress()), stalled_s_max):
                    return False
        return True

    def close(self, drain_s_max: float = CLOSE_S_MAX) -> bool:
        """Show what is queued and end the thread; False when the console did not move for `drain_s_max`."""
        if self._closed:
            return True
        shown = self._thread is None or self.wait(lambda: not (self._own_lines or self._writing), drain_s_max)
        with self._news:
            self._closed = True
            if self._thread is None:
                os.close(self._wake_fd)
            else:
                os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None and shown:
            self._thread.join()
        return shown

    def _wake(self) -> None:
        if self._closed:
            return
        if self._thread is None:
            # A daemon: it may be inside a write to a terminal that was stopped at the wrong moment.
            thread = threading.Thread(target=self._run, name="holdfast-console", daemon=True)
            thread.start()
            self._thread = thread  # only now: `close` must not wait for a thread that could not be started
        os.eventfd_write(self._wake_fd, 1)

    def _progress(self) -> int:
        return sum(stream.written_bytes for stream in self._streams) + sum(each.progress for each in self._sources)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            now = time.monotonic()
            for stream in self._streams:
                stream.flush()
            self._report_lost_reader()
            self._put_own_lines()
            dues = [due for source in self._sources if (due := source.pump(now)) is not None]
            with self._news:
                self._news.notify_all()
            self._wait_for_work(min(dues, default=None))
        with self._news:
            os.close(self._wake_fd)

    def _report_lost_reader(self) -> None:
        """Report once that stdout's reader is gone (`| head`), since the job itself continues."""
        if self.out.broken and not self._lost and not self.err.broken:
            self._lost = True
            self.say("standard output has no reader any more; the job continues, and `holdfast logs` shows its lines")

    def _put_own_lines(self) -> None:
        if not self.err.free:
            return
        with self._news:
            lines = list(self._own_lines)
            if self._dropped:
                lines.append(f"{SAY_PREFIX}({self._dropped} more lines dropped: the console was blocked)\n".encode())
            self._own_lines.clear()
            self._dropped = 0
            self._writing = bool(lines)
        if lines:  # outside the lock: `say` must not wait for a terminal
            self.err.put(b"".join(lines))
            self._writing = False

    def _wait_for_work(self, due: float | None) -> None:
        """Wait until there is something to do. Changes of files are ignored for CALM_S after the last ones."""
        now = time.monotonic()
        if now < self._calm_until:
            calm_due = self._calm_until if due is None else min(due, self._calm_until)
            if self._poll(calm_due, with_sources=False) or calm_due == due:
                return
        if self._poll(due, with_sources=True):
            self._calm_until = time.monotonic() + CALM_S

    def _poll(self, due: float | None, *, with_sources: bool) -> bool:
        """Wait for a call, for room in a stream with pending lines, or for a change of a source. Returns False when
        `due` came first."""
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        for stream in self._streams:
            if not stream.free:
                poller.register(stream.fd, select.POLLOUT)
        for source in self._sources if with_sources else ():
            if (fd := source.fileno()) is not None:
                poller.register(fd, select.POLLIN)
        timeout_ms = None if due is None else max(0.0, due - time.monotonic()) * 1000
        ready = poller.poll(timeout_ms)
        if any(fd == self._wake_fd for fd, _ in ready):
            os.eventfd_read(self._wake_fd)
        return bool(ready)


COPY_BYTES_MAX = 65_536
READS_MAX = 16
"""Number of reads of one terminal after which the others have their turn."""
HANGUP_S_MAX = 0.5
"""Time after the end of the workers for which we still read their terminal (s): a process that they have left behind
may keep it open."""
COLUMNS_MIN = 20
_OPOST_INDEX, _LOCAL_INDEX = 1, 3


class Terminal:
    """One worker stream's pseudo-terminal and the log file behind it: progress bars and colours work if the agent has a
    terminal."""

    def __init__(self, model_fd: int, file_fd: int, *, columns_taken: int = 0) -> None:
        """`model_fd` is the agent's terminal: its size is used, less the columns of our prefix. Owns `file_fd`. Raises
        OSError."""
        self.master_fd, self.worker_fd = os.openpty()
        self.file_fd = file_fd
        self._model_fd = model_fd
        self._columns_taken = columns_taken
        self.hangup_due: float | None = None
        os.set_blocking(self.master_fd, False)
        modes = termios.tcgetattr(self.worker_fd)
        modes[_OPOST_INDEX] &= ~termios.OPOST  # bytes reach the file as they were written
        modes[_LOCAL_INDEX] &= ~termios.ECHO
        termios.tcsetattr(self.worker_fd, termios.TCSANOW, modes)
        self.resize()

    def resize(self) -> None:
        """Apply the size of the agent's terminal, so that a progress bar and our prefix fit into one row together."""
        try:
            size = fcntl.ioctl(self._model_fd, termios.TIOCGWINSZ, bytes(8))
            rows, columns, *pixels = struct.unpack("HHHH", size)
            if columns:
                columns = max(COLUMNS_MIN, columns - self._columns_taken)
            fcntl.ioctl(self.master_fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, *pixels))
        except OSError:  # the agent's terminal is gone: the size no longer matters
            pass

    def copy(self) -> bool:
        """Copy available bytes into the file, a bounded number, since a worker that prints without pause would keep the
        thread from all other terminals. False at the end."""
        try:
            for _ in range(READS_MAX):
                data = os.read(self.master_fd, COPY_BYTES_MAX)
                if not data:
                    return False
                self._store(data)
        except BlockingIOError:
            pass
        except OSError:  # EIO: the last process closed it
            return False
        return True

    def close(self) -> None:
        os.close(self.master_fd)
        os.close(self.file_fd)

    def _store(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self.file_fd, data) :]
        except OSError:  # the disk is full: the worker goes on, as on a real terminal
            pass


class TerminalPump:
    """The one thread that copies from all pseudo-terminals of this agent. It starts with the first terminal, and
    may block on the disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all_finished = threading.Condition(self._lock)
        self._terminals: dict[int, Terminal] = {}
        """The open ones, by master descriptor."""
        self._finishing: list[tuple[set[int], Callable[[], None]]] = []
        """The descriptors that are still open, and the function to call when none is, of each call of `finish`."""
        self._wake_fd = -1
        """Wakes the thread; -1: there is no thread."""
        self._closed = False

    def add(self, terminals: Sequence[Terminal]) -> None:
        if not terminals:
            return
        with self._lock:
            self._terminals.update({terminal.master_fd: terminal for terminal in terminals})
            if self._wake_fd < 0:
                self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                # A daemon: a disk that stalls must not delay the agent's exit.
                threading.Thread(target=self._run, name="holdfast-terminals", daemon=True).start()
            os.eventfd_write(self._wake_fd, 1)

    def finish(self, terminals: Sequence[Terminal], then: Callable[[], None]) -> None:
        """The writers are dead: copy the rest, close, and call `then` (from the pump's thread). Returns at once."""
        if not terminals:
            then()
            return
        due = time.monotonic() + HANGUP_S_MAX
        with self._lock:
            for terminal in terminals:
                terminal.hangup_due = due
            # A terminal that was closed at end-of-file is done already.
            open_fds = {each.master_fd for each in terminals if self._terminals.get(each.master_fd) is each}
            self._finishing.append((open_fds, then))
            os.eventfd_write(self._wake_fd, 1)

    def await_finished(self, s_max: float) -> None:
        """Wait until the rest of all terminals that `finish` was called for is copied, at most for this time."""
        with self._all_finished:
            self._all_finished.wait_for(lambda: not self._finishing, s_max)

    def resize(self) -> None:
        with self._lock:
            for terminal in self._terminals.values():
                terminal.resize()

    def close(self) -> None:
        """End the thread; unfinished terminals are not copied."""
        with self._lock:
            if self._wake_fd >= 0 and not self._closed:
                os.eventfd_write(self._wake_fd, 1)
            self._closed = True

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                terminals = dict(self._terminals)
            poller = select.poll()
            poller.register(self._wake_fd, select.POLLIN)
            for fd in terminals:
                poller.register(fd, select.POLLIN)
            dues = [terminal.hangup_due for terminal in terminals.values() if terminal.hangup_due is not None]
            timeout_ms = max(0.0, min(dues) - time.monotonic()) * 1000 if dues else None
            for fd, _ in poller.poll(timeout_ms):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                elif not terminals[fd].copy():
                    self._remove(terminals[fd])
            now = time.monotonic()
            for terminal in terminals.values():
                if terminal.hangup_due is not None and terminal.hangup_due <= now:
                    self._remove(terminal)
            self._call_finished()
        with self._lock:
            for terminal in self._terminals.values():
                terminal.close()
            self._terminals.clear()
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _remove(self, terminal: Terminal) -> None:
        with self._lock:
            if self._terminals.get(terminal.master_fd) is not terminal:
                return
            del self._terminals[terminal.master_fd]
            for fds, _ in self._finishing:
                fds.discard(terminal.master_fd)
            terminal.close()

    def _call_finished(self) -> None:
        with self._lock:
            done = [then for fds, then in self._finishing if not fds]
            self._finishing = [(fds, then) for fds, then in self._finishing if fds]
            self._all_finished.notify_all()
        for then in done:
            then()
