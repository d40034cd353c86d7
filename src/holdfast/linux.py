"""Facts from /proc and /sys about processes, the cgroups of this process, and this machine.

All packages except the pure ones may import this: standard library only, nothing heavy. A missing value is None, empty
or zero, never an error. Programs that run without this package by design keep their own few lines: launchers/ssh/far.py
is sent to hosts as text; worker/forking.py and worker/fork_server.py are imported before a worker's environment is
settled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

CGROUPS = "sys/fs/cgroup"
SIOCGIFADDR, SIOCGIFFLAGS, IFF_UP = 0x8915, 0x8913, 0x1
VIRTUAL = (
    *("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "cilium", "lxc", "lxd", "podman", "kube", "wg"),
    *("weave", "tailscale", "zt", "tun", "tap", "vmnet", "dummy", "nerdctl", "ovs", "genev", "vxlan"),
)
"""Beginnings of the names of containers', virtual machines' and tunnels' interfaces, which seldom reach other nodes."""
UNLIMITED_BYTES = 2**60
"""Limit of memory from which a cgroup has none: version 1 writes a number near 2**63 then."""


class ProcessStat(NamedTuple):
    """The content of /proc/PID/stat of a process, or of one thread.

    A scan of all processes reads only two of its numbers, so each is converted on access.
    """

    command: bytes
    fields: list[bytes]
    """The fields after the name, the first of which is number 3 in proc(5)."""

    @property
    def name(self) -> str:
        return self.command.decode(errors="replace")

    @property
    def state(self) -> str:
        """The kernel's state letter of the main thread."""
        return self.fields[0].decode()

    @property
    def parent(self) -> int:
        return int(self.fields[1])

    @property
    def session(self) -> int:
        return int(self.fields[3])

    @property
    def cpu_s(self) -> float:
        """Processor time of all threads together, without children."""
        return (int(self.fields[11]) + int(self.fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def ended_cpu_s(self) -> float:
        """Processor time of children that have ended and were waited for, with their children."""
        return (int(self.fields[13]) + int(self.fields[14])) / os.sysconf("SC_CLK_TCK")

    @property
    def has_ended(self) -> bool:
        """Whether this is a zombie. A main thread that ended before its other threads has the state of one while they
        run, so their number is checked as well."""
        return self.fields[0] in (b"Z", b"X", b"x") and self.fields[17] in (b"0", b"1")

    @property
    def started(self) -> str:
        """Start time in ticks since boot. It distinguishes two processes that had the same id."""
        return self.fields[19].decode()


def process_stat(pid: int | str) -> ProcessStat | None:
    """The status of a process, or of a thread given as `PID/task/TID`; None: there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name is in parentheses and may itself hold any byte, parentheses too.
            head, _, rest = file.read().rpartition(b")")
    except OSError:
        return None
    fields = rest.split()
    return ProcessStat(head.partition(b"(")[2], fields) if len(fields) >= 20 else None


def boot_id() -> str:
    """An id that changes with each start of the machine, and is the same in all its containers; empty: not readable."""
    return read_text("/proc/sys/kernel/random/boot_id").strip()


def own_address(towards: str) -> str:
    """This machine's address on the way to another host; empty: there is none."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)  # chooses a route, and sends nothing
                return str(sock.getsockname()[0])
    return ""


def addresses() -> dict[str, str]:
    """The IPv4 addresses of the interfaces that are up, by name.

    psutil would list IPv6 too, but its import costs a tenth of a second.
    """
    return {name: found for _, name in socket.if_nameindex() if (found := _address(name))}


def _address(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        flags = struct.unpack_from("<H", fcntl.ioctl(sock, SIOCGIFFLAGS, request), 16)[0]
        if flags & IFF_UP:
            return socket.inet_ntoa(fcntl.ioctl(sock, SIOCGIFADDR, request)[20:24])
    return ""


class GroupLimits:
    """The lowest limits of the cgroups of this process, version 1 or 2. None: there is no limit."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.memory_bytes: int | None = None
        self.cpus: float | None = None
        self.pids: int | None = None
        self.pids_used = 0
        """Number of processes and threads in the cgroup that has the lowest limit of them."""
        for folder in group_folders(root):
            self._take(folder)

    def _take(self, folder: str) -> None:
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read_int(f"{folder}/{name}")
            if limit is not None and limit < UNLIMITED_BYTES:
                self.memory_bytes = min(limit, self.memory_bytes or limit)
        quota = _cpu_quota(folder)
        if quota is not None:
            self.cpus = min(quota, self.cpus or quota)
        pids = read_int(f"{folder}/pids.max")
        if pids is not None and (self.pids is None or pids < self.pids):
            self.pids = pids
            self.pids_used = read_int(f"{folder}/pids.current") or 0


class ControlGroup(NamedTuple):
    """A cgroup of this process, as one mounted hierarchy shows it."""

    controllers: str
    """Controllers of the hierarchy, separated by commas, in version 1; empty in version 2."""
    top: str
    """The folder of the hierarchy's root. In a container it may be the container's own cgroup."""
    path: str
    """The cgroup's path below `top`. In a container it may be the host's path, of which a part is missing here."""


def own_groups(root: str | os.PathLike[str] = "/") -> Iterator[ControlGroup]:
    """The cgroups that contain this process."""
    mount = os.path.join(root, CGROUPS)
    for line in read_text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = {controllers, *controllers.split(",")} - {""}
        for top in [os.path.join(mount, name) for name in names] or [mount, os.path.join(mount, "unified")]:
            yield ControlGroup(controllers, top, path.strip("/"))


def group_folders(root: str | os.PathLike[str] = "/") -> Iterator[str]:
    """The folders of the cgroups of this process and of all above them."""
    for group in own_groups(root):
        path = group.path
        while path and ".." not in path.split("/"):
            yield f"{group.top}/{path}"
            path = path.rpartition("/")[0]
        yield group.top


def group_room_bytes(folder: str | os.PathLike[str]) -> float:
    """Memory left within the limit of a cgroup (version 2); the page cache counts as free. inf: there is no limit."""
    limit, used = read_int(os.path.join(folder, "memory.max")), read_int(os.path.join(folder, "memory.current"))
    if limit is None or used is None:
        return inf
    cache = re.search(r"^inactive_file (\d+)$", read_text(os.path.join(folder, "memory.stat")), re.MULTILINE)
    return limit - used + (int(cache[1]) if cache is not None else 0)


def room_in_groups_bytes() -> float:
    """Memory left within the limits of all cgroups above this process, as `group_room_bytes`."""
    return min(map(group_room_bytes, group_folders()), default=inf)


def check_memory(more_bytes: int) -> None:
    """Raise OSError if this memory is not available. A tmpfs may be larger than the free memory: to use that would wake
    the kernel's OOM killer."""
    if more_bytes > min(available_bytes(), room_in_groups_bytes()):
        raise OSError(errno.ENOMEM, "too little memory is available")


def available_bytes() -> float:
    """Memory that this machine has available; inf: unknown."""
    found = re.search(r"MemAvailable: +(\d+) kB", read_text("/proc/meminfo"))
    return inf if found is None else int(found[1]) * 1024


def read_text(path: str | os.PathLike[str]) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def read_int(path: str | os.PathLike[str]) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


def _cpu_quota(folder: str) -> float | None:
    quota, _, period = read_text(f"{folder}/cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (read_text(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        return int(quota) / int(period)
    return None


def default_interface(root: str | os.PathLike[str] = "/") -> str:
    """The interface of the IPv4 default route with the lowest metric; empty: there is none. `root`: of /proc."""
    found = []
    for line in read_text(os.path.join(root, "proc/net/route")).splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000":
            found.append((int(fields[6]), fields[0]))
    return min(found)[1] if found else ""
