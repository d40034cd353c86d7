"""The agent's observation of its workers: their progress, the phases of their start, and samples of their stacks.

Three readers of one board, each with its own timer: `Observer` reports to the machine, `Phases` and `ProgressNotes`
write events into the journal. They execute, and decide nothing. stack_sampler.py takes the samples.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.agent.events import Event, WorkersProgress, WorkersSeen
from holdfast.protocol import board_layout as layout
from holdfast.protocol.messages import Assign, Start
from holdfast.protocol.rank_progress import RankProgress, RankSample
from holdfast.supervisor.board import Board
from holdfast.supervisor.stack_sampler import StackSampler

PHASE_DIGITS = 4
LOOK_FIRST_S, LOOK_AGAIN_S_MAX, LOOK_BACKOFF = 0.25, 10.0, 1.5
"""Between two reads of the board, until the first step is done; each read costs some microseconds."""

MARKS = {
    "import": layout.MEETING,
    "store": layout.STORE,
    "process_group": layout.GROUP,
    "first_step": layout.FIRST_STEP,
}


class Phases:
    """How long each part of a generation's start took on this node: the event `phases`, once per generation.

        detect          a worker of the one before has ended in failure  →  its end is ordered
        stop            → no process of it is alive
        form            → (or: the agent begins) the order to start: the nodes meet, are assigned and prepared
        spawn           → all workers run
        import          → they ask for their process group: imports (the fork server's too if they waited for it)
                        and whatever else the script does first
        store           → they are connected to the store
        process_group   → they have their process group
        first_step      → the first step of an optimizer is done

    A part that was not there (no failure, no process group, no optimizer) is left out; what follows is measured from
    the last moment there was. Where workers differ, the slowest counts. `write` gets the journal's event."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._told: dict[str, float] = {}
        """The phases of the generation that starts or runs, seconds."""
        self._generation: dict[str, int] = {}
        """The generation's numbers, once it has been ordered to start."""
        self._last_s = self._loop.time()
        """The end of the last phase."""
        self._trouble_s: float | None = None
        self._stopping = False
        self._awaited = 0
        """Workers that do not run yet."""
        self._board: Board | None = None
        self._timer: asyncio.TimerHandle | None = None

    def trouble(self) -> None:
        """A worker has failed, and the generation still runs."""
        if self._trouble_s is None and not self._stopping:
            self._trouble_s = self._loop.time()

    def stop(self) -> None:
        """The end of the generation was ordered."""
        if self._stopping:
            return
        self.close()
        self._stopping = True
        self._last_s = self._loop.time() if self._trouble_s is None else self._trouble_s
        if self._trouble_s is not None:
            self._passed("detect")

    def gone(self) -> None:
        """No process of the generation is alive."""
        if self._stopping:
            self._passed("stop")

    def start(self, generation: int, restart_count: int, nproc: int, board: Board) -> None:
        """The workers were ordered to start."""
        self._passed("form")
        self._stopping, self._trouble_s = False, None
        self._generation = {"generation": generation, "restart_count": restart_count}
        self._awaited, self._board = nproc, board

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
            self._look(LOOK_FIRST_S)

    def close(self) -> None:
        """The generation is over: write the phases that were measured."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._generation:
            if self._awaited == 0:
                self._read()
            told = {f"{name}_s": s for name, s in self._told.items()}
            self._write("phases", **self._generation, **told, until_monotonic=round(self._last_s, PHASE_DIGITS))
        self._generation, self._told, self._board, self._awaited = {}, {}, None, 0

    def _passed(self, phase: str, moment_s: float | None = None) -> None:
        now = self._loop.time() if moment_s is None else moment_s
        self._told[phase] = round(self._told.get(phase, 0.0) + max(0.0, now - self._last_s), PHASE_DIGITS)
        self._last_s = max(now, self._last_s)

    def _look(self, again_s: float) -> None:
        assert self._board is not None
        if self._board.moment(layout.FIRST_STEP) is not None:
            self.close()
        else:
            again_s = min(again_s * LOOK_BACKOFF, LOOK_AGAIN_S_MAX)
            self._timer = self._loop.call_later(again_s, self._look, again_s)

    def _read(self) -> None:
        assert self._board is not None
        for phase, mark in MARKS.items():
            moment_s = self._board.moment(mark)
            if moment_s is not None:
                self._passed(phase, moment_s)


FIRST_S, EVERY_S, GROWTH = 1.0, 10.0, 2.0
"""Between two events: soon after the start, so that short runs have events too, then rarely."""
PROGRESS_DIGITS = 3


class ProgressNotes:
    """Writes the progress of one node's workers, generation after generation. `write` gets the journal's event."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._note: Callable[[], None] | None = None
        """Writes one event of the running generation."""
        self._timer: asyncio.TimerHandle | None = None

    def start(
        self, generation: int, rank_base: int, board: Board, look: Callable[[], tuple[RankProgress, ...]]
    ) -> None:
        """The workers of this generation were ordered to start."""
        self._note = None  # it belongs to an older generation, whose board is closed
        self.close()

        def note() -> None:
            ranks = look()
            told = [board.job_steps(each.local_rank) for each in ranks]
            self._write(
                "progress",
                generation=generation,
                rank_base=rank_base,
                stages=[each.stage.value for each in ranks],
                steps=[each.steps for each in ranks],
                ages_s=[round(each.age_s, PROGRESS_DIGITS) for each in ranks],
                own_s=[round(each.own_s, PROGRESS_DIGITS) for each in ranks],
                began_at=[began for began, _ in told],
                at=[at for _, at in told],
            )

        self._note = note
        self._again(FIRST_S)

    def close(self) -> None:
        """The generation is over; its board is still open."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._note is not None:
            note, self._note = self._note, None
            note()

    def _again(self, after_s: float) -> None:
        self._timer = self._loop.call_later(after_s, self._ring, min(after_s * GROWTH, EVERY_S))

    def _ring(self, then_s: float) -> None:
        if self._note is not None:
            self._note()
            self._again(then_s)


REACH_S_MAX = 3.0
"""Limit for the test connection to the generation's store."""


class Observer:
    """Reports the workers of one node, generation after generation. `emit` gets the machine's events, on the loop."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        emit: Callable[[Event], None],
        *,
        host: str,
        folder: Path | None,
        interval_s: float,
        fault: Callable[[str, Exception], None],
    ) -> None:
        """`folder`: the run's, where evidence is kept; None: no evidence is kept. `fault`: gets the error of a failed
        sample, whose result is then empty."""
        self._fault = fault
        self._tasks = tasks
        self._emit = emit
        self._host = host
        self._folder = folder
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._generation = 0
        self._stack_sampler: StackSampler | None = None
        self._store = ("", 0)
        self._timer: asyncio.TimerHandle | None = None

    def start(
        self, assign: Assign, start: Start, board: Board, progress: Callable[[], tuple[RankProgress, ...]]
    ) -> None:
        """The workers of this generation were ordered to start. The board may be closed once another generation
        starts."""
        self._retire()
        self._generation = assign.generation
        self._stack_sampler = StackSampler(board, generation=assign.generation, rank_base=assign.rank_base)
        self._store = (start.master_addr, start.master_port)
        self._again(progress)

    def stop(self) -> None:
        """No worker of the generation is alive."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def close(self) -> None:
        self.stop()
        if self._stack_sampler is not None:
            await self._stack_sampler.close()

    def look(self, generation: int, number: int, pids: Mapping[int, int], *, store: bool) -> None:
        """Sample each of these workers (local rank -> pid), and try to reach the store if asked. Answers with
        WorkersSeen."""
        self._tasks.create_task(self._look(generation, number, pids, store=store))

    async def _look(self, generation: int, number: int, pids: Mapping[int, int], *, store: bool) -> None:
        samples, reach = await asyncio.gather(self.samples(generation, pids), self._reach(store))
        self._emit(WorkersSeen(generation, number, samples, reach))

    async def samples(self, generation: int, pids: Mapping[int, int]) -> tuple[RankSample, ...]:
        """One sample of each of these workers; none when the generation is over."""
        if self._stack_sampler is None or generation != self._generation:
            return ()
        try:
            return await self._stack_sampler.look(pids, self._folder)
        except OSError:  # no descriptor left, or the generation is over meanwhile: no samples
            return ()
        except Exception as error:  # noqa: BLE001 - no thread left, or a fault of ours: what only looks ends no job
            self._fault("look", error)
            return ()

    async def _reach(self, wanted: bool) -> tuple[str, ...]:
        """The problems with the connection to the store, in words."""
        if not wanted:
            return ()
        address, port = self._store
        try:
            async with asyncio.timeout(REACH_S_MAX):
                _, writer = await asyncio.open_connection(address, port)
        except TimeoutError:
            problem = "timed out"
        except socket.gaierror as error:
            problem = f"the name is not known here ({error.strerror})"
        except UnicodeError:
            problem = "that is no name of a host"
        except OSError as error:
            problem = (
                "connection refused" if isinstance(error, ConnectionRefusedError) else str(error.strerror or error)
            )
        else:
            writer.close()
            return ()
        return (f"{self._host} cannot reach {address}:{port}: {problem}",)

    def _again(self, progress: Callable[[], tuple[RankProgress, ...]]) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._tell, progress)

    def _tell(self, progress: Callable[[], tuple[RankProgress, ...]]) -> None:
        self._again(progress)
        self._emit(WorkersProgress(self._generation, progress()))

    def _retire(self) -> None:
        self.stop()
        if self._stack_sampler is not None:
            self._tasks.create_task(self._stack_sampler.close())
            self._stack_sampler = None
