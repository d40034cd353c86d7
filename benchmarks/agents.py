"""Real agents and a real coordinator on real sockets, without workers: for measuring how worlds form.

    assign = join_once(Endpoint(host="localhost", port=29400), job, node)      one agent, in this process
    seconds = form_many(1000, processes=4)                                     many, sharing processes

Everything from the agent's machine to the wire is the product's own; only the worker group is a stand-in that starts nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable

from holdfast.agent import commands as do
from holdfast.agent.agent import Agent
from holdfast.agent.events import Dialed, DialFailed, Event, LinkLost, NodePrepared, Received, Signalled
from holdfast.protocol.errors import HoldfastError
from holdfast.protocol.messages import Assign
from holdfast.extension_list import EXTENSIONS
from holdfast.protocol.options import CommandKind, Endpoint, LogOptions, RunOptions, WorkerCommand
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec, Tick
from holdfast.runtime.driver import Driver
from holdfast.runtime.rendezvous_client import CoordinatorLink, RendezvousClient
from holdfast.journal import Journal
from tests.support.simulator.nodes import simple_judge

STORE_PORT = 1
"""Stands for the store's port; nobody connects."""
FORM_S_MAX = 120.0


class FormationError(HoldfastError):
    """The world did not form."""

    code = "HF902"


class FormingAgent:
    """One agent from its first dial until the coordinator says start. Stays a member until `close`."""

    def __init__(self, endpoint: Endpoint, job: JobSpec, node: NodeSpec, limits: Limits, *, host: bool | None) -> None:
        loop = asyncio.get_running_loop()
        nothing = WorkerCommand(kind=CommandKind.PROGRAM, target="true")
        options = RunOptions(
            job=job,
            limits=limits,
            nproc=node.nproc,
            command=nothing,
            logs=LogOptions(log_dir=None),
            endpoint=endpoint,
            is_host=host,
            node_rank=node.node_rank,
        )
        self.started: asyncio.Future[Assign] = loop.create_future()
        self._rendezvous = RendezvousClient(options, simple_judge, Journal(None), lambda _: None, EXTENSIONS)
        self._link: CoordinatorLink | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._driver: Driver[Event, do.Command] = Driver(Agent(node, limits, loop.time()), Tick(), self._execute)

    async def form(self) -> Assign:
        """This agent's place in the world, once every node is prepared. Raises FormationError."""
        self._driver.feed(Tick())
        return await self.started

    async def close(self) -> None:
        self._driver.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._link is not None:
            self._link.close()
        await self._rendezvous.close()

    def leave(self) -> None:
        self._driver.feed(Signalled(15, "SIGTERM"))

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.Dial(node):
                task = asyncio.get_running_loop().create_task(self._dial(node))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case do.Send(message):
                if self._link is not None:
                    self._link.send(message)
            case do.Prepare(assign):
                self._driver.feed(NodePrepared(assign.generation, STORE_PORT if assign.hosts_store else None))
            case do.StartWorkers(assign, _):
                if not self.started.done():
                    self.started.set_result(assign)
            case do.Exit(outcome):
                if not self.started.done():
                    self.started.set_exception(FormationError(outcome.message))
            case _:
                pass

    async def _dial(self, node: NodeSpec) -> None:
        answer = await self._rendezvous.connect(node)
        if isinstance(answer, DialFailed):
            self._driver.feed(answer)
            return
        self._link = answer
        answer.start(lambda message: self._driver.feed(Received(message)), lambda why: self._driver.feed(LinkLost(why)))
        self._driver.feed(Dialed())


def join_once(endpoint: Endpoint, job: JobSpec, node: NodeSpec, limits: Limits | None = None) -> Assign:
    """Join as one agent, hosting the coordinator if the endpoint can be bound, and return this node's place.

    The membership is kept up in a background thread until the process ends, because others may still be joining and
    the coordinator may be here.
    """
    import threading
    from concurrent.futures import Future

    place: Future[Assign] = Future()

    async def join() -> None:
        agent = FormingAgent(endpoint, job, node, limits or Limits(), host=None)
        try:
            place.set_result(await agent.form())
        except HoldfastError as error:
            place.set_exception(error)
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(join()), daemon=True).start()
    return place.result(FORM_S_MAX)


def form_many(count: int, processes: int = 1) -> float:
    """Seconds from the first dial until the last of `count` agents, shared by `processes` processes, may start.

    The coordinator runs in the first process, beside its share of the agents.
    """
    from multiprocessing import get_context

    context = get_context("fork")
    go, over, done = context.Event(), context.Event(), context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    share = [count // processes + (1 if index < count % processes else 0) for index in range(processes)]

    def member(index: int) -> None:
        go.wait()
        asyncio.run(_form_share(Endpoint(host="127.0.0.1", port=port), count, share[index], index, done.put, over.wait))

    children = [context.Process(target=member, args=(index,)) for index in range(processes)]
    for child in children:
        child.start()
    time.sleep(0.2)  # the children are forked and wait: forking is not what is measured
    began = time.monotonic()
    go.set()
    ended = max(done.get() for _ in range(processes))
    over.set()
    for child in children:
        child.join()
    return float(ended - began)


async def _form_share(
    endpoint: Endpoint,
    count: int,
    share: int,
    index: int,
    report: Callable[[float], None],
    wait_for_the_others: Callable[[], object],
) -> None:
    job = JobSpec(run_id="formation", min_nodes=count, max_nodes=count, backend="c10d")
    agents = [
        FormingAgent(
            endpoint,
            job,
            NodeSpec(member=f"{index}.{number}#{os.getpid()}", host=f"h{index}", nproc=1),
            Limits(join_s=FORM_S_MAX),
            host=index == 0 and number == 0,
        )
        for number in range(share)
    ]
    await asyncio.gather(*(agent.form() for agent in agents))
    report(time.monotonic())
    await asyncio.to_thread(wait_for_the_others)
    await asyncio.gather(*(agent.close() for agent in agents))
