"""Ranks as users write them: `3`, `0-7`, `1,5`."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.protocol.errors import UsageError

RANKS_MAX = 1_000_000
"""Largest number of ranks in one range."""


def ranks_of(texts: Sequence[str] | None, option: str = "--rank") -> set[int]:
    """The ranks of `--rank 3 --rank 0-7,12`; empty: all. Raises UsageError.

    >>> sorted(ranks_of(["3", "0-1,8"]))
    [0, 1, 3, 8]
    """
    found: set[int] = set()
    for text in texts or ():
        for part in text.split(","):
            first, dash, last = part.partition("-")
            written = first.isdecimal() and (not dash or last.isdecimal())
            ranks = range(int(first), int(last or first) + 1) if written else range(0)
            if not 0 < len(ranks) <= RANKS_MAX:  # no rank would mean all
                raise UsageError(f"{option} {text}: write ranks like 3, 0-7 or 1,5")
            found |= set(ranks)
    return found
