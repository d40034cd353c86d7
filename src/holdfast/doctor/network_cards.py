"""Reads the counters of this machine's network cards from /sys, and waits for changes of their links. Judges nothing.

What `carrier` and `speed` say is not read: a driver that hangs may hold the lock that these files need.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Mapping
from pathlib import Path

from holdfast.doctor.machine_state import NetworkCard
from holdfast.linux import read_int, read_text

ROOT = Path("/")
TYPE_ETHERNET = 1
MASTERS_MAX = 4
"""Bonds, bridges and the like above each other that are followed."""
LINK_CHANGES = 1
"""RTMGRP_LINK, the kernel's messages about interfaces."""
READ_BYTES = 65536


def network_cards(root: Path = ROOT, own: Mapping[str, int] | None = None) -> tuple[NetworkCard, ...]:
    """The cards, and in a container its way to them. `own`: names and numbers of the interfaces of this process's
    network; None: asks the kernel. In some containers /sys shows those of another network."""
    if own is None:
        own = {name: index for index, name in socket.if_nameindex()}
    routed = _routed(root)
    folder = root / "sys/class/net"
    return tuple(
        _card(folder, name, routed)
        for name, index in sorted(own.items())
        if read_int(folder / name / "ifindex") == index and _reaches_others(folder / name, name in routed)
    )


def _reaches_others(interface: Path, routed: bool) -> bool:
    """Hardware does; of the others (a container's eth0, a bond, a VLAN) those with a route. A bridge for containers
    loses its carrier with the last of them, and the hosts' ends of containers' interfaces come and go."""
    if (interface / "device").exists():
        return True
    is_ethernet = read_int(interface / "type") == TYPE_ETHERNET
    return routed and is_ethernet and not (interface / "bridge").exists() and not (interface / "tun_flags").exists()


def _card(folder: Path, name: str, routed: frozenset[str]) -> NetworkCard:
    interface = folder / name
    state = read_text(interface / "operstate").strip()

    def total(*names: str) -> int | None:
        values = [read_int(interface / "statistics" / each) for each in names]
        return sum(value for value in values if value is not None) if None not in values[:2] else None

    return NetworkCard(
        name=name,
        routed=bool(routed.intersection(_with_masters(folder, name))),
        up=state in ("up", "unknown") if state else None,
        carrier_losses=read_int(interface / "carrier_down_count"),
        carrier_changes=read_int(interface / "carrier_changes"),
        packets=total("rx_packets", "tx_packets"),
        errors=total("rx_errors", "tx_errors"),
        drops=total("rx_dropped", "tx_dropped", "rx_missed_errors"),
    )


def _with_masters(folder: Path, name: str) -> list[str]:
    names = [name]
    with contextlib.suppress(OSError):  # it has no master
        while len(names) <= MASTERS_MAX:
            names.append(os.path.basename(os.readlink(folder / names[-1] / "master")))
    return names


def _routed(root: Path) -> frozenset[str]:
    """The interfaces through which a route to more than one address leads."""
    found = set()
    for line in read_text(root / "proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[7] != "FFFFFFFF":
            found.add(fields[0])
    for line in read_text(root / "proc/net/ipv6_route").splitlines():
        fields = line.split()
        if len(fields) > 9 and fields[1] != "80" and not fields[0].startswith(("fe80", "ff00")):
            found.add(fields[9])
    return frozenset(found)


class LinkEvents:
    """Waits for the kernel's messages about interfaces. Used by one thread; `end` may be called by another."""

    def __init__(self) -> None:
        self._end_read, self._end_write = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(self._end_read, select.POLLIN)
        self._messages: socket.socket | None = None
        try:
            self._messages = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
            self._messages.setblocking(False)
            self._messages.bind((0, LINK_CHANGES))
            self._poll.register(self._messages, select.POLLIN)
        except OSError:  # a sandbox without them
            if self._messages is not None:
                self._messages.close()
            self._messages = None

    @property
    def come(self) -> bool:
        """False: the kernel sends none, so the counters must be read often."""
        return self._messages is not None

    def wait(self, limit_s: float) -> None:
        """Return with the next message, when the limit is over, or after `end`."""
        self._poll.poll(limit_s * 1000)
        if self._messages is not None:
            # What they say is not looked at: the counters are read again. Some may have been lost (ENOBUFS).
            with contextlib.suppress(OSError):
                while self._messages.recv(READ_BYTES):
                    pass

    def end(self) -> None:
        """Every wait returns at once from now on."""
        with contextlib.suppress(OSError):
            self._end_write.send(b"e")

    def close(self) -> None:
        for each in (self._messages, self._end_read, self._end_write):
            if each is not None:
                each.close()
