"""What /proc says of processes: states, processor time, signals, children. Bounded reads; knows nothing of workers."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.linux import process_stat

TASKS_MAX = 256
"""Threads of one process that are described."""
FIRST_PID = 1
ENVIRONMENT_BYTES_MAX = 1 << 20
SECTOR_BYTES = 512
"""In /proc/diskstats, whatever the disk's own are."""


class Child(NamedTuple):
    pid: int
    name: str
    state: str
    parent: int
    cpu_s: float
    """With that of its own children that have ended."""


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


def wanted_s(pid: int, *, all_threads: bool) -> float:
    """Processor time that a process, or its main thread, has used so far, and time for which it waited for a processor: on a
    machine that has too much to do the second is most of it. 0 where that is not known."""
    tasks = [str(pid)]
    if all_threads:
        with contextlib.suppress(OSError):
            tasks = os.listdir(f"/proc/{pid}/task")[:TASKS_MAX]
    found_ns = 0
    for task in tasks:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/task/{task}/schedstat", "rb") as file:
            found_ns += sum(map(int, file.read().split()[:2]))
    return found_ns / 1e9


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


def descendants(roots: Mapping[int, bytes]) -> dict[int, list[Child]]:
    """The processes below each of these, the dead that nobody has waited for among them; in order of their pids.

    With them those whose parent is gone, and that belong to a root by their session or by what the root maps to: a
    variable as the environment has it, which its processes inherit.
    """
    below: dict[int, list[Child]] = {}
    orphans: dict[int, list[Child]] = {}
    parents: dict[int, int] = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        stat = process_stat(pid)
        if stat is not None:
            child = Child(pid, stat.name, stat.state, stat.parent, stat.cpu_s + stat.ended_cpu_s)
            below.setdefault(stat.parent, []).append(child)
            parents[pid] = stat.parent
            if stat.session in roots and pid not in roots:
                orphans.setdefault(stat.session, []).append(child)
    for adopter in {FIRST_PID} | {parents[root] for root in roots if root in parents}:
        for child in below.get(adopter, ()):
            if child.pid not in roots and (root := _started_by(child, roots)) is not None:
                orphans.setdefault(root, []).append(child)
    return {root: _family(below.get(root, []) + orphans.get(root, []), below) for root in roots}


def _family(of: list[Child], below: Mapping[int, list[Child]]) -> list[Child]:
    """These and all that are below them, each once."""
    found: dict[int, Child] = {}
    todo = list(of)
    while todo:
        child = todo.pop()
        if child.pid not in found:
            found[child.pid] = child
            todo += below.get(child.pid, ())
    return sorted(found.values())


def _started_by(child: Child, roots: Mapping[int, bytes]) -> int | None:
    """To which of these it belongs by its environment. Reading that of a process that a disk holds may last."""
    if child.state == "D":
        return None
    try:
        with open(f"/proc/{child.pid}/environ", "rb") as file:
            variables = set(file.read(ENVIRONMENT_BYTES_MAX).split(b"\0"))
    except OSError:
        return None
    return next((root for root, variable in roots.items() if variable and variable in variables), None)


def disk_bytes(proc: str = "/proc") -> int:
    """What all disks and network file systems of this machine have read and written so far. It grows while a file is being
    brought to one of them, when the process that waits for it has nothing else to show."""
    found = 0
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"{proc}/diskstats", "rb") as file:
        found = sum((int(fields[5]) + int(fields[9])) * SECTOR_BYTES for fields in map(bytes.split, file))
    with contextlib.suppress(OSError, ValueError), open(f"{proc}/self/mountstats", "rb") as file:
        found += sum(sum(map(int, line.split()[5:7])) for line in file if line.startswith(b"\tbytes:"))
    return found


def describe_tasks(pid: int) -> list[str]:
    """One line for each thread: number, name, state, and in which of the kernel's functions it sleeps, where that may be known."""
    try:
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return []
    lines = []
    for task in tasks[:TASKS_MAX]:
        stat = process_stat(f"{pid}/task/{task}")
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
