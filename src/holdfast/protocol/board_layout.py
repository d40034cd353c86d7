"""The layout of the board: a little memory that an agent shares with its workers, one generation long.

Words of 8 bytes in the machine's own order, each written by one side only. A header of the agent's, then a slot for
each local rank, of the worker's. Imports nothing: the bootstrap loads it by its path, under any Python.
"""

from __future__ import annotations

BOARD_VARIABLE = "HOLDFAST_BOARD"
"""In a worker's environment: `PATH@SLOT`, where the board is and the first word of this worker's slot."""

WORD_BYTES = 8
SLOT_WORDS = 16
"""Of the header as well; two cache lines, of which the second changes with every step."""

# The header's words.
HELD = 0
"""1: workers wait at their next safe point until SAFE_POINT is not 0 or this is 0 again."""
SAFE_POINT = 1
"""Where the workers stop, counted from 1; 0: nowhere. Set once."""
RAISED = 2
"""The agent's descriptor of a pipe. A worker whose program raised an exception writes the index of its slot there, as
REPORT_BYTES in the machine's own order: the agent acts on it while the process is still on its way out."""
REPORT_BYTES = 4

# A slot's words, relative to its first.
PID = 0
"""Whose slot it is; 0: nobody has asked for a safe point yet."""
REACHED = 1
"""The newest safe point this worker has reached, counted from 1."""
TOLD = 2
"""The safe point at which it was told to stop; 0: it was not."""


# Moments of a worker's start and of its steps: nanoseconds of the monotonic clock, which all processes share; 0: not yet.
MEETING = 3
"""It asks for its process group: whatever it imports and sets up first is done."""
STORE = 4
"""It is connected to the store."""
GROUP = 5
"""It has its process group."""
FIRST_STEP = 6
"""The first step of an optimizer is done."""
STEPS = 7
"""How many steps of an optimizer are done: a number, and no moment."""
LAST_STEP = 8
OWN = 9
"""Nanoseconds of all steps together from the end of the step before to the beginning of backward: a number."""
BEATS = 10
"""How many times the program said that it goes on, holdfast.worker.beat(): a number."""
LAST_BEAT = 11

STACKS = 12
"""Of the agent's, before the worker is started: its descriptor of the file for this worker's stacks; 0: there is none."""
BEGAN_AT = 13
"""The step of the whole job, as the script counts it over all restarts, at which this worker began, plus 1; 0: it does not say."""
AT = 14
"""The same of the step that it does now."""

LOOK_SIGNAL = 62
"""SIGRTMAX - 2 on Linux: a worker that catches it writes the stacks of all its threads into that file. For workers that
sleep: a thread that runs meanwhile changes what is being read, and the worker may die of it."""
LOOK_MAIN_SIGNAL = 61
"""The same for the thread that catches it alone. Sent to the main thread of a worker that runs: nobody else touches what an
interrupted thread has on its stack."""


def size_bytes(nproc: int) -> int:
    return (1 + nproc) * SLOT_WORDS * WORD_BYTES


def slot(local_rank: int) -> int:
    """The index of the first word of this rank's slot."""
    return (1 + local_rank) * SLOT_WORDS
