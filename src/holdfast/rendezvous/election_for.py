"""The election that a job's options ask for: in etcd, or by a shared value.

Knows which clients there are; elections.py knows what they offer.
"""

from __future__ import annotations

import socket

from holdfast.protocol.errors import EtcdUnreachableError
from holdfast.protocol.options import Endpoint, EtcdOptions, RunOptions
from holdfast.rendezvous.elections import CALL_S_MAX, Api, Election


def election_for(options: RunOptions) -> Election | None:
    """The election. None: the agent that can bind the endpoint hosts the coordinator. Raises RendezvousConfigError."""
    if options.etcd is not None:
        return EtcdElection(options.etcd, options.job.run_id)
    if options.shared_value is not None:
        from holdfast.rendezvous.third_party import ValueElection, load_backend  # lazily: few jobs need it

        name = options.job.backend
        return ValueElection(name, load_backend(name), options.shared_value, options.job.run_id)
    return None


class EtcdElection:
    """The election by a lease in etcd; implements Election."""

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
