"""What Linux reports about this machine: limits, memory, interfaces, clock, folders. Reads; judges nothing.

Every function takes the folder that it reads from, so that tests can bring a tree of their own; none raises when
something is not there: what cannot be found out is None or empty.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import tempfile
from pathlib import Path

from holdfast.linux import read_text
from holdfast.protocol.doctor_facts import Folder, Interface

ROOT = Path("/")
CAP_SYS_PTRACE = 19
STA_UNSYNC = 0x40


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
