"""Election of the coordinator by etcd or by a shared value: records, interfaces and the choice of one.

etcd.py implements the lease in etcd, third_party.py the lease in a shared value. Both are needed: etcd counts a
lease from its last renewal and renews it without a write. A lease in a value starts to count when another node first
reads it, so a silent host is replaced up to one lease later, and each renewal is a write, which etcd would keep in its
history.

Opens no connection before it is asked to.
"""

from __future__ import annotations

import socket
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from holdfast.protocol.errors import HoldfastError

RECORD_BYTES_MAX = 4096
SHOWN_CHARS_MAX = 60
"""Length at which a foreign value is cut in a message."""
CALL_S_MAX = 1.0
"""Limit of one call to one etcd server: without quorum etcd does not answer at all."""
_DOCUMENTATION_ADDRESSES = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses reserved for documentation. Asking for the route to them sends no packet."""


class Leader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent that hosts the coordinator: the value of the key under the lease."""

    holdfast: int = 1
    run_id: str
    address: str
    port: int
    identity: str
    """A text that is used once, so that two leases of one agent differ."""


class Memory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constraints for the next leader."""

    holdfast: int = 1
    run_id: str
    generation: int
    """The newest generation that may have been started; 0: none."""
    workers_may_live_s: float
    """Time after the end of the leader's key in which its workers may still be alive."""


class LeaderLease(Protocol):
    """The leader's key in the hands of this agent. Every method blocks, and raises EtcdUnreachableError when no server
    answers."""

    previous_leader: Memory | None
    """The previous leader's record at the time when this agent took the key."""

    def renew(self) -> bool:
        """Renew the lease. False: this agent does not hold the key any more."""

    def remember(self, memory: Memory) -> bool:
        """Write the record. False: this agent does not hold the key any more, and nothing was written."""

    def resign(self, memory: Memory | None) -> None:
        """Release the key if this agent still holds it. `memory` None: the job is over, delete the record."""


class Api(Protocol):
    """A client of the store, for one thread at a time. Raises EtcdError, or EtcdUnreachableError when trying again may
    help."""

    notice: str
    """A line for the console of this node; empty: none."""

    def leader(self) -> Leader | None:
        """The present leader; None: there is none."""

    def take(self, me: Leader) -> LeaderLease | None:
        """Take the leader's key if it is free. None: another agent holds it."""

    def close(self) -> None: ...


Record = TypeVar("Record", bound=Struct)


def read_record(
    kind: type[Record], where: str, value: bytes, run_id: str, fault: type[HoldfastError], remedy: str = ""
) -> Record:
    """The record in a value. Raises `fault` if this job did not write it. `where` and `remedy` are for the message."""
    if len(value) > RECORD_BYTES_MAX:
        raise fault(f"{where} has {len(value)} bytes that holdfast did not write{remedy}")
    try:
        record = msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError:  # ValidationError too
        shown = value[:SHOWN_CHARS_MAX].decode("utf-8", "replace")
        raise fault(f"{where} has a value that holdfast did not write: {shown!r}{remedy}") from None
    owner = getattr(record, "run_id", "")
    if owner != run_id:
        raise fault(f"{where} has the record of the job {owner!r}, not of {run_id!r}{remedy}")
    return record


class Election(Protocol):
    """Finds the agent that hosts the coordinator, or lets this agent acquire the lease."""

    lease_ttl_s: float
    by_loopback: str
    """The reason why this machine's own address may be loopback, for a warning; empty: the user asked for it."""

    def open_api(self) -> Api:
        """A client for one thread. Raises HoldfastError."""

    def own_address(self) -> str:
        """The address at which the others reach this machine. Blocks; raises HoldfastError."""


def address_of_default_route() -> str:
    """The address that this machine uses on its default route; loopback without one."""
    for address, family in _DOCUMENTATION_ADDRESSES:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
