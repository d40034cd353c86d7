"""Waits until the GPU memory of workers that have ended is free. The driver frees it some time after their end, and the
next generation would run out of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from holdfast.detached import run_detached
from holdfast.doctor.machine_reader import used_memory

SLACK_BYTES = 256 * 2**20
"""More than before by this counts as free: other programs use the GPUs, too."""
WAIT_S_MAX = 10.0
LOOK_S = 0.1
"""Time between two looks (s)."""


class Freed(Struct, frozen=True):
    """The result of the wait."""

    seconds: float
    left: dict[int, int]
    """Bytes that are still in use, by GPU, beyond what was in use before; empty: all is free."""


def leftover(before: Mapping[int, int], now: Mapping[int, int]) -> dict[int, int]:
    """Bytes in use beyond what was in use before, by GPU. A GPU that is unknown in one of them has nothing left."""
    return {
        index: used - before[index]
        for index, used in now.items()
        if index in before and used - before[index] > SLACK_BYTES
    }


async def wait_until_free(
    before: Mapping[int, int], limit_s: float = WAIT_S_MAX, look: Callable[[], dict[int, int]] = used_memory
) -> Freed:
    """Wait for the memory that was free before the workers began. Ends within the limit, also if the driver hangs."""
    began_s = time.monotonic()
    left: dict[int, int] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while left := leftover(before, await run_detached(look)):  # noqa: ASYNC110 - the driver has no event for it
                await asyncio.sleep(LOOK_S)
    return Freed(round(time.monotonic() - began_s, 3), left)
