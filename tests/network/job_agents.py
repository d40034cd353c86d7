"""A job on pretend hosts: its agents, and what its workers did according to the workers themselves.

Every worker writes a line every 50 ms, with the time, into one file. The monotonic clock is the same on all pretend
hosts, so the lines of all can be put in order, and who was alive when is known without asking the system under test.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.network.hosts import Host, PretendHosts, Program
from tests.support import limits
from tests.support.changed_program import changed_program
from tests.support.limits import until

WAIT_S = 40.0
"""On a quiet machine."""
"""A look may read all of /proc."""
ALIVE_EVERY_S = 0.05
LEASE_S = round(limits.limit_s(1.5), 2)
"""A short one, for tests that wait until it is over: also a machine that is slow sends its pings in this time."""
SHORT_LEASE = f"lease={LEASE_S:g}"
FENCE_S = LEASE_S * 2 / 3
"""An agent with this lease ends its workers after so long without an answer."""
LONG_LEASE = "lease=3600"
"""For what must not wait until it is over."""
PORT_AGAIN_S = limits.limit_s(1.0)
"""Within so long after the end of all others a worker may still begin that was started with them."""

WORKER = f"""
import json, os, signal, socket, sys, time

SITE = os.environ["SITE"]
ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
about = {{"host": socket.gethostname(), "pid": os.getpid(), "rank": int(os.environ["RANK"]),
         "world": int(os.environ["WORLD_SIZE"]), "local_world": int(os.environ["LOCAL_WORLD_SIZE"]),
         "node": int(os.environ["GROUP_RANK"]), "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
         "master": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"]),
         "born": (ticks + 1) / os.sysconf("SC_CLK_TCK")}}
trail = os.open(SITE + "/trail.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note():
    line = json.dumps({{**about, "now": time.monotonic()}})
    os.write(trail, line.encode() + b"\\n")


if os.environ.get("SLOW_TO_STOP"):
    signal.signal(signal.SIGTERM, lambda *_: open(SITE + "/asked", "w").close())
if os.environ.get("CONNECT"):
    socket.create_connection((about["master"], about["port"])).close()
while not os.path.exists(SITE + "/finish"):
    note()
    time.sleep({ALIVE_EVERY_S})
"""


@dataclass
class Worker:
    """One worker process, by its own account. Times are the monotonic clock's."""

    host: str
    pid: int
    rank: int
    born_s: float
    """When the kernel made it, rounded up to 10 ms: rounded down, it might be before the end of what it replaces."""
    first_s: float
    last_s: float
    """When it was last seen alive."""


@dataclass
class Generation:
    """The workers that were given the same master address and port, as parts of a world of the same size."""

    master: str
    port: int
    restarts: int
    world: int
    workers: dict[tuple[str, int], Worker] = field(default_factory=dict)

    @property
    def hosts(self) -> set[str]:
        return {worker.host for worker in self.workers.values()}

    @property
    def born_s(self) -> float:
        return min(worker.born_s for worker in self.workers.values())

    @property
    def began_s(self) -> float:
        """When the first of its workers began its script. A standby may have been born before it was needed."""
        return min(worker.first_s for worker in self.workers.values())

    @property
    def complete(self) -> bool:
        return {worker.rank for worker in self.workers.values()} == set(range(self.world))

    def last_s(self, hosts: Collection[str] = ()) -> float:
        """When any of its workers (on these hosts) was last seen alive."""
        return max(worker.last_s for worker in self.workers.values() if not hosts or worker.host in hosts)

    def place(self, host: str) -> list[int]:
        """The ranks of a host."""
        return sorted(worker.rank for worker in self.workers.values() if worker.host == host)


@dataclass
class Agent:
    """One `holdfast run` on a pretend host."""

    host: Host
    program: Program
    screen: Path

    @property
    def text(self) -> str:
        return self.screen.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """As this machine counts. It is not the command that it was forked for (see warm_jobs.py)."""
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.host.entered()}
        (found,) = [pid for pid, line in lines.items() if b"warm_jobs.py" not in line]
        return found

    def signal(self, signum: int) -> None:
        self.program.signal(signum)

    def end(self, limit_s: float = WAIT_S) -> int:
        """Its exit code as a shell shows it."""
        until(lambda: not self.program.running, lambda: f"{self.host.name} to end:\n{self.text}", limit_s)
        return self.program.wait(limits.limit_s(1.0))

    def says(self, text: str, limit_s: float = WAIT_S) -> None:
        until(lambda: text in self.text, lambda: f"{text!r} on {self.host.name}:\n{self.text}", limit_s)


class JobAgents:
    """A folder on the shared disk, and the agents of one job."""

    def __init__(self, hosts: PretendHosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.agents: list[Agent] = []
        self._trail = folder / "trail.jsonl"
        self._trail.touch()
        self._read_bytes = 0
        self._generations: list[Generation] = []
        self._newest: dict[tuple[str, int, int, int], Generation] = {}
        self.script = folder / "train.py"
        self.script.write_text(WORKER)
        self.args: tuple[str, ...] = ()
        """Options that all agents of the job have."""
        self.launcher: tuple[str, ...] = (sys.executable, "-m", "holdfast.run")
        """What an agent is started by, and the beginning of its line."""

    def c10d(self, nnodes: str, endpoint: str = "node1", conf: str = "") -> None:
        """The options of a job that meets there."""
        self.args = ("--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
        if conf:
            self.args += ("--rdzv-conf", conf)

    def change(self, text: str) -> None:
        """Agents that are started from now on are `holdfast run` after this change of holdfast."""
        program = self.folder / "program.py"
        program.write_text(changed_program(text))
        self.launcher = (sys.executable, str(program))

    def start(
        self, number: int, *more: str | Path, env: Mapping[str, str] | None = None, script: Path | None = None
    ) -> Agent:
        """Start an agent on node `number`."""
        name = f"agent{len(self.agents)}-node{number}"
        screen = self.folder / f"{name}.txt"
        line = (*self.launcher, "--log-dir", self.folder / name, *self.args, *more)
        with screen.open("wb") as file:
            program = self.hosts[number].start(
                [*line, script or self.script],
                cwd=self.folder,
                env={**(env or {}), "SITE": str(self.folder)},
                stdout=file,
            )
        agent = Agent(self.hosts[number], program, screen)
        self.agents.append(agent)
        return agent

    def start_all(self, numbers: Iterable[int]) -> list[Agent]:
        return [self.start(number) for number in numbers]

    def finish(self) -> None:
        """Let every worker end with 0."""
        (self.folder / "finish").touch()

    def finish_all(self, agents: Iterable[Agent]) -> None:
        """The job ends well, for these agents too."""
        self.finish()
        for agent in agents:
            assert agent.end() == 0, agent.text

    # ---------------------------------------------------------------- what the workers tell

    @property
    def generations(self) -> list[Generation]:
        """Oldest first."""
        with self._trail.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._read_bytes += whole
        for line in text[:whole].splitlines():
            self._take(json.loads(line))
        return sorted(self._generations, key=lambda generation: generation.began_s)

    def _take(self, note: dict[str, Any]) -> None:
        key = (note["master"], note["port"], note["restarts"], note["world"])
        who, now = (note["host"], note["pid"]), note["now"]
        generation = self._newest.get(key)
        if generation is None or (who not in generation.workers and self._is_over(generation, note)):
            generation = self._newest[key] = Generation(*key)
            self._generations.append(generation)
        worker = generation.workers.setdefault(who, Worker(*who, note["rank"], note["born"], now, now))
        worker.last_s = now

    def _is_over(self, generation: Generation, note: dict[str, Any]) -> bool:
        """Whether a worker that is new belongs to a later generation, which was given the same port by chance: its rank
        was another one's that has ended, or it was born long after the end of all."""
        same_rank = [worker.last_s for worker in generation.workers.values() if worker.rank == note["rank"]]
        end_s = max(same_rank) if same_rank else generation.last_s() + PORT_AGAIN_S
        return bool(note["born"] > end_s)

    def trains(self, numbers: Iterable[int], since_s: float = 0.0, limit_s: float = WAIT_S) -> Generation:
        """Wait for a generation of exactly these nodes whose ranks are all at work, and began after `since_s`."""
        wanted = {f"node{number}" for number in numbers}

        def find() -> Generation | None:
            fitting = [each for each in self.generations if each.hosts == wanted and each.began_s > since_s]
            return next((each for each in fitting if each.complete), None)

        generation: Generation = until(find, lambda: f"{sorted(wanted)} to train\n{self.story()}", limit_s)
        return generation

    def check(self, overlap_s: float = 0.0) -> None:
        """No two generations were alive at once (for longer than `overlap_s`), and none gave a rank twice."""
        generations = self.generations
        for first, second in combinations(generations, 2):
            both_s = first.last_s() - second.began_s
            assert both_s <= overlap_s, f"two generations were alive together for {both_s:.3f} s\n{self.story()}"
        for generation in generations:
            ranks = [worker.rank for worker in generation.workers.values()]
            assert len(set(ranks)) == len(ranks), f"a rank was given twice\n{self.story()}"
            assert set(ranks) <= set(range(generation.world)), self.story()

    def story(self) -> str:
        """For a test that failed."""
        lines = [
            f"generation {each.master}:{each.port} restarts {each.restarts} world {each.world} "
            f"born {each.born_s:.2f} last {each.last_s():.2f}: "
            + ", ".join(f"rank {w.rank} {w.host} {w.first_s:.2f}–{w.last_s:.2f}" for w in each.workers.values())
            for each in self.generations
        ]
        screens = [f"--- {agent.screen.name}\n{agent.text}" for agent in self.agents]
        return "\n".join([f"now {time.monotonic():.2f}", *lines, *screens])


def workers_on(job: JobAgents, number: int) -> list[bytes]:
    """The command lines of the workers there: the agent has the script on its line as well, but more before it."""
    found = []
    for pid in job.hosts[number].pids():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read()
        except OSError:
            continue
        if b"holdfast.run" not in line and b"train.py" in line:
            found.append(line)
    return found
