"""Reads from /proc what a thread waits for: its system call, and the file, pipe or connection that it is called for.

Unknown where the kernel does not show it: gVisor, a hardened container, another architecture. Changes nothing about the
thread. Judges nothing: see diagnosis/places.py.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Container
from typing import NamedTuple

from holdfast.protocol.rank_progress import KernelWait

THREADS_MAX = 64
"""Threads of one process that are looked at."""

_X86 = {
    KernelWait.SLEEP: (35, 230),  # nanosleep, clock_nanosleep
    KernelWait.THREAD: (202, 449),  # futex, futex_waitv
    KernelWait.CHILD: (61, 247),  # wait4, waitid
}
_X86_FILES = (0, 1, 17, 18, 19, 20, 42, 43, 44, 45, 46, 47, 288)
"""read, write, pread64, pwrite64, readv, writev, connect, accept, sendto, recvfrom, sendmsg, recvmsg, accept4."""
_X86_POLL = (7, 271)
"""poll, ppoll."""
_ARM = {
    KernelWait.SLEEP: (101, 115),
    KernelWait.THREAD: (98, 449),
    KernelWait.CHILD: (260, 95),
}
_ARM_FILES = (63, 64, 65, 66, 67, 68, 202, 203, 206, 207, 211, 212, 242)
_ARM_POLL = (73,)
_CALLS = {"x86_64": (_X86, _X86_FILES, _X86_POLL), "aarch64": (_ARM, _ARM_FILES, _ARM_POLL)}
_POLLED = struct.Struct("=i")
"""The begin of pollfd: the descriptor."""


class Wait(NamedTuple):
    waits_for: KernelWait = KernelWait.UNKNOWN
    inode: int = 0
    """Of the connection for which it waits; 0: it waits for none."""


def wait_of(pid: int, task: int, connections: Container[int]) -> Wait:
    """What this thread waits for. `connections`: the inodes of all TCP connections of the machine."""
    known = _CALLS.get(os.uname().machine)
    try:
        with open(f"/proc/{pid}/task/{task}/syscall") as file:
            number, *words = file.read().split()
        arguments = [int(word, 16) for word in words]
        call = int(number)
    except (OSError, ValueError):  # `running` is no number
        return Wait()
    if known is None or len(arguments) < 2:
        return Wait()
    calls, files, poll = known
    for waits_for, numbers in calls.items():
        if call in numbers:
            return Wait(waits_for)
    if call in poll and arguments[1] == 1:
        return _of_file(pid, _polled(pid, arguments[0]), connections)
    if call in files:
        return _of_file(pid, arguments[0], connections)
    return Wait(KernelWait.OTHER)


def waits_of_others(pid: int, connections: Container[int]) -> list[Wait]:
    """What the threads of this process wait for, without the main thread."""
    tasks: list[int] = []
    with contextlib.suppress(OSError):
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:THREADS_MAX]
    return [wait_of(pid, task, connections) for task in tasks if task != pid]


def _polled(pid: int, address: int) -> int:
    """The descriptor in the structure for which it polls; -1: unreadable."""
    try:
        file = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        return int(_POLLED.unpack(os.pread(file, _POLLED.size, address))[0])
    except (OSError, OverflowError, struct.error):
        return -1
    finally:
        os.close(file)


def _of_file(pid: int, fd: int, connections: Container[int]) -> Wait:
    try:
        kind, _, name = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")
    except OSError:
        return Wait(KernelWait.OTHER)
    if kind == "pipe":
        return Wait(KernelWait.CHILD)
    if kind == "socket" and name.strip("[]").isdigit():
        inode = int(name.strip("[]"))
        return Wait(KernelWait.SOCKET, inode) if inode in connections else Wait(KernelWait.OTHER)
    return Wait(KernelWait.OTHER)


_CONNECTING = b"02"
"""SYN_SENT in /proc/net/tcp."""


def is_connecting(pid: int, task: int) -> bool:
    """Whether this thread polls for a connection that is being made. A signal ends that poll, also one whose handler
    restarts system calls, and torch raises it as an error of the connection: such a thread is not asked for its
    stack."""
    known = _CALLS.get(os.uname().machine)
    try:
        with open(f"/proc/{pid}/task/{task}/syscall") as file:
            number, *words = file.read().split()
        if known is None or int(number) not in known[2] or int(words[1], 16) != 1:
            return False
        _, _, name = os.readlink(f"/proc/{pid}/fd/{_polled(pid, int(words[0], 16))}").partition(":")
    except (OSError, ValueError, IndexError):
        return False
    inode = name.strip("[]").encode()
    return any(_state_of(f"/proc/{pid}/net/{table}", inode) == _CONNECTING for table in ("tcp", "tcp6"))


def _state_of(table: str, inode: bytes) -> bytes:
    """The state of the connection with this inode, as the kernel's table of the process's network shows it."""
    with contextlib.suppress(OSError), open(table, "rb") as file:
        for line in file:
            fields = line.split()
            if len(fields) > 9 and fields[9] == inode:
                return fields[3]
    return b""
