"""Calls and processes that may hang, each bounded in time: the doctor must come to an end on the sickest machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from holdfast.runtime.driver import run_detached

ANSWER_BYTES_MAX = 256 * 1024
REAP_S_MAX = 2.0

Result = TypeVar("Result")


class ProcessResult(NamedTuple):
    """A process that was run."""

    code: int | None
    """None: it did not end in time, and was killed."""
    out: str
    err: str


async def bounded(function: Callable[[], Result], limit_s: float, otherwise: Result) -> Result:
    """What it returns; `otherwise` when that takes too long: a dead file system or name server. The call goes on alone."""
    try:
        async with asyncio.timeout(limit_s):
            return await run_detached(function)
    except TimeoutError:
        return otherwise


async def run_bounded(command: Sequence[str], limit_s: float) -> ProcessResult:
    """Runs a program to its end. Raises OSError when it cannot be started."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate()
        return ProcessResult(process.returncode, _text(out), _text(err))
    except TimeoutError:
        return ProcessResult(None, "", "")
    finally:
        await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """Kills what is left of it, children too. One that cannot be killed (a dead disk) is left behind."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_S_MAX):
                await process.wait()


def _text(data: bytes) -> str:
    return data[-ANSWER_BYTES_MAX:].decode(errors="replace")
