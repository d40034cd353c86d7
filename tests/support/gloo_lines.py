"""Removes the lines that gloo itself prints on stdout with some versions of torch: one for each group of each rank.

2.9.1 does so, 2.6.0 and 2.11.0 do not. No test is about them.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"^(?:[^\n|]*\| )?\[Gloo\] Rank \d+ is connected to [^\n]*\n", re.MULTILINE)


def without_gloo_lines(stdout: str) -> str:
    """The output of a program, or of the console, without them."""
    return _LINE.sub("", stdout)
