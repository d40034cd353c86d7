"""`holdfast token`: draw a job token, which agents prove to each other that they know."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.printing import Parser
from holdfast.runtime.secret_variables import draw_token


def main(argv: Sequence[str]) -> int:
    """Runs `holdfast token` with these arguments; returns the exit status. Raises HoldfastError."""
    parser().parse_args(argv)
    print(draw_token())
    return 0


def parser() -> Parser:
    return Parser(
        prog="holdfast token",
        description="Print a new job token of 64 characters. Write it into a file that only you may read "
        "(`holdfast token > token; chmod 600 token`) and name that with --rdzv-conf token_file=, or set HOLDFAST_TOKEN.",
        allow_abbrev=False,
    )
