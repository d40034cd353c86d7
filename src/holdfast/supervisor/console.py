"""The agent's own terminal, pipe or file behind descriptors 1 and 2, written by one thread.

Writes without blocking the agent, keeps a transient last line on a terminal, and shows the launcher's own lines. Must
not know workers, ranks or files: a part that has lines to show attaches a Source, and the console's thread asks it for
more whenever a destination has room. So a blocked console blocks nothing but itself.
"""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

PIECE_BYTES_MAX = 4096
"""PIPE_BUF: a pipe or terminal that polls as writable takes this much without blocking."""
SAID_LINES_MAX = 10_000
CALM_S = 0.01
"""A busy worker wakes us at most this often; a line after silence is shown at once."""
CLOSE_S_MAX = 1.0

SAY_PREFIX = "holdfast: "
ERASE = b"\r\x1b[K"
CLIP, UNCLIP = b"\x1b[?7l", b"\x1b[?7h"
"""Without automatic wrap a long transient line stays on one row, so that ERASE removes all of it."""
RESET = b"\x1b[0m"


class Source(Protocol):
    """Supplies lines for console streams on request; called only in the console's thread."""

    def fileno(self) -> int | None:
        """A descriptor that is readable when there may be news."""

    def pump(self, now: float) -> float | None:
        """Put the lines that are ready into free streams. Returns the monotonic time of the next call; None: call at
        news or room."""

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
        self.identity: tuple[int, int, int] | None = None
        self._pending = memoryview(b"")
        self._transient = b""
        self._drawn = False
        self._row_is_open = False
        """The last row shows a prompt, and perhaps the typed answer."""
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
        data = self._with_transient(lines, transient) if self.live else lines
        self._pending = memoryview(data if self.free else bytes(self._pending) + data)
        self.flush()

    def put_prompt(self, text: bytes) -> None:
        """On a live terminal: show a question whose answer is typed after it. It stays, and the next line begins on a
        row of its own."""
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
            except OSError:
                self.broken = True
                self._pending = memoryview(b"")
                return
            self.written_bytes += count
            self._pending = self._pending[count:]

    def _fresh_row(self) -> bytes:
        """Move to the beginning of an empty row, whether Enter has left the prompt's row or not: blanks for a whole row
        but one move to the next row only from within a row."""
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
        self._said: deque[bytes] = deque()
        self._saying = False
        self._unsaid = 0
        self._news = threading.Condition()
        """Guards the state that callers and the thread share; notified after each turn of the thread."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._calm_until = 0.0

    def say(self, text: str, *, prefix: str = SAY_PREFIX) -> None:
        """Show lines of the launcher on stderr, each with the prefix. Never blocks; ignored after `close`.

        Lines that do not fit into the queue because the console is blocked are dropped; their number is shown later.
        """
        lines = [f"{prefix}{line}\n".encode(errors="surrogateescape") for line in text.splitlines()]
        with self._news:
            for line in lines:
                if len(self._said) < SAID_LINES_MAX:
                    self._said.append(line)
                else:
                    self._unsaid += 1
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
        shown = self._thread is None or self.wait(lambda: not (self._said or self._saying), drain_s_max)
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
            self._thread = threading.Thread(target=self._run, name="holdfast-console", daemon=True)
            self._thread.start()
        os.eventfd_write(self._wake_fd, 1)

    def _progress(self) -> int:
        return sum(stream.written_bytes for stream in self._streams) + sum(each.progress for each in self._sources)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            now = time.monotonic()
            for stream in self._streams:
                stream.flush()
            self._say_lost()
            self._put_said()
            dues = [due for source in self._sources if (due := source.pump(now)) is not None]
            with self._news:
                self._news.notify_all()
            self._wait_for_work(min(dues, default=None))
        with self._news:
            os.close(self._wake_fd)

    def _say_lost(self) -> None:
        """Report once that stdout's reader is gone (`| head`), since the job itself continues."""
        if self.out.broken and not self._lost and not self.err.broken:
            self._lost = True
            self.say("standard output has no reader any more; the job continues, and `holdfast logs` shows its lines")

    def _put_said(self) -> None:
        if not self.err.free:
            return
        with self._news:
            lines = list(self._said)
            if self._unsaid:
                lines.append(f"{SAY_PREFIX}({self._unsaid} more lines dropped: the console was blocked)\n".encode())
            self._said.clear()
            self._unsaid = 0
            self._saying = bool(lines)
        if lines:  # outside the lock: `say` must not wait for a terminal
            self.err.put(b"".join(lines))
            self._saying = False

    def _wait_for_work(self, due: float | None) -> None:
        now = time.monotonic()
        if now < self._calm_until:
            calm_due = self._calm_until if due is None else min(due, self._calm_until)
            if self._poll(calm_due, with_sources=False) or calm_due == due:
                return
        if self._poll(due, with_sources=True):
            self._calm_until = time.monotonic() + CALM_S

    def _poll(self, due: float | None, *, with_sources: bool) -> bool:
        """Wait for a call, for room in a stream with pending lines, or for news; False when `due` came first."""
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
