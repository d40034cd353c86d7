"""The shell of a coordinator under a lease, with its own agent alone: no worker starts before its number is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.authority.leased import Leased
from holdfast.coordinator.coordinator import Coordinator
from holdfast.journal import Journal
from holdfast.protocol.messages import (
    Assign,
    FromAgent,
    FromCoordinator,
    Join,
    Prepared,
    Start,
    Stop,
    Stopped,
    WorkersFailed,
)
from holdfast.protocol.outcome import Failure
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec
from holdfast.rendezvous.elections import Memory
from holdfast.runtime.leadership import ElectedService, fence_s
from tests.support.simulator.nodes import simple_judge


class FakeLease:
    """A lease that is always fresh. What is to be remembered waits for `write`."""

    over = ""
    previous_leader: Memory | None = None

    def __init__(self) -> None:
        self.written: list[int] = []
        self._waiting: list[tuple[Memory, Callable[[bool], None]]] = []

    def fresh(self) -> bool:
        return True

    def left_s(self) -> float:
        return 3600.0

    def workers_may_live_s(self, fence_s: float) -> float:
        return fence_s

    def remember(self, memory: Memory, done: Callable[[bool], None]) -> None:
        self._waiting.append((memory, done))

    def write(self) -> None:
        for memory, done in self._waiting:
            self.written.append(memory.generation)
            done(True)
        self._waiting.clear()


async def test_a_generation_announced_with_stop_starts_when_its_number_is_written() -> None:
    lease = FakeLease()
    job = JobSpec(run_id="j", min_nodes=1, max_nodes=1, backend="etcd", max_restarts=1)
    now = asyncio.get_running_loop().time()
    machine = Coordinator(job, Limits(), simple_judge, now, Leased(Limits(), now, holds=lambda: True))
    service = ElectedService(machine, lease, Journal(None), print, print)  # type: ignore[arg-type]
    heard: list[FromCoordinator] = []
    link = service.connect_locally()
    link.start(heard.append, print)

    async def say(*messages: FromAgent) -> FromCoordinator:
        """The newest answer. A message and its answer take one round of the loop each."""
        for message in messages:
            link.send(message)
        for _ in range(4):
            await asyncio.sleep(0)
        return heard[-1]

    async def written() -> FromCoordinator:
        lease.write()
        return await say()

    failure = Failure(rank=0, local_rank=0, host="a", pid=1, exit_code=1)
    await say(Join(NodeSpec(member="a#1", host="a", nproc=1)))
    assert isinstance(await written(), Assign)
    assert isinstance(await say(Prepared(1, 40_001)), Start)
    stop = await say(WorkersFailed(1, (failure,)))
    assert isinstance(stop, Stop), "an order to stop waits for nothing"
    assert stop.following is not None
    assert service.final_record() == Memory(run_id="j", generation=2, workers_may_live_s=fence_s(Limits()))
    assert not isinstance(await say(Stopped(1), Prepared(2, 40_002)), Start)
    assert lease.written == [1]
    assert isinstance(await written(), Start)
    assert lease.written == [1, 2]
    await service.close()
