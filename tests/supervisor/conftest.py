"""A supervisor on a bench, driven step by step, with everything that it tells; and a preloaded: a bench with a fork server and scripts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from holdfast.protocol.board_layout import BOARD_VARIABLE
from holdfast.supervisor import processes, stack_sampler
from holdfast.supervisor.board import Board
from holdfast.supervisor.client import (
    PreloadReported,
    ProcessEnded,
    ProcessStarted,
    StandbysReported,
    SupervisorClient,
    SupervisorEvent,
    sweep,
)
from holdfast.supervisor.supervisor import exec_supervisor
from holdfast.supervisor.worker_command import BOOTSTRAP, FOLDER
from tests.supervisor.looks import Start, out
from tests.support.limits import limit_s, settled

EVENT_LIMIT_S = limit_s(20.0)
E = TypeVar("E")


class Bench:
    """A supervisor, and its events one at a time."""

    def __init__(self, ignored: tuple[int, ...] = ()) -> None:
        self.others = processes.descendants(os.getpid())  # of this test process, which stands for the agent
        self.events: asyncio.Queue[SupervisorEvent] = asyncio.Queue()
        self.supervisor = SupervisorClient(exec_supervisor(ignored), self.events.put_nowait)

    async def next(self, kind: type[E]) -> E:
        event = await asyncio.wait_for(self.events.get(), EVENT_LIMIT_S)
        assert isinstance(event, kind), event
        return event

    async def close(self) -> None:
        await self.supervisor.close(self.others)

    async def sweep(self) -> None:
        """What an agent does when its supervisor has died; other tests' processes are spared."""
        await asyncio.to_thread(sweep, self.supervisor.handle, self.others)

    until = staticmethod(settled)


@contextmanager
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread can be started in the block, as at a user's limit."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        yield


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[AbstractAsyncContextManager[Bench]]:
    """A fresh supervisor, closed at the end of the test. Parameter: the signals that it ignores."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Bench]:
        made = Bench(getattr(request, "param", ()))
        try:
            yield made
        finally:
            await made.close()

    yield opened()
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 0)
    while True:  # orphans that fell to us in the meantime
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break


HEAVY = """
    import os
    with open(os.path.join(os.path.dirname(__file__), "imports"), "a") as file:
        file.write(f"{os.getpid()}\\n")
"""
PROBE = """
    import os, sys
    import heavy
    with open("/proc/self/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    print(os.getpid(), parent, len(sys.argv), flush=True)
"""


class PreloadedScript:
    """A folder with a heavy module and a script, and workers that run it on a bench."""

    def __init__(self, bench: Any, folder: Path) -> None:
        self.bench = bench
        self.folder = folder
        self.told: list[str] = []
        self.ended: dict[str, ProcessEnded] = {}
        self.pids: dict[str, int] = {}
        self.parked: tuple[int, ...] = ()
        self.own_bytes = 0
        self.heavy = HEAVY
        self.write("heavy.py", HEAVY)
        self.write("probe.py", PROBE)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(text))

    def start_fork_server(
        self,
        *modules: str,
        later: tuple[str, ...] = (),
        threads: int = 1,
        later_s: float = 1000.0,
        standby: int = 0,
        env_set: dict[str, str] | None = None,
    ) -> None:
        self.bench.supervisor.start_fork_server(
            {
                "do": "start_fork_server",
                "argv": [sys.executable, "-u", BOOTSTRAP, "fork-server", FOLDER, "3"],
                "env_set": {"OMP_NUM_THREADS": str(threads), **(env_set or {})},
                "modules": list(modules),
                "later": list(later),
                "later_s": later_s,
                "standby": standby,
                "worker": {"argv": self.argv(), "first_path": str(self.folder)},
            }
        )

    def argv(self, script: str = "probe.py", *arguments: str) -> list[str]:
        return [sys.executable, "-u", BOOTSTRAP, "script", str(self.folder / script), *arguments]

    def spawn(self, key: str, *line: str, **options: Any) -> None:
        with open(self.folder / f"{key}.out", "ab") as file:
            fds = {1: file.fileno(), 2: file.fileno(), **options.pop("fds", {})}
            self.bench.supervisor.spawn(key, self.argv(*line), fds=fds, warm=True, **options)

    async def take(self) -> Any:
        event = await asyncio.wait_for(self.bench.events.get(), EVENT_LIMIT_S)
        match event:
            case PreloadReported(text):
                self.told.append(text)
            case StandbysReported(pids, own_bytes):
                self.parked, self.own_bytes = pids, own_bytes
            case ProcessStarted(key, pid):
                self.pids[key] = pid
            case ProcessEnded(key):
                self.ended[key] = event
        return event

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.take()

    async def end_of(self, *keys: str) -> list[int]:
        await self.until(lambda: set(keys) <= self.ended.keys())
        return [self.ended[key].exit_code for key in keys]

    def output(self, key: str) -> str:
        return (self.folder / f"{key}.out").read_text(errors="surrogateescape")

    def name_of(self, pid: int) -> str:
        return Path(f"/proc/{pid}/comm").read_text().strip()

    def imports(self) -> list[int]:
        """The process of every import of the heavy module."""
        return [int(line) for line in (self.folder / "imports").read_text().split()]

    async def fork_server(self) -> int:
        """Its pid, once it is ready."""
        await self.until(lambda: any(text.startswith("imported") for text in self.told))
        return self.imports()[-1]


@pytest.fixture
def preloaded(
    bench: AbstractAsyncContextManager[Bench], tmp_path: Path
) -> AbstractAsyncContextManager[PreloadedScript]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[PreloadedScript]:
        async with bench as made:
            yield PreloadedScript(made, tmp_path)

    return opened()


@pytest.fixture
def patient_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look shows does not depend on how busy this machine is. A worker that never answers costs the limit."""
    for limit in ("ANSWER_S_MAX", "KEEP_S_MAX", "LOOK_S_MAX", "READ_S_MAX", "RECORDED_S_MAX"):
        monkeypatch.setattr(stack_sampler, limit, limit_s(20))


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board(2)
    yield made
    made.close()


@pytest.fixture
def start(board: Board, tmp_path: Path) -> Iterator[Start]:
    """Start a program as a worker, and wait until it has said `up`."""
    started: list[subprocess.Popen[str]] = []

    def begin(source: str, local_rank: int = 0, line: list[str] | None = None) -> subprocess.Popen[str]:
        script = tmp_path / f"program{local_rank}.py"
        script.write_text(source)
        process = subprocess.Popen(
            line or [sys.executable, "-u", BOOTSTRAP, "script", str(script)],
            env={**os.environ, BOARD_VARIABLE: board.address(local_rank)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        if line is None:
            assert out(process).readline() == "up\n"
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out(process).close()
