"""The agent's side of the board, and what this node reads from it: progress, phases of the start, stack samples.

`Board` holds workers at their safe points, sets where they stop, and reads what they have written. It also holds, for
each worker, the memory file into which it writes its stacks when they are sampled (see stack_sampler.py).

Three classes read it at intervals: `Observer` reports to the agent's machine, `Phases` and `ProgressNotes` write events
into the journal. They execute, and decide nothing.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from math import inf
from pathlib import Path

from holdfast.agent.events import Event, WorkersProgress
from holdfast.protocol import board_layout as layout
from holdfast.protocol.messages import Start
from holdfast.protocol.policy import COUNT_MAX
from holdfast.protocol.rank_progress import RankProgress, RankSample, Stage
from holdfast.supervisor.stack_sampler import StackSampler

HOLD_SETTLES_S = 0.02
"""Time from setting HELD until every worker's newest safe point can be read (s). A worker first writes REACHED and then
reads HELD: if it did not see HELD yet, its REACHED has arrived in this process after this time."""

REPORTS_AT_ONCE = 64
"""Number of exceptions that one read of the pipe takes at least."""


class Board:
    """The board of workers that were started together, and of their replacements.

    Its memory belongs to no file system: nothing is left over when the last process that maps it ends.
    """

    def __init__(self, nproc: int) -> None:
        """Raises OSError when there is no memory for the board."""
        self._nproc = nproc
        self._fd = os.memfd_create(layout.BOARD_NAME)
        os.truncate(self._fd, layout.size_bytes(nproc))
        self._memory = mmap.mmap(self._fd, layout.size_bytes(nproc))
        self._words = memoryview(self._memory).cast("Q")
        self._began_ns = time.monotonic_ns()
        """The time at which the workers' generation began: ages count from it until a worker makes a step in it."""
        self._before = [(0, 0, 0)] * nproc
        """Steps, beats and own time (ns) of earlier generations, by local rank."""
        self._stacks: list[int] = []
        """Descriptor of each worker's file for stacks, by local rank."""
        for rank in range(nproc):
            fd = os.memfd_create("holdfast-stacks")
            self._stacks.append(fd)
            self._words[layout.slot(rank) + layout.STACKS] = fd
        # Workers open our copy of the writing end through /proc. It also keeps the reading end from end-of-file.
        self.raised_fd, self._report_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """Readable when a worker has reported that its program raised."""
        self._words[layout.RAISED] = self._report_fd

    def stacks(self, local_rank: int) -> int:
        """The descriptor of the file for this worker's stacks, open until close(). The file is in memory, so that no
        disk can stall a worker that writes its stacks."""
        return self._stacks[local_rank]

    def recorder(self, local_rank: int) -> tuple[int, int]:
        """The worker's own descriptor of the pipe for questions about its collectives, and the pipe's inode; 0: it
        answers none, or the board is closed: a look may last longer. Call it on the loop, as close()."""
        if self._memory.closed:
            return 0, 0
        at = layout.slot(local_rank)
        return self._words[at + layout.RECORDER], self._words[at + layout.RECORDER_PIPE]

    def address(self, local_rank: int) -> str:
        """The board's address for a worker's environment. The path is valid while this agent has the board open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}@{layout.slot(local_rank)}"

    @property
    def inode(self) -> int:
        return os.fstat(self._fd).st_ino

    def hold(self) -> None:
        """Let no worker pass its next safe point. `reached` can be read after HOLD_SETTLES_S."""
        self._words[layout.HELD] = 1

    def release(self, safe_point: int, *, save: bool = False) -> None:
        """Let the workers continue and stop at this safe point, or save there and go on; 0: they only continue."""
        # The target before the permission: a worker that continues has to see it.
        if safe_point:
            self._words[layout.save_word(safe_point) if save else layout.SAFE_POINT] = safe_point
        self._words[layout.HELD] = 0

    def clear(self, local_rank: int) -> None:
        """Prepare the slot for another process."""
        at = layout.slot(local_rank)
        for word in range(layout.SLOT_WORDS):
            # The file for stacks stays: its descriptor is the same for the next process.
            if word != layout.STACKS:
                self._words[at + word] = 0
        os.truncate(self._stacks[local_rank], 0)
        self._before[local_rank] = (0, 0, 0)

    def begin_again(self) -> None:
        """Prepare the board for another generation of the same workers, which counts safe points and steps from 0. Call
        it while all of them wait."""
        for word in (layout.HELD, layout.SAFE_POINT, *map(layout.save_word, range(layout.SAVE_POINTS_MAX))):
            self._words[word] = 0
        self._began_ns = time.monotonic_ns()
        for rank in range(self._nproc):
            at = layout.slot(rank)
            for word in (layout.REACHED, layout.STOP_SEEN, layout.BEGAN_AT):
                self._words[at + word] = 0
            words = self._words[at : at + layout.SLOT_WORDS]
            # The process counts on from its start: it cannot be told to begin again at 0.
            self._before[rank] = (words[layout.STEPS], words[layout.BEATS], words[layout.OWN])

    def reached(self) -> int:
        """The newest safe point that any worker has reached; 0: no worker has called should_stop()."""
        return min(COUNT_MAX, max(self._words[layout.slot(rank) + layout.REACHED] for rank in range(self._nproc)))

    def all_save(self, local_ranks: Iterable[int]) -> bool:
        """Whether these workers ask at their safe points whether to save. Spares have nothing to save."""
        slots = [layout.slot(rank) for rank in local_ranks]
        return all(self._words[at + layout.SAVES] or self._words[at + layout.SPARE] for at in slots)

    def stop_seen(self, local_rank: int) -> bool:
        """Whether this worker has seen that it must stop."""
        return self._words[layout.slot(local_rank) + layout.STOP_SEEN] != 0

    def moment(self, mark: int) -> float | None:
        """The time at which the last worker passed this mark of its slot (monotonic s); None: some workers have not
        passed it."""
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
        counted = (words[layout.STEPS], words[layout.BEATS], words[layout.OWN])
        steps, beats, own_ns = (
            max(0, min(now, COUNT_MAX) - before) for now, before in zip(counted, self._before[local_rank], strict=True)
        )
        # It was something else before, and its steps of then are not the job's
        # (test_a_spare_is_told_as_one_and_its_old_step_is_not_the_jobs).
        if words[layout.SPARE]:
            stage = Stage.SPARE
        # Before the marks of the group: a program without a process group makes steps, too
        # (test_steps_are_counted_without_a_process_group).
        elif steps or beats:
            stage = Stage.STEPPING
        elif words[layout.GROUP]:
            stage = Stage.READY
        elif words[layout.STORE]:
            stage = Stage.GROUPING
        else:
            stage = Stage.MEETING if words[layout.MEETING] else Stage.STARTING
        since_ns = max(words[layout.LAST_STEP], words[layout.LAST_BEAT], self._began_ns)
        age_s = max(0, now_ns - since_ns) / 1e9
        job_step = min(max(0, words[layout.AT]), COUNT_MAX)
        # Beats are for loops in which no optimizer makes steps (test_steps_count_where_there_are_both).
        return RankProgress(local_rank, stage, steps or beats, age_s, own_ns / 1e9, beats, job_step)

    def job_steps(self, local_rank: int) -> tuple[int, int]:
        """The step of the whole job at which this worker began, and its present one; -1: the script does not report
        steps."""
        at = layout.slot(local_rank)
        return self._words[at + layout.BEGAN_AT] - 1, self._words[at + layout.AT] - 1

    def job_position(self, local_ranks: Iterable[int]) -> tuple[int, int]:
        """The step of the whole job, and how many it will have, as these workers report it; 0: none reports it. A rank
        that was lost, and that the generation does without, still has its last step on the board."""
        slots = (self._words[layout.slot(rank) :][: layout.SLOT_WORDS] for rank in local_ranks)
        # A spare has the step of an earlier generation.
        known = [(slot[layout.AT], slot[layout.TOTAL]) for slot in slots if not slot[layout.SPARE]]
        # The slowest rank: what the others have begun is not done. AT is one more than the step.
        step, steps = min((each for each in known if all(each)), default=(1, 0))
        return min(step - 1, COUNT_MAX), min(steps, COUNT_MAX)

    def step(self, local_rank: int) -> int:
        """The steps that the worker has made: of the whole job if its script reports them, else since the worker's
        start. 0: none, or unknown."""
        at = layout.slot(local_rank)
        reported, done = self._words[at + layout.AT], self._words[at + layout.STEPS]
        return reported - 1 if reported else done

    def stepped(self, local_rank: int) -> bool:
        """Whether the worker has made a step since its generation began."""
        began, present = self.job_steps(local_rank)
        return present > began >= 0 or self.steps(local_rank) > self._before[local_rank][0]

    def in_group(self, local_rank: int) -> bool:
        """Whether the worker's process group was ready."""
        return self._words[layout.slot(local_rank) + layout.GROUP] != 0

    def steps(self, local_rank: int) -> int:
        """The optimizer steps that the worker's process has made."""
        return self._words[layout.slot(local_rank) + layout.STEPS]

    def order_profile(self, local_rank: int, order: int) -> None:
        """Order a profile of this worker (see PROFILE), or withdraw the order: 0."""
        self._words[layout.slot(local_rank) + layout.PROFILE] = order

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


PHASE_DIGITS = 4
"""Number of decimals of a phase's seconds in the journal."""
LOOK_FIRST_S, LOOK_GROWTH, LOOK_S_MAX = 0.25, 1.5, 10.0
"""Time between two reads of the board until the first step is done (s): the first, its growth, and the longest. Each
read costs some microseconds."""

MARKS = {
    "import": layout.MEETING,
    "store": layout.STORE,
    "process_group": layout.GROUP,
    "first_step": layout.FIRST_STEP,
}
"""The mark of the board with which each phase ends, in order."""


class Repeat:
    """Calls a function at intervals that grow, until `stop`. Runs on the running loop."""

    def __init__(self, call: Callable[[], None], first_s: float, growth: float = 1.0, longest_s: float = inf) -> None:
        self._call = call
        self._growth = growth
        self._longest_s = longest_s
        self._timer = asyncio.get_running_loop().call_later(first_s, self._ring, first_s)

    def stop(self) -> None:
        self._timer.cancel()

    def _ring(self, after_s: float) -> None:
        after_s = min(after_s * self._growth, self._longest_s)
        self._timer = asyncio.get_running_loop().call_later(after_s, self._ring, after_s)
        self._call()


class Phases:
    """Measures the parts of a generation's start on this node: the event `phases`, once per generation.

        detect          a worker of the one before has ended in failure  →  its end is ordered
        stop            → no process of it is alive
        form            → (or: the agent begins) the order to start: the nodes meet, are assigned and prepared
        spawn           → all workers run
        import          → they ask for their process group: imports (the fork server's too if they waited for it)
                        and whatever else the script does first
        store           → they are connected to the store
        process_group   → they have their process group
        first_step      → the first step of an optimizer is done

    When workers go on in another generation, `stop` ends when all wait for it, `process_group` when all have joined it,
    and `first_step` with the first step of the training function.

    A part that was not there (no failure, no process group, no optimizer) is left out; what follows is measured from
    the last moment there was. Where workers differ, the slowest counts. `write` gets the journal's event."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._durations_s: dict[str, float] = {}
        """The phases of the generation that starts or runs, seconds."""
        self._generation: dict[str, int] = {}
        """The generation's numbers, once it has been ordered to start."""
        self._last_s = self._loop.time()
        """The end of the last phase."""
        self._trouble_s: float | None = None
        """The time at which the first worker failed; None: all is well."""
        self._stopping = False
        self._awaited = 0
        """Number of ordered workers that do not run yet."""
        self._board: Board | None = None
        self._timer: Repeat | None = None

    def trouble(self) -> None:
        """A worker has failed, and the generation still runs."""
        # What fails during a stop fails because of it.
        if self._trouble_s is None and not self._stopping:
            self._trouble_s = self._loop.time()

    def stop(self) -> None:
        """The end of the generation was ordered."""
        if self._stopping:
            return
        self.close()
        self._stopping = True
        # A failure that was seen before the order is the begin of `detect`.
        self._last_s = self._loop.time() if self._trouble_s is None else self._trouble_s
        if self._trouble_s is not None:
            self._passed("detect")

    def gone(self) -> None:
        """No process of the generation is alive."""
        if self._stopping:
            self._passed("stop")

    def start(self, generation: int, restart_count: int, nproc: int, board: Board | None) -> None:
        """The workers were ordered to start. 0 workers and no board: to go on from another generation."""
        self._passed("form")
        self._stopping, self._trouble_s = False, None
        self._generation = {"generation": generation, "restart_count": restart_count}
        self._awaited, self._board = nproc, board

    def joined_process_group(self) -> None:
        """All workers that went on have joined their process group."""
        # With a board the workers were started, and their marks are read from it.
        if self._generation and self._board is None:
            self._passed("process_group")

    def went_on(self) -> None:
        """All workers that went on have done their first step."""
        if self._generation and self._board is None:
            self._passed("first_step")
            self.close()

    def imported(self) -> None:
        """The fork server has imported the modules that the workers need; workers that were requested have waited for
        it."""
        if self._awaited:
            self._passed("import")

    def spawned(self) -> None:
        """One more worker runs. Ignored when the end of its generation has been ordered meanwhile."""
        if not self._awaited:
            return
        self._awaited -= 1
        if self._awaited == 0:
            self._passed("spawn")
            self._timer = Repeat(self._look, LOOK_FIRST_S, LOOK_GROWTH, LOOK_S_MAX)

    def close(self) -> None:
        """The generation is over: write the phases that were measured."""
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        if self._generation:
            if self._awaited == 0 and self._board is not None:
                self._read()
            durations_s = {f"{name}_s": s for name, s in self._durations_s.items()}
            self._write("phases", **self._generation, **durations_s, until_monotonic=round(self._last_s, PHASE_DIGITS))
        self._generation, self._durations_s, self._board, self._awaited = {}, {}, None, 0

    def _passed(self, phase: str, moment_s: float | None = None) -> None:
        now = self._loop.time() if moment_s is None else moment_s
        self._durations_s[phase] = round(self._durations_s.get(phase, 0.0) + max(0.0, now - self._last_s), PHASE_DIGITS)
        self._last_s = max(now, self._last_s)

    def _look(self) -> None:
        assert self._board is not None
        if self._board.moment(layout.FIRST_STEP) is not None:
            self.close()

    def _read(self) -> None:
        assert self._board is not None
        for phase, mark in MARKS.items():
            moment_s = self._board.moment(mark)
            if moment_s is not None:
                self._passed(phase, moment_s)


FIRST_S, GROWTH, EVERY_S = 1.0, 2.0, 10.0
"""Time between two events (s): the first, its growth, and the longest. The first is short, so that short runs have
events too."""
PROGRESS_DIGITS = 3
"""Number of decimals of seconds in the event `progress`."""


class ProgressNotes:
    """Writes the progress of one node's workers, generation after generation. `write` gets the journal's event."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._note: Callable[[], None] | None = None
        """Writes one event of the running generation."""
        self._timer: Repeat | None = None

    def start(
        self, generation: int, rank_base: int, board: Board, look: Callable[[], tuple[RankProgress, ...]]
    ) -> None:
        """The workers of this generation were ordered to start."""
        self._stop()

        def note() -> None:
            ranks = look()
            steps = [board.job_steps(each.local_rank) for each in ranks]
            self._write(
                "progress",
                generation=generation,
                rank_base=rank_base,
                stages=[each.stage.value for each in ranks],
                steps=[each.steps for each in ranks],
                ages_s=[round(each.age_s, PROGRESS_DIGITS) for each in ranks],
                own_s=[round(each.own_s, PROGRESS_DIGITS) for each in ranks],
                began_at=[began for began, _ in steps],
                at=[at for _, at in steps],
            )

        self._note = note
        self._timer = Repeat(note, FIRST_S, GROWTH, EVERY_S)

    def close(self) -> None:
        """The generation is over; its board is still open."""
        note = self._note
        self._stop()
        if note is not None:
            note()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        self._note = None


Report = Callable[[int], WorkersProgress]
"""Reads the progress of a generation, given by its number."""


class Observer:
    """Reports the workers of one node, generation after generation. `emit` gets the machine's events, on the loop."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        emit: Callable[[Event], None],
        *,
        folder: Path | None,
        fault: Callable[[str, Exception], None],
    ) -> None:
        """`folder`: the run's, where evidence is kept; None: no evidence is kept. `fault`: gets the error of a failed
        sample, whose result is then empty."""
        self._fault = fault
        self._tasks = tasks
        self._emit = emit
        self._folder = folder
        self._generation = 0
        """The newest generation of the workers that were started last; 0: none were."""
        self._new_sampler: Callable[[], StackSampler] | None = None
        """Makes the sampler of the workers that were started last; None: none were started yet."""
        self._stack_sampler: StackSampler | None = None
        """Made by the first question about these workers: most generations end without one."""
        self._timer: Repeat | None = None

    def start(self, start: Start, board: Board, rank_of: Callable[[int], int], progress: Report) -> None:
        """The workers of this generation were ordered to start. The board may be closed once others are started.
        `rank_of`: the present rank of a local rank."""
        self.stop()
        if self._stack_sampler is not None:
            self._tasks.create_task(self._stack_sampler.close())
            self._stack_sampler = None
        # Not the time of the first question: a trace that a worker has written before that is of this generation, too.
        started_epoch_s = time.time()
        self._new_sampler = lambda: StackSampler(board, self._generation, rank_of, started_epoch_s)
        self._begin(start, progress)

    def regrouped(self, start: Start, progress: Report) -> None:
        """The workers were ordered to go on in this generation."""
        self.stop()
        if self._stack_sampler is not None:
            self._stack_sampler.regrouped(start.generation)
        self._begin(start, progress)

    def _begin(self, start: Start, progress: Report) -> None:
        self._generation = start.generation

        def report() -> None:
            self._emit(progress(start.generation))

        # The first one comes early, after a random time: the agents of a job are not to report all at once.
        interval_s = 0.98 * start.progress_interval_s  # just before a ping is due, which it replaces
        self._timer = Repeat(report, interval_s * (1 + os.urandom(1)[0]) / 256, inf, interval_s)

    def stop(self) -> None:
        """No worker of the generation is alive."""
        if self._timer is not None:
            self._timer.stop()
            self._timer = None

    async def close(self) -> None:
        self.stop()
        if self._stack_sampler is not None:
            await self._stack_sampler.close()

    async def samples(self, generation: int, pids: Mapping[int, int]) -> tuple[RankSample, ...]:
        """One sample of each of these workers; none when the generation is over."""
        # The question took its time: the answer would be about other workers
        # (test_a_look_at_a_generation_that_is_over_sees_nobody).
        if self._new_sampler is None or generation != self._generation:
            return ()
        if self._stack_sampler is None:
            self._stack_sampler = self._new_sampler()
        try:
            return await self._stack_sampler.look(pids, self._folder)
        except OSError:  # no descriptor left, or the generation is over meanwhile: no samples
            return ()
        except Exception as error:  # noqa: BLE001 - no thread left, or a fault of ours: an observer must not end a job
            self._fault("look", error)
            return ()
