"""A worker that is signalled before it runs its own program has not been spared."""

from __future__ import annotations

import asyncio
import signal

from holdfast.runtime.workers.keeper import KeeperHandle, fork_keeper
from holdfast.runtime.workers.keeper_client import KeeperClient, KeeperEvent, ProcessEnded
from tests.support.limits import limit_s

WORKERS = 100


def test_a_signal_right_after_the_spawn_is_not_lost() -> None:
    handle = fork_keeper()
    assert asyncio.run(spawn_and_signal(handle)) == [-signal.SIGTERM] * WORKERS


async def spawn_and_signal(handle: KeeperHandle) -> list[int]:
    codes: list[int] = []
    over = asyncio.Event()

    def on_event(event: KeeperEvent) -> None:
        if isinstance(event, ProcessEnded):
            codes.append(event.exit_code)
            if len(codes) == WORKERS:
                over.set()

    keeper = KeeperClient(handle, on_event)
    for number in range(WORKERS):
        keeper.spawn(f"worker{number}", ["sleep", "30"])
        keeper.signal(f"worker{number}", signal.SIGTERM)
    try:
        async with asyncio.timeout(limit_s(15)):
            await over.wait()
    except TimeoutError:
        pass
    finally:
        await keeper.close()
    return codes
