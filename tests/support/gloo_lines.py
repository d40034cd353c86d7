"""Removes the lines that gloo itself prints on stdout with some versions of torch: one for each group of each rank.

2.9.1 does so, 2.6.0 and 2.11.0 do not. No test is about them.
"""

from __future__ import annotations

import re

_BEGIN = r"\[Gloo\] Rank "
_PIECES = rf"(?:{_BEGIN}|\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : |\n)*\n"
_LINES = re.compile(rf"(?:^|(?<=\f))(?:[^\n|]*\| )?{_BEGIN}{_PIECES}", re.MULTILINE)
"""gloo writes a line in pieces, and ranks that share a file write between each other's. A form feed ends a run of several
(on_ranks.py)."""


def without_gloo_lines(stdout: str) -> str:
    """The output of a program, or of the console, without them."""
    return _LINES.sub("", stdout)
