"""The election of the coordinator, by etcd or by a third party's shared value: its records, its contract, its choice.

etcd's lease is etcd.py, the one made of a third party's value shared_value.py. They stay two: etcd counts a lease from
its last renewal, before anybody looks, and renews it without writing. A lease made of a value starts to count
when another node first looks at it, so a silent host would be replaced up to one lease later, and each renewal would be
a write that etcd keeps in its history.

Chooses by the options; opens nothing before it is asked to.
"""

from __future__ import annotations

import socket
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from holdfast.protocol.errors import BackendError, EtcdUnreachableError, HoldfastError, RendezvousConfigError
from holdfast.protocol.options import Endpoint, EtcdOptions, RunOptions, ThirdPartyOptions
from holdfast.rendezvous.conf import KEYS, THIRD_PARTY, Conf, read_conf
from holdfast.rendezvous.third_party import Backend, Place, SharedValue

LEASE_TTL_S = 5
RECORD_BYTES_MAX = 4096
SHOWN_CHARS_MAX = 60
CALL_S_MAX = 1.0
"""One call to one etcd server: without quorum etcd answers nothing at all."""
_FAR_AWAY = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses that nobody has: asking for the way there sends nothing."""


class Leader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who hosts the coordinator: the value of the key under the lease."""

    holdfast: int = 1
    run_id: str
    address: str
    port: int
    identity: str
    """Used once: tells two leases of one agent apart."""


class Memory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the next leader must observe."""

    holdfast: int = 1
    run_id: str
    generation: int
    """The newest that may have been started; 0: none."""
    tail_s: float
    """So long after the leader's key is gone its workers may still live somewhere."""


class LeaderLease(Protocol):
    """We hold the leader's key. Every method blocks; raises EtcdUnreachableError when no server answers."""

    previous_leader: Memory | None
    """What the previous leader left, when we took the key."""

    def renew(self) -> bool:
        """False: the key is not ours any more."""

    def remember(self, memory: Memory) -> bool:
        """False: the key is not ours any more, and nothing was written."""

    def resign(self, memory: Memory | None) -> None:
        """Give the key back, if it is still ours; None: the job is over, forget it altogether."""


class Api(Protocol):
    """One client, for one thread at a time. Raises EtcdError, or EtcdUnreachableError when trying again may help."""

    notice: str
    """Worth a line to the people at this node; empty: nothing is."""

    def leader(self) -> Leader | None: ...

    def take(self, me: Leader) -> LeaderLease | None:
        """Take the leader's key if nobody has it. None: somebody has."""

    def close(self) -> None: ...


Record = TypeVar("Record", bound=Struct)


def read_record(
    kind: type[Record], where: str, value: bytes, run_id: str, fault: type[HoldfastError], remedy: str = ""
) -> Record:
    """Raises `fault` when the value is not what this job writes there. `where` and `remedy` are for its message."""
    if len(value) > RECORD_BYTES_MAX:
        raise fault(f"{where} holds {len(value)} bytes that are not holdfast's{remedy}")
    try:
        record = msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError:  # ValidationError too
        shown = value[:SHOWN_CHARS_MAX].decode("utf-8", "replace")
        raise fault(f"{where} holds what holdfast did not write: {shown!r}{remedy}") from None
    owner = getattr(record, "run_id", "")
    if owner != run_id:
        raise fault(f"{where} holds the record of the job {owner!r}, not of {run_id!r}{remedy}")
    return record


class Election(Protocol):
    """How an agent learns who hosts the coordinator, or becomes it."""

    lease_ttl_s: float
    by_loopback: str
    """Why this machine may know itself by nothing but loopback; empty: because that is what was asked for."""

    def open_api(self) -> Api:
        """A client for one thread. Raises HoldfastError."""

    def own_address(self) -> str:
        """Under which the others reach this machine. Blocks; raises HoldfastError."""


def election_for(options: RunOptions) -> Election | None:
    """None: whoever can bind the endpoint hosts the coordinator. Raises RendezvousConfigError."""
    if options.etcd is not None:
        return EtcdElection(options.etcd, options.job.run_id)
    if options.third_party is not None:
        from holdfast.rendezvous.registry import load_third_party

        name = options.job.backend
        return ValueElection(name, load_third_party(name), options.third_party, options.job.run_id)
    return None


class EtcdElection:
    def __init__(self, etcd: EtcdOptions, run_id: str) -> None:
        self._etcd = etcd
        self._run_id = run_id
        self.lease_ttl_s: float = etcd.lease_ttl_s
        host = etcd.endpoints[0].host
        self.by_loopback = "" if host == "localhost" or host.startswith("127.") else f"{host} is this machine"

    def open_api(self) -> Api:
        from holdfast.rendezvous.etcd import open_api

        return open_api(self._etcd, self._run_id)

    def own_address(self) -> str:
        return address_towards(self._etcd.endpoints)


class ValueElection:
    def __init__(self, name: str, backend: Backend, options: ThirdPartyOptions, run_id: str) -> None:
        from holdfast.rendezvous.shared_value import ValueWatch

        self._name = name
        self._backend = backend
        self._place = Place(options.endpoint, run_id, options.conf)
        self._watch = ValueWatch(options.lease_ttl_s)
        self.lease_ttl_s: float = options.lease_ttl_s
        self.by_loopback = "no route leads out of this machine"

    def open_api(self) -> Api:
        from holdfast.rendezvous.shared_value import ValueApi

        return ValueApi(self._name, open_value(self._name, self._backend, self._place), self._place.run_id, self._watch)

    def own_address(self) -> str:
        from holdfast.rendezvous.shared_value import ask

        value = open_value(self._name, self._backend, self._place)
        try:
            return ask(self._name, value.local_address) or address_of_default_route()
        finally:
            value.close()


def open_value(name: str, backend: Backend, place: Place) -> SharedValue:
    """Raises RendezvousConfigError, or BackendError when the backend breaks its contract."""
    from holdfast.rendezvous.shared_value import ask

    try:
        value = ask(name, lambda: backend.open(place), passing=(ValueError,))
    except ValueError as error:
        raise RendezvousConfigError(f"--rdzv-backend {name}: {error}") from None
    if not isinstance(value, SharedValue):
        raise BackendError(f"rendezvous backend {name}: open() must return a SharedValue, not {value!r:.60}")
    return value


def read_third_party(name: str, backend: Backend, endpoint: str, run_id: str, conf: Conf) -> ThirdPartyOptions:
    """The options of an election by this backend, which has judged them.

    Raises RendezvousConfigError, EndpointError or BackendError.
    """
    taken = sorted(KEYS[THIRD_PARTY].keys() & set(backend.conf_keys))
    if taken:
        raise RendezvousConfigError(f"--rdzv-backend {name}: its conf_keys {', '.join(taken)} are holdfast's own")
    own = {key: value for key, value in conf.items() if key in backend.conf_keys}
    lease_ttl_s = read_conf(THIRD_PARTY, conf).get("lease_ttl", LEASE_TTL_S)
    assert isinstance(lease_ttl_s, int)
    open_value(name, backend, Place(endpoint, run_id, own)).close()
    return ThirdPartyOptions(endpoint=endpoint, conf=own, lease_ttl_s=lease_ttl_s)


def address_towards(endpoints: tuple[Endpoint, ...]) -> str:
    """The address from which this machine reaches etcd. Raises EtcdUnreachableError."""
    why = ""
    for endpoint in endpoints:
        try:
            with socket.create_connection((endpoint.host, endpoint.port), timeout=CALL_S_MAX) as probe:
                return str(probe.getsockname()[0])
        except OSError as error:
            why = error.strerror or str(error)
    raise EtcdUnreachableError(f"no etcd answers at {endpoints[-1]}: {why}")


def address_of_default_route() -> str:
    """The address that this machine would use towards the world; loopback when it knows no way there."""
    for address, family in _FAR_AWAY:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
