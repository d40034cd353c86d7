"""How long a test waits before it gives up.

A limit is for the case that something never happens, so it costs nothing to be generous. What is enough on a quiet
machine is multiplied by how slow this one is, measured once when the tests start: no test fails because a machine is
slow. Nothing here measures the product: what is about time is a benchmark.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

QUIET_S = 0.05
"""Wall time of one start of Python on a quiet machine of ours."""
MARGIN = 2.0
"""A machine becomes slower while tests run: by the tests themselves, and by its other tenants."""
VARIABLE = "TEST_SLOWNESS"
POLL_S, POLL_S_MAX = 0.005, 0.1
"""Pause between two looks: it grows with the time that was waited, since a look may cost processor time."""

T = TypeVar("T")


def measure() -> float:
    """How many times slower this machine is than a quiet one of ours, with a margin; never below the margin."""
    times = []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import asyncio"], check=True)
        times.append(time.monotonic() - began)
    return MARGIN * max(1.0, statistics.median(times) / QUIET_S)


def slowness() -> float:
    """The factor for every limit. Measured once; test processes and the scripts they start inherit it."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{measure():.2f}"
    return float(os.environ[VARIABLE])


def limit_s(seconds: float) -> float:
    """What `seconds` on a quiet machine are here."""
    return seconds * slowness()


def until(condition: Callable[[], T], what: str | Callable[[], str], seconds: float = 40.0) -> T:
    """The first true value of `condition`. Fails with `what` after `seconds` of a quiet machine."""
    begun = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        waited_s = time.monotonic() - begun
        if waited_s > limit_s(seconds):
            pytest.fail(f"not within {limit_s(seconds):g} s: {what if isinstance(what, str) else what()}")
        time.sleep(min(POLL_S_MAX, max(POLL_S, waited_s / 50)))


async def settled(condition: Callable[[], object]) -> None:
    """`until` in an event loop: return when the condition is true. Raises TimeoutError."""
    async with asyncio.timeout(limit_s(20)):
        while not condition():  # noqa: ASYNC110 - any condition, under a deadline
            await asyncio.sleep(0.001)
