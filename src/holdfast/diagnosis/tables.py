"""Tables of codes and texts: TOML files beside the modules that explain them, read when they are asked for.

Start-up reads none of them. The coordinator's node reads the causes while workers start, so that a verdict waits for no
file.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_table(module: str, name: str) -> dict[str, Any]:
    """The file `name` in the folder of a module's own file."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))
