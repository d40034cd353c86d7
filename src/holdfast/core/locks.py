"""Which lock a line of a program waits for, and which lines are inside it, by the program's text alone. Pure.

Python does not say who holds a lock. What can be known: one thread is at `with LOCK:` or `LOCK.acquire()`, and another
one is inside a `with` of the same words, or behind an `acquire()` of them in the same function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_NAMES = (ast.Name, ast.Attribute, ast.Subscript)
"""What a lock is usually written as; `with open(path)` is none."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def wanted_at(tree: ast.AST, line: int) -> str:
    """The lock that is taken in this line, as the program writes it; empty: none is."""
    for node in ast.walk(tree):
        taken = ""
        if isinstance(node, ast.With) and node.lineno <= line < max(node.lineno + 1, node.body[0].lineno):
            taken = next(_locks(node), "")
        elif isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno):
            taken = _called(node, "acquire")
        if taken:
            return taken
    return ""


def is_inside(tree: ast.AST, line: int, lock: str) -> bool:
    """Whether somebody who is at this line has passed a `with` or an `acquire()` of this lock, and not left it."""
    held_since, released = 0, 0
    for node in _of_one_function(_function_at(tree, line)):
        if isinstance(node, ast.With) and node.body[0].lineno <= line <= (node.end_lineno or node.lineno):
            if lock in _locks(node):
                return True
        elif isinstance(node, ast.Call) and (node.end_lineno or node.lineno) < line:
            if _called(node, "acquire") == lock:
                held_since = max(held_since, node.lineno)
            elif _called(node, "release") == lock:
                released = max(released, node.lineno)
    return held_since > released


def _locks(node: ast.With) -> Iterator[str]:
    return (ast.unparse(item.context_expr) for item in node.items if isinstance(item.context_expr, _NAMES))


def _called(node: ast.Call, method: str) -> str:
    """`self.lock` of `self.lock.acquire()`; empty: it calls something else."""
    called = node.func
    return ast.unparse(called.value) if isinstance(called, ast.Attribute) and called.attr == method else ""


def _function_at(tree: ast.AST, line: int) -> ast.AST:
    """The innermost function around a line; the module where there is none."""
    found = tree
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, _FUNCTIONS) and node.lineno <= line <= (node.end_lineno or node.lineno):
            found = node
    return found


def _of_one_function(node: ast.AST) -> Iterator[ast.AST]:
    """What runs in one frame: not what is defined inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _FUNCTIONS):
            yield child
            yield from _of_one_function(child)
