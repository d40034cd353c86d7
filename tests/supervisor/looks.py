"""Programs that are started as workers, and looks at them, for tests of the stack sampler and of what it keeps."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from holdfast.protocol.rank_progress import RankSample
from holdfast.supervisor import stack_sampler as stack_sampler_module
from holdfast.supervisor.board import Board
from holdfast.supervisor.stack_sampler import StackSampler
from tests.support.limits import limit_s

Start = Callable[..., subprocess.Popen[str]]
DEADLINE_S = limit_s(20.0)

SLEEPS = "import time\nprint('up')\ntime.sleep(600)\n"
HOLDS_THE_LOCK = """
import ctypes, os
pipe = os.pipe()[0]
def native():
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
print('up')
native()
"""
SPINS = "print('up')\nwhile True:\n    pass\n"


def out(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def look(board: Board, *processes: subprocess.Popen[str], folder: Path | None = None, times: int = 1) -> Any:
    """The samples of the last of so many looks."""

    async def scenario() -> tuple[RankSample, ...]:
        stack_sampler = StackSampler(board, 3, lambda local_rank: 4 + local_rank, time.time())
        try:
            for _ in range(times):
                async with asyncio.timeout(stack_sampler_module.LOOK_S_MAX + DEADLINE_S):
                    samples = await stack_sampler.look({rank: each.pid for rank, each in enumerate(processes)}, folder)
            return samples
        finally:
            await stack_sampler.close()

    return asyncio.run(scenario())


def functions(sample: RankSample) -> list[tuple[str, int]]:
    return [(frame.function, frame.line) for frame in sample.frames]


def is_at_rest(board: Board, process: subprocess.Popen[str]) -> bool:
    """SLEEPS has said `up`, and is at its next line."""
    return functions(look(board, process)[0]) == [("<module>", 3)]
