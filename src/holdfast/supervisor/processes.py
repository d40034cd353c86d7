"""Finds, ends and measures processes, by /proc, netlink and system calls.

Whole trees are ended by the supervisor, which is every worker's parent, and by the agent, which sweeps what a dead
supervisor left behind. The agent also reads what the kernel counts for a worker: states, processor time, signals, open
files, TCP traffic. Traffic is read by netlink because recv() and send() are not counted as input and output in
/proc/PID/io: a download into memory appears only there. All reads are bounded.

Standard library only: the supervisor is forked before anything else is imported. Knows nothing of workers or ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from holdfast.linux import ProcessStat, process_stat

RESCAN_S = 0.05
"""Longest time between two scans of a tree that is being killed (s). A process may fork between a scan and its signal:
only another scan finds that child."""

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
FIRST_FIELD, ARGUMENTS = 3, (48, 49)
"""Numbers of fields in /proc/PID/stat, as in proc(5): the first one after the name; bounds of the command line."""


def prctl(option: int, argument: int | bytes) -> None:
    """prctl(2) for the options that take one argument. Raises OSError."""
    import ctypes  # it costs milliseconds, so not before the fork

    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(option, value, 0, 0, 0):
        raise _errno_error()


def close_all_but(needed: int) -> None:
    """Close every descriptor of this process but the standard ones and this one."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != needed:
            with contextlib.suppress(OSError):
                os.close(int(name))


def set_command_line(text: bytes) -> None:
    """Write this text over the command line of this process, which a forked process has from its parent.

    A longer text is cut. `worker.forking.show_as` takes texts of any length, which not every kernel allows.
    """
    import ctypes

    stat = process_stat("self")
    if stat is None or len(stat.fields) <= ARGUMENTS[-1] - FIRST_FIELD:  # an emulator of a kernel may know fewer
        return
    begin, end = (int(stat.fields[number - FIRST_FIELD]) for number in ARGUMENTS)
    if 0 < begin < end:
        ctypes.memmove(begin, text[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def _errno_error() -> OSError:
    """The error of the last call through ctypes, in the subclass of OSError that belongs to its number."""
    import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Make orphans among our descendants our children instead of init's: no double fork leads out of our tree."""
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


def _all_processes() -> Iterator[tuple[int, ProcessStat]]:
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        stat = process_stat(pid)
        if stat is not None:
            yield pid, stat


def descendants(root: int, spare: Collection[int] = ()) -> list[int]:
    """All living processes below `root`, in any session or process group; zombies do not count.

    Processes in `spare` and everything below them are left out.
    """
    children: dict[int, list[int]] = {}
    living: set[int] = set()
    for pid, stat in _all_processes():
        children.setdefault(stat.parent, []).append(pid)
        if not stat.has_ended:
            living.add(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        below = [pid for pid in children.get(todo.pop(), ()) if pid not in spare]
        found += below
        todo += below
    # A zombie is left out only here: its own children may live, until the kernel gives them another parent.
    return [pid for pid in found if pid in living]


def kill_each(root: int, pids: Collection[int]) -> None:
    """Send SIGKILL to each of these processes below `root`, also to stopped ones; ignores those that are gone."""
    for pid in pids:
        signal_below(root, pid, signal.SIGKILL)


def signal_below(root: int, pid: int, signum: int) -> None:
    """Signal a process if it is still below `root`. Since it was found there, it may have ended and been reaped by its
    parent, and a process of somebody else may have its number; root may signal that one too."""
    process = -1
    try:
        with contextlib.suppress(PermissionError):
            # The pidfd is opened before the check. What was checked is then what gets the signal, also if the process
            # ends in between and its number is used again.
            with contextlib.suppress(OSError):  # a kernel without pidfd, or no descriptor left: the number must do
                process = os.pidfd_open(pid)
            if not _is_below(root, pid):
                return
            with contextlib.suppress(ProcessLookupError):
                if process >= 0:
                    signal.pidfd_send_signal(process, signum)
                else:
                    os.kill(pid, signum)
    finally:
        if process >= 0:
            os.close(process)


WALKS_MAX = 16
"""Number of walks from a process up to its root. Another one is needed where a parent was reaped during a walk."""


def _is_below(root: int, pid: int) -> bool:
    """Whether `root` is the parent, or a parent of the parent and so on, of this process."""
    for _ in range(WALKS_MAX):
        at = pid
        while at > FIRST_PID and (found := process_stat(at)) is not None:
            at = found.parent
            if at == root:
                return True
        if at in (0, FIRST_PID, pid):
            return False
        # A process between them was reaped during the walk: those below it have another parent now.
    return False


def _wait_for_ends(pids: Collection[int], limit_s: float) -> None:
    """Wait until all have ended, for at most `limit_s`. A process that has no pidfd is not waited for."""
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

    `root` must be a subreaper. Below another process, a child whose parent is killed first gets a parent outside of the
    tree, and is not found any more.
    When `root` is the caller, its dead children are reaped too. Returns the processes still alive after `limit_s`
    (stuck in the kernel), usually none.
    """
    deadline = time.monotonic() + limit_s
    killed: set[int] = set()
    while living := descendants(root, spare):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return living
        kill_each(root, living)
        killed.update(living)
        _wait_for_ends(living, min(left_s, RESCAN_S))
    if root == os.getpid():
        # Only now: every process that was still dying during the wait is a zombie by now.
        _reap(killed)
    return []


SESSION_SCANS_MAX = 5
"""Number of scans of one session. It bounds the work where a program forks faster than we kill."""


def kill_session(root: int, leader: int) -> None:
    """SIGKILL every process below `root` in the session of a leader that has ended. Does not wait."""
    killed: set[int] = set()
    for _ in range(SESSION_SCANS_MAX):
        below = [(pid, process_stat(pid)) for pid in descendants(root)]
        members = {pid for pid, stat in below if stat is not None and stat.session == leader}
        # No member is new: those that are left have got SIGKILL, and cannot fork any more.
        if members <= killed:
            return
        kill_each(root, members)
        killed |= members


def _reap(pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
REQUEST_OF_ALL = 0x301
"""Flags NLM_F_REQUEST and NLM_F_DUMP: the answer lists all sockets."""
NLMSG_ERROR, NLMSG_DONE = 2, 3
INET_DIAG_INFO = 2
CONNECTED = 1 << 1
"""Bit of the state ESTABLISHED."""

HEAD = struct.Struct("=IHHII")
"""Structure nlmsghdr: length, type, and three fields that are not needed here."""
QUESTION = struct.Struct("=BBBBI48x")
"""Structure inet_diag_req_v2: family, protocol, attributes that are wanted, padding, states; any address."""
INODE_AT, ANSWER_BYTES = 68, 72
"""Offset of the inode in inet_diag_msg, and the length of that structure."""
ATTRIBUTE = struct.Struct("=HH")
MOVED = struct.Struct("=QQ")
MOVED_AT = 120
"""Offset in tcp_info of two counters: bytes that the peer has acknowledged, and bytes received."""

NETLINK_PACKETS_MAX = 1024
"""Number of packets of an answer that are read. Each has some dozens of sockets."""
ANSWER_BYTES_MAX = 1 << 16
WAIT_S_MAX = 0.2
FILES_MAX = 4096
"""Number of open files of one process that are read."""


def tcp_moved_bytes() -> dict[int, int]:
    """Bytes sent and received by each connection of this machine, by the inode of its socket. Empty where this cannot
    be read."""
    found: dict[int, int] = {}
    with (
        contextlib.suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as link,
    ):
        link.settimeout(WAIT_S_MAX)
        # The kernel answers for one family at a time.
        for family in (socket.AF_INET, socket.AF_INET6):
            question = QUESTION.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), 0, CONNECTED)
            link.send(HEAD.pack(HEAD.size + len(question), SOCK_DIAG_BY_FAMILY, REQUEST_OF_ALL, 0, 0) + question)
            for _ in range(NETLINK_PACKETS_MAX):
                if _read_packet(link.recv(ANSWER_BYTES_MAX), found):
                    break
    return found


def _read_packet(packet: bytes, found: dict[int, int]) -> bool:
    """Add a packet's connections to `found`. Returns whether it is the last packet of the answer."""
    at = 0
    while at + HEAD.size <= len(packet):
        length, kind, *_ = HEAD.unpack_from(packet, at)
        if kind in (NLMSG_ERROR, NLMSG_DONE) or length < HEAD.size:
            return True
        _read_connection(packet[at + HEAD.size : at + length], found)
        at += _aligned(length)
    return False


def _read_connection(answer: bytes, found: dict[int, int]) -> None:
    """Add one connection to `found`: the sum of its two counters, by the inode of its socket."""
    (inode,) = struct.unpack_from("=I", answer, INODE_AT)
    at = ANSWER_BYTES
    while at + ATTRIBUTE.size <= len(answer):
        length, kind = ATTRIBUTE.unpack_from(answer, at)
        # An older kernel has a shorter tcp_info, without these counters.
        if kind == INET_DIAG_INFO and length >= ATTRIBUTE.size + MOVED_AT + MOVED.size:
            found[inode] = sum(MOVED.unpack_from(answer, at + ATTRIBUTE.size + MOVED_AT))
        at += max(_aligned(length), ATTRIBUTE.size)


def _aligned(length: int) -> int:
    """Length of a netlink message or attribute with its padding: the next one begins at a multiple of 4 bytes."""
    return (length + 3) & ~3


def of_connections(pids: Iterable[int], moved: Mapping[int, int]) -> dict[int, float]:
    """The bytes that each connection of these processes has moved; `moved` covers all connections."""
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd")[:FILES_MAX]:
                with contextlib.suppress(OSError, ValueError):
                    kind, _, number = os.readlink(f"/proc/{pid}/fd/{name}").partition(":")
                    if kind == "socket":
                        inodes.add(int(number.strip("[]")))
    return {inode: moved[inode] for inode in inodes if inode in moved}


TASKS_MAX = 256
"""Number of threads of one process that are described."""
FIRST_PID = 1
ENVIRONMENT_BYTES_MAX = 1 << 20
SECTOR_BYTES = 512
"""The unit of /proc/diskstats, whatever the disk's own sectors are."""
MEMORY_FILE = "/memfd:"
"""Beginning of the name of a memory file in /proc/PID/fd."""


class Child(NamedTuple):
    """A process below another one, as `families` finds it."""

    pid: int
    name: str
    state: str
    parent: int
    cpu_s: float
    """Processor time so far (s), including that of its own children that have ended."""


class Signals(NamedTuple):
    """Signal masks of a process and of its main thread. Bit N-1 stands for signal N."""

    caught: int = 0
    blocked: int = 0
    waiting: int = 0

    def catches(self, signum: int) -> bool:
        return bool(self.caught >> (signum - 1) & 1)

    def blocks(self, signum: int) -> bool:
        """Whether the main thread blocks this signal; also true while its handler runs."""
        return bool(self.blocked >> (signum - 1) & 1)

    def pending(self, signum: int) -> bool:
        return bool(self.waiting >> (signum - 1) & 1)


def wanted_s(pid: int, *, all_threads: bool) -> float:
    """Processor time that a process, or its main thread, has used so far, plus the time for which it waited for a
    processor: on an overloaded machine the second is most of it. 0 where that is unknown."""
    tasks = [str(pid)]
    if all_threads:
        with contextlib.suppress(OSError):
            tasks = os.listdir(f"/proc/{pid}/task")[:TASKS_MAX]
    found_ns = 0
    for task in tasks:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/task/{task}/schedstat", "rb") as file:
            found_ns += sum(map(int, file.read().split()[:2]))
    return found_ns / 1e9


def waited_ns(pid: int) -> dict[str, int]:
    """The time for which each thread of a process has waited for a processor so far (ns), by thread. Empty where that
    is unknown."""
    tasks, found = list[str](), dict[str, int]()
    with contextlib.suppress(OSError):
        tasks = os.listdir(f"/proc/{pid}/task")[:TASKS_MAX]
    for task in tasks:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/task/{task}/schedstat", "rb") as file:
            found[task] = int(file.read().split()[1])
    return found


def moved_bytes(pid: int | str) -> int:
    """Bytes that a process, or a thread given as `PID/task/TID`, has read and written so far, as system calls and as
    disks count them: one of the two grows while it copies. 0 where this cannot be read."""
    return sum(_counted(pid).values())


def wrote_bytes(pid: int | str) -> int:
    """Bytes that system calls of a process, or of a thread given as `PID/task/TID`, have written so far: a part of
    `moved_bytes`. 0 where this cannot be read."""
    return _counted(pid).get(b"wchar", 0)


def _counted(pid: int | str) -> dict[bytes, int]:
    """Counters of /proc/PID/io (bytes), by their names; empty where this cannot be read."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            counts = dict(line.split(b":") for line in file)
        return {name: int(counts[name]) for name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes")}
    except (OSError, ValueError, KeyError):
        return {}


def signals(pid: int | str) -> Signals:
    """Signal masks of a process, or of a thread given as `PID/task/TID`. All empty when there is none."""
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
    """Number of times that the main thread went to sleep or was preempted; -1: there is no such process.

    If the number has not grown between two calls, the thread slept all the time, or ran all the time.
    """
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
    """A thread of this process that waits for another thread and accepts this signal; the main thread if there is none.

    Its wait continues after the signal. A sleep of C code in the main thread would end.
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
    """Send a signal to one thread. Raises ProcessLookupError, PermissionError."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).tgkill(pid, task, signum):
        raise _errno_error()


def families(roots: Mapping[int, bytes]) -> dict[int, list[Child]]:
    """The processes below each of these roots, including zombies, in order of their pids.

    Includes processes whose parent is gone and that belong to a root by their session, or by the root's value in the
    mapping: an environment variable that its processes inherit.
    """
    below: dict[int, list[Child]] = {}
    orphans: dict[int, list[Child]] = {}
    parents: dict[int, int] = {}
    for pid, stat in _all_processes():
        child = Child(pid, stat.name, stat.state, stat.parent, stat.cpu_s + stat.ended_cpu_s)
        below.setdefault(stat.parent, []).append(child)
        parents[pid] = stat.parent
        if stat.session in roots and pid not in roots:
            orphans.setdefault(stat.session, []).append(child)
    # A process that has lost its parent belongs to init now, or to the supervisor, which is the parent of the roots.
    for parent in {FIRST_PID} | {parents[root] for root in roots if root in parents}:
        for child in below.get(parent, ()):
            if child.pid not in roots and (root := _started_by(child, roots)) is not None:
                orphans.setdefault(root, []).append(child)
    return {root: _family(below.get(root, []) + orphans.get(root, []), below) for root in roots}


def _family(of: list[Child], below: Mapping[int, list[Child]]) -> list[Child]:
    """These processes and all that are below them, each once."""
    found: dict[int, Child] = {}
    todo = list(of)
    while todo:
        child = todo.pop()
        if child.pid not in found:
            found[child.pid] = child
            todo += below.get(child.pid, ())
    return sorted(found.values())


def _started_by(child: Child, roots: Mapping[int, bytes]) -> int | None:
    """The root to which this process belongs by its environment; None: none of them."""
    if child.state == "D":  # a disk stalls it, and reading its environment would wait for that
        return None
    try:
        with open(f"/proc/{child.pid}/environ", "rb") as file:
            variables = set(file.read(ENVIRONMENT_BYTES_MAX).split(b"\0"))
    except OSError:
        return None
    return next((root for root, variable in roots.items() if variable and variable in variables), None)


def stolen_s(proc: str = "/proc") -> float:
    """Time so far for which other virtual machines had this one's processors while it needed them (s): the mean over
    its processors. No process's counter shows this time: neither used nor waited. 0 where that is unknown."""
    with contextlib.suppress(OSError, ValueError, LookupError, ZeroDivisionError), open(f"{proc}/stat", "rb") as file:
        lines = [line.split() for line in file if line.startswith(b"cpu")]
        return int(lines[0][8]) / os.sysconf("SC_CLK_TCK") / (len(lines) - 1)
    return 0.0


def disk_bytes(proc: str = "/proc") -> int:
    """Bytes that all disks and network file systems of this machine have read and written so far. It grows while a file
    is being written, when the waiting process itself shows no other activity."""
    found = 0
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"{proc}/diskstats", "rb") as file:
        found = sum((int(fields[5]) + int(fields[9])) * SECTOR_BYTES for fields in map(bytes.split, file))
    with contextlib.suppress(OSError, ValueError), open(f"{proc}/self/mountstats", "rb") as file:
        found += sum(sum(map(int, line.split()[5:7])) for line in file if line.startswith(b"\tbytes:"))
    return found


def describe_tasks(pid: int) -> list[str]:
    """One line for each thread: number, name, state, and the kernel function in which it sleeps, where that is
    readable."""
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


def has_open(pid: int, fd: int) -> bool:
    """Whether this very memory file is open in that process: it may have closed it, or be another program by now."""
    ours = os.fstat(fd)
    folder = f"/proc/{pid}/fd"
    try:
        numbers = sorted(map(int, os.listdir(folder)), reverse=True)
    except OSError:
        return False
    for number in numbers:  # from the highest: the file has a high number, see worker/bootstrap.py
        with contextlib.suppress(OSError):
            # The name comes without a disk. The status of any other file would wait for a network disk that stalls.
            if not os.readlink(f"{folder}/{number}").startswith(MEMORY_FILE):
                continue
            theirs = os.stat(f"{folder}/{number}")
            if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
                return True
    return False
