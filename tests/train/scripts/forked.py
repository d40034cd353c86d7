"""Ranks without a launcher that would watch or end them, forked from a process that has imported everything."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import _dynamo  # noqa: F401 - DDP would import it in each rank
from torch.distributed import fsdp  # noqa: F401 - as above

sys.path.append(str(Path(__file__).parents[3]))
from tests.support.ports import free_port

PATIENCE_S = 60.0


def limit_s(seconds: float) -> float:
    """As tests.support.limits has it: what `seconds` on a quiet machine are here."""
    return seconds * float(os.environ["TEST_SLOWNESS"])


def run_ranks(world: int, function: Callable[[], None]) -> list[int | None]:
    """Exit codes by rank: negative for a signal, None for a rank that was still there after PATIENCE_S of a quiet machine."""
    port = free_port()
    pids = [_start(function, rank, world, port) for rank in range(world)]
    deadline = time.monotonic() + limit_s(PATIENCE_S)
    return [_end(pid, deadline) for pid in pids]


def _start(function: Callable[[], None], rank: int, world: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # Not before the fork: two threads of the child may repair torch's pool at once, and abort.
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        function()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - a rank's end is told by its code
        traceback.print_exc()
    finally:
        os._exit(code)


def _end(pid: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None
