"""Reads what the source of a program shows about a thread at one of its lines: the lock that it takes, and what a loop
polls. Pure: a syntax tree in, words out.

Python does not report which thread holds a lock. What the source shows: one thread is at `with LOCK:` or
`LOCK.acquire()`, and another one is inside a `with` of the same text, or after an `acquire()` of it in the same
function.

A loop that sleeps and polls is nearly always asleep when it is sampled, because a poll takes microseconds: only the
source shows what it polls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from holdfast.protocol.rank_progress import Polling

_NAMES = (ast.Name, ast.Attribute, ast.Subscript)
"""Expressions that usually name a lock; `with open(path)` does not."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Functions = Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef]
"""The functions of a file, by name."""


def wanted_at(tree: ast.AST, line: int) -> str:
    """The lock that this line acquires, as the program writes it; empty: none."""
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
    """Whether a thread at this line is inside a `with` of this lock, or after its `acquire()` and before its end."""
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
    """`self.lock` for `self.lock.acquire()`; empty: another call."""
    called = node.func
    return ast.unparse(called.value) if isinstance(called, ast.Attribute) and called.attr == method else ""


def _function_at(tree: ast.AST, line: int) -> ast.AST:
    """The innermost function around a line; the module if there is none."""
    found = tree
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, _FUNCTIONS) and node.lineno <= line <= (node.end_lineno or node.lineno):
            found = node
    return found


def _of_one_function(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run in one frame: without the functions and classes defined inside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _FUNCTIONS):
            yield child
            yield from _of_one_function(child)


def may_handle(tree: ast.AST, lines: Iterable[int]) -> bool:
    """Whether an exception may be handled at one of these lines: in an `except` or `finally`, or at the end of a
    `with`, which stands at its first line."""
    wanted = set(lines)
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith) and node.lineno in wanted:
            return True
        parts: list[ast.AST] = [*node.handlers, *node.finalbody] if isinstance(node, ast.Try) else []
        if any(_has(part, line) for part in parts for line in wanted):
            return True
    return False


# --- polling loops ----------------------------------------------------------------------------------------------------

_SLEEPS = re.compile(r"(^|\.)sleep$|\.wait$")
_TRAINS = re.compile(
    r"(^|\.)(step|backward|forward|beat|should_stop|barrier|all_(reduce|gather)\w*|reduce|reduce_scatter\w*|broadcast\w*"
    r"|scatter|gather|send|recv)$"
)
"""A loop with one of these calls trains, whatever else it does."""
_LOOKS = {
    Polling.RANKS: re.compile(r"\.is_completed$|store(\(\))?\.(check|get|num_keys)$", re.IGNORECASE),
    Polling.OUTSIDE: re.compile(
        r"(^|\.)(l?exists|is_?file|is_?dir|l?stat|access|getsize|getmtime|listdir|scandir|i?glob|rglob|iterdir|urlopen"
        r"|getoutput|check_output|system|popen|head_object|(get|query|fetch|read)_(job|run|state|status|result)\w*"
        r"|status|describe_\w+|list_\w+)$"
        r"|^(subprocess\.(run|call)|(requests|httpx|session|client|api|fs)\.\w+)$"
    ),
    Polling.CHILD: re.compile(r"\.(poll|exitcode|waitpid)$"),
    Polling.THREADS: re.compile(r"\.(is_set|is_alive|done|running|empty|full|qsize|get_nowait|locked|ready)$"),
}
"""Names of the calls that poll, by the kind of thing that they poll; the first match counts."""
_EXPANDED_MAX = 2
"""Depth to which calls of functions of the same file are followed."""
_SMALL = 3
"""Number of statements up to which a function is one that only sleeps."""


def polled_at(tree: ast.AST, lines: Sequence[int]) -> tuple[Polling, str]:
    """The kind of thing that the loop around a line polls, and the call that polls it, as the program writes it.

    `lines`: the lines of the program's frames in this file, innermost first. The loop may call a small function that
    sleeps.
    """
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)}
    for number, line in enumerate(lines):
        function = _function_at(tree, line)
        nodes = _of_one_function(function)
        loops = [node for node in nodes if isinstance(node, ast.While | ast.For) and _has(node, line)]
        if loops:
            return _of_loop(loops[-1], line, functions, sleeps_inside=number > 0)
        if isinstance(function, ast.Module) or len(getattr(function, "body", ())) > _SMALL:
            break
    return Polling.NOTHING, ""


def _of_loop(
    loop: ast.While | ast.For, line: int, functions: _Functions, *, sleeps_inside: bool
) -> tuple[Polling, str]:
    """The same for one loop. `sleeps_inside`: a function that the loop calls is known to sleep now."""
    names = list(_calls(loop, functions))
    if any(_TRAINS.search(name) for name in names):
        return Polling.NOTHING, ""
    looks = [(polled, name) for polled, names_of in _LOOKS.items() for name in names if names_of.search(name)]
    if isinstance(loop, ast.While) and all(isinstance(each, ast.Pass | ast.Continue) for each in loop.body):
        return looks[0] if looks else (Polling.SPIN, ast.unparse(loop.test))
    if not sleeps_inside and not any(_SLEEPS.search(name) for name in names):
        return Polling.NOTHING, ""

    # An attempt that fails and sleeps before the next one.
    tried = _tried(loop, line, functions)
    if tried is not None:
        caught = ast.unparse(tried.type) if tried.type is not None else ""
        return (Polling.OUTSIDE, "a file") if "FileNotFoundError" in caught else (Polling.RETRY, caught)

    # A loop may poll and work. It polls now only if the line is at the poll, at the sleep, or at the loop's head.
    here = [name for node in _of_one_function(loop) if _has(node, line) for name in _called_in(node, functions)]
    looking = {name for _, name in looks}
    at_it = line == loop.lineno or any(_SLEEPS.search(name) or name in looking for name in here)
    return looks[0] if looks and at_it else (Polling.NOTHING, "")


def _tried(loop: ast.AST, line: int, functions: _Functions) -> ast.ExceptHandler | None:
    """The handler that sleeps before the next attempt, if this line is part of such an attempt."""
    for node in _of_one_function(loop):
        if isinstance(node, ast.Try) and _has(node, line):
            for handler in node.handlers:
                if any(_SLEEPS.search(name) for name in _calls(handler, functions)):
                    return handler
    return None


def _calls(node: ast.AST, functions: _Functions, depth: int = 0) -> Iterator[str]:
    """The names of all calls below a node: `os.path.exists`; those of the file's own functions are followed."""
    for each in _of_one_function(node):
        yield from _called_in(each, functions, depth)


def _called_in(node: ast.AST, functions: _Functions, depth: int = 0) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    own = functions.get(name.removeprefix("self."))
    if own is None:
        yield name
    elif depth < _EXPANDED_MAX:
        yield from _calls(own, functions, depth + 1)


def _has(node: ast.AST, line: int) -> bool:
    begin = getattr(node, "lineno", None)
    return begin is not None and begin <= line <= (getattr(node, "end_lineno", None) or begin)
