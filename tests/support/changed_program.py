"""`holdfast run` after a change of holdfast, such as a longer limit: a program to start in the agent's place."""

from __future__ import annotations


def changed_program(text: str) -> str:
    """`text`: statements that change modules of holdfast."""
    return f"import sys\nfrom holdfast import cli\n{text}\nsys.exit(cli.main(['run', *sys.argv[1:]]))\n"
