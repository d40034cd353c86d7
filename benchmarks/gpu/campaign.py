"""Runs the parts of the campaign one after the other, each as a process with a deadline of its own.

A part that fails, or hangs, costs no other part: its processes are killed, and what it has measured until then counts.
The results are written after each part, so that a run which is cut off has left what it had.

Knows processes and deadlines; knows nothing of GPUs. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.descendants import descendants

PR_SET_CHILD_SUBREAPER = 36
NOT_HERE = 77
"""Exit code of a part that this machine cannot run; its last note is the reason."""
LEAST_S = 5.0
"""A part is not started if less time is left."""
STACKS_S = 1.0
"""A part that hangs has this long to write its stacks."""
END_S = 10.0
"""Limit of the wait for the end of killed processes."""
ERROR_CHARACTERS = 2500
PYTEST_ERROR_LINES = 30


@dataclass(frozen=True)
class Part:
    """One part: the program `benchmarks.gpu.parts.NAME`."""

    name: str
    title: str
    deadline_s: float
    shows: str = ""
    """What its success shows, in the words of docs/promises.md; empty: it only measures."""


class Ended(Enum):
    """How a part ended."""

    DONE = "done"
    FAILED = "FAILED"
    HUNG = "HUNG"
    """It was killed at its deadline."""
    NOT_HERE = "not possible here"
    NO_TIME = "not started: no time was left"


@dataclass
class PartResult:
    """What came of a part."""

    part: Part
    ended: Ended
    seconds: float = 0.0
    notes: list[dict[str, Any]] = field(default_factory=list)
    """What it wrote down: {"name", "value", "unit"} or {"name", "text"}, in this order."""
    error: str = ""
    """The end of what it printed, unless it is done."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ended": self.ended.value}


def run(
    parts: Sequence[Part], settings: Mapping[str, str], folder: Path, budget_s: float, after: Callable[..., object]
) -> list[PartResult]:
    """Run the parts within this time. `settings`: variables for them. `after` is called with all results so far."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a part fall to us, and are killed
    end_s = time.monotonic() + budget_s
    results: list[PartResult] = []
    for part in parts:
        left_s = end_s - time.monotonic()
        if left_s < LEAST_S:
            results.append(PartResult(part, Ended.NO_TIME))
        else:
            print(f"{part.name}: {part.title}", file=sys.stderr, flush=True)
            results.append(run_part(part, settings, folder / part.name, min(part.deadline_s, left_s)))
            print(f"  {results[-1].ended.value}, {results[-1].seconds:.1f} s", file=sys.stderr, flush=True)
        after(results)
    return results


def run_part(part: Part, settings: Mapping[str, str], folder: Path, deadline_s: float) -> PartResult:
    """Run one part, and kill all that it has left."""
    folder.mkdir(parents=True, exist_ok=True)
    notes, output = folder / "notes.jsonl", folder / "output.txt"
    notes.write_text("")
    environ = {**os.environ, **settings, "GPU_FOLDER": str(folder), "GPU_NOTES": str(notes)}
    environ["GPU_END"] = f"{time.monotonic() + deadline_s}"
    began_s = time.monotonic()
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{settings.get('GPU_PARTS', 'benchmarks.gpu.parts')}.{part.name}"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(deadline_s)
            ended = {0: Ended.DONE, NOT_HERE: Ended.NOT_HERE}.get(code, Ended.FAILED)
        except subprocess.TimeoutExpired:
            ended = Ended.HUNG
            process.send_signal(signal.SIGUSR1)  # faulthandler: which line it is at (measuring.py)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STACKS_S)
        finally:
            seconds = time.monotonic() - began_s
            killdescendants()
            process.wait()
    text = "" if ended is Ended.DONE else output.read_text(errors="replace")[-ERROR_CHARACTERS:]
    return PartResult(part, ended, round(seconds, 2), list(_notes(notes)), text)


def _notes(path: Path) -> Iterator[dict[str, Any]]:
    """The notes of a part; the last line may be half written."""
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def killdescendants() -> None:
    """Kill all processes below this one, by their ids, and wait for their ends."""
    deadline_s = time.monotonic() + END_S
    while (left := descendants(os.getpid())) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(left)
        time.sleep(0.02)


def _reap(pids: Sequence[int]) -> None:
    """Take the exit codes of those that are our children by now."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
