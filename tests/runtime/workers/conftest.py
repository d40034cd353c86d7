"""A keeper on a bench: started by exec, driven step by step, with everything that it tells."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from holdfast.runtime.workers import processes
from holdfast.runtime.workers.keeper import exec_keeper
from holdfast.runtime.workers.keeper_client import KeeperClient, KeeperEvent

EVENT_LIMIT_S = 10.0
E = TypeVar("E")


class Bench:
    """A keeper, and its events one at a time."""

    def __init__(self, ignored: tuple[int, ...] = ()) -> None:
        self.events: asyncio.Queue[KeeperEvent] = asyncio.Queue()
        self.keeper = KeeperClient(exec_keeper(ignored), self.events.put_nowait)

    async def next(self, kind: type[E]) -> E:
        event = await asyncio.wait_for(self.events.get(), EVENT_LIMIT_S)
        assert isinstance(event, kind), event
        return event

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + EVENT_LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, "never came true"
            await asyncio.sleep(0.01)


Scenario = Callable[[Bench], Awaitable[None]]


@pytest.fixture
def on_bench() -> Iterator[Callable[..., None]]:
    """`on_bench(scenario, ignored=())` runs it against a fresh keeper and closes that."""

    def run(scenario: Scenario, ignored: tuple[int, ...] = ()) -> None:
        async def play() -> None:
            bench = Bench(ignored)
            try:
                await scenario(bench)
            finally:
                await bench.keeper.close()

        asyncio.run(play())

    yield run
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 0)
    while True:  # orphans that fell to us in the meantime
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
