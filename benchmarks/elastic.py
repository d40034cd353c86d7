"""A job on pretend hosts, for rows about nodes that come and go: agents of any launcher, and the steps their workers stamped.

What counts as training is decided by the stamps alone: every rank of a world of that size has done a step since.
Knows launchers and hosts; must not know what the rows measure.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import SCRIPTS, BenchmarkError, Launcher, Sample, environment
from tests.network.hosts import PretendHosts, Program, why_not

__all__ = ["Job", "Trained", "job", "why_not"]

POLL_S = 0.01
START_S_MAX = 90.0
"""From the start of two agents to the first common step: torchrun's defaults need half of it."""
COMPLAINT = re.compile(r"[\w.]*Error: ")
COMPLAINT_CHARS_MAX = 160
PARTS = {"script begins": "main", "torch imported": "torch", "DDP built": "built"}
"""Their names in the table, and in the lines of scripts/ddp_steps.py and survive_steps.py."""


@dataclass(frozen=True)
class Trained:
    """The first step that all ranks of a world have done. Seconds since the event in question, always by the last rank."""

    step_s: float
    parts: Sample
    """When the scripts began, had imported torch, and had built their DDP models (which imports torch._dynamo)."""

    def sample(self, name: str) -> Sample:
        return {name: self.step_s, **{f"{name}: {part}": value for part, value in self.parts.items()}}


def trained(firsts: list[dict[str, Any]], since_s: float) -> Trained:
    """From the first steps of all ranks. A worker that was there before has nothing to tell of how it began."""
    fresh = [stamp for stamp in firsts if stamp["main"] > since_s]
    parts = {part: max(stamp[key] for stamp in fresh) - since_s for part, key in PARTS.items()} if fresh else {}
    return Trained(max(stamp["now"] for stamp in firsts) - since_s, parts)


class Job:
    """Agents of one launcher on pretend hosts."""

    def __init__(
        self,
        launcher: Launcher,
        hosts: PretendHosts,
        folder: Path,
        flags: tuple[str, ...],
        script: str,
        arguments: Sequence[str],
    ) -> None:
        self.hosts = hosts
        self.folder = folder
        self.agents: dict[int, Program] = {}
        """The newest on each host."""
        self._launcher = launcher
        self._script = (SCRIPTS / script, *arguments)
        self._flags = (*flags, "--nproc-per-node", "1", "--max-restarts", "3")
        self._trail = folder / "steps.jsonl"
        self._trail.touch()
        self._read_bytes = 0

    def start(self, number: int) -> float:
        """Start an agent on this host; when (monotonic)."""
        began_s = time.monotonic()
        env = environment(self.folder, {**self._launcher.env, "OMP_NUM_THREADS": "1"})
        clean = ("env", "--ignore-environment", *(f"{name}={value}" for name, value in env.items()))
        command = (*self._launcher.command, *self._flags, "--log-dir", self._logs(number), *self._script)
        with self._screen(number).open("ab") as screen:
            self.agents[number] = self.hosts[number].start([*clean, *command], cwd=self.folder, stdout=screen)
        return began_s

    def two_train(self) -> Trained:
        return self.train(2)

    def train(self, count: int) -> Trained:
        """So many agents, started together, the first one first, and their workers at the first common step."""
        began_s = self.start(1)
        for number in range(2, count + 1):
            self.start(number)
        return self.trains(count, began_s, START_S_MAX)

    def trains(self, world: int, since_s: float, limit_s: float) -> Trained:
        """Wait for a step of every rank of such a world. Raises BenchmarkError after `limit_s`, or when no agent is left."""
        firsts: dict[int, dict[str, Any]] = {}
        while True:
            for stamp in self._fresh_stamps():
                if stamp["world"] == world and stamp["now"] > since_s:
                    firsts.setdefault(stamp["rank"], stamp)
            if len(firsts) == world:
                return trained(list(firsts.values()), since_s)
            waited_s = time.monotonic() - since_s
            if not any(agent.running for agent in self.agents.values()):
                raise BenchmarkError(f"job dead: every agent had ended after {waited_s:.1f} s: {self.said()}")
            if waited_s > limit_s:
                raise BenchmarkError(f"not within {limit_s:g} s: {world} in training: {self.said()}")
            time.sleep(POLL_S)

    def forget(self, number: int) -> None:
        """This host was killed: its agent is not waited for any more."""
        del self.agents[number]

    def must_live(self, number: int, since_s: float, seconds: float) -> None:
        """Watch an agent for so long. Raises BenchmarkError when it ends."""
        agent = self.agents[number]
        while time.monotonic() < since_s + seconds:
            if not agent.running:
                after_s, code = time.monotonic() - since_s, agent.wait(0)
                raise BenchmarkError(f"job dead: node{number}'s agent ended with {code} after {after_s:.1f} s")
            time.sleep(POLL_S)

    def events(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        """What holdfast's agents wrote into their journals: host number and event."""
        found = []
        for number in self.agents:
            for path in self._logs(number).glob("**/events.jsonl"):
                lines = map(json.loads, path.read_text().splitlines())
                found += [(number, each) for each in lines if each["event"] == name]
        return sorted(found, key=lambda each: each[1]["monotonic"])

    def said(self) -> str:
        """The last complaint on any agent's screen, cut short."""
        lines = [
            line.strip()
            for path in sorted(self.folder.glob("screen.*"))
            for line in path.read_text(errors="replace").splitlines()
        ]
        complaints = [line for line in lines if COMPLAINT.match(line)]
        return complaints[-1][:COMPLAINT_CHARS_MAX] if complaints else "nobody complained"

    def _fresh_stamps(self) -> list[dict[str, Any]]:
        """Those written since the last call."""
        with self._trail.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._read_bytes += whole
        return list(map(json.loads, text[:whole].splitlines()))

    def _logs(self, number: int) -> Path:
        return self.folder / f"logs{number}"

    def _screen(self, number: int) -> Path:
        return self.folder / f"screen.{number}"


@contextmanager
def job(
    launcher: Launcher,
    folder: Path,
    nnodes: str,
    *,
    hosts: int,
    backend: str = "c10d",
    endpoint: str = "node1:29400",
    script: str = "ddp_steps.py",
    arguments: Sequence[str] = (),
    prepare: Callable[[PretendHosts], None] = lambda _: None,
) -> Iterator[Job]:
    """Hosts and a job to start on them; all is gone at the end. `prepare` gets the hosts before any agent is started."""
    with ExitStack() as stack:
        try:
            pretended = stack.enter_context(PretendHosts(hosts, folder / "hosts"))
            prepare(pretended)
        except (RuntimeError, AssertionError) as error:
            raise BenchmarkError(f"the pretend hosts do not stand: {error}") from error
        flags = ("--nnodes", nnodes, "--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "elastic")
        yield Job(launcher, pretended, folder, flags, script, arguments)
