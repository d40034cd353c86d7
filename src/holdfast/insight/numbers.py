"""Numbers for people. PURE."""

from __future__ import annotations

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400


def duration(seconds: float) -> str:
    """In words that fit into a line.

    >>> [duration(s) for s in (0.04, 9.94, 59.7, 200, 7500, 200000)]
    ['0.0 s', '9.9 s', '60 s', '3 min 20 s', '2 h 5 min', '2 d 7 h']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S} s"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S} h"


def plural(number: int, word: str) -> str:
    """
    >>> plural(1, "rank"), plural(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
