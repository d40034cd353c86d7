"""Real jobs for tests: scripts that leave a trail, agents whose screen is a file, and waits with deadlines."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import pytest

from holdfast import cli
from holdfast.compile_caches import VARIABLES as CACHE_VARIABLES
from tests.conftest import alive as is_alive
from tests.conftest import descendants
from tests.processes.agent_server import AgentServer, can_be_forked
from tests.support.changed_program import changed_program
from tests.support.documents import checked
from tests.support.limits import limit_s as scaled
from tests.support.limits import until
from tests.warm import Warm
from tests.warm_jobs import Started, WarmJobs

WAIT_S = 30.0
"""Long enough on a quiet machine with a test on each core; nothing here takes a second of its own."""

TRAIL_MODULE = '''
"""What the test scripts share: every note is one line in one file, a Python literal.

Only what every interpreter has loaded is imported at the top: json or subprocess would double the start of a worker.
"""
import os, sys, time

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL_RANK, NODE = int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"])
ROUND = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
PORT = os.environ["MASTER_PORT"]
SLOWNESS = float(os.environ["TEST_SLOWNESS"])

_read, _offset = [], 0


def note(event, **more):
    record = {"event": event, "rank": RANK, "world": WORLD, "node": NODE, "local_rank": LOCAL_RANK, "round": ROUND,
              "port": PORT, "pid": os.getpid(), "agent": os.environ.get("AGENT", ""), **more}
    with open(os.environ["TRAIL"], "ab", buffering=0) as file:
        file.write(repr(record).encode() + b"\\n")


def all_notes():
    """Of all ranks in all generations."""
    global _offset
    with open(os.environ["TRAIL"], "rb") as file:
        file.seek(_offset)
        *lines, rest = file.read().split(b"\\n")
        _offset = file.tell() - len(rest)
    _read.extend(map(eval, lines))
    return _read


def notes(event):
    """Of this generation."""
    return [each for each in all_notes() if each["event"] == event and each["port"] == PORT]


def meet(event="up"):
    """Note it, and wait until every rank of this generation has."""
    note(event)
    end = time.monotonic() + 30 * SLOWNESS
    while len({each["rank"] for each in notes(event)}) < WORLD and time.monotonic() < end:
        time.sleep(0.01)


def hold():
    time.sleep(60 * SLOWNESS)


def on_signal(*names, exit_code=None):
    import signal

    def handler(signum, _frame):
        note("signal", name=signal.Signals(signum).name)
        if exit_code is not None:
            os._exit(exit_code)
    for name in names:
        signal.signal(getattr(signal, name), handler)


def child():
    """A plain child that dies of nothing but SIGKILL."""
    pid = os.fork()
    if pid == 0:
        os.execlp("sh", "sh", "-c", "trap '' TERM; sleep 600; sleep 600")
    note("child", child=pid)


def daemon():
    """A grandchild in a session of its own, whose parent is gone."""
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            import _signal
            _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)
            note("child", child=os.getpid())
            os.write(tell, b"!")
            time.sleep(600)
        os._exit(0)
    os.read(ready, 1)
'''
IMPORTS = ("json", "signal", "subprocess")
"""Imported by a script that names them."""

Note = dict[str, Any]
T = TypeVar("T")


def holdfast(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """A command, in this process: what these tests start are the jobs."""
    line, out, err = list(map(str, args)), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(line)
    return subprocess.CompletedProcess(line, code, out.getvalue(), err.getvalue())


def told(*args: str | Path) -> Any:
    """What such a command prints with --json."""
    done = holdfast(*args, "--json")
    assert done.returncode == 0, done.stderr
    return checked(str(args[0]), done.stdout)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass
class Agent:
    """One `holdfast run` process."""

    process: Any
    """A Popen, or as much of one as tests use."""
    screen: Path
    logs: Path
    began_s: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def supervisor(self) -> int:
        """The agent's only child."""
        (found,) = children(self.pid)
        return found

    def find_below(self, word: str) -> int | None:
        """A process below it whose command line has this word; None: there is none."""
        for pid in descendants(self.pid):
            with contextlib.suppress(OSError):
                if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    @property
    def text(self) -> str:
        return self.screen.read_text(errors="replace")

    def end(self, limit_s: float = WAIT_S) -> int:
        """Its exit code as a shell shows it."""
        try:
            code = self.process.wait(scaled(limit_s))
        except subprocess.TimeoutExpired:
            pytest.fail(f"the agent did not end within {scaled(limit_s):g} s\n{self.text}")
        return 128 - code if code < 0 else code

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def says(self, text: str, limit_s: float = WAIT_S) -> None:
        while_running(lambda: text in self.text, self, limit_s=limit_s)

    @property
    def begun(self) -> bool:
        return self.logs.is_dir() and any(self.logs.iterdir())

    @property
    def folder(self) -> Path:
        """Its run folder."""
        found = [path for path in self.logs.iterdir() if path.is_dir()]
        assert len(found) == 1, found
        return found[0]

    @property
    def verdict(self) -> Any:
        return json.loads((self.folder / "verdict.json").read_bytes())

    def events(self, name: str = "") -> list[Note]:
        path = self.folder / "events.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [each for each in map(json.loads, lines) if each["event"].endswith(name)]


def while_running(condition: Callable[[], T], *agents: Agent, limit_s: float = WAIT_S) -> T:
    """`until`, for what happens while these agents run: fails with their screens as soon as one of them has ended."""

    def screens() -> str:
        return "\n".join(agent.text for agent in agents)

    def looked() -> T:
        ended = [agent for agent in agents if agent.process.poll() is not None]
        value = condition()  # after that look: it may have come true just before the end
        if ended and not value:
            pytest.fail(f"{len(ended)} of {len(agents)} agents ended meanwhile:\n{screens()}")
        return value

    return until(looked, screens, limit_s)


PROGRAM = (sys.executable, "-m", "holdfast.run")


def c10d(endpoint: str, nnodes: str = "2", *more: str) -> tuple[str, ...]:
    """The options of one node of several."""
    return ("--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *more)


def coordinators_first(agents: Sequence[Agent]) -> list[Agent]:
    """The agents, first the one that hosts the coordinator."""
    return sorted(agents, key=lambda agent: not agent.events("coordinator.joined"))


def as_users_have() -> dict[str, str]:
    """Our environment, without what users do not have in theirs: torch sets the folder of its cache in a process that
    compiles, so after a test that compiles in this one; and somebody may forbid Python to keep its bytecode."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in CACHE_VARIABLES and name != "PYTHONDONTWRITEBYTECODE"
    }


class JobFolder:
    """A folder in which jobs run."""

    def __init__(self, folder: Path, server: AgentServer | WarmAgents | None = None) -> None:
        self.folder = folder
        self.server = server
        self.agents: list[Agent] = []
        self._trail = folder / "trail.jsonl"
        self._trail.touch()
        self._read: list[Note] = []
        self._offset = 0
        (folder / "trail.py").write_text(TRAIL_MODULE)

    def script(self, body: str, name: str = "train.py") -> Path:
        path = self.folder / name
        imports = "".join(f"import {each}\n" for each in IMPORTS if f"{each}." in body)
        path.write_text(f"from trail import *\n{imports}{body}")
        return path

    def start(
        self,
        *args: str | Path,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        cwd: Path | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> Agent:
        """Start an agent; its screen (both streams) is a file unless `stdout` says otherwise. It is forked from the
        server, if there is one, unless the program, the environment or the stream must be its own."""
        number = len(self.agents)
        screen, logs = self.folder / f"screen{number}.txt", self.folder / f"logs{number}"
        own_logs = () if "--log-dir" in args else ("--log-dir", str(logs))
        arguments = [*own_logs, *map(str, args)]
        environment = {**as_users_have(), "TRAIL": str(self._trail), "AGENT": str(number), **(env or {})}
        screen.touch()
        process: Any
        if self.server and program == PROGRAM and stdout is None and can_be_forked(environment):
            process = self.server.start(arguments, environment, cwd or self.folder, screen)
        else:
            with screen.open("wb") as file:
                process = subprocess.Popen(
                    [*program, *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file if stdout is None else stdout,
                    stderr=file if stdout is None else stdout,
                    cwd=cwd or self.folder,
                    start_new_session=True,
                )
        agent = Agent(process, screen, logs)
        self.agents.append(agent)
        return agent

    def run(self, *args: str | Path, limit_s: float = WAIT_S, **more: Any) -> tuple[int, Agent]:
        agent = self.start(*args, **more)
        return agent.end(limit_s), agent

    def ends(self, code: int, *args: str | Path, **more: Any) -> Agent:
        """Run an agent, which has to end with this code."""
        ended, agent = self.run(*args, **more)
        assert ended == code, agent.text
        return agent

    def changed(self, text: str) -> tuple[str, ...]:
        """A program to start in place of the agent's: `holdfast run` after this change of holdfast."""
        return self.program(changed_program(text))

    def program(self, text: str) -> tuple[str, ...]:
        """A program to start in place of the agent's."""
        path = self.folder / "program.py"
        path.write_text(text)
        return sys.executable, str(path)

    def trail(self, event: str = "", **wanted: Any) -> list[Note]:
        with self._trail.open("rb") as file:
            file.seek(self._offset)
            *lines, rest = file.read().split(b"\n")
            # A line that is being written is not complete yet: the kernel shows the first part of it.
            self._offset = file.tell() - len(rest)
        self._read.extend(ast.literal_eval(line.decode()) for line in lines)
        return [
            each
            for each in self._read
            if (not event or each["event"] == event) and all(each[key] == value for key, value in wanted.items())
        ]

    def wait(self, count: int, event: str, limit_s: float = WAIT_S, **wanted: Any) -> list[Note]:
        """Wait for so many notes."""

        def told() -> str:
            screens = "\n".join(f"--- agent {n}\n{agent.text}" for n, agent in enumerate(self.agents))
            return f"{count} × {event} {wanted}; trail {self.trail()}\n{screens}"

        until(lambda: len(self.trail(event, **wanted)) >= count, told, limit_s)
        return self.trail(event, **wanted)

    def joined(self, count: int) -> None:
        """Wait until the coordinator, whichever agent hosts it, has so many members."""
        until(
            lambda: any(len(agent.events("coordinator.joined")) >= count for agent in self.agents if agent.begun),
            lambda: "\n".join(agent.text for agent in self.agents),
        )

    def all_gone(self) -> None:
        """Wait until no process that ever left a note is alive."""
        pids = {each["pid"] for each in self.trail()} | {each["child"] for each in self.trail("child")}
        until(lambda: not any(map(is_alive, pids)), lambda: f"alive: {[pid for pid in pids if is_alive(pid)]}", 10.0)

    def close(self) -> None:
        """End what a test has left running."""
        for agent in self.agents:
            if agent.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    agent.process.send_signal(signal.SIGCONT)
                    agent.process.kill()
            agent.process.wait(scaled(WAIT_S))


class WarmAgents:
    """Agents and fork servers that share an import of torch: what `JobFolder` uses of an AgentServer."""

    def __init__(self, jobs: WarmJobs) -> None:
        self._jobs = jobs

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, screen: Path) -> Started:
        return self._jobs.start("holdfast", "run", *arguments, env=environment, output=screen, folder=folder)


@pytest.fixture(scope="module")
def warm_agents(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmAgents]:
    """For modules whose jobs need torch: their fixture `agent_server` returns it."""
    with WarmJobs(warm, tmp_path_factory.mktemp("jobs")) as made:
        yield WarmAgents(made)


@pytest.fixture
def job_folder(tmp_path: Path, agent_server: AgentServer | WarmAgents) -> Iterator[JobFolder]:
    made = JobFolder(tmp_path, agent_server)
    yield made
    made.close()


@pytest.fixture
def endpoint(free_port: Callable[[], int]) -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list of running agents and the runs that are kept, this test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "running"))
    return tmp_path / "running"


@dataclass(frozen=True)
class SmallDisk:
    """A file system of 32 MB and 400 inodes."""

    path: Path

    def fill(self) -> None:
        """Take all blocks."""
        with contextlib.suppress(OSError), (self.path / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        (self.path / "filler").unlink()
        for path in self.path.glob("inode*"):
            path.unlink()

    def fill_and_take_inodes(self) -> None:
        self.fill()
        with contextlib.suppress(OSError):
            for number in range(1000):
                (self.path / f"inode{number}").touch()


LACKS: dict[str, Callable[[SmallDisk], None]] = {
    "no blocks": SmallDisk.fill,
    "no inodes": SmallDisk.fill_and_take_inodes,
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("needs root: a full disk is a small tmpfs")
    place = tmp_path / "disk"
    place.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=32m,nr_inodes=400", "tmpfs", str(place)]
    if subprocess.run(line, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here: the full disk is not tested")
    yield SmallDisk(place)
    subprocess.run(["umount", "-l", str(place)], check=True)
