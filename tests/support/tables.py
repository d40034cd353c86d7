"""Tables of cases that are data: command lines with their messages, texts with what is read from them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def tables(test_file: str) -> dict[str, Any]:
    """tables.toml of the folder of a test's file, each table under its name."""
    return tomllib.loads((Path(test_file).parent / "tables.toml").read_text())
