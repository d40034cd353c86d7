"""The processes that a measurement has started. Standard library only: on a machine with a GPU nothing else is there."""

from __future__ import annotations

import contextlib
import os


def descendants(root: int) -> list[int]:
    """The processes below `root`. By parent ids: not every kernel lists the children of a task.
    Processes come and go: one that is gone is left out."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found: list[int] = []
    todo = [root]
    while todo:
        fresh = children.get(todo.pop(), [])
        found += fresh
        todo += fresh
    return found
