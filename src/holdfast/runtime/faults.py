"""Whose fault an exception is that nobody caught: asyncio hands it to the loop's handler, or swallows it.

An exception that came through our code is ours and ends the agent. What asyncio met alone, such as no descriptor left
for another connection, or a peer that broke off, is not: asyncio tries again by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from holdfast.core.errors import HoldfastError, InternalError, PlatformError

OUR_PACKAGE = "holdfast"
NO_THREAD = "can't start new thread"
"""Python's words."""
SAID_INTERVAL_S = 60.0
"""The same trouble is said once in this time, however often asyncio meets it."""


def fault_of(context: Mapping[str, Any]) -> Exception | None:
    """The exception that makes this context of the loop's exception handler a fault of ours; None: it is none."""
    error = context.get("exception")
    if not isinstance(error, Exception):
        return None
    return error if not isinstance(error, OSError) or _came_through_us(error.__traceback__) else None


def _came_through_us(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0] == OUR_PACKAGE:
            return True
        traceback = traceback.tb_next
    return False


def as_error(error: BaseException) -> HoldfastError:
    """What ends an agent, as an error with a code: one of ours as it is, anything else as a fault of ours."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # a task group's: what went wrong first is what there is to tell
    if isinstance(error, HoldfastError):
        return error
    fault: HoldfastError = InternalError(f"holdfast failed: {describe(error)}")
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        fault = PlatformError(f"{error}: this user, or this container, may have no more processes (`ulimit -u`)")
    fault.__cause__ = error
    return fault


def describe(error: BaseException) -> str:
    """One exception in one line."""
    text = " ".join(str(error).splitlines())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Troubles:
    """What asyncio meets and tries again, said once in a while."""

    def __init__(self, say: Callable[[str], None], now: Callable[[], float]) -> None:
        self._say = say
        self._now = now
        self._said: dict[str, float] = {}

    def met(self, context: Mapping[str, Any]) -> None:
        error = context.get("exception")
        what = str(context.get("message") or "trouble").partition("\n")[0]
        text = f"{what}: {describe(error)}" if isinstance(error, BaseException) else what
        now = self._now()
        if now - self._said.get(text, -SAID_INTERVAL_S) >= SAID_INTERVAL_S:
            self._said[text] = now
            self._say(text)
