"""Reads tables of codes and texts: TOML files beside the modules that use them, read on first use.

Start-up reads none of them. The coordinator's node reads the causes while workers start, so that a verdict need not
wait for a file.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_table(module: str, name: str) -> dict[str, Any]:
    """The table in the file `name`, which is in the same folder as the module's file."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))
