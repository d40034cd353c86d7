"""The ranks agree on whether a step is done, before an optimizer changes anything.

Where each shard has a replica, a rank that is lost takes no shard with it. But the shards that are left have to be of
one step. Without this, the loss of a rank in the middle of an exchange of gradients could leave one rank with all its
gradients, which steps, and another one without, which cannot: of neither step all shards would be there.

So a rank enters its optimizer only when all ranks of the world have all their gradients. The wait costs no time of the
training: the next collective operation would wait for the same ranks. The number of a lost rank counts: it had sent all
that the others needed from it.

**On one node** each rank writes the number of its step into a file in memory that they share, under a lock. The last
rank to write finds the numbers of all others there, and decides that the step is done. Then all ranks complete it,
except those that are lost. If a rank leaves its training function before, it closes the file: no rank enters its
optimizer, and the step before is that of all.

**On several nodes** the ranks of a node share a file, too. One rank speaks for its node (step_links.py): when all
numbers are in its file, it says so to the rank that decides, rank 0 of the world. That one decides when all nodes have
said so, and tells all. A rank knows of the decision when it is in its node's file.

A loss may come when some ranks know of it and others do not. No rank can find that out alone, so the next generation
does, whose ranks the coordinator has agreed on:

1. A rank that knows that the step is done completes it. Then it leaves its training function, and waits for the next
   generation.
2. A rank that has announced the step and knows of no decision when it learns of the loss has an *open* step. It waits
   for the next generation, too, but inside its optimizer's hook; and it looks no more at its file.
3. The coordinator sends all ranks on when each rank of the next generation waits for it. From then on no rank can
   learn of a decision in the old way. Each writes the newest decision that it knows into the store of that generation.
4. A rank with an open step reads what all have written. If one of them knows that the step is done (`is_known`), this
   rank completes it: it has its gradients, since all ranks had announced the step. Otherwise it gives the step up.

All open steps of a generation end alike, because all read the same set. If a rank is lost in between, some may have
read it and others not. Then there is another generation, with 3 and 4 again: a rank that has completed the step writes
that, and one that has given it up has read that no rank knew. So these two never meet: when all of a generation have
written and none knows, no living rank will ever know. A decision that only lost ranks knew is void, and no living rank
has completed that step. It makes no difference which rank is lost, the one that decides, too, or which link.

Not covered: a program whose ranks step at different calls, or a rank that is silent for SILENCE_S while none is lost.
Then the ranks do not agree on steps any more in this world.

Knows files and numbers. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

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
LINK_POLL_S = 5e-3
"""Limit of one wait for another node. After it the rank looks whether another one was lost."""


lock_file: Callable[[int, int], None] = fcntl.lockf
"""Locks and unlocks the file, between processes. Processes that the rank has forked, as those of torch's loader, do not
have this lock. They would have that of flock, and may live for 5 s longer than the rank."""


class StepEntry(Enum):
    """The result of `StepAgreement.enters`."""

    DONE = "done"
    """All ranks complete this step."""
    LEFT = "left"
    """A rank was lost before: no rank does."""
    OPEN = "open"
    """A rank was lost, on several nodes, and another one may know that this step is done: see `is_known`."""
    UNKNOWN = "unknown"
    """Another rank has not come, although none was lost. The ranks do not agree on any step any more."""


class Decision(NamedTuple):
    """The newest step that is done, as one rank knows it."""

    world: str
    """A word of the world whose ranks have decided it. Steps of another one may have the same numbers."""
    step: int


def is_known(step: Decision, told: Iterable[Decision]) -> bool:
    """Whether a rank with this open step completes it. `told`: what all ranks of the next generation know."""
    return any(each.world == step.world and each.step >= step.step for each in told)


class NodeLink(Protocol):
    """A connection to the rank that speaks for another node."""

    @property
    def newest(self) -> int:
        """The newest step that the other side has said; 0: none. It does not wait."""

    @property
    def ended(self) -> bool:
        """Whether the other side has said that its node agrees on no more steps."""

    def say(self, step: int) -> None:
        """Say that this step is ready, or done. It raises nothing if the connection is lost."""

    def end(self) -> None:
        """Say that this node agrees on no more steps."""

    def close(self) -> None:
        """Close the connection."""


class Speaker:
    """The part of the rank that speaks for its node."""

    def __init__(
        self, links: Sequence[NodeLink], *, decides: bool, await_news: Callable[[float], object] = time.sleep
    ) -> None:
        """`decides`: this is rank 0 of the world, and the links are those to all other nodes; otherwise the only link
        is that to rank 0. `await_news`: waits for a link, at most for this time (s)."""
        self._links, self._decides, self.await_news = links, decides, await_news
        self._said = 0
        """The newest step that was said."""

    def is_done(self, step: int) -> bool:
        """Whether this step is done, which all ranks of this node have announced. It does not wait."""
        if self._decides and not all(link.newest >= step for link in self._links):
            return False
        if self._said < step:
            self._said = step
            for link in self._links:
                link.say(step)
        return self._decides or self._links[0].newest >= step

    @property
    def ended(self) -> bool:
        """Whether another node agrees on no more steps."""
        return any(link.ended for link in self._links)

    def close(self, *, lost: bool) -> None:
        """End the links. `lost`: since a rank was lost, so the other nodes will learn of it, too."""
        for link in self._links:
            if not lost:
                link.end()
            link.close()


class StepAgreement:
    """One rank's side, in one world."""

    def __init__(
        self,
        path: str,
        rank: int,
        world: int,
        speaker: Speaker | None = None,
        *,
        one_node: bool = True,
    ) -> None:
        """`path`: a file in memory of this world, equal on all ranks of this node. `rank`, `world`: among those on this
        node. `speaker`: this rank speaks for its node. `one_node`: all ranks of the world are on this node. OSError."""
        self._rank, self._path, self._one_node, self._speaker = rank, path, one_node, speaker
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
        self.announce(step)
        pause_s, deadline_s = POLL_S_MIN, 0.0
        while (entry := self.look(step, is_cut)) is None:
            now = time.monotonic()
            deadline_s = deadline_s or now + SILENCE_S
            if now > deadline_s:
                return self._close(step, FOR_GOOD)
            if self._speaker is not None and self._all_here(step):
                self._speaker.await_news(LINK_POLL_S)
            else:
                time.sleep(pause_s)
                pause_s = min(POLL_S_MAX, pause_s * 1.5)
        return entry

    def announce(self, step: int) -> None:
        """Announce that this rank has all gradients of this step. On one node the last rank decides."""
        words = self._words
        with self._locked():
            words[FIRST_RANK + self._rank] = step
            if self._one_node and not words[CLOSED] and self._all_here(step):
                words[DECIDED] = step

    def look(self, step: int, is_cut: Callable[[], bool]) -> StepEntry | None:
        """What becomes of the announced step; None: it is not known yet. It does not wait."""
        words = self._words
        if words[DECIDED] >= step:
            return StepEntry.DONE
        if words[CLOSED] == FOR_GOOD:
            return StepEntry.UNKNOWN
        if is_cut():
            return self._close(step, BY_LOSS) if self._one_node else StepEntry.OPEN
        if self._speaker is None or not self._all_here(step):
            return None
        if self._speaker.is_done(step):
            words[DECIDED] = step
            return StepEntry.DONE
        return self._close(step, FOR_GOOD) if self._speaker.ended else None

    def _all_here(self, step: int) -> bool:
        """Whether all ranks of this node have announced this step."""
        return min(self._words[FIRST_RANK:]) >= step

    def _close(self, step: int, why: int) -> StepEntry:
        """Let no step be decided any more, unless another rank has just decided this one."""
        with self._locked():
            if self._words[DECIDED] >= step:
                return StepEntry.DONE
            self._words[CLOSED] = max(self._words[CLOSED], why)
        return StepEntry.LEFT if why == BY_LOSS else StepEntry.UNKNOWN

    def end(self, *, lost: bool) -> None:
        """Leave the world, since a rank was lost, or since this rank's training is over."""
        if self._one_node or not lost:
            self._close(NEVER, BY_LOSS if lost else FOR_GOOD)
        if self._speaker is not None:
            self._speaker.close(lost=lost)
        self._words.release()
        self._map.close()
        os.close(self._fd)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The kernel releases it when the process is killed, at any moment: each word is written at once.
        lock_file(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock_file(self._fd, fcntl.LOCK_UN)
