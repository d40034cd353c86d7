"""Follows the growing output of workers and turns it into whole console lines.

Follows it with inotify, and shares one destination fairly; log_fold.py knows what a line is. Must not know options,
roles or what a prefix means.

Reading happens only when the destination has room, so a blocked console costs no memory: the log files are the queue.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from holdfast.supervisor.log_fold import (
    FOLD_BYTES_MAX,
    HeldTraceback,
    LineCutter,
    LineFold,
    add_prefix,
    keep_matching,
    tame,
)

NOTIFICATIONS_BYTES_MAX = 64 * 1024
"""Number of bytes of notifications that one read takes at most. A notification has 16."""


class ChangeWatch:
    """One inotify descriptor for all files. It shows that something has changed, and not what: it is cheap to check
    each file."""

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
        # A limit of inotify watches is reached: files are polled then (test_without_inotify_files_are_polled).
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
        """Discard pending notifications; call it before the files are checked.

        One read: where many workers write, new ones come as fast as they are read. Those that are left wake the caller
        again.
        """
        with contextlib.suppress(BlockingIOError):
            if self.fd >= 0:
                os.read(self.fd, NOTIFICATIONS_BYTES_MAX)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


CHUNK_BYTES_MAX = 256 * 1024
"""Bytes read from one file before the next file's turn; fits a core's cache."""
PROGRESS_S = 1.0
"""Shortest time between two states of a line that overwrites itself, where the sink is no terminal (s). Its last state
is always shown."""
TRANSIENT_S = 0.1
"""Shortest time between two changes of the transient last line of a terminal (s)."""
PROMPT_S = 0.2
"""Time after which an unfinished line is shown on a terminal (s): it may be a prompt."""
PROMPT_ENDS = (b"?", b":", b">", b"]", b")", b"$", b"#")
"""Last characters of a line that may be a prompt."""
POLL_S = 0.05
"""Interval of polling where the kernel refuses inotify (s)."""
AT_ONCE = 0.0
"""A time that has come: more can be read now."""


class Sink(Protocol):
    """A destination for lines."""

    @property
    def free(self) -> bool:
        """Whether it takes the next lines now."""

    broken: bool
    """Nobody reads it any more: what is put into it is lost."""
    live: bool
    """It is a terminal that can draw its last line again: it shows transient lines, and gets no control sequence of a
    worker but colours."""

    def put(self, lines: bytes, transient: bytes | None = None) -> None: ...

    def put_prompt(self, text: bytes) -> None: ...


class Followed(Protocol):
    """A stream that grows, and that a StreamTail follows: a Spool of log_spool.py."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def memory_path(self) -> Path: ...

    def read(self, begin: int, bytes_max: int) -> tuple[bytes, int]:
        """Bytes from this offset on, and the offset after them. OSError."""

    def use(self) -> None: ...

    def leave(self) -> None: ...


class StreamTail:
    """One followed stream, as prefixed lines for one sink."""

    def __init__(
        self,
        followed: Followed,
        prefix: bytes,
        *,
        live: bool = False,
        needles: tuple[bytes, ...] = (),
        asks: bool = False,
        rank: int | None = None,
        held: HeldTraceback | None = None,
    ) -> None:
        """`asks`: the terminal is interactive, so prompts are shown. `rank`: its lines may be folded with those of
        other ranks. `held`: a traceback at its end is kept back."""
        self.followed = followed
        followed.use()
        self.rank = rank
        self.held = held
        self.read_bytes = 0
        """Bytes read so far; it only grows."""
        self.changed_at = 0.0
        """The time at which something was read last."""
        self.drawn = b""
        """The part of the unfinished line that was drawn last."""
        self.prefix = prefix
        """Set from any thread, as are `rank` and `hidden`."""
        self.hidden = False
        """Nothing of it is shown now."""
        self.ended = False
        """Set from any thread: no more will be written."""
        self.over = False
        """It has ended, and was shown to its end."""
        self._live = live
        self._asks = asks
        self._needles = needles
        self._cutter = LineCutter()
        self._watch_handle: int | None = None
        """None: it is not open."""
        self._offset = 0
        """Offset in the stream of the next byte to read."""
        self._has_more = False
        """The newest read has left bytes that are there already."""
        self._progress_shown: bytes | None = None
        """The state of a line that overwrites itself which was shown last; None: none since the last whole line."""
        self._progress_due = 0.0
        """The time before which no other such state is shown."""

    def open(self, watch: ChangeWatch) -> None:
        """Begin to follow the stream."""
        self._watch_handle = watch.add(self.followed.memory_path)

    def close(self, watch: ChangeWatch | None) -> None:
        """`watch`: None if it was never opened."""
        if self._watch_handle is not None and watch is not None:
            watch.remove(self._watch_handle)
            self._watch_handle = None
        self.followed.leave()

    def take(self, now: float) -> tuple[bytes, bool]:
        """The next lines, not yet prefixed, and whether more may be available at once."""
        chunk = self._read()
        if not chunk:
            return b"", False
        self.changed_at = now
        lines = self._without_repeat(self._cutter.feed(chunk))
        if lines:
            self.drawn = b""
        # It is read on: after a loss this worker may get a rank that is shown
        # (test_a_worker_that_gets_a_rank_of_the_filter_is_shown_from_then_on).
        if self.hidden:
            return b"", self._has_more
        if self.held is not None:
            lines = self.held.feed(lines, now)
        return lines, self._has_more

    def finish(self, now: float) -> bytes:
        """The last line, if it has no newline."""
        lines = self._without_repeat(self._cutter.flush())
        if self.hidden:
            return b""
        return self.held.feed(lines, now) if self.held is not None else lines

    def take_progress(self, now: float) -> tuple[bytes, float | None]:
        """The state of a line that overwrites itself, as a line, or the time of the next check. It is for a sink that
        is no terminal."""
        state = self._cutter.progress
        if self.hidden or not state or state == self._progress_shown:
            return b"", None
        if self.held is not None and self.held.due is not None:  # it was printed before
            return b"", self.held.due
        if now < self._progress_due:
            return b"", self._progress_due
        self._progress_shown, self._progress_due = state, now + PROGRESS_S
        return self.dress(state + b"\n"), None

    def transient(self) -> tuple[bytes, float | None]:
        """The unfinished line, and the time at which it is due; None: it is drawn already, or there is none. It is for
        a terminal."""
        text = b"" if self.hidden else self._cutter.newest
        if text == self.drawn or not text:
            return text, None
        return text, self.changed_at if b"\r" in self._cutter.partial else self.changed_at + PROMPT_S

    def is_prompt(self, text: bytes) -> bool:
        """Whether the text looks like a question that waits for typed input."""
        return self._asks and b"\r" not in self._cutter.partial and text.rstrip(b" ").endswith(PROMPT_ENDS)

    def give_prompt(self, text: bytes) -> bytes:
        """The prompt. It is removed from the line to come, because the typed answer follows it on the screen."""
        self._cutter.partial = b""
        self.drawn = b""
        return self.prefix + tame(text)

    def draw(self, text: bytes) -> bytes:
        """The unfinished line in the form for a terminal. It counts as drawn from now on."""
        self.drawn = text
        return self.prefix + tame(text) if text else b""

    def _read(self) -> bytes:
        chunk, torn = b"", False
        try:
            size = self.followed.size_bytes
            if size < self._offset:  # the worker truncated it
                self._offset, torn = 0, True
            before, missing_bytes = -1, 0
            # Again, if only bytes were passed over.
            while not chunk and before < self._offset < size:
                before = self._offset
                chunk, self._offset = self.followed.read(before, min(size - before, CHUNK_BYTES_MAX))
                missing_bytes += self._offset - before - len(chunk)
            self._has_more = bool(chunk) and self._offset < size
        except OSError:  # no descriptor is left, or no memory
            return b""
        self.read_bytes += len(chunk)
        if missing_bytes:
            chunk = b"holdfast: %d bytes of output are missing here\n%s" % (missing_bytes, chunk)
        # The rest of the unfinished line will never come: what is there now must not become its end.
        ends_line = (torn or missing_bytes > 0) and self._cutter.partial != b""
        return b"\n" + chunk if ends_line else chunk

    def _without_repeat(self, lines: bytes) -> bytes:
        """A line whose last state was shown as progress is not shown again."""
        if lines and self._progress_shown is not None:
            first, _, others = lines.partition(b"\n")
            # The bar ended in the state that was shown last (test_a_shown_state_is_not_repeated).
            if first == self._progress_shown:
                lines = others
            self._progress_shown = None
        return lines

    def dress(self, lines: bytes) -> bytes:
        """The lines in the form for the sink."""
        if self._needles:
            lines = keep_matching(lines, self._needles)
        return add_prefix(self.plain(lines), self.prefix)

    def plain(self, lines: bytes) -> bytes:
        """The lines without control sequences that would disturb a shared terminal."""
        return tame(lines) if self._live else lines


class TailGroup:
    """The files of one attempt that go to one sink."""

    def __init__(
        self, tails: Sequence[StreamTail], done: Callable[[], None] | None = None, fold: LineFold | None = None
    ) -> None:
        """`done` is called in the console's thread when everything was put into the sink, or abandoned."""
        self.tails = tuple(tails)
        self.fold = fold
        self._done = done
        self.ended = False
        """Set from any thread: no more will be written."""
        self.shown_elsewhere: dict[int, str] | None = None
        """Set from any thread: tracebacks that are shown elsewhere, by rank. None: not known yet."""
        self.turn = 0
        """Index of the tail that is read next."""
        self._opened = 0
        """Number of tails that are open: those at the beginning of `tails`, since others are added at its end."""
        self._lock = threading.Lock()
        """Guards `tails`, to which the agent's thread adds."""

    def add(self, tail: StreamTail) -> None:
        """Follow one more file. Called from any thread."""
        with self._lock:
            self.tails = (*self.tails, tail)

    def end(self, followed: Collection[Followed]) -> None:
        """Nothing more will be written into these. Called from any thread."""
        for tail in self.tails:
            if tail.followed in followed:
                tail.ended = True

    def pass_over(self) -> None:
        """Nothing can be shown: what has ended is over."""
        for tail in self.tails:
            tail.over = tail.ended

    def close_over(self, watch: ChangeWatch) -> None:
        """Close the files that have ended and were shown to their ends."""
        for tail in [each for each in self.tails if each.over]:
            with self._lock:
                self.tails = tuple(each for each in self.tails if each is not tail)
            self._opened -= 1
            self.turn = 0
            tail.close(watch)

    def open(self, watch: ChangeWatch) -> None:
        tails = self.tails
        for tail in tails[self._opened :]:
            tail.open(watch)
        self._opened = len(tails)

    def close(self, watch: ChangeWatch) -> None:
        for tail in self.tails:
            tail.close(watch)
        if self._done is not None:
            self._done()


class Lane:
    """All output that goes to one sink, attempt after attempt."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.read_bytes = 0
        """Bytes read so far, of all groups; it only grows."""
        self._groups: deque[TailGroup] = deque()
        self._drawn_at = 0.0
        """The time at which the transient last line was drawn last."""
        self._owner: StreamTail | None = None
        """The tail whose unfinished line is the transient last line."""
        self._prompt = b""
        """A prompt to show after the lines that came before it."""

    @property
    def idle(self) -> bool:
        return not self._groups

    def add(self, group: TailGroup) -> None:
        self._groups.append(group)

    def pump(self, now: float, watch: ChangeWatch) -> float | None:
        """Show available lines while the sink has room. Returns the time of the next call; None: call it when a file
        has changed."""
        while self._groups and self.sink.free:
            # One attempt after the other: lines of the next one must not come between.
            group = self._groups[0]
            # Both are read before the files: what is read from the files afterwards is then their final content.
            over = group.ended
            group.open(watch)
            elsewhere = group.shown_elsewhere
            due = None
            if self.sink.broken:
                group.pass_over()
            else:
                due = self._show(group, now, over=over)
            group.close_over(watch)
            if over and due is None and not self.sink.broken:
                due = self._show_held(group, now, elsewhere)
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
        """Show what this group has now. Returns the time of the next call; None: call it when a file has changed, or
        never if the group is over."""
        blocks: list[bytes] = []
        size = 0
        more = False
        # Before the files are read, as in `pump`.
        ended = [tail for tail in group.tails if tail.ended]

        # One chunk of each file in turn, from where the last call stopped: a busy rank must not hide the others.
        for _ in group.tails:
            tail = group.tails[group.turn]
            group.turn = (group.turn + 1) % len(group.tails)
            before = tail.read_bytes
            block, has_more = tail.take(now)
            self.read_bytes += tail.read_bytes - before
            self._put(group, tail, block, now, blocks)
            size += len(block)
            more = more or has_more
            if size >= CHUNK_BYTES_MAX:
                more = True
                break

        if not more:
            for tail in ended:
                self._finish(group, tail, now, blocks)

        # The unfinished line at the end. Its owner may have finished it just now: then it is removed.
        due: float | None = AT_ONCE
        transient = b"" if self._owner is not None and not self._owner.drawn else None
        if not more and over:
            for tail in group.tails:
                self._put(group, tail, tail.finish(now), now, blocks)
            due, transient = None, b""
        elif not more and self.sink.live:
            due, transient = self._next_transient(group, now, transient)
        elif not more:
            due = self._add_progress(group, now, blocks)
        if transient == b"":
            self._owner = None

        # Lines that are held or folded wait for their time, unless something that must not overtake them is shown now.
        at_end = over and due is None
        dues = [] if due is None else [due]
        if not at_end:
            dues += self._release_late(group, now, blocks)
        if group.fold is not None and group.fold.due is not None:
            if at_end or transient or self._prompt or group.fold.due <= now:
                blocks.append(group.fold.take())
            else:
                dues.append(group.fold.due)

        lines = b"".join(blocks)
        if lines or transient is not None:
            self.sink.put(lines, transient)
        if self._prompt:
            self.sink.put_prompt(self._prompt)
            self._prompt = b""
        return min(dues, default=None)

    def _finish(self, group: TailGroup, tail: StreamTail, now: float, blocks: list[bytes]) -> None:
        """Show the rest of a file that has ended. It is over when none of its lines waits any more."""
        self._put(group, tail, tail.finish(now), now, blocks)
        holds = tail.held is not None and tail.held.due is not None
        tail.over = not holds and (group.fold is None or group.fold.due is None)

    def _put(self, group: TailGroup, tail: StreamTail, lines: bytes, now: float, blocks: list[bytes]) -> None:
        """Put these lines into the sink, at once or folded with those of other ranks."""
        if not lines:
            return
        if group.fold is None or tail.rank is None:
            blocks.append(tail.dress(lines))
            return
        if len(lines) > FOLD_BYTES_MAX or group.fold.full:  # what waits is older than these lines, and comes first
            blocks.append(group.fold.take())
        if len(lines) > FOLD_BYTES_MAX:
            blocks.append(tail.dress(lines))
        else:
            group.fold.add(id(tail), tail.rank, tail.plain(lines), now)

    def _release_late(self, group: TailGroup, now: float, blocks: list[bytes]) -> list[float]:
        """Release tracebacks that were held long enough. Returns the times at which the others are due."""
        dues = []
        for tail in group.tails:
            if tail.held is None or tail.held.due is None:
                continue
            if tail.held.due <= now:
                self._put(group, tail, tail.held.release(), now, blocks)
            else:
                dues.append(tail.held.due)
        return dues

    def _show_held(self, group: TailGroup, now: float, elsewhere: dict[int, str] | None) -> float | None:
        """Show the held tracebacks of a group whose workers have ended, except those that are shown elsewhere. Returns
        the time until which it waits to learn that; None: all is shown."""
        held = [(tail, tail.held) for tail in group.tails if tail.held is not None and tail.held.due is not None]
        late = [each.due for _, each in held if each.due is not None and each.due > now]
        # The verdict may still say that it shows them.
        if elsewhere is None and late:
            return min(late)
        blocks: list[bytes] = []
        for tail, each in held:
            without = (elsewhere or {}).get(tail.rank, "") if tail.rank is not None else ""
            self._put(group, tail, each.release(without), now, blocks)
        if group.fold is not None:
            blocks.append(group.fold.take())
        if lines := b"".join(blocks):
            self.sink.put(lines)
        return None

    def _add_progress(self, group: TailGroup, now: float, blocks: list[bytes]) -> float | None:
        """Add the states of lines that overwrite themselves. Returns the time of the next one; None: there is none."""
        # They come after the lines that their ranks printed before, which may be folded meanwhile
        # (test_a_progress_bar_comes_after_the_lines_before_it).
        if group.fold is not None and group.fold.due is not None:
            if group.fold.due > now:
                return group.fold.due
            blocks.append(group.fold.take())
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
        """The time at which the transient line changes next, and its new text now (None: it stays)."""
        waiting: list[tuple[float, StreamTail, bytes]] = []
        for tail in group.tails:
            text, due = tail.transient()
            if due is not None:
                waiting.append((max(due, self._drawn_at + TRANSIENT_S), tail, text))
        ready = [each for each in waiting if each[0] <= now]
        if ready:
            # There is one such line, and several bars may want it: the one that moved last gets it.
            _, tail, text = max(ready, key=lambda each: each[1].changed_at)
            self._owner, self._drawn_at = tail, now
            if tail.is_prompt(text):
                self._owner, transient = None, None
                self._prompt = tail.give_prompt(text)
            else:
                transient = tail.draw(text)
        later = [
            now + TRANSIENT_S if due <= now else due for due, tail, _ in waiting if not (ready and tail is self._owner)
        ]
        return min(later, default=None), transient


class LogTail:
    """All lanes together, as a Source of the console. A lane ends with its last group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # groups are added from the agent's thread
        self._lanes: tuple[Lane, ...] = ()
        self._left_bytes = 0
        """Bytes read by lanes that have ended."""
        self._watch: ChangeWatch | None = None
        self.abandoned = False
        """Set from any thread: show nothing more."""
        self.closed = False
        """It was abandoned, and has closed everything."""

    def add(self, sink: Sink, group: TailGroup) -> None:
        """Show the group after all earlier ones of this sink. The caller must wake the console afterwards."""
        with self._lock:
            lane = next((lane for lane in self._lanes if lane.sink is sink), None)
            if lane is None:
                lane = Lane(sink)
                self._lanes = (*self._lanes, lane)
            lane.add(group)

    @property
    def idle(self) -> bool:
        """Whether every group has ended and was shown to its end."""
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
