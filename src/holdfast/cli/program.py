"""What each worker executes: the combination of script, -m, --no-python and --run-path, checked before anything starts.

Knows the file system as the worker will see it (same folder, same PATH); knows nothing of ranks. A module name is not
checked, but for being a file's: finding it would mean importing its package.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from holdfast.core.errors import EnvironmentValueError, ScriptError, UsageError
from holdfast.core.options import CommandKind, WorkerCommand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.cli.grammar import Parsed

DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def worker_command(parsed: Parsed, environ: Mapping[str, str], notices: list[str]) -> WorkerCommand:
    """Raises UsageError for flags that exclude each other, ScriptError for a script that cannot be run."""
    values = parsed.values
    kind = command_kind(parsed, notices)
    target: str = values.training_script
    use_env: bool = getattr(values, "use_env", True)
    if not use_env and values.no_python:
        raise UsageError("holdfast launch --no-python needs --use-env as well")
    if not target:
        raise ScriptError("the training script's name is empty")
    if kind is CommandKind.PROGRAM:
        check_program(target, environ)
    elif kind is CommandKind.MODULE:
        check_module(target)
    elif target != "-" and "$" not in target:  # `$local_rank`: known per worker
        check_script(target)
    return WorkerCommand(
        kind=kind,
        target=target,
        args=tuple(values.training_script_args),
        python="" if kind is CommandKind.PROGRAM else interpreter(environ),
        local_rank_argument=not use_env,
    )


def command_kind(parsed: Parsed, notices: list[str]) -> CommandKind:
    values = parsed.values
    if values.run_path:
        idle = [parsed.said(dest) for dest in ("module", "no_python") if getattr(values, dest)]
        if idle:
            notices.append(f"{' and '.join(idle)} without effect: --run-path wins")
        return CommandKind.RUN_PATH
    if values.no_python and values.module:
        raise UsageError("--no-python and --module exclude each other")
    if values.no_python:
        return CommandKind.PROGRAM
    return CommandKind.MODULE if values.module else CommandKind.SCRIPT


def check_script(path: str) -> None:
    """Raises ScriptError for what python could not run."""
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            raise ScriptError(f"the training script {path} is a folder without a __main__.py")
    elif not os.path.exists(path):
        raise ScriptError(f"the training script {path} does not exist{similar(path)}")
    if not os.access(path, os.R_OK):
        raise ScriptError(f"the training script {path} cannot be read: permission denied")


def check_module(name: str) -> None:
    """Raises ScriptError for a file's name: `python -m train.py` runs `train`, all of it, before it says that."""
    if name.endswith(".py") and os.path.isfile(name) and not os.path.isdir(name.removesuffix(".py")):
        raise ScriptError(f"-m takes a module's name and {name} is a file; leave -m out")


def similar(path: str) -> str:
    """`; did you mean X?` when the folder holds a file of nearly that name, else where it was looked for."""
    import difflib

    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder or ".")
    except OSError:
        names = []
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if matches:
        return f"; did you mean {os.path.join(folder, matches[0])}?"
    return "" if os.path.isabs(path) else f" in {folder_here()}"


def folder_here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "the current folder, which was deleted"


def check_program(name: str, environ: Mapping[str, str]) -> None:
    """Raises ScriptError unless exec would find it."""
    if find_program(name, environ) is not None:
        return
    if "/" not in name:
        raise ScriptError(f"the program {name} is not on PATH; write ./{name} for one in this folder")
    if os.path.isdir(name):
        raise ScriptError(f"the program {name} is a folder")
    if os.path.exists(name):
        raise ScriptError(f"the program {name} is not executable; chmod +x it, or leave --no-python out for python")
    raise ScriptError(f"the program {name} does not exist{similar(name)}")


def find_program(name: str, environ: Mapping[str, str]) -> str | None:
    """The file that exec would run. (shutil.which would load the compression modules.)"""
    folders = [""] if "/" in name else environ.get("PATH", DEFAULT_PATH).split(os.pathsep)
    candidates = (os.path.join(folder, name) for folder in folders)
    return next((path for path in candidates if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def interpreter(environ: Mapping[str, str]) -> str:
    """PYTHON_EXEC, one path that is never split; else the python that runs this."""
    python = environ.get("PYTHON_EXEC")
    if not python:
        return sys.executable
    if find_program(python, environ) is None:
        raise EnvironmentValueError(f"PYTHON_EXEC={python}: no such executable; it must be one path without arguments")
    return python
