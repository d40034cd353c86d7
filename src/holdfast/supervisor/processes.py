"""Finding and ending whole process trees through /proc.

Shared by the supervisor (which is every worker's parent) and the agent (which sweeps what a dead supervisor left
behind). Standard library only: the supervisor is forked before anything else is imported. Knows nothing of workers or
ranks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection

from holdfast.linux import process_stat

RESCAN_S = 0.05
"""While a tree is being killed: scan again at least this often, for children forked between a scan and its signals."""

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, argument: int | bytes) -> None:
    """prctl(2) for the options that take one argument. Raises OSError."""
    import ctypes  # it costs milliseconds, so not before the fork

    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Make orphans among our descendants our children instead of init's."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def is_alive(pid: int) -> bool:
    """Whether the process runs or is stopped; a zombie is not alive."""
    stat = process_stat(pid)
    return stat is not None and not stat.has_ended


def own_bytes(pid: int) -> int:
    """Memory that only this process holds (its private pages); 0 when the kernel does not report it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            lines = [line.split() for line in file if line.startswith(b"Private_")]
    except OSError:
        return 0
    return sum(int(line[1]) for line in lines if line[0] in (b"Private_Clean:", b"Private_Dirty:")) * 1024


def descendants(root: int, spare: Collection[int] = ()) -> list[int]:
    """All living processes below `root`, in any session or process group; zombies do not count.

    Processes in `spare` and everything below them are left out.
    """
    children: dict[int, list[int]] = {}
    living: set[int] = set()
    for name in os.listdir("/proc"):
        if name[0] in "123456789" and (stat := process_stat(name)) is not None:
            children.setdefault(stat.parent, []).append(int(name))
            if not stat.has_ended:
                living.add(int(name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = [pid for pid in children.get(todo.pop(), ()) if pid not in spare]
        found += below
        todo += below
    return [pid for pid in found if pid in living]


def kill_each(pids: Collection[int]) -> None:
    """Send SIGKILL to each, also to stopped ones; ignores processes that are already gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _wait_for_ends(pids: Collection[int], limit_s: float) -> None:
    """Wait until all have ended, at most `limit_s`."""
    deadline = time.monotonic() + limit_s
    poller = select.poll()
    watched: set[int] = set()
    try:
        for pid in pids:
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(pid)
                watched.add(fd)
                poller.register(fd, select.POLLIN)
        while watched and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(left_s * 1000):
                poller.unregister(fd)
                watched.discard(fd)
                os.close(fd)
    finally:
        for fd in watched:
            os.close(fd)


def kill_descendants(root: int, spare: Collection[int] = (), limit_s: float = 10.0) -> list[int]:
    """SIGKILL everything below `root` except `spare`, until nothing is left; blocks.

    When `root` is the caller, its dead children are reaped too. Returns the processes still alive after `limit_s`
    (stuck in the kernel), usually none.
    """
    deadline = time.monotonic() + limit_s
    killed: set[int] = set()
    while living := descendants(root, spare):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return living
        kill_each(living)
        killed.update(living)
        _wait_for_ends(living, min(left_s, RESCAN_S))
    if root == os.getpid():
        _reap(killed)  # only now: a process that was still dying during the wait is a zombie by now
    return []


def _reap(pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
