"""What /proc says of processes: states, processor time, signals, children. Bounded reads; knows nothing of workers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import NamedTuple

TASKS_MAX = 256
"""Threads of one process that are described."""


class Stat(NamedTuple):
    state: str
    """The kernel's letter for the main thread."""
    cpu_s: float
    """Of all threads together, children not counted."""
    parent: int
    name: str


class Child(NamedTuple):
    pid: int
    name: str
    state: str


class Signals(NamedTuple):
    """Masks of a process, and of its main thread."""

    caught: int = 0
    blocked: int = 0
    waiting: int = 0

    def catches(self, signum: int) -> bool:
        return bool(self.caught >> (signum - 1) & 1)

    def blocks(self, signum: int) -> bool:
        """The main thread does; also while its handler runs."""
        return bool(self.blocked >> (signum - 1) & 1)

    def pending(self, signum: int) -> bool:
        return bool(self.waiting >> (signum - 1) & 1)


def read_stat(pid: int | str) -> Stat | None:
    """None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    head, _, rest = text.rpartition(b")")  # the name may itself hold parentheses
    fields = rest.split()
    if len(fields) < 13:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Stat(fields[0].decode(), cpu_s, int(fields[1]), head.partition(b"(")[2].decode(errors="replace"))


def moved_bytes(pid: int) -> int:
    """What a process has read and written so far, as system calls count it and as disks do: one of them grows while it
    copies. 0 where that may not be known."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            told = dict(line.split(b":") for line in file)
        return sum(int(told[name]) for name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"))
    except (OSError, ValueError, KeyError):
        return 0


def signals(pid: int | str) -> Signals:
    """Of a process, or of a thread given as `PID/task/TID`. All empty when there is none."""
    found = {}
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                name, _, value = line.partition(b":")
                if name in (b"SigCgt", b"SigBlk", b"SigPnd", b"ShdPnd"):
                    found[name] = int(value, 16)
    except (OSError, ValueError):
        return Signals()
    waiting = found.get(b"SigPnd", 0) | found.get(b"ShdPnd", 0)
    return Signals(found.get(b"SigCgt", 0), found.get(b"SigBlk", 0), waiting)


def switches(pid: int) -> int:
    """How often the main thread has gone to sleep or had to give way: the same number twice, and it slept all the while or
    ran. -1 when there is no such process."""
    found = 0
    try:
        with open(f"/proc/{pid}/task/{pid}/status", "rb") as file:
            for line in file:
                if b"ctxt_switches" in line:
                    found += int(line.partition(b":")[2])
    except (OSError, ValueError):
        return -1
    return found


def idle_thread(pid: int, signum: int) -> int:
    """A thread of this process that waits for another one's word and takes this signal; the main thread if there is none.

    Its wait is taken up again after the signal. A sleep of C code in the main thread would end.
    """
    try:
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return pid
    for task in tasks[:TASKS_MAX]:
        if task != pid and _wchan(pid, task).startswith("futex") and not signals(f"{pid}/task/{task}").blocks(signum):
            return task
    return pid


def signal_thread(pid: int, task: int, signum: int) -> None:
    """Send a signal to one thread. ProcessLookupError, PermissionError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, task, signum):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))  # of the kind that belongs to the number


def children(parents: Iterable[int]) -> dict[int, list[Child]]:
    """The processes that each of these has started, the dead that it has not waited for among them; in order of their pids."""
    found: dict[int, list[Child]] = {parent: [] for parent in parents}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        stat = read_stat(pid)
        if stat is not None and stat.parent in found:
            found[stat.parent].append(Child(pid, stat.name, stat.state))
    return found


def describe_tasks(pid: int) -> list[str]:
    """One line for each thread: number, name, state, and in which of the kernel's functions it sleeps, where that may be known."""
    try:
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return []
    lines = []
    for task in tasks[:TASKS_MAX]:
        stat = read_stat(f"{pid}/task/{task}")
        if stat is not None:
            lines.append(f"{task} {stat.name} {stat.state} {_wchan(pid, task)}".rstrip())
    return lines


def _wchan(pid: int, task: int) -> str:
    try:
        with open(f"/proc/{pid}/task/{task}/wchan", encoding="ascii", errors="replace") as file:
            text = file.read(200)
    except OSError:
        return ""
    return "" if text == "0" else text
