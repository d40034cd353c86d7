"""How an agent of each launcher is started, and which process on a host is what.

Knows command lines; knows nothing of faults.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

NNODES = "2:4"
"""At least two: of a partition 2|2 exactly one side may go on, and a node that is left alone must wait."""
FOLDER = Path(__file__).resolve().parent
WORKERS = {"torch": FOLDER / "train.py", "survive": FOLDER / "survive.py", "plain": FOLDER / "plain.py"}
"""The training scripts."""
HOSTS_OWN = b"sleep\x003600\x00"


@dataclass(frozen=True)
class Launcher:
    name: str
    module: str
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    store_in: str = "a process of its own"
    """Who serves the workers' store: that, or `agent` or `worker`, those of rank 0."""

    def command(self, log_dir: Path, site: Path, script: Path) -> list[str]:
        job = ("--nnodes", NNODES, "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29400", "--rdzv-id", "soak")
        patience = ("--max-restarts", "100000", "--log-dir", str(log_dir))
        return [sys.executable, "-m", self.module, *job, *patience, *self.options, str(script), str(site)]


HOLDFAST = Launcher("holdfast", "holdfast.run")
TORCHRUN = Launcher("torchrun", "torch.distributed.run", store_in="agent")
TUNED = Launcher(
    "torchrun-tuned",
    "torch.distributed.run",
    ("--rdzv-conf", "last_call_timeout=1"),
    {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    store_in="worker",
)
"""What makes a change of members work at all with torch 2.13, and its answer quick."""
ALL = {launcher.name: launcher for launcher in (HOLDFAST, TUNED, TORCHRUN)}


def command_line(pid: int) -> bytes:
    """Empty for a process that is gone or a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def left(pids: Iterable[int]) -> list[int]:
    """Those that run and are not the host's own."""
    return [pid for pid in pids if runs(pid) and command_line(pid) != HOSTS_OWN]


def runs(pid: int) -> bool:
    """Whether it is neither gone nor a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False


def workers(pids: Iterable[int], site: Path) -> list[int]:
    """Those that hold a ledger open: a command line says nothing of a worker that was forked."""
    ledger = str(site / "ledger")
    return [pid for pid in pids if any(name.startswith(ledger) for name in _open_files(pid))]


def _open_files(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def supervisors(pids: Iterable[int]) -> list[int]:
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "hf-supervisor":
                found.append(pid)
    return found


def store_hosts(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if b"store_server" in command_line(pid)]
