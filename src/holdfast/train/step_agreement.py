"""The ranks of one node agree on whether a step is done, before an optimizer changes anything.

Where each shard has a replica, a rank that is lost takes no shard with it. But the shards that are left have to be of
one step. Without this, the loss of a rank in the middle of an exchange of gradients could leave one rank with all its
gradients, which steps, and another one without, which cannot: of neither step all shards would be there.

So a rank enters its optimizer only when all ranks of the world have all their gradients. Each writes the number of its
step into a file in memory that they share, under a lock. The last rank to write finds the numbers of all others there,
and decides that the step is done. Then all ranks complete it, except those that are lost. If a rank leaves its training
function before, it closes the file: no rank enters its optimizer, and the step before is that of all. The number of a
lost rank counts: it had sent all that the others needed from it.

The wait costs no time of the training: the next collective operation would wait for the same ranks. It is not done over
several nodes, which share no memory: a message to each other node would cost more than a loss is worth.

Knows a file and numbers. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from enum import Enum

from holdfast import own_folders

WORD_BYTES = 8
DECIDED, CLOSED, FIRST_RANK = 0, 1, 2
"""Words of the file: the newest step that is decided; why no other will be, 0 while some may; then each rank's step."""
BY_LOSS, FOR_GOOD = 1, 2
"""Values of CLOSED: a rank was lost, so this world is left; the ranks of this world do not agree on steps any more."""
NEVER = 1 << 63
"""A step that is never decided."""
POLL_S_MIN, POLL_S_MAX = 20e-6, 1e-3
"""Pause between two looks: it grows with the time that was waited."""
SILENCE_S = 10.0
"""The wait for the others. A program in which ranks step their optimizers at different calls would wait for ever."""


class StepEntry(Enum):
    """The result of `StepAgreement.enters`."""

    DONE = "done"
    """All ranks complete this step."""
    LEFT = "left"
    """A rank was lost before: no rank does."""
    UNKNOWN = "unknown"
    """Another rank has not come, although none was lost. The ranks do not agree on any step any more."""


class StepAgreement:
    """One rank's side, in one world."""

    def __init__(self, path: str, rank: int, world: int) -> None:
        """`path`: a file in memory of this world, equal on all ranks, all of which are on this node. OSError."""
        self._rank, self._path = rank, path
        self._fd = own_folders.open_file(path)
        try:
            size_bytes = (FIRST_RANK + world) * WORD_BYTES
            os.posix_fallocate(self._fd, 0, size_bytes)  # new bytes are 0; those that another rank has written stay
            self._map = mmap.mmap(self._fd, size_bytes)
        except BaseException:
            os.close(self._fd)
            raise
        self._words = memoryview(self._map).cast("Q")

    def enters(self, step: int, is_cut: Callable[[], bool]) -> StepEntry:
        """Announce that this rank has all gradients of this step, and wait until all ranks have. `is_cut`: whether a
        rank was lost, and this world is to be left."""
        words = self._words
        with self._locked():
            words[FIRST_RANK + self._rank] = step
            if not words[CLOSED] and min(words[FIRST_RANK:]) >= step:
                words[DECIDED] = step
        pause_s, deadline_s = POLL_S_MIN, 0.0
        while words[DECIDED] < step:
            if words[CLOSED] == FOR_GOOD:
                return StepEntry.UNKNOWN
            if is_cut():
                return self._close(step, BY_LOSS)
            now = time.monotonic()
            deadline_s = deadline_s or now + SILENCE_S
            if now > deadline_s:
                return self._close(step, FOR_GOOD)
            time.sleep(pause_s)
            pause_s = min(POLL_S_MAX, pause_s * 1.5)
        return StepEntry.DONE

    def _close(self, step: int, why: int) -> StepEntry:
        """Let no step be decided any more, unless another rank has just decided this one."""
        with self._locked():
            if self._words[DECIDED] >= step:
                return StepEntry.DONE
            self._words[CLOSED] = max(self._words[CLOSED], why)
        return StepEntry.LEFT if why == BY_LOSS else StepEntry.UNKNOWN

    def end(self, *, lost: bool) -> None:
        """Leave the world, since a rank was lost, or since this rank's training is over."""
        self._close(NEVER, BY_LOSS if lost else FOR_GOOD)
        self._words.release()
        self._map.close()
        os.close(self._fd)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The kernel releases it when the process is killed, at any moment: each word is written at once.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
