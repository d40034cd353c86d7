"""One coordinator and thousands of light agents with a TCP connection each: `python -m benchmarks.scale 10000` prints its
costs as JSON.

On a busy machine the processes of agents may be late: a second argument is the time, in seconds, for which the
coordinator waits for an agent that is silent, joins, prepares or stops.

The coordinator is the product's own, as with c10d: it has voters, and one of the agents in its process. The others
share a few processes; each is a connection that speaks the product's protocol by hand and starts no worker, but reports
the progress of some. The story: all join and form a generation, all train for a while, one is lost, the others form the
next generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from benchmarks.harness import cpu_s
from benchmarks.simulated import judge
from holdfast.authority.voters import Voters
from holdfast.coordinator.coordinator import Coordinator
from holdfast.extension_list import EXTENSIONS
from holdfast.coordinator.coordinator_commands import StepDown
from holdfast.protocol.charter import NO_CHARTER, Renew, Renewed, Seat, Succession
from holdfast.protocol.codec import decode_from_coordinator
from holdfast.protocol.messages import (
    Assign,
    FromAgent,
    FromCoordinator,
    Join,
    Joined,
    Ping,
    Pong,
    Prepared,
    Progress,
    Start,
    Stop,
    Stopped,
)
from holdfast.protocol.options import Endpoint
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec
from holdfast.protocol.rank_progress import RankProgress, Stage
from holdfast.protocol.session import ClientHandshake, Session
from holdfast.rendezvous.bind import claim
from holdfast.runtime.connection import fresh_nonce, tune
from holdfast.inherited import raise_limit
from holdfast.runtime.replicated_service import ReplicatedService
from holdfast.journal import Journal
from holdfast.runtime.succession import SuccessionClient

PROCESSES = 2
"""Among which the agents are shared out: with the coordinator's, all are busy while a generation is formed."""
RANKS = 8
"""Workers of each agent."""
FORK_S = 0.5
STEP_S = 0.25
"""Of a worker that trains."""
TRAIN_S = 20.0
"""For how long the coordinator's load is measured."""
SETTLE_S = 12.0
"""Until every agent has reported once."""
LIMIT_S = 600.0
"""Until all agents are in a generation."""
DIALLED_AT_ONCE = 250
"""Agents of a process that have dialled and have not joined."""
STORE_PORT = AGENT_PORT = 1
"""Stand for the ports of the store and of the agents; nobody connects."""


@dataclass
class Traffic:
    """What the agents of one process have sent and received since the last report."""

    up: Counter[str] = field(default_factory=Counter)
    """Messages to the coordinator, by name."""
    down: Counter[str] = field(default_factory=Counter)
    up_bytes: int = 0
    down_bytes: int = 0
    pong_s_max: float = 0.0
    """The slowest answer to a ping."""

    def add(self, other: Traffic) -> None:
        self.up += other.up
        self.down += other.down
        self.up_bytes += other.up_bytes
        self.down_bytes += other.down_bytes
        self.pong_s_max = max(self.pong_s_max, other.pong_s_max)


# --- agents ---------------------------------------------------------------------------------------------------------


def own_address(number: int) -> str:
    """An address of loopback that no other node has: one address alone has too few ports for all."""
    return f"127.{1 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def light(number: int) -> NodeSpec:
    return NodeSpec(member=f"node{number}#{number:08x}", host=f"node{number}", nproc=RANKS)


class LightAgent:
    """What one agent must remember to answer."""

    def __init__(self, crowd: Crowd, node: NodeSpec, send: Callable[[FromAgent], None]) -> None:
        self._crowd = crowd
        self._node = node
        self._send = send
        self.joined = asyncio.Event()
        self._generation = 0
        self._started_s = 0.0
        self._loop = asyncio.get_running_loop()
        self.lost = False
        self._ping_interval_s = 0.0
        self._pinged_s = 0.0
        self._pings = 0
        self._next_ping: asyncio.TimerHandle | None = None
        self._held = NO_CHARTER

    def join(self) -> None:
        self._send(Join(self._node, port=AGENT_PORT))

    def hear(self, message: FromCoordinator) -> None:
        traffic = self._crowd.traffic
        traffic.down[type(message).__name__] += 1
        match message:
            case Joined():
                self.joined.set()
                self._ping_interval_s = message.ping_interval_s
                self._number_ping()
            case Pong():
                traffic.pong_s_max = max(traffic.pong_s_max, self._loop.time() - self._pinged_s)
            case Assign():
                self._prepare(message)
            case Start():
                self._start(message)
            case Stop(generation, _, _, following):
                self._generation = 0
                self._send(Stopped(generation))
                if following is not None:
                    self._prepare(following)
            case Renew(term, probe, charter) if probe:
                self._held = self._held if charter is None else charter.position
                self._send(Renewed(term, probe, self._held))
            case _:
                pass

    def _prepare(self, assign: Assign) -> None:
        self._send(Prepared(assign.generation, STORE_PORT if assign.hosts_store else None))

    def _start(self, start: Start) -> None:
        self._generation, self._started_s = start.generation, self._loop.time()
        self._crowd.started(start.generation)
        interval_s = start.progress_interval_s
        self._report_interval_s = interval_s
        self._report_at_s = self._started_s + interval_s * random.random()

    def _ping(self) -> None:
        if self.lost:
            return
        number = self._number_ping()
        if self._generation and self._loop.time() >= self._report_at_s:
            self._report_at_s += self._report_interval_s
            self._report(number)
        else:
            self._send(Ping(number))

    def _number_ping(self) -> int:
        """The number of the ping to send now. The next one is due an interval later."""
        if self._next_ping is not None:
            self._next_ping.cancel()
        self._next_ping = self._loop.call_later(self._ping_interval_s, self._ping)
        self._pings += 1
        self._pinged_s = self._loop.time()
        return self._pings

    def _report(self, number: int) -> None:
        trained_s = self._loop.time() - self._started_s
        steps = int(trained_s / STEP_S)
        stage, age_s = (Stage.STEPPING if steps else Stage.READY), trained_s % STEP_S
        ranks = tuple(RankProgress(each, stage, steps, age_s, steps * STEP_S / 2) for each in range(RANKS))
        self._send(Progress(self._generation, ranks, ping=number))


class RemoteAgent(asyncio.Protocol):
    """An agent with its connection."""

    transport: asyncio.Transport

    def __init__(self, crowd: Crowd, number: int) -> None:
        self._crowd = crowd
        node = light(number)
        self._session = Session(ClientHandshake(crowd.job, node, None, fresh_nonce()), decode_from_coordinator)
        self.agent = LightAgent(crowd, node, self._send)
        self._asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        tune(transport.get_extra_info("socket"))
        transport.write(self._session.opening())

    def data_received(self, data: bytes) -> None:
        self._crowd.traffic.down_bytes += len(data)
        answer = self._session.feed(data)
        if answer:
            self.transport.write(answer)
        if self._session.error is not None:
            raise self._session.error
        if self._session.established and not self._asked:
            self._asked = True
            self.agent.join()
        for message in self._session.take():
            self.agent.hear(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.agent.lost:
            self._crowd.broke(f"an agent lost the coordinator: {exc}")

    def _send(self, message: FromAgent) -> None:
        data, traffic = self._session.pack(message), self._crowd.traffic
        traffic.up[type(message).__name__] += 1
        traffic.up_bytes += len(data)
        self.transport.write(data)


class Crowd:
    """The agents of one process. Speaks with the story by its pipe."""

    def __init__(self, job: JobSpec, port: int, numbers: range, pipe: Pipe) -> None:
        self.job = job
        self.traffic = Traffic()
        self._port = port
        self._pipe = pipe
        self._agents = [RemoteAgent(self, number) for number in numbers]
        self._numbers = numbers
        self._living = len(numbers)
        self._starts: Counter[int] = Counter()

    def started(self, generation: int) -> None:
        self._starts[generation] += 1
        if self._starts[generation] == self._living:
            self._pipe.send(("started", time.monotonic()))

    def broke(self, text: str) -> None:
        self._pipe.send(("broke", text))

    def told(self) -> None:
        order = self._pipe.recv()
        match order:
            case "go":
                self._dialling = asyncio.ensure_future(self._dial())
            case "lose":
                self._living -= 1
                remote = self._agents.pop()
                remote.agent.lost = True
                remote.transport.abort()
            case _:
                self._pipe.send(("traffic", self.traffic))
                self.traffic = Traffic()

    async def _dial(self) -> None:
        """All agents dial, each from an address of its own, as on as many machines."""
        gate = asyncio.Semaphore(DIALLED_AT_ONCE)

        async def dial(number: int, remote: RemoteAgent) -> None:
            async with gate:
                await asyncio.get_running_loop().create_connection(
                    lambda: remote, "127.0.0.1", self._port, local_addr=(own_address(number), 0)
                )
                await remote.agent.joined.wait()

        async with asyncio.TaskGroup() as tasks:
            for number, remote in zip(self._numbers, self._agents, strict=True):
                tasks.create_task(dial(number, remote))


async def crowd(job: JobSpec, port: int, numbers: range, pipe: Pipe) -> None:
    """Be these agents for ever."""
    agents, loop = Crowd(job, port, numbers, pipe), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: agents.broke(str(context.get("exception") or context["message"])))
    loop.add_reader(pipe.fileno(), agents.told)
    await asyncio.Event().wait()


# --- the coordinator ------------------------------------------------------------------------------------------------


class Alone(SuccessionClient):
    """In place of the client around a coordinator: nobody else could become one."""

    def __init__(self) -> None:
        pass

    def stepped_down(self, command: StepDown) -> None:
        sys.exit(f"the coordinator stepped down: {command.reason}")

    async def prove_gone(self, seat: Seat) -> bool:  # noqa: ARG002 - one agent is lost, by the end of its process
        return True


async def coordinate(job: JobSpec, limits: Limits, port: int, pipe: Pipe, journal: Path) -> None:
    """Serve for ever."""
    now, node = asyncio.get_running_loop().time(), light(0)
    voters = Voters(limits, now, node, Succession())
    machine = Coordinator(job, limits, judge, now, voters, extensions=EXTENSIONS)
    service = ReplicatedService(machine, voters, Journal(journal), lambda text: print(text, file=sys.stderr), Alone())
    await service.listen(claim(Endpoint(host="127.0.0.1", port=port), is_host=True), None, static=False)
    link = service.connect_locally()
    own = LightAgent(Crowd(job, port, range(0), pipe), node, link.send)
    link.start(own.hear, lambda reason: sys.exit(f"the coordinator left its own agent: {reason}"))
    own.join()
    pipe.send("listens")
    await asyncio.Event().wait()


# --- the story ------------------------------------------------------------------------------------------------------


def peak_mb(pid: int) -> float:
    """The most memory that a process has had in use."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


class Story:
    """The processes of one job, and what each part of its story costs."""

    def __init__(
        self, count: int, folder: Path, limits: Limits, *, settle_s: float = SETTLE_S, train_s: float = TRAIN_S
    ) -> None:
        self._settle_s, self._train_s = settle_s, train_s
        self._count, self._folder, self._limits = count, folder, limits
        self.costs: dict[str, Any] = {"agents": count, "load_1min": os.getloadavg()[0]}
        self._context = get_context("fork")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._job = JobSpec(run_id="scale", min_nodes=count - 1, max_nodes=count, backend="c10d")
        self._pipes: list[Pipe] = []

    def run(self) -> dict[str, Any]:
        raise_limit()
        with contextlib.ExitStack() as stack:
            pipe, pid = stack.enter_context(
                self._process(
                    lambda own: coordinate(self._job, self._limits, self._port, own, self._folder / "events.jsonl")
                )
            )
            assert pipe.recv() == "listens"
            others = self._count - 1
            processes = min(PROCESSES, others)
            share = [others * n // processes for n in range(processes + 1)]
            for first, last in pairwise(share):
                numbers = range(first + 1, last + 1)
                self._pipes.append(
                    stack.enter_context(
                        self._process(lambda own, numbers=numbers: crowd(self._job, self._port, numbers, own))
                    )[0]
                )
            time.sleep(FORK_S)
            with self._chapter("form", pid):
                self._tell("go")
                self._until_started()
            self.costs["form"]["peak MB"] = peak_mb(pid)
            time.sleep(self._settle_s)
            with self._chapter("train", pid):
                time.sleep(self._train_s)
            with self._chapter("lose one", pid):
                self._pipes[-1].send("lose")
                self._until_started()
            self.costs["peak MB"] = peak_mb(pid)
        return self.costs

    @contextlib.contextmanager
    def _process(self, main: Callable[[Pipe], Any]) -> Iterator[tuple[Pipe, int]]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=lambda: asyncio.run(main(theirs)))
        process.start()
        theirs.close()
        assert process.pid is not None
        try:
            yield ours, process.pid
        finally:
            process.kill()
            process.join()

    @contextlib.contextmanager
    def _chapter(self, name: str, pid: int) -> Iterator[None]:
        self._traffic()
        began_s, spent_s = time.monotonic(), cpu_s(pid)
        yield
        wall_s, spent_s = time.monotonic() - began_s, cpu_s(pid) - spent_s
        traffic = self._traffic()
        self.costs[name] = {"wall s": wall_s, "CPU s": spent_s, **vars(traffic)}
        print(f"{name}: {wall_s:.2f} s, CPU {spent_s:.2f} s", file=sys.stderr)

    def _tell(self, order: str) -> None:
        for pipe in self._pipes:
            pipe.send(order)

    def _traffic(self) -> Traffic:
        self._tell("traffic")
        total = Traffic()
        for _ in self._pipes:
            total.add(self._next("traffic"))
        return total

    def _until_started(self) -> None:
        for _ in self._pipes:
            self._next("started")

    def _next(self, wanted: str) -> Any:
        ready = wait(self._pipes, LIMIT_S)
        if not ready:
            raise RuntimeError(f"not {wanted} within {LIMIT_S:g} s")
        pipe = ready[0]
        assert isinstance(pipe, Pipe)
        what, value = pipe.recv()
        if what != wanted:
            raise RuntimeError(f"{what}: {value}")
        return value


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="holdfast-scale-") as scratch:
        limits = Limits()
        if sys.argv[2:]:
            patience_s = float(sys.argv[2])
            limits = Limits(lease_s=patience_s, prepare_s=patience_s, unjoined_s=patience_s, stop_slack_s=patience_s)
        print(json.dumps(Story(int(sys.argv[1]), Path(scratch), limits).run(), indent=1))
