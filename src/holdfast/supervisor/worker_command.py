"""Derives from the options how workers are started: command line, modules to import ahead, versions.

Starts nothing. Light, because it is used before the agent's own heavy modules are imported: modules that are ordered
early are imported while the nodes still meet.

The versions are facts that should be equal on every node: Python, holdfast, torch, CUDA, NCCL, the script and its
arguments. The coordinator compares them. They are read from a few small files, because the start of a job must not
wait for an import of torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from string import Template

from holdfast import seqpacket
from holdfast.linux import read_text
from holdfast.protocol.options import CommandKind, RunOptions, WorkerCommand
from holdfast.supervisor.fork_server_client import CONTROL_FD
from holdfast.supervisor.supervisor import SupervisorHandle
from holdfast.version import __version__

BOOTSTRAP = str(Path(__file__).resolve().parents[1] / "worker" / "bootstrap.py")
"""Run by its path, so that it works under any Python, with or without holdfast installed."""

CALL_FD, RESULT_FD = 3, 4
"""Descriptors of the call and of its result, in a worker that runs a function."""


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
    """The interpreter and the bootstrap, with which the command line of every Python program of this job begins."""
    command = options.command
    python = command.python or sys.executable
    unbuffered = [] if command.kind is CommandKind.RUN_PATH else ["-u"]
    return [python, *unbuffered, bootstrap_for(python)]


def bootstrap_for(python: str) -> str:
    """The bootstrap to run under this interpreter: its bytecode when it is our own interpreter.

    A program that is run by its path is compiled at every start, which costs several milliseconds of every restart.
    """
    if python != sys.executable:
        return BOOTSTRAP
    # The loader checks the cache against the source, and rewrites it where it is stale and writable.
    SourceFileLoader("holdfast.worker.bootstrap", BOOTSTRAP).get_code("holdfast.worker.bootstrap")
    cached = cache_from_source(BOOTSTRAP)
    return cached if os.path.isfile(cached) and not sys.dont_write_bytecode else BOOTSTRAP


def worker_fds(options: RunOptions, local_rank: int) -> dict[int, int]:
    """Number in the worker -> descriptor of ours, in addition to its standard streams."""
    fds = options.call_fds
    return {} if fds is None else {CALL_FD: fds.call, RESULT_FD: fds.results[local_rank]}


def _fill_in(argument: str, local_rank: int) -> str:
    return Template(argument).safe_substitute(local_rank=str(local_rank))


FOLDER = str(Path(__file__).resolve().parents[1] / "worker")
"""The folder of the fork server's program."""


def begin(supervisor: SupervisorHandle, options: RunOptions) -> None:
    """Send the supervisor the settings of all workers, and the order for the fork server if there is one.

    No other thread uses its socket yet. Blocks until both are sent.
    """
    out = seqpacket.Outbox()
    if options.preempt_signal is not None:
        out.add({"do": "ignore", "signum": options.preempt_signal})
    order = order_for(options, os.environ)
    if order is not None:
        out.add(order)
    # If the supervisor is gone, the agent will notice and start another one.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        out.flush(supervisor.sock)
    out.clear()


def order_for(options: RunOptions, environ: Mapping[str, str]) -> seqpacket.Message | None:
    """The order for the fork server; None when workers are to be started by exec."""
    if not options.preload.modules:
        return None
    return {
        "do": "start_fork_server",
        "argv": [*bootstrap_argv(options), "fork-server", FOLDER, str(CONTROL_FD)],
        "env_set": common_environment(options, environ),
        "modules": list(options.preload.modules),
        "later": list(options.preload.later),
        "standby": options.nproc if options.standby else 0,
        "worker": {"argv": worker_argv(options, 0), "first_path": first_path(options)},
    }


def script_argv(options: RunOptions) -> list[str]:
    """The command line before a script of ours that is forked from the same fork server as the workers."""
    return [*bootstrap_argv(options), CommandKind.SCRIPT.value]


def common_environment(options: RunOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that all workers get and that libraries read at import (see `worker_environment`)."""
    common = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
    if options.omp_num_threads is not None:
        common["OMP_NUM_THREADS"] = str(options.omp_num_threads)
    return common


def first_path(options: RunOptions) -> str:
    """The program's sys.path[0]: modules beside the program come before all others, in the fork server too."""
    if options.command.kind is CommandKind.MODULE:
        return os.getcwd()
    path = os.path.abspath(options.command.target)
    return path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))


HASH_CHARACTERS = 12
SCRIPT_BYTES_MAX = 1 << 20

_VERSION = r"^__version__ *(?::[^=\n]*)?= *['\"]([^'\"]+)"
_CUDA = r"^(?:cuda|hip) *(?::[^=\n]*)?= *['\"]([^'\"]+)"
_NCCL = r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)"


def node_versions(command: WorkerCommand, path: Sequence[str] | None = None) -> dict[str, str]:
    """Versions by name; missing or unreadable ones are left out. Takes a fraction of a millisecond.

    `path`: the module search path; by default this interpreter's own.
    """
    found = {"holdfast": __version__, "script": script_hash(command), "arguments": arguments_hash(command)}
    if command.kind is not CommandKind.PROGRAM and command.python in ("", sys.executable):
        found["python"] = ".".join(map(str, sys.version_info[:3]))
        found |= torch_versions(sys.path if path is None else path)
    return {name: version for name, version in found.items() if version}


def script_hash(command: WorkerCommand) -> str:
    """Hash of the script's bytes; empty for modules and programs."""
    if command.kind not in (CommandKind.SCRIPT, CommandKind.RUN_PATH):
        return ""
    try:
        with open(command.target, "rb") as file:
            return _hash(file.read(SCRIPT_BYTES_MAX))
    except (OSError, ValueError):
        return ""


def arguments_hash(command: WorkerCommand) -> str:
    """Hash of the rest of the command: its arguments, and the name of a module or program."""
    name = "" if command.kind in (CommandKind.SCRIPT, CommandKind.RUN_PATH) else command.target
    words = "\0".join((command.kind.value, name, *command.args))
    return _hash(words.encode(errors="surrogateescape"))


def _hash(data: bytes) -> str:
    import hashlib  # lazily: the fork server is ordered without it

    return hashlib.sha256(data).hexdigest()[:HASH_CHARACTERS] if data else ""


def torch_versions(path: Sequence[str]) -> dict[str, str]:
    """Versions of the torch that an import would find first."""
    for folder in path:
        text = read_text(os.path.join(folder, "torch", "version.py"))
        version = re.search(_VERSION, text, re.MULTILINE)
        if version is None:
            continue
        cuda = re.search(_CUDA, text, re.MULTILINE)
        header = read_text(os.path.join(folder, "nvidia", "nccl", "include", "nccl.h"))
        nccl = ".".join(re.findall(_NCCL, header)[:3])
        return {"torch": version[1], "cuda": cuda[1] if cuda else "", "nccl": nccl}
    return {}
