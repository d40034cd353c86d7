"""Fails in the way that is asked for: failures.py CASE. What each case is, and whose fault it is, is in `failing/`."""

from __future__ import annotations

import sys

from failing import CASES, play

if __name__ == "__main__":
    play(CASES[sys.argv[1]])
