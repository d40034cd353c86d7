"""From an exception in one of 4 ranks of DDP on gloo to the end of the job on both nodes, its verdict printed.

Again where that rank has an exit function of 3 s: until the other ranks have been stopped, and until the job has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import (
    HOLDFAST,
    BenchmarkError,
    Launcher,
    Metric,
    Row,
    Sample,
    launched,
    stamps,
    tail,
    wait_for_stamps,
)
from holdfast.supervisor.store_host import free_port

CULPRIT, RANKS = 1, 4
EXIT_S = 3
LIMIT_S = 120.0


class End(threading.Thread):
    """Waits for the end of a process, and keeps the moment: asking again and again would be late."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = os.pidfd_open(pid)
        self.at_ns = 0
        self.start()

    def run(self) -> None:
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        ended.poll()
        self.at_ns = time.monotonic_ns()
        os.close(self._process)


@contextlib.contextmanager
def two_nodes(launcher: Launcher, folder: Path, exit_s: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two agents of two workers each, that meet over loopback."""
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "raised"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{free_port(loopback_only=True)}"]
    extra = {"OMP_NUM_THREADS": "1", "BENCH_EXIT_S": str(exit_s), "BENCH_OUT": str(folder)}
    with contextlib.ExitStack() as stack:
        agents = []
        for name in ("a", "b"):
            (folder / name).mkdir()
            begun = stack.enter_context(launched(launcher, flags, "ddp_raises.py", folder / name, extra=extra))
            agents.append(begun[0])
        yield agents


def once(launcher: Launcher, folder: Path, exit_s: float) -> tuple[float, float]:
    """Seconds from the exception until the last other rank has ended, and until the last agent has."""
    folder.mkdir()
    with two_nodes(launcher, folder, exit_s) as agents:
        pids = wait_for_stamps(folder, "pid", RANKS, agents[0])
        ranks = [End(pid) for rank, pid in pids.items() if rank != CULPRIT]
        nodes = [End(agent.pid) for agent in agents]
        (folder / "go").touch()
        deadline = time.monotonic() + LIMIT_S
        for each in (*ranks, *nodes):
            each.join(max(0.0, deadline - time.monotonic()))
            if not each.at_ns:
                raise BenchmarkError(f"not over after {LIMIT_S:g} s")
        codes = [agent.wait() for agent in agents]
    raised_ns = stamps(folder, "raised")[CULPRIT]
    if codes != [1, 1]:
        raise BenchmarkError(f"exit codes {codes}: {tail(folder / 'a')}")
    if launcher is HOLDFAST:
        check_verdicts(folder)
    stopped_s, over_s = ((max(each.at_ns for each in ends) - raised_ns) / 1e9 for ends in (ranks, nodes))
    return stopped_s, over_s


def check_verdicts(folder: Path) -> None:
    """Both nodes have the whole of it: who, and its traceback."""
    files = list(folder.glob("*/state/holdfast/runs/*/verdict.json"))
    culprits = [json.loads(file.read_bytes())["verdict"]["culprit"] for file in files]
    if len(culprits) != 2 or any(
        each["rank"] != CULPRIT or "RuntimeError" not in each["traceback"] for each in culprits
    ):
        raise BenchmarkError(f"verdicts: {culprits}")


def measure(launcher: Launcher, folder: Path) -> Sample:
    stopped_s, over_s = once(launcher, folder / "plain", 0)
    late_stopped_s, late_over_s = once(launcher, folder / "late", EXIT_S)
    return {
        "job over": over_s,
        "other ranks stopped": stopped_s,
        f"exit function of {EXIT_S} s: other ranks stopped": late_stopped_s,
        f"exit function of {EXIT_S} s: job over": late_over_s,
    }


ROW = Row(
    name="raised",
    title="exception in a 4-rank DDP job on two nodes",
    metrics=(
        Metric("job over", "s", value_max=0.2),
        Metric("other ranks stopped", "s"),
        Metric(f"exit function of {EXIT_S} s: other ranks stopped", "s", value_max=0.2),
        Metric(f"exit function of {EXIT_S} s: job over", "s"),
    ),
    measure=measure,
    repeat={"holdfast": 5, "torchrun": 3},
)
