"""Console lines: cut from bytes, prefixed, filtered, and shown once where several ranks print the same. PURE.

Knows lines and ranks. Must not know files, sinks or what a prefix means. Files are never touched: they hold everything.

- `LineCutter` cuts bytes into lines. Progress bars overwrite themselves with a carriage return: of such a line only the
  last state is shown.
- `LineFold` keeps lines for a moment and shows a line that several ranks print as one. Each rank's own order stays.
- `HeldTraceback` keeps back the traceback that a worker may be ending with, until its agent knows whether the last
  screen shows it. Without an answer in time it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

LINE_BYTES_MAX = 1024 * 1024
"""A longer line is cut."""

_TRAILING_RETURNS = re.compile(rb"(?<!\r)\r+\n")
_OVERWRITTEN = re.compile(rb"(?m)^[^\n]*\r")
_SUSPECT = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
_CONTROL = re.compile(
    rb"\x1b(?!\[[0-9;:]*m)"
    rb"(?:\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\[[0-?]*[ -/]*[@-~]?|[PX^_][^\x1b\n]*(?:\x1b\\)?|[ -/]*[0-~]?)"
    rb"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]|\xc2(?![\xa0-\xbf])[\x80-\x9f]?"
)
"""Titles and links, cursor movements, device strings, other escapes, and single control characters; no colours. As in
dashboard/log_text.py, in bytes: half a character goes, too, since the removal of what follows would complete it."""
_ESCAPE = b"\x1b["
_COLOUR_RESET = b"\x1b[0m"


class LineCutter:
    """Turns bytes into whole lines; of a line that overwrites itself, keeps only the last state."""

    __slots__ = ("partial",)

    def __init__(self) -> None:
        self.partial = b""
        """The unfinished line; when it overwrote itself: its last complete state, a carriage return, the next state."""

    def feed(self, chunk: bytes) -> bytes:
        """The lines that are complete now, each ending with a newline and without carriage returns."""
        data = self.partial + chunk if self.partial else chunk
        cut = data.rfind(b"\n") + 1
        whole, rest = data[:cut], data[cut:]
        if b"\r" in whole:
            whole = _OVERWRITTEN.sub(b"", _TRAILING_RETURNS.sub(b"\n", whole))
        if b"\r" in rest:
            # A bar may redraw itself for hours without a newline: only its last state is kept.
            *states, coming = rest.split(b"\r")
            rest = next((state for state in reversed(states) if state), b"") + b"\r" + coming
        # A program may never write a newline (test_a_line_without_end_is_bounded).
        if len(rest) > LINE_BYTES_MAX:
            state = _last_state(rest)
            end = len(state) - _begun_bytes(state)
            whole, rest = whole + state[:end] + b"\n", state[end:]
        self.partial = rest
        return whole

    def flush(self) -> bytes:
        """The unfinished line as a line; b"" when there is none."""
        state, self.partial = _last_state(self.partial), b""
        return state + b"\n" if state else b""

    @property
    def progress(self) -> bytes:
        """The last state that a carriage return completed."""
        return self.partial.partition(b"\r")[0] if b"\r" in self.partial else b""

    @property
    def newest(self) -> bytes:
        """The text that a terminal would show in the unfinished line."""
        return _last_state(self.partial)


def _last_state(text: bytes) -> bytes:
    return next((state for state in reversed(text.split(b"\r")) if state), b"")


def _begun_bytes(text: bytes) -> int:
    """The number of bytes at the end that begin a character of UTF-8 and do not complete it.

    >>> [_begun_bytes("12€".encode()[:size]) for size in (2, 3, 4, 5)]
    [0, 1, 2, 0]
    """
    for size in range(1, min(3, len(text)) + 1):
        byte = text[-size]
        if byte >= 0xC0:
            return size if size < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            break
    return 0


def add_prefix(lines: bytes, prefix: bytes) -> bytes:
    """
    >>> add_prefix(b"a\\nb\\n", b"0: ")
    b'0: a\\n0: b\\n'
    """
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if prefix and lines else lines


def keep_matching(lines: bytes, needles: Sequence[bytes]) -> bytes:
    """Keep only the lines that contain any of the needles."""
    if not any(needle in lines for needle in needles):
        return b""
    return b"".join(line for line in lines.splitlines(keepends=True) if any(needle in line for needle in needles))


def tame(text: bytes) -> bytes:
    """Make one worker's text safe for a shared terminal: colours stay and end with the line, all other control
    sequences are removed."""
    if not _SUSPECT.search(text):
        return text
    text = _CONTROL.sub(b"", text)
    return b"\n".join(line + _COLOUR_RESET if _ESCAPE in line else line for line in text.split(b"\n"))


FOLD_S = 0.2
"""Time for which a line waits for an equal line of other ranks (s)."""
FOLD_LINES_MAX = 200
FOLD_BYTES_MAX = 16 * 1024
"""Larger output is shown at once: nobody reads along at that rate."""
HOLD_S = 2.0
"""A worker that still lives this long after a traceback has caught the exception, or ends slowly."""
HELD_BYTES_MAX = 64 * 1024

_OWN_STAMP = re.compile(rb"^(?:\[rank\d+\]: ?)?(?:\[?[EWIF]\d{4} \d\d:\d\d:\d\d\.\d+(?: +\d+)? )?")
"""The prefix that torch puts before a line, which differs between ranks: `[rank3]:[W1122 10:03:24.117
socket.cpp:767]`."""
_TORCH_RANK = re.compile(rb"^\[rank\d+\]: ?")
_TRACEBACK = re.compile(
    rb"(?m)^(?:\[rank\d+\]: ?)?(?:(?:  \+ Exception Group )?Traceback \(most recent call last\):"
    rb'|  File "[^"\n]+", line \d+$)'
)
"""The second form: an error in the syntax of the script itself has no frames, and Python writes no heading."""


class _Stream:
    """Lines of one stream of one rank that wait for equal lines of other ranks."""

    __slots__ = ("keys", "next", "rank", "texts")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.texts: list[bytes] = []
        self.keys: list[bytes] = []
        """The part of each of `texts` that must be equal in two equal lines."""
        self.next = 0
        """Index of the first line that is not shown yet."""

    def find(self, key: bytes) -> int | None:
        """Index of the next line with this key; None: there is none."""
        try:
            return self.keys.index(key, self.next)
        except ValueError:
            return None


class LineFold:
    """Collects the lines of several ranks for one sink."""

    def __init__(self, prefix: Callable[[Sequence[int]], bytes]) -> None:
        """`prefix` returns the prefix of a line that these ranks have printed."""
        self._prefix = prefix
        self._streams: dict[int, _Stream] = {}
        self._arrived: list[_Stream] = []
        """The stream of each line, in order of arrival."""
        self._bytes = 0
        """Length of all lines together."""
        self.due: float | None = None
        """The time at which `take` is due (s of the caller's clock); None: there are no lines."""

    @property
    def full(self) -> bool:
        return self._bytes > FOLD_BYTES_MAX or len(self._arrived) > FOLD_LINES_MAX

    def add(self, stream: int, rank: int, lines: bytes, now: float) -> None:
        """Add whole lines of one stream of one rank; `stream` is any number that identifies it."""
        self._bytes += len(lines)
        self.due = self.due if self.due is not None else now + FOLD_S
        waiting = self._streams.setdefault(stream, _Stream(rank))
        for text in lines[:-1].split(b"\n"):
            waiting.texts.append(text)
            # Two lines of torch differ in rank and time only
            # (test_a_warning_of_torchs_is_the_same_whatever_its_rank_and_time).
            waiting.keys.append(_OWN_STAMP.sub(b"", text))
            self._arrived.append(waiting)

    def take(self) -> bytes:
        """All lines with their prefixes, in order of arrival; equal lines are merged."""
        shown: list[bytes] = []
        indexes: dict[int, int] = {}
        for stream in self._arrived:
            index = indexes[id(stream)] = indexes.get(id(stream), -1) + 1
            if index >= stream.next:  # else it was shown already, as the equal line of another stream
                self._show(stream, shown, ())
        self._streams, self._arrived, self._bytes, self.due = {}, [], 0, None
        return b"".join(shown)

    def _show(self, stream: _Stream, shown: list[bytes], busy: tuple[_Stream, ...]) -> None:
        """Show the next line of this stream, after the lines that other streams printed before the same line.

        `busy`: streams with a line that a caller is about to show. They cannot show another line in between.
        """
        text, key = stream.texts[stream.next], stream.keys[stream.next]
        busy = (*busy, stream)
        ranks = [stream.rank]
        for other in self._streams.values():
            # A rank is counted once: what one rank says twice stays twice
            # (test_what_one_rank_says_twice_stays_twice).
            if other in busy or other.rank in ranks or (index := other.find(key)) is None:
                continue
            # What that rank printed before comes first: the order of each rank's own lines stays
            # (test_each_rank_keeps_the_order_of_its_own_lines).
            while other.next < index:
                self._show(other, shown, busy)
            if other.next == index:  # else a line before it has taken it along
                other.next += 1
                ranks.append(other.rank)
                # This line is shown below, after lines of the streams that follow. Its next line must not come with
                # one of those (test_the_order_of_each_rank_stays_whatever_they_print).
                busy = (*busy, other)
        stream.next += 1
        times = f" (×{len(ranks)})".encode() if len(ranks) > 1 and text.strip() else b""
        shown.append(self._prefix(sorted(ranks)) + text + times + b"\n")


class HeldTraceback:
    """Holds the end of one worker's stderr, from the first traceback that may be its last."""

    def __init__(self) -> None:
        self._held = b""
        self.due: float | None = None
        """The time at which it is shown without a decision about it (s of the caller's clock); None: nothing is
        held."""

    def feed(self, lines: bytes, now: float) -> bytes:
        """The part of these lines that can be shown now."""
        if self._held:
            self._held += lines
            return self.release() if len(self._held) > HELD_BYTES_MAX else b""
        found = _TRACEBACK.search(lines)
        if found is None or len(lines) - found.start() > HELD_BYTES_MAX:
            return lines
        self._held, self.due = lines[found.start() :], now + HOLD_S
        return lines[: found.start()]

    def release(self, without: str = "") -> bytes:
        """All held lines, but not the lines of `without`: they are shown elsewhere."""
        held, self._held, self.due = self._held, b"", None
        return without_text(held, without) if without else held


def without_text(lines: bytes, text: str) -> bytes:
    """These lines without one run of lines that equal the text, whatever prefix torch has put before them.

    >>> without_text(b"a\\n[rank1]: b\\n[rank1]: c\\nd\\n", "b\\nc\\n")
    b'a\\nd\\n'
    """
    wanted = text.rstrip().encode(errors="backslashreplace").split(b"\n")
    there = lines.splitlines(keepends=True)
    plain = [_TORCH_RANK.sub(b"", line).rstrip(b"\r\n") for line in there]
    # From the end: the traceback that ended the worker is the last one.
    for start in range(len(plain) - len(wanted), -1, -1):
        if plain[start : start + len(wanted)] == wanted:
            return b"".join(there[:start] + there[start + len(wanted) :])
    return lines
