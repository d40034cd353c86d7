"""This node's part of the small all-reduce: a process with torch (train/checkup.py), and what it says. A shell."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.core.doctor import Reduced
from holdfast.runtime.doctor.bounded import end
from holdfast.runtime.doctor.programs import CHECKUP, ERROR_CHARS_MAX, last_json


class Reducer:
    """A process that imports torch as soon as it is started, so that all nodes do so at the same time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, python: str, rank: int, world: int, limit_s: float) -> Reducer:
        """Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *(python, CHECKUP, "reduce", str(rank), str(world), str(limit_s)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process)

    async def store_port(self) -> int:
        """Of rank 0, whose store it is; 0 when there is none."""
        told = await self._answer()
        return int(told.get("port", 0))

    def join(self, host: str, port: int) -> None:
        """For the other ranks: where the store is."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{host} {port}\n".encode())

    async def result(self) -> Reduced:
        told = await self._answer()
        if told.get("ok"):
            return Reduced(ok=True, seconds=float(told.get("seconds", 0.0)))
        error = str(told.get("error") or "its process ended without a word")
        return Reduced(ok=False, error=error[:ERROR_CHARS_MAX])

    async def close(self) -> None:
        await end(self._process)

    async def _answer(self) -> dict[str, Any]:
        """The next line that is an object; empty at the end of the process."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            told = last_json(line.decode(errors="replace"))
            if told is not None:
                return told
        return {}
