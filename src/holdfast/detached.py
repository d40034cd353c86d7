"""Blocking calls that may never return, such as name resolution, beside a running event loop.

asyncio joins its own threads at the end of the loop: an agent that has to end would wait for a dead name server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def run_detached(function: Callable[[], Result]) -> Result:
    """Call the function in a thread of its own. Returns its result or raises its exception.

    If the caller is cancelled, the call continues alone, and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Result] = loop.create_future()

    def answer_with(result: Result | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:  # noqa: BLE001 - passed to the caller unchanged
            error = raised
        try:
            loop.call_soon_threadsafe(answer_with, result, error)
        except RuntimeError:
            return  # the loop has ended

    threading.Thread(target=run, name="holdfast-detached", daemon=True).start()
    return await answer
