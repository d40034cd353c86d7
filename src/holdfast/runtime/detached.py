"""Blocking calls that may take for ever, such as name resolution, in threads that nobody has to wait for.

asyncio's own threads are joined at the end of the loop: an agent that was told to end would wait for a dead name server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def run_detached(function: Callable[[], Result]) -> Result:
    """Its result or exception. When the caller is cancelled the call goes on alone, and what comes of it is dropped."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Result] = loop.create_future()

    def tell(result: Result | None, error: BaseException | None) -> None:
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
        except Exception as raised:  # noqa: BLE001 - handed to the caller as it is
            error = raised
        try:
            loop.call_soon_threadsafe(tell, result, error)
        except RuntimeError:
            return  # the loop has ended

    threading.Thread(target=run, name="holdfast-detached", daemon=True).start()
    return await answer
