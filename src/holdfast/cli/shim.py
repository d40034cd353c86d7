"""`holdfast shim DIR`: writes a `torchrun` that calls `holdfast run`, for images and tools that call torchrun by its
name.

What holdfast does not support goes to torch's own launcher, and which of the two it was is said each time. Here too is
`holdfast token`, which draws a job token: agents prove to each other that they know it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli import main as holdfast_main
from holdfast.cli.grammar import parse
from holdfast.cli.option_table import OPTIONS
from holdfast.cli.printing import Parser
from holdfast.protocol.errors import HoldfastError, UsageError
from holdfast.rendezvous.conf import is_built_in
from holdfast.runtime.secret_variables import draw_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


NAME = "torchrun"
PROGRAM = """\
#!{python}
# Written by `holdfast shim`: calls `holdfast run`, or torch's own launcher for what holdfast does not support.
import sys

from holdfast.cli.shim import torchrun

if __name__ == "__main__":
    sys.exit(torchrun(sys.argv[1:]))
"""
TORCHS_OWN = "torch.distributed.run"
TORCHS_HANDLERS = ("null", "console", "dynamic_rendezvous")


def main(argv: Sequence[str]) -> int:
    """Runs `holdfast shim` with these arguments; returns the exit status. Raises UsageError."""
    folder = Path(parser().parse_args(argv).folder)
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and "holdfast shim" not in path.read_text(errors="replace"):
            raise UsageError(f"{path} is another program's; name a folder of its own, and put it first on PATH")
        path.write_text(PROGRAM.format(python=sys.executable))
        path.chmod(0o755)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    print(f"{path} calls holdfast run; put its folder first on PATH: export PATH={folder.absolute()}:$PATH")
    return 0


def main_token(argv: Sequence[str]) -> int:
    """Runs `holdfast token` with these arguments; returns the exit status. Raises HoldfastError."""
    token_parser().parse_args(argv)
    print(draw_token())
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="holdfast shim", description="Write a torchrun command that calls holdfast run.", allow_abbrev=False
    )
    made.add_argument("folder", metavar="DIR", help="where to; it is made if needed")
    return made


def token_parser() -> Parser:
    return Parser(
        prog="holdfast token",
        description="Print a new job token of 64 characters. Write it into a file that only you may read "
        "(`holdfast token > token; chmod 600 token`) and name that with --rdzv-conf token_file=, or set "
        "HOLDFAST_TOKEN.",
        allow_abbrev=False,
    )


def torchrun(argv: Sequence[str]) -> int:
    """What the `torchrun` command does. Says on stderr which launcher runs the line, and why if that is not
    holdfast."""
    why = unsupported(argv, os.environ)
    if not why:
        print("torchrun: holdfast run takes this line", file=sys.stderr)
        return holdfast_main(["run", *argv])
    print(f"torchrun: torch's own launcher takes this line: {why}", file=sys.stderr, flush=True)
    return os.execv(sys.executable, [sys.executable, "-m", TORCHS_OWN, *argv])


def unsupported(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Why this line is for torch's own launcher; empty: it is not. What neither understands is holdfast's to refuse."""
    try:
        given = parse(argv, environ, OPTIONS).values
    except HoldfastError:
        return ""
    if given.logs_specs not in (None, "default"):
        return f"--logs-specs {given.logs_specs} is a plug-in of torchrun's"
    if given.event_log_handler not in TORCHS_HANDLERS:
        return f"--event-log-handler {given.event_log_handler} is a plug-in of torchrun's"
    if "store_type=file" in given.rdzv_conf.replace(" ", "").lower():
        return "--rdzv-conf store_type=file lets nodes meet in a file"
    if not is_built_in(given.rdzv_backend) and is_torchs_backend(given.rdzv_backend):
        return f"--rdzv-backend {given.rdzv_backend} is a plug-in of torchrun's"
    return ""


def is_torchs_backend(name: str) -> bool:
    """A package registers it with torchrun and none with holdfast."""
    from importlib.metadata import entry_points

    return bool(entry_points(group="torchrun.handlers", name=name)) and not entry_points(
        group="holdfast.rendezvous", name=name
    )
