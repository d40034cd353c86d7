"""Facts that should be equal on every node: versions (Python, holdfast, torch, CUDA, NCCL), the script and its
arguments.

Reads a few small files and imports nothing: torch has its version in a file of its own, and the start of a job must not
wait. Only reports; the coordinator compares.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence

from holdfast.protocol.options import CommandKind, WorkerCommand
from holdfast.version import __version__

HASH_CHARACTERS = 12
FILE_BYTES_MAX = 1 << 20
HEADER_BYTES_MAX = 4096
"""Bytes read of a file whose header has the answer."""

_VERSION = re.compile(r"^__version__ *(?::[^=\n]*)?= *['\"]([^'\"]+)", re.MULTILINE)
_CUDA = re.compile(r"^(?:cuda|hip) *(?::[^=\n]*)?= *['\"]([^'\"]+)", re.MULTILINE)
_NCCL = re.compile(r"#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)")


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
    data = _read(command.target, FILE_BYTES_MAX)
    return hashlib.sha256(data).hexdigest()[:HASH_CHARACTERS] if data else ""


def arguments_hash(command: WorkerCommand) -> str:
    """Hash of the rest of the command: its arguments, and the name of a module or program."""
    name = "" if command.kind in (CommandKind.SCRIPT, CommandKind.RUN_PATH) else command.target
    words = "\0".join((command.kind.value, name, *command.args))
    return hashlib.sha256(words.encode(errors="surrogateescape")).hexdigest()[:HASH_CHARACTERS]


def torch_versions(path: Sequence[str]) -> dict[str, str]:
    """Versions of the torch that an import would find first."""
    for folder in path:
        text = _read(os.path.join(folder, "torch", "version.py"), HEADER_BYTES_MAX).decode(errors="replace")
        version = _VERSION.search(text)
        if version is None:
            continue
        cuda = _CUDA.search(text)
        header = _read(os.path.join(folder, "nvidia", "nccl", "include", "nccl.h"), HEADER_BYTES_MAX)
        nccl = ".".join(_NCCL.findall(header.decode(errors="replace"))[:3])
        return {"torch": version[1], "cuda": cuda[1] if cuda else "", "nccl": nccl}
    return {}


def _read(path: str, bytes_max: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(bytes_max)
    except (OSError, ValueError):
        return b""
