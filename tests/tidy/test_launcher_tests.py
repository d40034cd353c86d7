"""The launcher's tests import neither torch nor what needs it: `make test-without-torch` runs them where there is none.

Programs that a test starts may use torch, and then the test is in a group "torch …" or calls `pytest.importorskip`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.pythons import LAUNCHER

TESTS = Path(__file__).resolve().parents[1]
NEED_TORCH = ("torch", "numpy", "safetensors", "holdfast.train")
WITHOUT = ("holdfast.train.snapshots", "holdfast.train.agent_channel")
"""Of train: standard library only, as import-linter checks."""
IN_WORKERS = {"launch_cases.py"}
"""Functions that run in workers."""
SKIPPED = re.compile(r'^pytestmark = .*xdist_group\("torch', re.MULTILINE)
"""The tests of such a file are skipped without torch; the file itself is imported all the same."""


def modules(folder: str) -> list[Path]:
    return sorted(
        path for path in (TESTS / folder).rglob("*.py") if "scripts" not in path.parts and path.name not in IN_WORKERS
    )


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each import that a test process without torch may come to."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for node in tree.body if SKIPPED.search(text) else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.lineno, f"{node.module}.{each.name}") for each in node.names)


def is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("folder", LAUNCHER)
def test_a_test_of_the_launcher_imports_no_torch(folder: str) -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}: {name}"
        for path in modules(folder)
        for line, name in imported(path)
        if is_in(name, NEED_TORCH) and not is_in(name, WITHOUT)
    ]
    assert modules(folder)
    assert found == []
