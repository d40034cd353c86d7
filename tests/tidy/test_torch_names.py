"""Private names of torch are used in holdfast/train/torch_private.py alone, where each says why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TRAIN = Path(__file__).resolve().parents[2] / "src" / "holdfast" / "train"
OURS = TRAIN / "torch_private.py"
WITHOUT_HOLDFAST = {"store_server.py"}
"""A program that imports nothing of holdfast; where it does not find torch's names it takes the public ones."""
NOT_TORCH = {
    ("checkup.py", "_exit"),  # os
    ("gpu_checkup.py", "_exit"),
    ("state_codec.py", "_fields"),  # of named tuples
    ("random_numbers.py", "_inst"),  # Python's own generator
    ("random_numbers.py", "_rand"),  # numpy's
    ("random_numbers.py", "_bit_generator"),
    ("guards.py", "_getframe"),  # sys
    ("snapshots_api.py", "_getframe"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and not name.startswith("_holdfast")


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def modules() -> list[Path]:
    """All but snapshots, which do not import torch, and integrations, whose private names are other libraries'."""
    return sorted(
        path
        for path in TRAIN.rglob("*.py")
        if path != OURS
        and path.name not in WITHOUT_HOLDFAST
        and path.relative_to(TRAIN).parts[0] not in ("snapshots", "integrations")
    )


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def accessed(path: Path) -> Iterator[tuple[str, bool, int]]:
    """Private names, whether they belong to something imported from torch, and the lines."""
    of_torch = set(from_torch(path))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if not is_own(node):
                yield node.attr, isinstance(root, ast.Name) and root.id in of_torch, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            for each in node.args[1:2]:
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and is_private(each.value):
                    yield each.value, False, node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for name in (*(node.module or "").split("."), *(each.name for each in node.names)):
                if is_private(name):
                    yield name, True, node.lineno


def from_torch(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "torch":
                    yield each.asname or each.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for each in node.names:
                yield each.asname or each.name


@cache
def defined() -> frozenset[str]:
    """Private names that holdfast gives its own attributes and functions."""
    found = set()
    for path in TRAIN.rglob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
                found.add(node.attr)
    return frozenset(found)


@cache
def listed() -> frozenset[str]:
    """Private names in torch_private.py: as attributes, and as texts."""
    of_code = {node.attr for node in ast.walk(tree(OURS)) if isinstance(node, ast.Attribute)}
    of_texts = {
        node.value for node in ast.walk(tree(OURS)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    imported = {each.name for node in ast.walk(tree(OURS)) if isinstance(node, ast.ImportFrom) for each in node.names}
    return frozenset(filter(is_private, of_code | of_texts | imported))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(TRAIN)))
def test_no_other_module_uses_a_private_name_of_torch(path: Path) -> None:
    found = [
        f"{path.name}:{line}: {name}"
        for name, of_torch, line in accessed(path)
        if (of_torch or name in listed() or name not in defined()) and (path.name, name) not in NOT_TORCH
    ]
    assert found == [], (
        "give it a function in train/torch_private.py that says why, and what happens where it is missing"
    )


def test_the_rule_finds_what_it_is_for() -> None:
    assert {"_get_default_store", "_new_process_group_helper", "_foreach_copy_", "_scale", "_get_fqns"} <= listed()
    assert "_tracker" in defined()


def test_each_use_in_that_module_is_explained() -> None:
    for node in tree(OURS).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node) is None:
            raise AssertionError(f"torch_private.{node.name} has no docstring")
