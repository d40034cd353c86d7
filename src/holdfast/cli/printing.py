"""Helpers of the commands other than run and launch: a parser that fails as holdfast does, tables, JSON.

A command's module describes what its `--json` prints in JSON_FORMS: the forms of its document, and of each form the
types whose fields it has, together. tools/json_schemas.py makes docs/schemas of them, and tests hold outputs against
these.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypedDict

from holdfast.cli import JSON_SCHEMA
from holdfast.protocol.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are UsageErrors."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def add_run(self) -> None:
        """The argument of commands about a running job."""
        self.add_argument(
            "run", nargs="?", metavar="RUN", help="run id, its beginning, or run folder; by default the only one"
        )

    def add_json(self, text: str = "print JSON") -> None:
        self.add_argument("--json", action="store_true", help=text)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def named(value: Any) -> Any:
    """Convert a value for JSON. Each field has its name, also of structs that are arrays in messages."""
    import msgspec  # here, since it takes 15 ms, and most commands that print tables have no structs
    from msgspec import structs

    if isinstance(value, msgspec.Struct):
        return {name: named(each) for name, each in structs.asdict(value).items()}
    if isinstance(value, list | tuple):
        return [named(each) for each in value]
    if isinstance(value, dict):
        return {name: named(each) for name, each in value.items()}
    return msgspec.to_builtins(value)


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns side by side."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for each in rows:
        print("  ".join(text.ljust(width) for text, width in zip(each, widths, strict=True)).rstrip())


def print_json(document: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Print one JSON document, with the version of its schema. `indent` None: as one line."""
    print(json.dumps({"schema": JSON_SCHEMA, **document}, indent=indent), flush=indent is None)


class Whole(TypedDict):
    """Part of an answer."""

    whole: bool
    """False: the coordinator does not answer, and only one node is in the answer."""


class AboutRun(TypedDict):
    """Part of an answer about a running job."""

    run: str
    """The name of its run folder."""


class SentToNodes(AboutRun):
    """An order was passed on."""

    nodes: int
    """Number of nodes that got it."""
