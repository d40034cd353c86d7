"""What Linux reports about this machine: cgroups, limits, memory, interfaces, clock, folders. Reads; judges nothing.

Every function takes the folder that it reads from, so that tests can bring a tree of their own; none raises when
something is not there: what cannot be found out is None or empty.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from holdfast.core.doctor import Folder, Interface

ROOT = Path("/")
UNLIMITED_BYTES = 2**60
"""cgroup v1 writes a number near 2**63 where there is no limit."""
CAP_SYS_PTRACE = 19
STA_UNSYNC = 0x40


class GroupLimits:
    """The lowest limits of the cgroups that this process is in, v1 or v2."""

    def __init__(self, root: Path = ROOT) -> None:
        self.memory_bytes: int | None = None
        self.cpus: float | None = None
        self.pids: int | None = None
        self.pids_used = 0
        for folder in group_folders(root):
            self._take(folder)

    def _take(self, folder: Path) -> None:
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read_int(folder / name)
            if limit is not None and limit < UNLIMITED_BYTES:
                self.memory_bytes = min(limit, self.memory_bytes or limit)
        quota = cpu_quota(folder)
        if quota is not None:
            self.cpus = min(quota, self.cpus or quota)
        pids = read_int(folder / "pids.max")
        if pids is not None and (self.pids is None or pids < self.pids):
            self.pids = pids
            self.pids_used = read_int(folder / "pids.current") or 0


def group_folders(root: Path) -> Iterator[Path]:
    """The cgroups of this process and all above them; a container's own root, too, where the paths are the host's."""
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        tops = [mount / name for name in {controllers, *controllers.split(",")} if name] or [mount, mount / "unified"]
        for top in tops:
            folder = top / path.lstrip("/")
            while folder != top and top in folder.parents:
                yield folder
                folder = folder.parent
            yield top


def cpu_quota(folder: Path) -> float | None:
    quota, _, period = read_text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        return int(quota) / int(period)
    return None


def soft_limits() -> dict[str, int | None]:
    kinds = {name: getattr(resource, f"RLIMIT_{name.upper()}") for name in ("nofile", "nproc", "memlock", "core")}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}


def may_trace(root: Path = ROOT) -> bool:
    for line in read_text(root / "proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_PTRACE & 1)
    return False


def driver_version(root: Path = ROOT) -> str:
    """NVIDIA's, of `NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu …`; empty without one."""
    first = read_text(root / "proc/driver/nvidia/version").partition("\n")[0]
    return next((word for word in first.split() if word[:1].isdecimal() and "." in word), "")


def infiniband(root: Path = ROOT) -> tuple[str, ...]:
    folder = root / "sys/class/infiniband"
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def default_interface(root: Path = ROOT) -> str:
    """Of the IPv4 default route with the lowest metric; empty without one."""
    found = []
    for line in read_text(root / "proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000":
            found.append((int(fields[6]), fields[0]))
    return min(found)[1] if found else ""


def interfaces() -> tuple[Interface, ...]:
    import psutil

    stats = psutil.net_if_stats()
    return tuple(
        Interface(
            name=name,
            up=name in stats and stats[name].isup,
            addresses=tuple(
                each.address
                for each in sorted(addresses, key=lambda each: each.family)
                if each.family in (socket.AF_INET, socket.AF_INET6) and not each.address.startswith("fe80:")
            ),
            speed_mbit_s=stats[name].speed if name in stats else 0,
        )
        for name, addresses in psutil.net_if_addrs().items()
    )


def ephemeral_ports(root: Path = ROOT) -> tuple[int, int] | None:
    words = read_text(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 and all(map(str.isdecimal, words)) else None


def folder_facts(path: str) -> Folder:
    """Room on its file system, and why nothing can be written there; of its parent, where it does not exist yet."""
    there = path
    while not os.path.lexists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    try:
        room = os.statvfs(there)
        with tempfile.NamedTemporaryFile(dir=there, prefix=".holdfast-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        return Folder(path=path, error=error.strerror or str(error))
    return Folder(path=path, total_bytes=room.f_blocks * room.f_frsize, free_bytes=room.f_bavail * room.f_frsize)


class _Timex(ctypes.Structure):
    """The kernel's `struct timex`, as far as it is read; the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_char * 256),
    )


def clock_synchronised() -> bool | None:
    """The kernel's own flag, which NTP daemons clear; None where it may not be read."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = _Timex()  # modes 0: changes nothing
        if libc.adjtimex(ctypes.byref(state)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return not state.status & STA_UNSYNC


def own_addresses(host: str) -> tuple[tuple[str, ...], str]:
    """What a host name resolves to here, or why it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), (error.strerror if isinstance(error, OSError) else "") or str(error)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found)), ""


def read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_int(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None
