"""Shortens the text of a Python traceback.

The root and the last exception of a chain stay, and of each the outermost and innermost frames and the first lines of
the message. What is left out is counted in brackets.

Pure, standard library only: supervisors use it before they send a traceback, the last screen before it shows one.
"""

from __future__ import annotations

import re

JOINT = re.compile(
    r"(?<!\n)\n*^(?:During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:)\s*\n",
    re.MULTILINE,
)
"""The lines that Python prints between two exceptions of a chain."""
LINE_CHARACTERS_MAX = 2000
FRAME = re.compile(r"^[\s|+-]*File \"")
LEVELS = (400, 200, 100, 50, 25, 12)
"""Numbers of lines that are tried in turn until the bytes fit."""
OUTER_LINES, MESSAGE_LINES_MIN = 4, 3


def shortened(text: str, *, bytes_max: int) -> str:
    """The traceback in at most this many bytes."""
    if len(text.encode(errors="replace")) <= bytes_max:
        return cut_middle(text, bytes_max)
    narrow = "\n".join(line[:LINE_CHARACTERS_MAX] for line in text.splitlines())
    for lines_max in LEVELS:
        found = fewer_lines(narrow, lines_max)
        if len(found.encode(errors="replace")) <= bytes_max:
            return cut_middle(found, bytes_max)
    return cut_middle(found, bytes_max)


def cut_middle(text: str, bytes_max: int) -> str:
    """The text in at most this many bytes of valid UTF-8: a quarter of them from its beginning, the rest from its end,
    which says most."""
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= bytes_max:
        return raw.decode()
    mark = b"\n[...]\n"
    head = (bytes_max - len(mark)) // 4
    tail = bytes_max - len(mark) - head
    return raw[:head].decode(errors="ignore") + mark.decode() + raw[-tail:].decode(errors="ignore")


def fewer_lines(text: str, lines_max: int) -> str:
    """The traceback in at most this many lines (at least 12).

    >>> print(fewer_lines("\\n".join(f"line {number}" for number in range(100)), 12))
    line 0
    line 1
    line 2
    line 3
    [... 89 lines left out ...]
    line 93
    line 94
    line 95
    line 96
    line 97
    line 98
    line 99
    """
    lines = text.rstrip().splitlines()
    if len(lines) <= lines_max:
        return text.rstrip()
    blocks, joints = JOINT.split(text.rstrip()), [found[0].strip() for found in JOINT.finditer(text)]
    if len(blocks) == 1:
        return "\n".join(_shorter(lines, lines_max))

    first, last = blocks[0].splitlines(), blocks[-1].splitlines()
    left_out = len(blocks) - 2
    between = ["", joints[0], ""]
    if left_out:
        between = ["", f"[... {left_out} more exceptions of this chain left out ...]", "", joints[-1], ""]
    room = lines_max - len(between)
    for_last = max(min(len(last), room // 2), room - len(first))
    return "\n".join([*_shorter(first, room - for_last), *between, *_shorter(last, for_last)])


def _shorter(block: list[str], lines_max: int) -> list[str]:
    """One exception in at most this many lines: its frames lose the middle, its message the end."""
    if len(block) <= lines_max:
        return block
    frames = next((number for number in range(len(block) - 1, -1, -1) if FRAME.match(block[number])), -1)
    message = next((n for n in range(frames + 1, len(block)) if block[n][:1].strip()), len(block))
    if frames < 0 or message == len(block):  # no traceback as Python writes it, or that of an exception group
        return _without_middle(block, lines_max)
    for_message = max(min(MESSAGE_LINES_MIN, len(block) - message), lines_max - message)
    head = _without_middle(block[:message], lines_max - for_message)
    return head + _without_end(block[message:], lines_max - len(head))


def _without_middle(lines: list[str], lines_max: int) -> list[str]:
    if len(lines) <= lines_max:
        return lines
    outer = min(OUTER_LINES, lines_max // 2)
    inner = max(0, lines_max - outer - 1)
    mark = f"[... {len(lines) - outer - inner} lines left out ...]"
    return [*lines[:outer], mark, *(lines[-inner:] if inner else [])]


def _without_end(lines: list[str], lines_max: int) -> list[str]:
    """The first lines, and the very last one."""
    if len(lines) <= lines_max:
        return lines
    first = max(lines_max - 2, 1)
    return [*lines[:first], f"[... {len(lines) - first - 1} lines left out ...]", lines[-1]][:lines_max]
