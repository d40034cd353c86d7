"""Pseudo-terminals of workers whose agent has a terminal, so that progress bars and colours work.

One thread, which may block on the disk, copies what workers write there into their log files. Knows terminals and file
descriptors; must not know lines, prefixes or options.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence

COPY_BYTES_MAX = 65_536
HANGUP_S_MAX = 0.5
"""After the workers are dead, how long a left-over process may keep their terminal open before we stop listening."""
COLUMNS_MIN = 20
_OPOST_INDEX, _LOCAL_INDEX = 1, 3


class Terminal:
    """One worker stream's pseudo-terminal and the log file behind it."""

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
        """Copy the available bytes into the file; False at the end."""
        try:
            while data := os.read(self.master_fd, COPY_BYTES_MAX):
                self._store(data)
        except BlockingIOError:
            return True
        except OSError:  # EIO: the last process closed it
            return False
        return False

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
    """The one thread that copies from all pseudo-terminals of this agent. It starts with the first terminal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terminals: dict[int, Terminal] = {}
        self._finishing: list[tuple[set[int], Callable[[], None]]] = []
        self._wake_fd = -1
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
        for then in done:
            then()
