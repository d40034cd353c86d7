"""Bytes of a log to lines of a console: cut, with a prefix, filtered, without what would disturb a shared terminal. PURE.

Progress bars overwrite themselves with a carriage return: of such a line its last state counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LINE_BYTES_MAX = 1024 * 1024
"""A longer line is cut."""

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
