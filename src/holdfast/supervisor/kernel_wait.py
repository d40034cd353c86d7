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
"""Number of threads of one process that are examined."""

_X86 = {
    KernelWait.SLEEP: (35, 230),  # nanosleep, clock_nanosleep
    KernelWait.THREAD: (202, 449),  # futex, futex_waitv
    KernelWait.CHILD: (61, 247),  # wait4, waitid
}
_X86_FILES = (0, 1, 17, 18, 19, 20, 42, 43, 44, 45, 46, 47, 288)
"""Numbers of read, write, pread64, pwrite64, readv, writev, connect, accept, sendto, recvfrom, sendmsg, recvmsg,
accept4: calls whose first argument is a descriptor."""
_X86_POLL = (7, 271)
"""Numbers of poll, ppoll."""
_ARM = {  # the same calls on aarch64, which has no poll
    KernelWait.SLEEP: (101, 115),
    KernelWait.THREAD: (98, 449),
    KernelWait.CHILD: (260, 95),
}
_ARM_FILES = (63, 64, 65, 66, 67, 68, 202, 203, 206, 207, 211, 212, 242)
_ARM_POLL = (73,)
_CALLS = {"x86_64": (_X86, _X86_FILES, _X86_POLL), "aarch64": (_ARM, _ARM_FILES, _ARM_POLL)}
_POLLED = struct.Struct("=i")
"""The beginning of the structure pollfd: the descriptor."""


class Wait(NamedTuple):
    """The kind of thing that a thread waits for."""

    waits_for: KernelWait = KernelWait.UNKNOWN
    inode: int = 0
    """Inode of the connection for which it waits; 0: it waits for none."""


def wait_of(pid: int, task: int, connections: Container[int]) -> Wait:
    """Read what this thread waits for. `connections`: the inodes of all TCP connections of the machine."""
    known = _CALLS.get(os.uname().machine)
    try:
        with open(f"/proc/{pid}/task/{task}/syscall") as file:
            number, *words = file.read().split()
        arguments = [int(word, 16) for word in words]
        call = int(number)
    except (OSError, ValueError):  # the thread is gone, or runs: then the file contains `running`
        return Wait()
    if known is None or len(arguments) < 2:
        return Wait()

    calls, files, poll = known
    for waits_for, numbers in calls.items():
        if call in numbers:
            return Wait(waits_for)
    if call in poll and arguments[1] == 1:  # a poll for several descriptors waits for none in particular
        return _of_file(pid, _polled(pid, arguments[0]), connections)
    if call in files:
        return _of_file(pid, arguments[0], connections)
    return Wait(KernelWait.OTHER)


def waits_of_others(pid: int, connections: Container[int]) -> list[Wait]:
    """Read what each thread of this process waits for, except its main thread."""
    tasks: list[int] = []
    with contextlib.suppress(OSError):
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:THREADS_MAX]
    return [wait_of(pid, task, connections) for task in tasks if task != pid]


def _polled(pid: int, address: int) -> int:
    """The descriptor for which this process polls, from the structure at this address; -1: it cannot be read."""
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
    """The wait for this descriptor of a process."""
    try:
        kind, _, name = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")
    except OSError:
        return Wait(KernelWait.OTHER)
    if kind == "pipe":  # the other end is usually held by a child, such as a process of a data loader
        return Wait(KernelWait.CHILD)
    if kind == "socket" and name.strip("[]").isdigit():
        inode = int(name.strip("[]"))
        return Wait(KernelWait.SOCKET, inode) if inode in connections else Wait(KernelWait.OTHER)
    return Wait(KernelWait.OTHER)


_CONNECTING = b"02"
"""The state SYN_SENT as /proc/net/tcp shows it."""


def is_connecting(pid: int, task: int) -> bool:
    """Whether this thread polls for a connection that is being made: it is not asked for its stack.

    A signal would end that poll, also one whose handler restarts system calls, and torch would raise an error of the
    connection.
    """
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
