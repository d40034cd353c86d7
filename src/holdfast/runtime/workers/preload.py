"""What the keeper's nursery is told to import: from resolved options to the order that goes over the lifeline.

Knows the options and the worker's command line; starts nothing itself. Light, for it is used before the agent's own
heavy modules are imported: what is ordered early is imported while the nodes still meet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from holdfast import seqpacket
from holdfast.core.options import CommandKind, RunOptions
from holdfast.runtime.workers.keeper import KeeperHandle
from holdfast.runtime.workers.nursery import CONTROL_FD
from holdfast.runtime.workers.spawn import bootstrap_argv, worker_argv

FOLDER = str(Path(__file__).resolve().parents[2] / "worker")
"""Where the nursery's program lies."""


def begin(keeper: KeeperHandle, options: RunOptions) -> None:
    """Tell the keeper what holds for all workers, and send the order if there is one.

    Nobody else uses its socket yet. Blocks for as long as that takes.
    """
    out = seqpacket.Outbox()
    if options.preempt_signal is not None:
        out.add({"do": "ignore", "signum": options.preempt_signal})
    order = order_for(options, os.environ)
    if order is not None:
        out.add(order)
    # Where it is gone the agent will notice, and start another one.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        out.flush(keeper.sock)
    out.clear()


def order_for(options: RunOptions, environ: Mapping[str, str]) -> seqpacket.Message | None:
    """None when workers are to be started by exec."""
    if not options.preload.modules:
        return None
    return {
        "do": "nurse",
        "argv": [*bootstrap_argv(options), "nursery", FOLDER, str(CONTROL_FD)],
        "env_set": common_environment(options, environ),
        "modules": list(options.preload.modules),
        "later": list(options.preload.later),
        "standby": options.nproc if options.standby else 0,
        "worker": {"argv": worker_argv(options, 0), "first_path": first_path(options)},
    }


def script_argv(options: RunOptions) -> list[str]:
    """What comes before a script of ours that is to be forked from the same nursery as the workers."""
    return [*bootstrap_argv(options), CommandKind.SCRIPT.value]


def common_environment(options: RunOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that all workers get and that libraries read while they are loaded (see core/worker_env.py)."""
    common = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
    if options.omp_num_threads is not None:
        common["OMP_NUM_THREADS"] = str(options.omp_num_threads)
    return common


def first_path(options: RunOptions) -> str:
    """The program's sys.path[0]: modules beside the program come before all others, for the nursery too."""
    if options.command.kind is CommandKind.MODULE:
        return os.getcwd()
    path = os.path.abspath(options.command.target)
    return path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))
