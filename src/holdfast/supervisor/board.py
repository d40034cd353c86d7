"""The agent's side of the board: holds workers at their safe points, sets where they stop, reads their progress.

Also holds, for each worker, the memory file into which it writes its stacks when the agent samples them (see
stack_sampler.py).
"""

from __future__ import annotations

import mmap
import os
import sys
import time

from holdfast.protocol import board_layout as layout
from holdfast.protocol.policy import COUNT_MAX
from holdfast.protocol.rank_progress import RankProgress, Stage

HOLD_SETTLES_S = 0.02
"""From setting HELD until every worker's newest safe point can be read: a worker that read HELD before it was set has
written its REACHED before that, and both processors' writes have long arrived."""

REPORTS_AT_ONCE = 64


class Board:
    """The board of one generation. Its memory belongs to no file system: it is freed when the last process that maps it
    ends."""

    def __init__(self, nproc: int) -> None:
        """Raises OSError when there is no memory for the board."""
        self._nproc = nproc
        self._fd = os.memfd_create("holdfast-board")
        os.truncate(self._fd, layout.size_bytes(nproc))
        self._memory = mmap.mmap(self._fd, layout.size_bytes(nproc))
        self._words = memoryview(self._memory).cast("Q")
        self._began_ns = time.monotonic_ns()
        self._stacks: list[int] = []
        for rank in range(nproc):
            fd = os.memfd_create("holdfast-stacks")
            self._stacks.append(fd)
            self._words[layout.slot(rank) + layout.STACKS] = fd
        # Our copy of the end for writing is what the workers open; it also keeps the pipe from ever being at its end.
        self.raised_fd, self._report_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """Readable when a worker has reported that its program raised."""
        self._words[layout.RAISED] = self._report_fd

    def stacks(self, local_rank: int) -> int:
        """The descriptor of the file for this worker's stacks, open until close(). The file is in memory, so no disk
        can stall a worker."""
        return self._stacks[local_rank]

    def address(self, local_rank: int) -> str:
        """The board's address for a worker's environment. The path is valid while this agent has the board open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}@{layout.slot(local_rank)}"

    def hold(self) -> None:
        """Let no worker pass its next safe point. `reached` can be read after HOLD_SETTLES_S."""
        self._words[layout.HELD] = 1

    def release(self, safe_point: int) -> None:
        """Let the workers continue and stop at this safe point; 0: let them continue without a stop."""
        if safe_point:
            self._words[layout.SAFE_POINT] = safe_point
        self._words[layout.HELD] = 0

    def reached(self) -> int:
        """The newest safe point that any worker has reached; 0: no worker has called should_stop()."""
        return min(COUNT_MAX, max(self._words[layout.slot(rank) + layout.REACHED] for rank in range(self._nproc)))

    def told(self, local_rank: int) -> bool:
        """Whether this worker knows that it must stop."""
        return self._words[layout.slot(local_rank) + layout.TOLD] != 0

    def moment(self, mark: int) -> float | None:
        """When the last worker passed this mark of its slot, in seconds of the monotonic clock; None: some workers have
        not passed it."""
        moments = [self._words[layout.slot(rank) + mark] for rank in range(self._nproc)]
        return max(moments) / 1e9 if all(moments) else None

    def progress(self, now_ns: int) -> tuple[RankProgress, ...]:
        """The progress of each local rank at this moment of the monotonic clock. No rank is DONE here: the board does
        not record ends."""
        return tuple(self._progress(rank, now_ns) for rank in range(self._nproc))

    def _progress(self, local_rank: int, now_ns: int) -> RankProgress:
        at = layout.slot(local_rank)
        words = self._words[at : at + layout.SLOT_WORDS]
        # A worker may write anything into its memory: the values must still fit into a message.
        steps, beats = min(words[layout.STEPS], COUNT_MAX), min(words[layout.BEATS], COUNT_MAX)
        if steps or beats:
            stage = Stage.STEPPING
        elif words[layout.GROUP]:
            stage = Stage.READY
        elif words[layout.STORE]:
            stage = Stage.GROUPING
        else:
            stage = Stage.MEETING if words[layout.MEETING] else Stage.STARTING
        since_ns = max(words[layout.LAST_STEP], words[layout.LAST_BEAT]) or self._began_ns
        age_s = max(0, now_ns - since_ns) / 1e9
        return RankProgress(local_rank, stage, steps or beats, age_s, words[layout.OWN] / 1e9, beats)

    def job_steps(self, local_rank: int) -> tuple[int, int]:
        """The step of the whole job at which this worker began, and its present one; -1: the script does not report
        steps."""
        at = layout.slot(local_rank)
        return self._words[at + layout.BEGAN_AT] - 1, self._words[at + layout.AT] - 1

    def step(self, local_rank: int) -> int:
        """The worker's present step, by its script's own count or else counted from the worker's start; 0: unknown."""
        at = layout.slot(local_rank)
        told, done = self._words[at + layout.AT], self._words[at + layout.STEPS]
        return told - 1 if told else (done + 1 if done else 0)

    def raised(self) -> set[int]:
        """The local ranks that have reported an exception since the last call."""
        try:
            raw = os.read(self.raised_fd, layout.REPORT_BYTES * max(self._nproc, REPORTS_AT_ONCE))
        except BlockingIOError:
            return set()
        # Any process of this user may write there: only a value that is a worker's slot counts.
        reports = (raw[at : at + layout.REPORT_BYTES] for at in range(0, len(raw), layout.REPORT_BYTES))
        slots = {int.from_bytes(report, sys.byteorder) for report in reports}
        return {rank for rank in range(self._nproc) if layout.slot(rank) in slots}

    def close(self) -> None:
        os.close(self.raised_fd)
        os.close(self._report_fd)
        self._words.release()
        self._memory.close()
        os.close(self._fd)
        for fd in self._stacks:
            os.close(fd)
