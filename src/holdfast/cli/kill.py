"""`holdfast kill [RUN]`: end a running job on all its nodes at once; nothing is saved."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cli.printing import Parser
from holdfast.cli.stop import parser_of, run
from holdfast.core.protocol import Question


def main(argv: Sequence[str]) -> int:
    """Runs `holdfast kill` with these arguments; returns the exit status. Raises HoldfastError."""
    return run(parser(), argv, Question.KILL)


def parser() -> Parser:
    return parser_of("kill", "End a running job on all its nodes at once: SIGKILL to every worker.")
