"""etcd: its options (`--rdzv-conf`) and the coordinator's lease in it. The clients are in etcd_stores.py.

The lease consists of two keys with a time to live. `<prefix>/<run id>/coordinator` lives for one lease and names the
leader and its address. `<prefix>/<run id>/memory` outlives the leader and has the constraints for the next one. A new
leader first writes the memory again. That changes its version, so that no previous leader can write it any more.

Knows the keys and the order of the changes; both APIs offer the same operations on one key.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

import msgspec

from holdfast.protocol.errors import EtcdError, EtcdUnreachableError, RendezvousConfigError
from holdfast.protocol.options import Endpoint, EtcdOptions
from holdfast.rendezvous.backends import default_port
from holdfast.rendezvous.conf import Conf, parse_endpoint, read_conf
from holdfast.rendezvous.elections import Api, Leader, Memory, Record, read_record
from holdfast.rendezvous.etcd_servers import Store

PASSWORD_BYTES_MAX = 4096
_FILES = {
    "etcd": {"ca_file": "cacert", "cert_file": "cert", "key_file": "key"},
    "etcd-v2": {"ca_file": "ca_cert", "cert_file": "ssl_cert", "key_file": "ssl_cert_key"},
}
"""Names of the --rdzv-conf keys for TLS files; torchrun's differ between its two backends."""
MEMORY_TTL_S = 120
"""Time to live of the memory without a leader. The job's workers have ended by then."""
ATTEMPTS_MAX = 8
"""Number of attempts to take the memory over while another node changes it."""
REMEDY = "; delete it, or choose another --rdzv-id or --rdzv-conf etcd_prefix="

Answer = TypeVar("Answer")


def open_api(options: EtcdOptions, run_id: str) -> Api:
    """The client for the backend. Raises MissingPackageError, EtcdError."""
    return EtcdApi(_open_store(options, leader_key(options, run_id)), options, run_id)


def _open_store(options: EtcdOptions, key: str) -> Store:
    from holdfast.rendezvous.etcd_stores import StoreV2, open_v3

    return StoreV2(options) if options.api == "v2" else open_v3(options, key)


def leader_key(options: EtcdOptions, run_id: str) -> str:
    return f"{_folder(options, run_id)}/coordinator"


def memory_key(options: EtcdOptions, run_id: str) -> str:
    return f"{_folder(options, run_id)}/memory"


def _folder(options: EtcdOptions, run_id: str) -> str:
    return f"{options.prefix}/{quote(run_id, safe='')}"


class EtcdApi:
    """One client; implements Api of elections.py."""

    def __init__(self, store: Store, options: EtcdOptions, run_id: str) -> None:
        self.notice = store.notice
        self.store = store
        self.run_id = run_id
        self.ttl_s = options.lease_ttl_s
        self.leader_key = leader_key(options, run_id)
        self.memory_key = memory_key(options, run_id)

    def leader(self) -> Leader | None:
        found = self.read(Leader, self.leader_key)
        return None if found is None else found[0]

    def take(self, me: Leader) -> EtcdLeaderLease | None:
        version = self.store.write(self.leader_key, msgspec.json.encode(me), self.ttl_s, 0)
        return None if version is None else EtcdLeaderLease(self, me, version)

    def close(self) -> None:
        self.store.close()

    def read(self, kind: type[Record], key: str) -> tuple[Record, int] | None:
        """A record of this job and its version."""
        found = self.store.read(key)
        if found is None:
            return None
        value, version = found
        return read_record(kind, f"the etcd key {key}", value, self.run_id, EtcdError, REMEDY), version


class EtcdLeaderLease:
    """The leader's key, held as long as it has this agent's record: no other agent ever writes the same."""

    def __init__(self, api: EtcdApi, me: Leader, version: int) -> None:
        self._api = api
        self._me = me
        self._version = version
        self._memory_version = 0
        self.previous_leader: Memory | None = None
        try:
            self._take_over()
        except EtcdError:
            with contextlib.suppress(EtcdError):
                self._give_back()
            raise

    def renew(self) -> bool:
        api = self._api
        version = api.store.refresh(api.leader_key, api.ttl_s, self._version)
        # With v2 a refresh changes the version: an earlier one may have succeeded without its answer.
        if version is None and self._is_ours():
            version = api.store.refresh(api.leader_key, api.ttl_s, self._version)
        if version is None:
            return False
        self._version = version
        self._change_memory(lambda known: api.store.refresh(api.memory_key, MEMORY_TTL_S, known))
        return True

    def remember(self, memory: Memory) -> bool:
        return self._change_memory(lambda known: self._write(memory, known))

    def resign(self, memory: Memory | None) -> None:
        if memory is None:
            self._api.store.delete(self._api.memory_key, self._memory_version)
        else:
            self.remember(memory)
        self._give_back()

    def _take_over(self) -> None:
        """Write the memory again: this changes its version, so that a leader that lost the key cannot write it."""
        for _ in range(ATTEMPTS_MAX):
            found = self._api.read(Memory, self._api.memory_key)
            fresh = Memory(run_id=self._api.run_id, generation=0, workers_may_live_s=0.0)
            memory, known = (fresh, 0) if found is None else found
            version = self._write(memory, known)
            if version is not None:
                self._memory_version = version
                self.previous_leader = memory if found is not None else None
                return
        raise EtcdUnreachableError(f"the key {self._api.memory_key} keeps changing")

    def _is_ours(self) -> bool:
        """Whether the leader's key still has this agent's record; stores its version."""
        found = self._api.read(Leader, self._api.leader_key)
        if found is None or found[0] != self._me:
            return False
        self._version = found[1]
        return True

    def _give_back(self) -> None:
        self._api.store.delete(self._api.leader_key, self._version)

    def _write(self, memory: Memory, version: int) -> int | None:
        api = self._api
        return api.store.write(api.memory_key, msgspec.json.encode(memory), MEMORY_TTL_S, version)

    def _change_memory(self, change: Callable[[int], int | None]) -> bool:
        """Change the memory. `change` gets the version that it may replace. False: it belongs to another leader."""
        version = change(self._memory_version)
        if version is None:
            found = self._api.store.read(self._api.memory_key)
            # As long as this agent has the leader's key, no other writes the memory: then the answer to an earlier
            # change was lost. If the key is taken between these calls, its new owner changes the version first.
            version = change(found[1] if found is not None else 0) if self._is_ours() else None
        if version is None:
            return False
        self._memory_version = version
        return True


def read_etcd_conf(backend: str, conf: Conf, endpoint: Endpoint) -> EtcdOptions:
    """The options of etcd. Raises RendezvousConfigError or EndpointError for the first invalid value."""
    values = read_conf(backend, conf)
    files = {field: _file(conf, key) for field, key in _FILES[backend].items()}
    tls = values.get("protocol") == "https"
    idle = [_FILES[backend][field] for field, path in files.items() if path is not None]
    if idle and not tls:
        raise RendezvousConfigError(f"--rdzv-conf {idle[0]} needs protocol=https, too")
    if files["key_file"] is not None and files["cert_file"] is None:
        names = _FILES[backend]
        raise RendezvousConfigError(f"--rdzv-conf {names['key_file']} needs {names['cert_file']}, too")
    lease_ttl_s = values.get("lease_ttl", 5)
    assert isinstance(lease_ttl_s, int)
    return EtcdOptions(
        api="v2" if backend == "etcd-v2" else "v3",
        endpoints=_endpoints(backend, conf, endpoint),
        prefix="/" + conf.get("etcd_prefix", "holdfast").strip("/"),
        lease_ttl_s=lease_ttl_s,
        tls=tls,
        user=conf.get("user"),
        password=_password(conf),
        **files,
    )


def _endpoints(backend: str, conf: Conf, endpoint: Endpoint) -> tuple[Endpoint, ...]:
    """--rdzv-endpoint first, then `endpoints=host:port;host:port`, each once."""
    more = [text for text in conf.get("endpoints", "").split(";") if text.strip()]
    return tuple(dict.fromkeys([endpoint, *(parse_endpoint(text, default_port(backend)) for text in more)]))


def _file(conf: Conf, key: str) -> str | None:
    path = conf.get(key)
    if path is None:
        return None
    try:
        with open(path, "rb"):
            return os.path.abspath(path)
    except OSError as error:
        raise RendezvousConfigError(f"--rdzv-conf {key}={path}: {error.strerror}") from None


def _password(conf: Conf) -> str | None:
    path, given = conf.get("password_file"), conf.get("password")
    if (path is not None or given is not None) and "user" not in conf:
        raise RendezvousConfigError("--rdzv-conf has a password for etcd but no user=")
    if path is None:
        return given
    if given is not None:
        raise RendezvousConfigError("--rdzv-conf password and password_file are both given; remove one")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(PASSWORD_BYTES_MAX).rstrip("\r\n")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RendezvousConfigError(f"--rdzv-conf password_file={path}: {reason}") from None
