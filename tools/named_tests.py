"""Tests that pages of docs/ name: how they are written, and whether they exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"


def short(test: str) -> str:
    """`test_x.py::test_y`, without the folder: names of test files are unique."""
    return f"`{test if test.startswith('scenarios/') else test.rpartition('/')[2]}`"


def exists(test: str) -> bool:
    """Whether there is this `file.py::test`, or this file of another kind. `test` is relative to tests/."""
    file, _, function = test.partition("::")
    path = TESTS / file
    if not path.is_file() or (not function and path.suffix == ".py"):
        return False
    found = re.search(rf"^(async )?def {function}\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    return not function or found is not None
