"""What the commands beside run and launch share: a parser that fails as holdfast does, tables, JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import NoReturn

from holdfast.core.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse that fails as the rest of holdfast does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns side by side."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for each in rows:
        print("  ".join(text.ljust(width) for text, width in zip(each, widths, strict=True)).rstrip())


def print_json(value: object) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=1))
