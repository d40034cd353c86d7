"""The command line of a worker: what torchrun would run, under our bootstrap.

Knows the options and where the bootstrap lies; starts nothing.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from string import Template

from holdfast.core.options import CommandKind, RunOptions

BOOTSTRAP = str(Path(__file__).resolve().parents[2] / "worker" / "bootstrap.py")
"""Run by its path, so that it works under any Python, with or without holdfast installed."""

CALL_FD, RESULT_FD = 3, 4
"""Where a worker that runs a function finds it, and where it writes what became of it."""


def worker_argv(options: RunOptions, local_rank: int) -> list[str]:
    """Program and arguments of one worker; the program may still have to be looked up in PATH.

    `${local_rank}` and `$local_rank` become the real local rank (also with --virtual-local-rank) and `$$` becomes `$`,
    in the target and the user's arguments, as in torchrun.
    """
    command = options.command
    legacy = ["--local-rank=${local_rank}"] if command.local_rank_argument else []
    arguments = [_fill_in(argument, local_rank) for argument in (*legacy, *command.args)]
    if command.kind is CommandKind.PROGRAM:
        return [command.target, *arguments]
    return [*bootstrap_argv(options), command.kind.value, _fill_in(command.target, local_rank), *arguments]


def bootstrap_argv(options: RunOptions) -> list[str]:
    """The interpreter and the bootstrap: what every Python program of this job begins with."""
    command = options.command
    python = command.python or sys.executable
    unbuffered = [] if command.kind is CommandKind.RUN_PATH else ["-u"]
    return [python, *unbuffered, bootstrap_for(python)]


def bootstrap_for(python: str) -> str:
    """The bootstrap to run under this interpreter: its bytecode where it is our own interpreter's.

    A program that is run by its path is compiled at every start; that is several milliseconds of every restart.
    """
    if python != sys.executable:
        return BOOTSTRAP
    # The loader checks the cache against the source, and writes it anew where it is stale and can be written.
    SourceFileLoader("holdfast.worker.bootstrap", BOOTSTRAP).get_code("holdfast.worker.bootstrap")
    cached = cache_from_source(BOOTSTRAP)
    return cached if os.path.isfile(cached) and not sys.dont_write_bytecode else BOOTSTRAP


def worker_fds(options: RunOptions, local_rank: int) -> dict[int, int]:
    """Number in the worker -> descriptor of ours, beside its standard streams."""
    fds = options.call_fds
    return {} if fds is None else {CALL_FD: fds.call, RESULT_FD: fds.results[local_rank]}


def _fill_in(argument: str, local_rank: int) -> str:
    return Template(argument).safe_substitute(local_rank=str(local_rank))
