"""Takes profiles of this node's workers, when a command asks for them.

torch's profiler runs in the worker (worker.py), which gets the order through the board: see PROFILE in
board_layout.py. Where py-spy is installed, it records a flame graph at the same time. A worker has one profile at a
time. The files go to the run folder, into profiles/NAME. Errors become the answer: a profile ends no job.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.detached import run_detached
from holdfast.extensions.profile.messages import TAKEN_S_MAX, Operation, Profiles, RankProfile, TakeProfiles
from holdfast.protocol.board_layout import PROFILE_SIGNAL
from holdfast.run_folder import PROFILES
from holdfast.runtime.node_extension import Node, NodeExtension, Send
from holdfast.supervisor import processes
from holdfast.supervisor.attached import attached
from holdfast.supervisor.generation import RunningGeneration
from holdfast.supervisor.stack_sampler import py_spy

LOOK_S = 0.02
"""Interval of reading a worker's answers (s)."""
ANSWERED_S_MAX = 30.0
"""Time beyond the ordered seconds after which a worker is not profiled if its main thread has run no Python (s)."""
SIGNAL_S = 1.0
"""Interval of signals to a worker that has not answered (s)."""
ANSWERS_BYTES_MAX = 256 * 1024
OPERATIONS_MAX = 10
WORDS_CHARACTERS_MAX = 500
SPY_S_MIN = 1.0
"""Shortest record by py-spy (s): it takes a part of a second to begin."""
SPY_ENDS_S_MAX = 20.0
"""Limit for py-spy to end (s): it needs some seconds to write a long record."""


class OnNode(NodeExtension):
    """The profiles of one node's workers. The journal gets the event `profile` for each."""

    messages = TakeProfiles

    def __init__(self, node: Node, send: Send) -> None:
        super().__init__(node, send)
        self._numbers = itertools.count(1)
        self._busy: set[int] = set()
        """The workers that are being profiled, by local rank."""

    def heard(self, message: TakeProfiles) -> None:
        running = self.node.workers(message.generation)
        if running is None:
            gone = (RankProfile(rank, why="it is not running") for rank in message.local_ranks)
            self.send(Profiles(message.number, tuple(gone)))
        else:
            self.node.start("profile", self._answer(running, message))

    async def _answer(self, running: RunningGeneration, order: TakeProfiles) -> None:
        taken = await asyncio.gather(*(self._take(running, order, rank) for rank in order.local_ranks))
        self.send(Profiles(order.number, tuple(taken)))
        for each in taken:
            self.node.write(
                "profile",
                generation=running.number,
                name=order.name,
                rank=running.rank_of(each.local_rank),
                files=list(each.files),
                **({"why": each.why} if each.why else {}),
                **({"note": each.note} if each.note else {}),
            )

    async def _take(self, running: RunningGeneration, order: TakeProfiles, local_rank: int) -> RankProfile:
        if local_rank in self._busy:
            return RankProfile(local_rank, why="it is being profiled already")
        self._busy.add(local_rank)
        try:
            return await self._taken(running, order, local_rank)
        except OSError as error:
            return RankProfile(local_rank, why=f"{error.strerror or error}: {error.filename or 'its files'}")
        except Exception as error:  # noqa: BLE001 - what a worker has written may be anything
            return RankProfile(local_rank, why=f"{type(error).__name__}: {error}")
        finally:
            self._busy.discard(local_rank)

    async def _taken(self, running: RunningGeneration, order: TakeProfiles, local_rank: int) -> RankProfile:
        pid = running.pids().get(local_rank, 0)
        if not pid:
            return RankProfile(local_rank, why="it is not running")
        if self.node.folder is None:
            return RankProfile(local_rank, why="the run has no folder for the files (--log-dir /dev/null)")
        if order.steps and not running.board.steps(local_rank):
            why = "it has made no step of a torch optimizer yet: `--seconds 5` profiles it without steps"
            return RankProfile(local_rank, why=why)
        folder = self.node.folder / PROFILES / order.name
        await run_detached(lambda: folder.mkdir(parents=True, exist_ok=True))
        name = f"rank{running.rank_of(local_rank)}"
        wanted = {"folder": str(folder), "name": name, "steps": order.steps, "for_s": order.for_s}
        worker = _OrderedProfile(running, local_rank, pid, next(self._numbers))

        # If torch's profiler cannot run, there is still a flame graph of the ordered time.
        least_s = max(order.for_s, SPY_S_MIN)
        async with _flame_graph(pid, folder / f"{name}.speedscope.json", least_s) as spied:
            with worker.ordered(wanted):
                answer = await worker.answer(order.for_s, by_signal=not order.steps)
        found = [str(folder / file) for file in (*answer.get("files", ()), *spied.files)]
        return RankProfile(
            local_rank,
            tuple(found),
            _operations(answer.get("operations")),
            str(answer.get("why", ""))[:WORDS_CHARACTERS_MAX],
            spied.problem[:WORDS_CHARACTERS_MAX],
        )


class _OrderedProfile:
    """One order to one worker, and its answers."""

    def __init__(self, running: RunningGeneration, local_rank: int, pid: int, number: int) -> None:
        self._running = running
        self._local_rank = local_rank
        self._pid = pid
        self._number = number
        self._file = -1

    @contextlib.contextmanager
    def ordered(self, order: dict[str, Any]) -> Iterator[None]:
        """The worker finds the order on its board as long as the block lasts. Raises OSError."""
        self._file = os.memfd_create("holdfast-profile")
        try:
            os.write(self._file, json.dumps(order).encode() + b"\n")
            self._running.board.order_profile(self._local_rank, self._number << 32 | self._file)
            yield
        finally:
            if self._lives():
                self._running.board.order_profile(self._local_rank, 0)
            os.close(self._file)

    async def answer(self, for_s: float, *, by_signal: bool) -> dict[str, Any]:
        """The worker's last answer, or one with the reason why there is none."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        signal_at_s = began_s
        while loop.time() < began_s + TAKEN_S_MAX:
            answers = self._answers()
            if answers and answers[-1].get("is") in ("done", "failed"):
                return answers[-1]
            if not self._lives():
                return {"why": "it ended while it was profiled"}
            stopped = any(each.get("is") == "stopped" for each in answers)
            if by_signal and not stopped:
                if loop.time() > began_s + for_s + ANSWERED_S_MAX:
                    return {"why": "its main thread runs no Python: `holdfast stacks` shows where it is"}
                if loop.time() >= signal_at_s:
                    self._signal()
                    # The next one ends the profile, unless the worker has not seen this one.
                    signal_at_s = loop.time() + (for_s if answers and for_s > SIGNAL_S else SIGNAL_S)
            await asyncio.sleep(LOOK_S)
        return {"why": f"it did not end within {TAKEN_S_MAX:g} s"}

    def _answers(self) -> list[dict[str, Any]]:
        found = []
        for line in os.pread(self._file, ANSWERS_BYTES_MAX, 0).split(b"\n")[1:]:
            with contextlib.suppress(ValueError):  # the last one may be unfinished
                answer = json.loads(line)
                if isinstance(answer, dict):
                    found.append(answer)
        return found

    def _lives(self) -> bool:
        return self._running.pids().get(self._local_rank) == self._pid

    def _signal(self) -> None:
        # A program that has no handler for it would be killed.
        if processes.signals(self._pid).catches(PROFILE_SIGNAL):
            with contextlib.suppress(OSError):
                processes.signal_thread(self._pid, self._pid, PROFILE_SIGNAL)


def _operations(found: object) -> tuple[Operation, ...]:
    """The operations of a worker's answer; none if it is invalid, because a worker may write anything."""
    try:
        return msgspec.convert(found or (), tuple[Operation, ...])[:OPERATIONS_MAX]
    except msgspec.ValidationError:
        return ()


class _Spied:
    """The result of py-spy."""

    def __init__(self) -> None:
        self.files: tuple[str, ...] = ()
        self.problem = ""
        """The reason why there is no file; empty: there is one, or py-spy is not installed."""


@contextlib.asynccontextmanager
async def _flame_graph(pid: int, path: Path, least_s: float) -> AsyncIterator[_Spied]:
    """Record the block with py-spy, if it is installed, for at least `least_s`."""
    spied, program = _Spied(), py_spy()
    if program is None:
        yield spied
        return
    line = ("record", "--format", "speedscope", "--output", str(path), "--pid", str(pid))
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        command = attached([program, *line])
        process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=null, stderr=pipe)
    except OSError as error:
        spied.problem = f"{program}: {error.strerror or error}"
        yield spied
        return
    loop = asyncio.get_running_loop()
    until_s = loop.time() + least_s
    try:
        yield spied
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        async with asyncio.timeout(SPY_ENDS_S_MAX):
            _, problem = await process.communicate()
        if await run_detached(path.is_file):
            spied.files = (path.name,)
        else:
            spied.problem = f"py-spy: {problem.decode(errors='replace').strip() or f'status {process.returncode}'}"
    except TimeoutError:
        spied.problem = f"py-spy did not end within {SPY_ENDS_S_MAX:g} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
