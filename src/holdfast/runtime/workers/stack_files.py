"""Evidence of where workers were: what was collected at each look, kept in the run folder whatever happens afterwards.

    <run folder>/stacks/gen<G>_<n>_rank<R>.txt           one look at one worker: the kernel's words, then all its threads
    <run folder>/stacks/gen<G>_nccl_trace_rank<R>        NCCL's flight recorder, if it has dumped

Where py-spy is installed its native stacks are appended, between two looks: while it works the worker is stopped for a
moment, and nothing waits for it. Functions that touch files block.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from holdfast.core.stacks import RankSample
from holdfast.runtime.driver import run_detached
from holdfast.runtime.workers import kernel

FIRST_LOOKS_MAX = 10
"""The first looks of a generation stay; of later ones the newest."""
LATER_LOOKS_MAX = 30
TRACE_BYTES_MAX = 64 * 1024 * 1024
SPY_S_MAX = 20.0
SPY_AGAIN_S = 300.0
"""A worker is shown to py-spy at most this often."""
SPY_BYTES_MAX = 1_000_000

TRACE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
TRACE_DEFAULT = "/tmp/nccl_trace_rank_"
"""torch's own."""


class StackFiles:
    """Of one generation."""

    def __init__(self, generation: int, rank_base: int) -> None:
        self._generation = generation
        self._rank_base = rank_base
        self._looks = 0
        self._began_epoch_s = time.time()
        self._traces: dict[int, float] = {}
        """When the trace that is kept of a rank was written."""
        self._spied_s: dict[int, float] = {}
        self._spying: asyncio.Task[None] | None = None

    def keep(self, folder: Path, samples: Sequence[RankSample], texts: Mapping[int, str]) -> tuple[RankSample, ...]:
        """Write one look down, and say in each sample where. `texts`: all threads of each local rank. Raises OSError."""
        at = folder / "stacks"
        at.mkdir(exist_ok=True)
        number = self._looks
        self._looks += 1
        if number >= FIRST_LOOKS_MAX:
            number = FIRST_LOOKS_MAX + (number - FIRST_LOOKS_MAX) % LATER_LOOKS_MAX
        kept = []
        for sample in samples:
            rank = self._rank_base + sample.local_rank
            path = at / f"gen{self._generation}_{number + 1}_rank{rank}.txt"
            path.write_text(self._describe(sample, texts.get(sample.local_rank, "")), errors="replace")
            kept.append(structs.replace(sample, file=str(path).encode(errors="replace").decode()))  # for people
            with contextlib.suppress(OSError):
                self._keep_trace(at, rank)
        return tuple(kept)

    def _describe(self, sample: RankSample, text: str) -> str:
        rank = self._rank_base + sample.local_rank
        state = f"state {sample.state}" if sample.state else "gone"
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        lines = [
            f"rank {rank}, local rank {sample.local_rank}, process {sample.pid}, {state}",
            f"{sample.cpu_s:.2f} s of processor time at {now}",
            *([sample.note] if sample.note else []),
            "",
            text.rstrip() or "It did not write its stacks: it is stopped, or no Python under holdfast's bootstrap.",
            "",
            "Its threads, as the kernel has them:",
            *kernel.describe_tasks(sample.pid),
        ]
        return "\n".join(lines) + "\n"

    def _keep_trace(self, at: Path, rank: int) -> None:
        """What NCCL's flight recorder has written about this rank in this generation."""
        path = (os.environ.get(TRACE_VARIABLE) or TRACE_DEFAULT) + str(rank)
        # In /tmp anybody may have put a pipe, or a link, under that name.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return
            if found.st_mtime < self._began_epoch_s or self._traces.get(rank) == found.st_mtime:
                return
            (at / f"gen{self._generation}_nccl_trace_rank{rank}").write_bytes(file.read(TRACE_BYTES_MAX))
        self._traces[rank] = found.st_mtime

    # ---------------------------------------------------------------- py-spy

    def spy(self, samples: Sequence[RankSample]) -> None:
        """Append native stacks to the files of these samples, until pause() or the end."""
        now_s = time.monotonic()
        due = [
            sample
            for sample in samples
            if sample.file and now_s - self._spied_s.get(sample.local_rank, -SPY_AGAIN_S) >= SPY_AGAIN_S
        ]
        program = _py_spy() if due else None
        if program is not None:
            self._spying = asyncio.create_task(self._spy(program, due))

    async def pause(self) -> None:
        """Let nobody be in a tracer's hands: a look would find it stopped."""
        task, self._spying = self._spying, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        await self.pause()

    async def _spy(self, program: str, samples: Sequence[RankSample]) -> None:
        for sample in samples:
            text = await _native_stacks(program, sample.pid)
            self._spied_s[sample.local_rank] = time.monotonic()
            if text:
                with contextlib.suppress(OSError):
                    await run_detached(functools.partial(_append, sample.file, text))


def _append(path: str, text: bytes) -> None:
    with open(path, "ab") as file:
        file.write(b"\npy-spy dump --native:\n" + text)


async def _native_stacks(program: str, pid: int) -> bytes:
    """Empty when it could not look, or did not end."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            program, "dump", "--native", "--pid", str(pid), stdin=null, stdout=pipe, stderr=null
        )
    except OSError:
        return b""
    try:
        async with asyncio.timeout(SPY_S_MAX):
            text, _ = await process.communicate()
    except TimeoutError:
        return b""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return text[:SPY_BYTES_MAX] if process.returncode == 0 else b""


def _py_spy() -> str | None:
    """Beside our Python, or in PATH."""
    for folder in (os.path.dirname(sys.executable), *os.environ.get("PATH", "").split(os.pathsep)):
        path = os.path.join(folder, "py-spy")
        if os.path.isabs(path) and os.access(path, os.X_OK):
            return path
    return None
