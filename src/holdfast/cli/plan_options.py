"""The last part of `--plan`: every option, its value, and who said so. Pure text; passwords are not shown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast.cli.grammar import FROM_FLAG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.cli.grammar import Parsed

HEAD = "options, their values, and where these come from"
ACTIONS = frozenset({"help", "version", "plan"})
PASSWORD = re.compile(r"(?<=password=)[^,]*")
IN_URL = re.compile(r"(?<=://)[^/@\s,]*@")
VALUE_COLUMNS_MAX = 40
"""Longer ones push their source to the right."""


def lines(parsed: Parsed) -> Iterator[str]:
    """What was said by somebody first, then the defaults."""
    rows = [
        ("--" + dest.replace("_", "-"), shown(getattr(parsed.values, dest)), source)
        for dest, source in parsed.sources.items()
        if dest not in ACTIONS
    ]
    rows.sort(key=lambda row: row[2] == "default")
    names = max(len(name) for name, _, _ in rows)
    values = min(max(len(value) for _, value, _ in rows), VALUE_COLUMNS_MAX)
    yield HEAD
    for name, value, source in rows:
        yield f"  {name:{names}}  {value:{values}}  {'command line' if source == FROM_FLAG else source}"


def shown(value: object) -> str:
    """As it would be typed; `-` for nothing."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ",".join(map(str, value)) or "-"
    return IN_URL.sub("***@", PASSWORD.sub("***", str(value)))
