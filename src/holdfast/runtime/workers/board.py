"""The agent's side of the board: holds workers at their safe points, says where they stop, sees how far they are."""

from __future__ import annotations

import mmap
import os

from holdfast.core import board as layout

HOLD_SETTLES_S = 0.02
"""From setting HELD until every worker's newest safe point can be read: one that read HELD before it was set has
written its REACHED before that, and both processors' writes have long arrived."""


class Board:
    """Of one generation. The memory belongs to no file system: it is gone when the last process that has it is."""

    def __init__(self, nproc: int) -> None:
        """Raises OSError when there is no memory for it."""
        self._nproc = nproc
        self._fd = os.memfd_create("holdfast-board")
        os.truncate(self._fd, layout.size_bytes(nproc))
        self._memory = mmap.mmap(self._fd, layout.size_bytes(nproc))
        self._words = memoryview(self._memory).cast("Q")

    def address(self, local_rank: int) -> str:
        """What a worker finds in its environment. The path is good for as long as this agent has the board open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}@{layout.slot(local_rank)}"

    def hold(self) -> None:
        """Let no worker pass its next safe point. What they have reached can be read after HOLD_SETTLES_S."""
        self._words[layout.HELD] = 1

    def release(self, safe_point: int) -> None:
        """Let them go on and stop there; 0: they stop nowhere."""
        if safe_point:
            self._words[layout.SAFE_POINT] = safe_point
        self._words[layout.HELD] = 0

    def reached(self) -> int:
        """The newest safe point any worker has reached; 0: none has asked for one."""
        return max(self._words[layout.slot(rank) + layout.REACHED] for rank in range(self._nproc))

    def told(self, local_rank: int) -> bool:
        """Whether this worker knows that it is to stop."""
        return self._words[layout.slot(local_rank) + layout.TOLD] != 0

    def moment(self, mark: int) -> float | None:
        """When the last of all workers passed this mark of its slot, in seconds of the monotonic clock; None: some have not."""
        moments = [self._words[layout.slot(rank) + mark] for rank in range(self._nproc)]
        return max(moments) / 1e9 if all(moments) else None

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self._fd)
