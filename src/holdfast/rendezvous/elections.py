"""What an election of the coordinator needs, whoever holds it: etcd, or a third party's shared value.

Chooses by the options; opens nothing before it is asked to.
"""

from __future__ import annotations

import socket
from typing import Protocol

from holdfast.core.errors import BackendError, EtcdUnreachableError, RendezvousConfigError
from holdfast.core.options import Endpoint, EtcdOptions, RunOptions, ThirdPartyOptions
from holdfast.rendezvous.conf import KEYS, THIRD_PARTY, Conf, read_conf
from holdfast.rendezvous.etcd import CALL_S_MAX, Api
from holdfast.rendezvous.third_party import Backend, Place, SharedValue

LEASE_TTL_S = 5
_FAR_AWAY = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses that nobody has: asking for the way there sends nothing."""


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
