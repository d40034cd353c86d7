"""`holdfast shim DIR`: writes a `torchrun` command that calls `holdfast run`, for images and tools that call torchrun.

Lines that holdfast does not support go to torch's own launcher; each time a message says which launcher it is.
`torchrun` below runs on every such line, so argparse is imported late. Here too is `holdfast token`, which draws a job
token: agents prove to each other that they know it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from holdfast import own_folders
from holdfast.cli import main as holdfast_main
from holdfast.cli.grammar import parse
from holdfast.cli.option_table import EVENT_HANDLERS, OPTIONS
from holdfast.inherited import draw_token
from holdfast.protocol.errors import HoldfastError, UsageError
from holdfast.rendezvous.backends import GROUP, is_built_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.cli.printing import Parser


NAME = "torchrun"
PROGRAM = """\
#!{python}
# Written by `holdfast shim`: calls `holdfast run`, or torch's own launcher for lines that holdfast does not support.
import sys

from holdfast.cli.shim import torchrun

if __name__ == "__main__":
    sys.exit(torchrun(sys.argv[1:]))
"""
TORCHS_OWN = "torch.distributed.run"


class ShimData(TypedDict):
    """The command was written."""

    path: str


class Token(TypedDict):
    """A new job token."""

    token: str


JSON_FORMS: dict[str, tuple[tuple[type, ...], ...]] = {"shim": ((ShimData,),), "token": ((Token,),)}


def main(argv: Sequence[str]) -> int:
    """Run `holdfast shim` with these arguments. Returns the exit status. Raises UsageError."""
    chosen = parser().parse_args(argv)
    folder = Path(chosen.folder)
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and "holdfast shim" not in path.read_text(errors="replace"):
            raise UsageError(f"{path} is another program's; name a new folder, and put it first on PATH")
        own_folders.write_new(path, PROGRAM.format(python=sys.executable).encode(), 0o755)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    if chosen.json:
        from holdfast.cli.printing import print_json

        print_json(ShimData(path=str(path.absolute())))
        return 0
    print(f"{path} calls holdfast run; put its folder first on PATH: export PATH={folder.absolute()}:$PATH")
    return 0


def main_token(argv: Sequence[str]) -> int:
    """Run `holdfast token` with these arguments. Returns the exit status. Raises HoldfastError."""
    from holdfast.cli.printing import print_json

    if token_parser().parse_args(argv).json:
        print_json(Token(token=draw_token()))
    else:
        print(draw_token())
    return 0


def parser() -> Parser:
    from holdfast.cli.printing import Parser

    made = Parser(prog="holdfast shim", description="Write a torchrun command that calls holdfast run.")
    made.add_argument("folder", metavar="DIR", help="folder for it; it is created if needed")
    made.add_json()
    return made


def token_parser() -> Parser:
    from holdfast.cli.printing import Parser

    made = Parser(
        prog="holdfast token",
        description="Print a new job token of 64 characters. Write it into a file that only you may read "
        "(`holdfast token > token; chmod 600 token`) and name that with --rdzv-conf token_file=, or set "
        "HOLDFAST_TOKEN.",
    )
    made.add_json()
    return made


def torchrun(argv: Sequence[str]) -> int:
    """Run a line of the `torchrun` command. Reports on stderr which launcher runs it, and why if that is torch's."""
    why = unsupported(argv, os.environ)
    if not why:
        print("torchrun: holdfast runs this line", file=sys.stderr)
        return holdfast_main(["run", *argv])
    print(f"torchrun: torch's own launcher runs this line: {why}", file=sys.stderr, flush=True)
    return os.execv(sys.executable, [sys.executable, "-m", TORCHS_OWN, *argv])


def unsupported(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The reason to run this line by torch's own launcher; empty: holdfast runs it, or refuses a malformed line."""
    try:
        given = parse(argv, environ, OPTIONS).values
    except HoldfastError:
        return ""
    if given.logs_specs not in (None, "default"):
        return f"--logs-specs {given.logs_specs} is a plug-in of torchrun's"
    if given.event_log_handler not in EVENT_HANDLERS:
        return f"--event-log-handler {given.event_log_handler} is a plug-in of torchrun's"
    if "store_type=file" in given.rdzv_conf.replace(" ", "").lower():
        return "--rdzv-conf store_type=file lets nodes meet in a file"
    if not is_built_in(given.rdzv_backend) and is_torchs_backend(given.rdzv_backend):
        return f"--rdzv-backend {given.rdzv_backend} is a plug-in of torchrun's"
    return ""


def is_torchs_backend(name: str) -> bool:
    """Whether a package registers the backend with torchrun, and none with holdfast."""
    from importlib.metadata import entry_points

    return bool(entry_points(group="torchrun.handlers", name=name)) and not entry_points(group=GROUP, name=name)
