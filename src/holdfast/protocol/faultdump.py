"""Reads where threads are, from the text of a stack dump and the source of the program. Pure: text in, frames out.

Python's faulthandler writes for all threads:

    Thread 0x00007f41168b56c0 (most recent call first):
      File "/srv/train.py", line 42 in step
      …
    Current thread 0x00007f4117435b80 (most recent call first):
      …

Threads are listed newest first, so the main thread is last. At most 100 threads are written, then `...`; the main
thread may be missing then. "Current" is the thread in which the signal's handler ran; the kernel prefers the main
thread. At most 100 frames of a thread are written, the innermost ones. Python 3.13 adds the thread's name after its
number.

A dump of a single thread begins with `Stack (most recent call first):`.

Python does not report which thread holds a lock. What the source shows: one thread is at `with LOCK:` or
`LOCK.acquire()`, and another one is inside a `with` of the same text, or after an `acquire()` of it in the same
function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from holdfast.protocol.rank_progress import FRAMES_MAX, THREAD_FRAMES_MAX, THREADS_MAX, Frame

DUMP_BYTES_MAX = 1_000_000
"""Limit of one worker's dump; 100 threads of 100 frames need less."""

_THREAD = re.compile(r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+.*|Stack) \(most recent call first\):$")
_FRAME = re.compile(r'^ {2}File (?:"(.*)"|(\?\?\?)), line (\d{1,9}|\?\?\?) in (.*)$')
_OWN = "/holdfast/worker/"
"""Frames of the bootstrap and of its wrappers around torch's functions; they are not the program's."""
_MACHINERY = re.compile(
    r"""^<(?!stdin>|string>)                # <frozen runpy>
      | /lib(64)?/python\d[\d.]*/(?!(site|dist)-packages/)
      | /torch/
      | /holdfast/(train|worker|launching)/""",
    re.VERBOSE,
)
_INSTALLED = re.compile(r"/(site|dist)-packages/")


def main_thread(text: str) -> tuple[Frame, ...]:
    """The main thread's frames, innermost first, at most FRAMES_MAX; empty if it has none or the text is no dump."""
    threads, main = _threads(text)
    return _own(threads[main])[:FRAMES_MAX] if main is not None else ()


def program_threads(text: str) -> tuple[tuple[Frame, ...], ...]:
    """The other threads with a frame of the program, newest first: at most THREADS_MAX, each cut to its innermost
    THREAD_FRAMES_MAX frames."""
    threads, main = _threads(text)
    others = [_own(frames) for number, frames in enumerate(threads) if number != main]
    own = [frames for frames in others if any(not is_library(frame.file) for frame in frames)]
    return tuple(frames[:THREAD_FRAMES_MAX] for frames in own[:THREADS_MAX])


def _threads(text: str) -> tuple[list[list[Frame]], int | None]:
    """All threads in the order of the text, and the index of the main thread."""
    threads: list[list[Frame]] = []
    current, cut = None, False
    for line in text.splitlines():
        if _THREAD.match(line):
            current = len(threads) if line.startswith("Current") and current is None else current
            threads.append([])
        elif threads and (frame := _frame(line)) is not None:
            threads[-1].append(frame)
        elif line == "...":  # threads were left out; for frames that were left out it is indented
            cut = True
    if not threads:
        return threads, None
    return threads, current if cut else len(threads) - 1


def _own(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    return tuple(frame for frame in frames if _OWN not in frame.file)


def _frame(line: str) -> Frame | None:
    match = _FRAME.match(line)
    if match is None:
        return None
    file, unknown, number, function = match.groups()
    return Frame(file or unknown or "", int(number) if number.isdigit() else 0, function)


def is_library(file: str) -> bool:
    """Whether the file belongs to Python, torch, holdfast or an installed package, and not to the program."""
    return _MACHINERY.search(file) is not None or _INSTALLED.search(file) is not None


def program_frame(frames: Sequence[Frame]) -> int | None:
    """The index of the innermost frame of the program; None: there is none.

    If the program itself is an installed package: of the innermost frame outside of Python and torch.
    """
    own = [index for index, frame in enumerate(frames) if not is_library(frame.file)]
    own = own or [index for index, frame in enumerate(frames) if not _MACHINERY.search(frame.file)]
    return own[0] if own else None


_NAMES = (ast.Name, ast.Attribute, ast.Subscript)
"""Expressions that usually name a lock; `with open(path)` does not."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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
