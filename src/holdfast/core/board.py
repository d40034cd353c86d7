"""The layout of the board: a little memory that an agent shares with its workers, one generation long.

Words of 8 bytes in the machine's own order, each written by one side only. A header of the agent's, then a slot for
each local rank, of the worker's; a slot fills a cache line.
"""

from __future__ import annotations

BOARD_VARIABLE = "HOLDFAST_BOARD"
"""In a worker's environment: `PATH@SLOT`, where the board is and the first word of this worker's slot."""

WORD_BYTES = 8
SLOT_WORDS = 8
"""Of the header as well."""

# The header's words.
HELD = 0
"""1: workers wait at their next safe point until SAFE_POINT is not 0 or this is 0 again."""
SAFE_POINT = 1
"""Where the workers stop, counted from 1; 0: nowhere. Set once."""

# A slot's words, relative to its first.
PID = 0
"""Whose slot it is; 0: nobody has asked for a safe point yet."""
REACHED = 1
"""The newest safe point this worker has reached, counted from 1."""
TOLD = 2
"""The safe point at which it was told to stop; 0: it was not."""


def size_bytes(nproc: int) -> int:
    return (1 + nproc) * SLOT_WORDS * WORD_BYTES


def slot(local_rank: int) -> int:
    """The index of the first word of this rank's slot."""
    return (1 + local_rank) * SLOT_WORDS
