"""Layout of the board: a small shared memory of an agent and its workers, for one generation.

It consists of words of 8 bytes in native byte order, each written by one side only: a header, written by the agent,
then a slot for each local rank, written by its worker. Its file also gives the socket for messages its name. Imports
nothing: the bootstrap loads it by its path, under any Python.
"""

from __future__ import annotations

BOARD_VARIABLE = "HOLDFAST_BOARD"
"""Variable of a worker's environment: `PATH@SLOT`, the board's file and the first word of this worker's slot."""
BOARD_NAME = "holdfast-board"
"""Name of the board's memory file, by which a process sees that it has a board before it."""

WORD_BYTES = 8
SLOT_WORDS = 24
"""Size of a slot and of the header: three cache lines, of which the first two change with every step."""

# The header's words.
HELD = 0
"""1: workers wait at their next safe point until SAFE_POINT is not 0 or this is 0 again."""
SAFE_POINT = 1
"""The safe point at which the workers stop, counted from 1; 0: none. It is set once in a generation."""
RAISED = 2
"""The agent's descriptor of a pipe. A worker whose program raised an exception writes the index of its slot there
(REPORT_BYTES, native byte order), so that the agent can react before the process has ended."""
REPORT_BYTES = 4

SAVE_POINTS = 8
"""First of SAVE_POINTS_MAX words with the newest safe points at which the workers save and go on, counted as SAFE_POINT
(see save_word); 0: none. One word would not do: another save may be agreed while a slow rank is still on its way to the
safe point of this one."""
SAVE_POINTS_MAX = 8

# A slot's words, relative to its first.
PID = 0
"""The worker's process; 0: not known yet. The bootstrap writes it before the program runs. Where a program runs without
it (`--no-python`), the first process that asks for a safe point does."""
REACHED = 1
"""The newest safe point that this worker has reached, counted from 1."""
STOP_SEEN = 2
"""The safe point at which `should_stop()` returned true; 0: it has not."""

# Times of a worker's start and steps: nanoseconds of the monotonic clock, which all processes share; 0: not yet.
MEETING = 3
"""It asks for its process group: its imports and set-up are done."""
STORE = 4
"""It is connected to the store."""
GROUP = 5
"""It has its process group."""
FIRST_STEP = 6
"""The first optimizer step is done."""
STEPS = 7
"""Number of optimizer steps that are done (a count, not a time)."""
LAST_STEP = 8
"""The newest optimizer step is done."""
OWN = 9
"""Own part of all steps together, from the end of the previous step to the start of backward (a duration, ns)."""
BEATS = 10
"""Number of calls of holdfast.worker.beat() (a count, not a time)."""
LAST_BEAT = 11
"""The newest call of holdfast.worker.beat()."""

# Other words of a slot.
STACKS = 12
"""The agent's descriptor of the file for this worker's stacks; 0: none. The agent writes it before the start."""
BEGAN_AT = 13
"""The step at which this worker began, plus 1, as the script counts over all restarts; 0: the script reports none."""
AT = 14
"""The current step, plus 1, in the same count."""
TOTAL = 15
"""The number of steps of the whole job, in the same count; 0: the script does not know it."""

PROFILE = 16
"""The order to take a profile: PROFILE_FD has the agent's descriptor of its file (worker/profile.py), the rest a number
that no other order has; 0: none. Written by the agent, read by the worker after each step and on PROFILE_SIGNAL."""
PROFILE_FD = (1 << 32) - 1
"""Mask of the descriptor in PROFILE."""
SAVES = 17
"""1: this worker asks at its safe points whether to save."""
SPARE = 18
"""1: this worker waits as a spare: the training function of `ht.survive` uses fewer ranks than there are."""

RECORDER = 19
"""The worker's descriptor of a pipe, into which the agent writes a question (QUESTION_BYTES, a number in native byte
order) about its collectives (extensions/hangs/worker.py); 0: it cannot answer. The answer, a line, comes into the file
for stacks."""
QUESTION_BYTES = 4
RECORDER_PIPE = 20
"""The inode of that pipe: a program may have closed the descriptor and opened something else."""

PROFILE_SIGNAL = 60
"""SIGRTMAX - 4: a worker that catches it reads PROFILE, for an order that does not count steps."""
HANDLED_SIGNAL = 59
"""SIGRTMAX - 5: a worker that catches it, and whose main thread handles an exception, writes HANDLED and the exception,
and on a second line its place, into the file for stacks. It interrupts a system call: sent only to a main thread in a
wait of Python's own, which Python resumes."""
HANDLED = "Handles: "
HANDLED_CHARACTERS_MAX = 300
INTERRUPT_SIGNAL = 58
"""SIGRTMAX - 6: its handler interrupts a worker in `ht.survive` (train/agent_channel.py). No other process sends it."""
LOOK_SIGNAL = 62
"""SIGRTMAX - 2 on Linux: a worker that catches it writes the stacks of all its threads into the file for stacks. Only
sleeping workers get it: a running thread changes its stack while it is read, which can crash the worker."""
LOOK_MAIN_SIGNAL = 61
"""SIGRTMAX - 3: a thread that catches it writes its own stack, and no other. The main thread of a running worker gets
it: the stack of an interrupted thread does not change."""


def save_word(safe_point: int) -> int:
    """The word of the header that has this number if the workers save at this safe point."""
    return SAVE_POINTS + safe_point % SAVE_POINTS_MAX


def channel_name(inode: int) -> bytes:
    """The name of the socket at which the agent listens for messages of the workers on this board, in the kernel's
    abstract name space. `inode`: that of the board's file.

    Two containers may share that name space and have agents with the same process id, but no two files in memory have
    the same inode.
    """
    return b"\0holdfast-board-%d" % inode


def size_bytes(nproc: int) -> int:
    """Size of a board for this number of workers (bytes)."""
    return (1 + nproc) * SLOT_WORDS * WORD_BYTES


def slot(local_rank: int) -> int:
    """The index of the first word of this rank's slot."""
    return (1 + local_rank) * SLOT_WORDS
