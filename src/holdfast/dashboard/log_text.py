r"""What one line of a worker's log says about itself: when it was written, and whether it is an error. PURE.

A log file has what the worker wrote and nothing else: no times, and no levels. So both are read from the text. A line
without a time takes the one of the line before it in its file. If no line has one, it is only known when the file had
grown to its end (`times`).

Colours (`\x1b[31m`) stay in the text, and the page shows the basic ones. All other control sequences are removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from enum import Enum

COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
CONTROL = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[PX^_][^\x1b]*(?:\x1b\\)?|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
"""Titles and links, cursor movements and colours, device strings, other escapes, and single control characters."""
HEAD_CHARACTERS = 80
"""Number of characters at the beginning of a line in which its time and its level are searched."""
RANK = re.compile(r"^\[(?:rank)?\d+\]: ?")
TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
TORCH_TIME = re.compile(r"^\[?[EWIF](\d\d)(\d\d) (\d\d:\d\d:\d\d)\.(\d{1,9})")
"""The time in lines of torch's C++ code, such as `[W1122 10:03:24.117 socket.cpp:767]`: month and day, without a
year."""
TRACEBACK = re.compile(r"^[ +|]*(?:Exception Group )?Traceback \(most recent call last\):")
IN_TRACEBACK = re.compile(r"^(?:\s|$|[+|] )")
ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)(?::|$)|Fatal Python error|Segmentation fault"
    r"|terminate called|During handling of the above exception|The above exception was the direct cause"
    r"|\[?[EF]\d{4} \d\d:|(?:\S+: )?(?:[Ff]atal )?[Ee]rror: )"
    r"|\b(?:ERROR|CRITICAL|FATAL)\b"
    r'|"level(?:name)?": ?"(?i:error|critical|fatal)"'
)
WARNING = re.compile(r"^\[?W\d{4} \d\d:|\bWARN(?:ING)?\b|\b\w*Warning: |\"level(?:name)?\": ?\"(?i:warn)")


class LineLevel(Enum):
    """The level of a line, as the page names it."""

    ERROR = "error"
    WARNING = "warning"
    OTHER = ""


def without_controls(line: str) -> str:
    """The line with colours as its only control sequences.

    >>> without_controls("\\x1b[2K\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07\\x08")
    '\\x1b[31mred\\x1b[0m'
    """
    return CONTROL.sub(lambda found: found[0] if COLOUR.fullmatch(found[0]) else "", line)


def plain(line: str) -> str:
    """The line without colours, as it is searched. `line` is a result of `without_controls`."""
    return COLOUR.sub("", line) if "\x1b" in line else line


class Levels:
    """The levels of one file's lines, in order: a traceback has many lines, and only its first one says what it is."""

    def __init__(self) -> None:
        self._in_traceback = False

    def next(self, line: str) -> LineLevel:
        """The level of the file's next line."""
        text = RANK.sub("", plain(line))
        if TRACEBACK.match(text):
            self._in_traceback = True
            return LineLevel.ERROR
        if self._in_traceback:  # the last line of a traceback names the exception, and is not indented
            self._in_traceback = IN_TRACEBACK.match(text) is not None
            return LineLevel.ERROR
        head = text[:HEAD_CHARACTERS]
        return LineLevel.ERROR if ERROR.search(head) else LineLevel.WARNING if WARNING.search(head) else LineLevel.OTHER


def times(lines: Sequence[str], written_s: Sequence[float]) -> list[float]:
    """The time (epoch s) at which each of these lines of one file was written. It never decreases.

    A line's own text says it, or the line before. `written_s` is, for each line, the earliest change of the file after
    which the line is known to have been there. It counts for lines behind the last time in the text, unless they
    continue that line (they are indented), and so for all lines of a file without times.
    """
    if not lines:
        return []
    year = datetime.fromtimestamp(written_s[-1]).year
    own = [_time(plain(line), year) for line in lines]
    known = [each for each in own if each is not None]
    now_s, times_ahead = known[0] if known else written_s[0], len(known)
    found: list[float] = []
    for line, at_s, latest_s in zip(lines, own, written_s, strict=True):
        if at_s is not None:
            now_s, times_ahead = max(now_s, at_s), times_ahead - 1
        elif not times_ahead and line and not line[0].isspace():
            now_s = max(now_s, latest_s)
        found.append(now_s)
    return found


def _time(line: str, year: int) -> float | None:
    """The time (epoch s) in the text of a line; None: there is none. `year` is for torch's times, which lack it."""
    text = RANK.sub("", line)[:HEAD_CHARACTERS]
    if found := TIME.search(text):
        date, clock, fraction, zone = found[1], found[2], found[3], found[4] or ""
    elif found := TORCH_TIME.match(text):
        date, clock, fraction, zone = f"{year}-{found[1]}-{found[2]}", found[3], found[4], ""
    else:
        return None
    try:
        return datetime.fromisoformat(f"{date}T{clock}.{(fraction or '0')[:6]:0<6}{zone}").timestamp()
    except (ValueError, OverflowError, OSError):  # digits that are no date, or one that this machine cannot hold
        return None
