"""Shows the output of all hosts on this machine's console: whole lines, in order of arrival.

    Screen ── Console (one thread)
       └── Feed per host and stream: reads ssh's pipe only when the console has room, so a stalled terminal
           delays only what is shown; on the hosts the log files are the queue

Lines with the mark of this run are far.py's messages and are not shown. Agents' own lines
(`holdfast: …`) are shown with the host's name; equal lines of several agents are shown once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable

from holdfast.supervisor.console import SAY_PREFIX, Console, ConsoleStream
from holdfast.supervisor.log_fold import LineCutter

CHUNK_BYTES_MAX = 64 * 1024
ONCE_S = 3.0
"""Equal lines from another host within this time are not shown again."""
HELD_BYTES_MAX = 16 * 1024
"""Of what comes before the far side's first message: greetings, or ssh's errors."""

_PREFIX = SAY_PREFIX.encode()


class Screen:
    """The console of a job on several hosts."""

    def __init__(self, mark: str) -> None:
        self.console = Console()
        self.mark = mark.encode()
        self._told: dict[bytes, tuple[str, float]] = {}
        self.drops = False
        """What the console has no room for is read and thrown away."""

    def say(self, text: str) -> None:
        self.console.say(text)

    def feed(
        self, fd: int, host: str, *, error: bool, told: Callable[[bytes], None], ended: Callable[[], None]
    ) -> Feed:
        """Show what comes from this descriptor, which is the feed's from here on. `told` gets the marked lines, `ended`
        is called when all has been read; both in the console's thread."""
        feed = Feed(fd, self.console.err if error else self.console.out, self, host, told, ended)
        self.console.attach(feed)
        return feed

    def edit(self, lines: bytes, host: str, now: float) -> bytes:
        """The same lines, the agents' own words with their host's name, and once."""
        if _PREFIX not in lines:
            return lines
        return b"".join(self._edit_line(line, host, now) for line in lines.splitlines(keepends=True))

    def _edit_line(self, line: bytes, host: str, now: float) -> bytes:
        if not line.startswith(_PREFIX):
            return line
        words = line[len(_PREFIX) :]
        who, until = self._told.get(words, ("", 0.0))
        if who and who != host and now < until:
            return b""
        self._told = {text: one for text, one in self._told.items() if now < one[1]}
        self._told[words] = (host, now + ONCE_S)
        return _PREFIX + host.encode() + b": " + words

    @property
    def written_bytes(self) -> int:
        return sum(stream.written_bytes for stream in {self.console.out, self.console.err})

    def drop(self) -> None:
        """Wait for the console no more: what the hosts have to say of their end comes behind what it does not take."""
        self.drops = True
        self.console.wake()

    def close(self, stall_s: float) -> None:
        self.console.close(stall_s)


class Feed:
    """One pipe from ssh. Everything except the constructor, `held` and `show` belongs to the console thread."""

    def __init__(
        self,
        fd: int,
        stream: ConsoleStream,
        screen: Screen,
        host: str,
        told: Callable[[bytes], None],
        ended: Callable[[], None],
    ) -> None:
        os.set_blocking(fd, False)
        self.progress = 0
        self.last = ""
        """The last line that was read."""
        self._fd: int | None = fd
        self._stream = stream
        self._screen = screen
        self._host = host
        self._tell = told
        self._tell_ended = ended
        self._cutter = LineCutter()
        self._lock = threading.Lock()
        self._held: deque[bytes] | None = deque()
        self._held_bytes = 0

    def held(self) -> str:
        """The output before `show`."""
        with self._lock:
            return b"".join(self._held or ()).decode(errors="replace")

    def show(self) -> None:
        """From here on what comes is shown. What came before were greetings."""
        with self._lock:
            self._held = None

    def fileno(self) -> int | None:
        return self._fd if self._stream.free or self._screen.drops or self._held is not None else None

    def pump(self, now: float) -> float | None:
        while (fd := self._fd) is not None and self.fileno() is not None:
            try:
                data = os.read(fd, CHUNK_BYTES_MAX)
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            self.progress += 1
            self._take(self._cutter.feed(data) if data else self._cutter.flush(), now)
            if not data:
                self.close()
        return None

    def _take(self, lines: bytes, now: float) -> None:
        if self._screen.mark in lines:
            lines = b"".join(map(self._unmarked, lines.splitlines(keepends=True)))
        if not lines:
            return
        self.last = lines[lines.rfind(b"\n", 0, -1) + 1 :].decode(errors="replace")
        with self._lock:
            if self._held is not None:
                self._held.append(lines)
                self._held_bytes += len(lines)
                while self._held_bytes > HELD_BYTES_MAX:
                    self._held_bytes -= len(self._held.popleft())
                return
        if self._stream.free or not self._screen.drops:
            self._stream.put(self._screen.edit(lines, self._host, now))

    def _unmarked(self, line: bytes) -> bytes:
        before, mark, words = line.partition(self._screen.mark)
        if mark:
            self._tell(words)
            return before + b"\n" if before else b""
        return line

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)
            self._tell_ended()
