"""`--help` from the table of options: one line each, by group. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cli.options import FLAG, Option

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMN = 38
"""Where the explanations begin."""


def render(command: str, table: Sequence[Option]) -> str:
    """The text of `holdfast COMMAND --help`."""
    lines = [
        f"usage: holdfast {command} [options] script.py [arguments of the script]",
        "",
        "Starts the workers of this node and keeps the job going. Options are torchrun's: each is also accepted with",
        "underscores, abbreviated as long as it is unambiguous, and read from the variable named at its end.",
    ]
    for group in dict.fromkeys(option.group for option in table):
        lines += ["", f"{group}:", *(line(option) for option in table if option.group == group)]
    return "\n".join(lines)


def line(option: Option) -> str:
    names = f"{option.short}, {option.name}" if option.short else option.name
    left = f"  {names} {option.metavar}".rstrip()
    gap = " " * max(COLUMN - len(left), 2)
    return f"{left}{gap}{option.help}{origin(option)}"


def origin(option: Option) -> str:
    """Default and variable, in brackets."""
    shown = option.kind != FLAG and option.default not in (None, "", ())
    parts = [str(option.default)] if shown else []
    if option.variable:
        parts.append(option.variable)
    return f"  [{'; '.join(parts)}]" if parts else ""
