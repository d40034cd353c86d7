"""Tells the machine how far the workers are, again and again while they run, and where they are when it asks.

Executes, and decides nothing: what a look at the workers is, is looker.py's; what it means is said elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.core.agent.events import Event, WorkersProgress, WorkersSeen
from holdfast.core.progress import RankProgress
from holdfast.core.protocol import Assign, Start
from holdfast.core.stacks import RankSample
from holdfast.runtime.workers.board import Board
from holdfast.runtime.workers.looker import Looker

REACH_S_MAX = 3.0
"""For the test connection to the generation's store."""


class Observer:
    """Of one node, generation after generation. `emit` gets the machine's events, on the loop."""

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
        """`folder`: the run's, where evidence is kept; None: nowhere. `fault`: gets what goes wrong with a look, which shows
        nothing then."""
        self._fault = fault
        self._tasks = tasks
        self._emit = emit
        self._host = host
        self._folder = folder
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._generation = 0
        self._looker: Looker | None = None
        self._store = ("", 0)
        self._timer: asyncio.TimerHandle | None = None

    def start(
        self, assign: Assign, start: Start, board: Board, progress: Callable[[], tuple[RankProgress, ...]]
    ) -> None:
        """The workers of this generation are ordered to start. The board may be closed once another one starts."""
        self._retire()
        self._generation = assign.generation
        self._looker = Looker(board, generation=assign.generation, rank_base=assign.rank_base)
        self._store = (start.master_addr, start.master_port)
        self._again(progress)

    def stop(self) -> None:
        """No worker of the generation is alive."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def close(self) -> None:
        self.stop()
        if self._looker is not None:
            await self._looker.close()

    def look(self, generation: int, number: int, pids: Mapping[int, int], *, store: bool) -> None:
        """Take a sample of each of these workers (local rank -> pid), and try to reach the store if asked. Answers with
        WorkersSeen."""
        self._tasks.create_task(self._look(generation, number, pids, store=store))

    async def _look(self, generation: int, number: int, pids: Mapping[int, int], *, store: bool) -> None:
        samples, reach = await asyncio.gather(self.samples(generation, pids), self._reach(store))
        self._emit(WorkersSeen(generation, number, samples, reach))

    async def samples(self, generation: int, pids: Mapping[int, int]) -> tuple[RankSample, ...]:
        """Of each of these workers, one; of none when the generation is over."""
        if self._looker is None or generation != self._generation:
            return ()
        try:
            return await self._looker.look(pids, self._folder)
        except OSError:  # no descriptor left, or the generation is over meanwhile: nobody to be seen
            return ()
        except Exception as error:  # noqa: BLE001 - no thread left, or a fault of ours: what only looks ends no job
            self._fault("look", error)
            return ()

    async def _reach(self, wanted: bool) -> tuple[str, ...]:
        """What is wrong with the way to the store, in words."""
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
        if self._looker is not None:
            self._tasks.create_task(self._looker.close())
            self._looker = None
