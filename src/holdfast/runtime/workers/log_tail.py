"""From growing log files to whole console lines.

Knows how to cut bytes into lines (progress bars overwrite themselves with a carriage return), how to follow files without
polling, and how to share one destination fairly. Must not know options, roles or what a prefix means.

Reading happens only when the destination has room, so a blocked console costs no memory: the files are the queue.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

CHUNK_BYTES_MAX = 256 * 1024
"""Read from one file before it is the next one's turn, and put into a destination at once; fits a core's cache."""
LINE_BYTES_MAX = 1024 * 1024
"""A longer line is cut."""
PROGRESS_S = 1.0
"""Not a terminal: a line that overwrites itself is shown at most this often, and at its end."""
TRANSIENT_S = 0.1
"""Terminal: the transient last line changes at most this often."""
PROMPT_S = 0.2
"""Terminal: an unfinished line that stays this long is shown: it may be a prompt."""
POLL_S = 0.05
"""Only where the kernel refuses inotify."""
AT_ONCE = 0.0

_TRAILING_RETURNS = re.compile(rb"\r+\n")
_OVERWRITTEN = re.compile(rb"(?m)^[^\n]*\r")
_CURSOR_CONTROL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]")
"""Every control sequence but colours (final byte m)."""
_ESCAPE = b"\x1b["
_COLOUR_RESET = b"\x1b[0m"


class LineCutter:
    """Bytes in, whole lines out; of a line that overwrites itself only the last state."""

    __slots__ = ("partial",)

    def __init__(self) -> None:
        self.partial = b""
        """The unfinished line; when it overwrote itself: its last complete state, a carriage return, the coming state."""

    def feed(self, chunk: bytes) -> bytes:
        """The lines that are complete now, each ending with a newline and without carriage returns."""
        data = self.partial + chunk if self.partial else chunk
        cut = data.rfind(b"\n") + 1
        whole, rest = data[:cut], data[cut:]
        if b"\r" in whole:
            whole = _OVERWRITTEN.sub(b"", _TRAILING_RETURNS.sub(b"\n", whole))
        if b"\r" in rest:
            *states, coming = rest.split(b"\r")
            rest = next((state for state in reversed(states) if state), b"") + b"\r" + coming
        if len(rest) > LINE_BYTES_MAX:
            whole, rest = whole + _last_state(rest) + b"\n", b""
        self.partial = rest
        return whole

    def flush(self) -> bytes:
        """The unfinished line as a line; b"" when there is none."""
        state, self.partial = _last_state(self.partial), b""
        return state + b"\n" if state else b""

    @property
    def progress(self) -> bytes:
        """The last state that was completed by a carriage return."""
        return self.partial.partition(b"\r")[0] if b"\r" in self.partial else b""

    @property
    def newest(self) -> bytes:
        """What a terminal would show in the unfinished line."""
        return _last_state(self.partial)


def _last_state(text: bytes) -> bytes:
    return next((state for state in reversed(text.split(b"\r")) if state), b"")


def add_prefix(lines: bytes, prefix: bytes) -> bytes:
    """
    >>> add_prefix(b"a\\nb\\n", b"0: ")
    b'0: a\\n0: b\\n'
    """
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if prefix and lines else lines


def keep_matching(lines: bytes, needles: Sequence[bytes]) -> bytes:
    """Only the lines that contain any of the needles."""
    if not any(needle in lines for needle in needles):
        return b""
    return b"".join(line for line in lines.splitlines(keepends=True) if any(needle in line for needle in needles))


def tame(text: bytes) -> bytes:
    """Text of one worker on a terminal shared by many: colours stay and end with the line, cursor movements go."""
    if _ESCAPE not in text:
        return text
    text = _CURSOR_CONTROL.sub(b"", text)
    return b"\n".join(line + _COLOUR_RESET if _ESCAPE in line else line for line in text.split(b"\n"))


class Sink(Protocol):
    """Where lines go."""

    @property
    def free(self) -> bool:
        """Takes the next lines now."""

    broken: bool
    live: bool

    def put(self, lines: bytes, transient: bytes | None = None) -> None: ...


class ChangeWatch:
    """One inotify descriptor for all files. It tells that something changed, not what: asking each file is cheap."""

    def __init__(self) -> None:
        import ctypes  # lazily: only an agent that shows logs needs it

        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.reliable = self.fd >= 0
        """False: some file cannot be watched and has to be polled."""
        self._users: dict[int, int] = {}

    def add(self, path: Path) -> int:
        """Watch a file; the handle for `remove`. A file may be watched several times."""
        in_modify = 0x2
        handle: int = self._libc.inotify_add_watch(self.fd, os.fsencode(path), in_modify)
        if handle < 0:
            self.reliable = False
        self._users[handle] = self._users.get(handle, 0) + 1
        return handle

    def remove(self, handle: int) -> None:
        self._users[handle] -= 1
        if not self._users[handle]:
            del self._users[handle]
            if handle >= 0:
                self._libc.inotify_rm_watch(self.fd, handle)

    def drain(self) -> None:
        """Forget the news that came so far; to be called before the files are asked."""
        try:
            while self.fd >= 0:
                os.read(self.fd, 65_536)
        except BlockingIOError:
            pass

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StreamTail:
    """One followed file, as prefixed lines for one sink."""

    def __init__(self, path: Path, prefix: bytes, *, live: bool = False, needles: tuple[bytes, ...] = ()) -> None:
        self.path = path
        self.read_bytes = 0
        self.changed_at = 0.0
        self.drawn = b""
        """What was drawn of the unfinished line last."""
        self._prefix = prefix
        self._live = live
        self._needles = needles
        self._cutter = LineCutter()
        self._fd = -1
        self._watch_handle = -1
        self._offset = 0
        self._progress_shown: bytes | None = None
        self._progress_due = 0.0

    def open(self, watch: ChangeWatch) -> None:
        """A file that is gone is shown as an empty one."""
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        self._watch_handle = watch.add(self.path)

    def close(self, watch: ChangeWatch) -> None:
        if self._fd >= 0:
            watch.remove(self._watch_handle)
            os.close(self._fd)
            self._fd = -1

    def take(self, now: float) -> tuple[bytes, bool]:
        """The next lines, and whether there may be more at once."""
        chunk = self._read()
        if not chunk:
            return b"", False
        self.changed_at = now
        lines = self._dress(self._without_repeat(self._cutter.feed(chunk)))
        if lines:
            self.drawn = b""
        return lines, len(chunk) == CHUNK_BYTES_MAX

    def finish(self) -> bytes:
        """The last line, if it has no newline."""
        return self._dress(self._without_repeat(self._cutter.flush()))

    def take_progress(self, now: float) -> tuple[bytes, float | None]:
        """Not a terminal: the state of a line that overwrites itself, as a line, or when to ask again."""
        state = self._cutter.progress
        if not state or state == self._progress_shown:
            return b"", None
        if now < self._progress_due:
            return b"", self._progress_due
        self._progress_shown, self._progress_due = state, now + PROGRESS_S
        return self._dress(state + b"\n"), None

    def transient(self) -> tuple[bytes, float | None]:
        """Terminal: the unfinished line, and when it is due; None: it is drawn already, or there is none."""
        text = self._cutter.newest
        if text == self.drawn or not text:
            return text, None
        return text, self.changed_at if b"\r" in self._cutter.partial else self.changed_at + PROMPT_S

    def draw(self, text: bytes) -> bytes:
        self.drawn = text
        return self._prefix + tame(text) if text else b""

    def _read(self) -> bytes:
        if self._fd < 0:
            return b""
        try:
            size = os.fstat(self._fd).st_size
            if size < self._offset:  # the worker truncated it
                self._offset = 0
            wanted = min(size - self._offset, CHUNK_BYTES_MAX)
            chunk = os.pread(self._fd, wanted, self._offset) if wanted else b""
        except OSError:  # the disk fails: what cannot be read cannot be shown
            return b""
        self._offset += len(chunk)
        self.read_bytes += len(chunk)
        return chunk

    def _without_repeat(self, lines: bytes) -> bytes:
        """A line whose last state was shown as progress is not shown again."""
        if lines and self._progress_shown is not None:
            first, _, others = lines.partition(b"\n")
            if first == self._progress_shown:
                lines = others
            self._progress_shown = None
        return lines

    def _dress(self, lines: bytes) -> bytes:
        if self._needles:
            lines = keep_matching(lines, self._needles)
        return add_prefix(tame(lines) if self._live else lines, self._prefix)


class TailGroup:
    """The files of one attempt that go to one sink."""

    def __init__(self, tails: Sequence[StreamTail], done: Callable[[], None] | None = None) -> None:
        """`done` is called in the console's thread when all was put into the sink, or given up."""
        self.tails = tuple(tails)
        self._done = done
        self.ended = False
        """Set from any thread: nothing will be written any more."""
        self.turn = 0
        self._opened = False

    def open(self, watch: ChangeWatch) -> None:
        if not self._opened:
            self._opened = True
            for tail in self.tails:
                tail.open(watch)

    def close(self, watch: ChangeWatch) -> None:
        for tail in self.tails:
            tail.close(watch)
        if self._done is not None:
            self._done()


class Lane:
    """All that goes to one sink, attempt after attempt."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.read_bytes = 0
        self._groups: deque[TailGroup] = deque()
        self._drawn_at = 0.0
        self._owner: StreamTail | None = None
        """Whose unfinished line is the transient last line."""

    @property
    def idle(self) -> bool:
        return not self._groups

    def add(self, group: TailGroup) -> None:
        self._groups.append(group)

    def pump(self, now: float, watch: ChangeWatch) -> float | None:
        """Show what there is while the sink has room; when to come again, None: at news."""
        while self._groups and self.sink.free:
            group = self._groups[0]
            over = group.ended  # asked before reading: what is read afterwards is all there will ever be
            group.open(watch)
            due = None if self.sink.broken else self._show(group, now, over=over)
            if due is not None or not over:
                return due
            group.close(watch)
            self._groups.popleft()
        return None

    def abandon(self, watch: ChangeWatch) -> None:
        """Show nothing more."""
        for group in self._groups:
            group.close(watch)
        self._groups.clear()

    def _show(self, group: TailGroup, now: float, *, over: bool) -> float | None:
        blocks: list[bytes] = []
        size = 0
        more = False
        for _ in group.tails:
            tail = group.tails[group.turn]
            group.turn = (group.turn + 1) % len(group.tails)
            before = tail.read_bytes
            block, has_more = tail.take(now)
            self.read_bytes += tail.read_bytes - before
            blocks.append(block)
            size += len(block)
            more = more or has_more
            if size >= CHUNK_BYTES_MAX:
                more = True
                break
        due: float | None = AT_ONCE
        transient = b"" if self._owner is not None and not self._owner.drawn else None
        if not more and over:
            blocks.extend(tail.finish() for tail in group.tails)
            due, transient = None, b""
        elif not more and self.sink.live:
            due, transient = self._next_transient(group, now, transient)
        elif not more:
            due = self._add_progress(group, now, blocks)
        if transient == b"":
            self._owner = None
        lines = b"".join(blocks)
        if lines or transient is not None:
            self.sink.put(lines, transient)
        return due

    def _add_progress(self, group: TailGroup, now: float, blocks: list[bytes]) -> float | None:
        dues: list[float] = []
        for tail in group.tails:
            block, due = tail.take_progress(now)
            blocks.append(block)
            if due is not None:
                dues.append(due)
        return min(dues, default=None)

    def _next_transient(
        self, group: TailGroup, now: float, transient: bytes | None
    ) -> tuple[float | None, bytes | None]:
        """When the transient line is to change next, and what it is to become now (None: it stays)."""
        waiting: list[tuple[float, StreamTail, bytes]] = []
        for tail in group.tails:
            text, due = tail.transient()
            if due is not None:
                waiting.append((max(due, self._drawn_at + TRANSIENT_S), tail, text))
        ready = [each for each in waiting if each[0] <= now]
        if ready:
            _, tail, text = max(ready, key=lambda each: each[1].changed_at)
            self._owner, self._drawn_at = tail, now
            transient = tail.draw(text)
        later = [
            now + TRANSIENT_S if due <= now else due for due, tail, _ in waiting if not (ready and tail is self._owner)
        ]
        return min(later, default=None), transient


class LogTail:
    """All lanes together: the console's Source."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the set of lanes: groups are added from the agent's thread."""
        self._lanes: tuple[Lane, ...] = ()
        self._left_bytes = 0
        """Read by lanes that are gone."""
        self._watch: ChangeWatch | None = None
        self.abandoned = False
        """Set from any thread: show nothing more."""
        self.closed = False
        """Nothing is open any more, because it was abandoned."""

    def add(self, sink: Sink, group: TailGroup) -> None:
        """Show the group after all earlier ones of this sink. The console is to be woken afterwards."""
        with self._lock:
            lane = next((lane for lane in self._lanes if lane.sink is sink), None)
            if lane is None:
                lane = Lane(sink)
                self._lanes = (*self._lanes, lane)
            lane.add(group)

    @property
    def idle(self) -> bool:
        """Every group has ended and was shown to its end."""
        return all(lane.idle for lane in self._lanes)

    @property
    def progress(self) -> int:
        return self._left_bytes + sum(lane.read_bytes for lane in self._lanes)

    def fileno(self) -> int | None:
        return self._watch.fd if self._watch is not None and self._watch.fd >= 0 else None

    def pump(self, now: float) -> float | None:
        if self._watch is None:
            self._watch = ChangeWatch()
        if self.abandoned:
            for lane in self._lanes:
                lane.abandon(self._watch)
            self._watch.close()
            self.closed = True
            return None
        self._watch.drain()
        dues = [due for lane in self._lanes if (due := lane.pump(now, self._watch)) is not None]
        with self._lock:
            self._left_bytes += sum(lane.read_bytes for lane in self._lanes if lane.idle)
            self._lanes = tuple(lane for lane in self._lanes if not lane.idle)
        if not self._watch.reliable and not self.idle:
            dues.append(now + POLL_S)
        return min(dues, default=None)
