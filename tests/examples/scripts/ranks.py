"""Runs examples one after the other on ranks forked from here: ranks.py LINE …, each `RANKS SCRIPT ARGUMENT …` as JSON.

0 ranks: one process that no launcher has started. A line of dashes ends what each example prints. Ends with 1 at the
first example of which a rank fails. No limit here: who started this ends the whole process group.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import socket
import sys
import traceback

import sklearn.datasets  # noqa: F401 - the examples' data: imported once for all ranks
import torch.multiprocessing

# What spawns imports everything again in each rank.
torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")


def started(environment: dict[str, str], script: str, arguments: list[str]) -> int:
    """The pid of a fork that runs the script as its `__main__`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(environment)
        sys.argv[:] = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - a rank's end is said by its code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def environments(ranks: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(ranks)]


def run(ranks: int, script: str, *arguments: str) -> None:
    pids = [started(each, script, list(arguments)) for each in environments(ranks) or [{}]]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.write(1, b"---\n")
    if any(codes):
        sys.exit(1)


if __name__ == "__main__":
    for line in sys.argv[1:]:
        run(*json.loads(line))
