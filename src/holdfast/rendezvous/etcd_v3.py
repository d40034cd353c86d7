"""etcd's API v3 through etcd3gw and the JSON gateway.

The leader's key hangs on a lease; every write compares the revision at which we made that key, so it fails once the
key is not ours. The memory hangs on a lease of its own, which outlives us for a while.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.core.errors import EtcdError, EtcdUnreachableError, MissingPackageError
from holdfast.rendezvous.etcd import (
    CALL_S_MAX,
    MEMORY_TTL_S,
    Api,
    Leader,
    Memory,
    Servers,
    leader_key,
    memory_key,
    read_record,
    write_record,
)

if TYPE_CHECKING:
    from holdfast.core.options import Endpoint, EtcdOptions

API_PATH = "/v3/"
Answer = TypeVar("Answer")


PASSING = (
    "timed out",
    "no leader",
    "leader changed",
    "too many requests",
    "database space exceeded",
    "no space",
    "server stopped",
    "unhealthy cluster",
)
"""What a server says when somebody has to help it, and can: it is full, or on its way down or up."""


class _NoSuchApiError(EtcdError):
    """The server has no /v3/."""


def open_v3(options: EtcdOptions, run_id: str) -> Api:
    """The v3 client, or the v2 client where the servers have no v3. Raises MissingPackageError, EtcdError."""
    api = ApiV3(options, run_id)
    try:
        api.leader()
    except _NoSuchApiError as absent:
        from holdfast.rendezvous.etcd_v2 import ApiV2

        old = ApiV2(options, run_id, f"{absent}; going by API v2")
        try:
            old.leader()
        except EtcdUnreachableError:
            raise
        except EtcdError as error:
            raise EtcdError(f"etcd serves neither API v3 (its JSON gateway) nor v2: {error}") from None
        return old
    return api


class ApiV3:
    """One client: an etcd3gw client for each server, made when it is needed."""

    notice = ""

    def __init__(self, options: EtcdOptions, run_id: str) -> None:
        try:
            import etcd3gw
        except ImportError as error:
            raise MissingPackageError(
                f"--rdzv-backend etcd needs the package etcd3gw ({error}): pip install 'holdfast[etcd]'"
            ) from None
        self._module = etcd3gw
        self._options = options
        self._run_id = run_id
        self._servers = Servers(options.endpoints)
        self._clients: dict[str, Any] = {}
        self.leader_key = leader_key(options, run_id)
        self.memory_key = memory_key(options, run_id)

    @property
    def ttl(self) -> int:
        return self._options.lease_ttl_s

    def leader(self) -> Leader | None:
        answer = self.post("kv/range", {"key": encode(self.leader_key)})
        value = _first(answer)
        return None if value is None else read_record(Leader, self.leader_key, value, self._run_id)

    def take(self, me: Leader) -> TenureV3 | None:
        lease = self.grant(self.ttl)
        answer = self.post(
            "kv/txn",
            {
                "compare": [_compare(self.leader_key, 0)],
                "success": [
                    {
                        "request_put": {
                            "key": encode(self.leader_key),
                            "value": encode(write_record(me)),
                            "lease": lease,
                        }
                    },
                    {"request_range": {"key": encode(self.memory_key)}},
                ],
            },
        )
        if not answer.get("succeeded"):
            with contextlib.suppress(EtcdError):
                self.revoke(lease)
            return None
        try:
            value = _first(answer["responses"][1].get("response_range", {}))
            memory = None if value is None else read_record(Memory, self.memory_key, value, self._run_id)
        except EtcdError:
            with contextlib.suppress(EtcdError):
                self.revoke(lease)
            raise
        return TenureV3(self, lease, int(answer["header"]["revision"]), memory)

    def close(self) -> None:
        for client in self._clients.values():
            client.session.close()
        self._clients.clear()

    # For the tenure

    def grant(self, ttl_s: int) -> str:
        return str(self.post("lease/grant", {"TTL": ttl_s, "ID": 0})["ID"])

    def revoke(self, lease: str) -> None:
        self.post("lease/revoke", {"ID": lease})

    def keep_alive(self, lease: str) -> bool:
        """False: it has run out."""
        result = self.post("lease/keepalive", {"ID": lease}).get("result", {})
        return int(result.get("TTL", 0)) > 0

    def change(self, revision: int, changes: list[dict[str, Any]]) -> bool:
        """Make the changes if the leader's key is the one made at `revision`."""
        answer = self.post("kv/txn", {"compare": [_compare(self.leader_key, revision)], "success": changes})
        return bool(answer.get("succeeded"))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        def ask(endpoint: Endpoint) -> dict[str, Any]:
            try:
                return self._post(endpoint, path, body)
            except _StaleTokenError:
                self._clients.pop(str(endpoint)).session.close()
                return self._post(endpoint, path, body)

        return self._servers.ask(ask)

    def _post(self, endpoint: Endpoint, path: str, body: dict[str, Any]) -> dict[str, Any]:
        client = self._clients.get(str(endpoint))
        if client is None:
            client = self._log_in(endpoint)
            self._clients[str(endpoint)] = client
        answer = self._told(endpoint, lambda: client.post(client.get_url(path), json=body))
        if not isinstance(answer, dict):
            raise EtcdError(f"what listens at {endpoint} does not answer as etcd does")
        return answer

    def _log_in(self, endpoint: Endpoint) -> Any:
        import requests

        options = self._options
        session = requests.Session()
        session.trust_env = False  # no proxy between us and etcd
        if options.ca_file is not None:
            session.verify = options.ca_file
        if options.cert_file is not None:
            session.cert = (options.cert_file, options.key_file) if options.key_file else options.cert_file
        protocol = "https" if options.tls else "http"
        client = self._module.Etcd3Client(
            host=endpoint.host,
            port=endpoint.port,
            protocol=protocol,
            timeout=CALL_S_MAX,
            api_path=API_PATH,
            session=session,
        )
        if options.user is not None:
            login = {"name": options.user, "password": options.password or ""}
            try:
                answer = self._told(endpoint, lambda: client.post(client.get_url("auth/authenticate"), json=login))
            except _NoAuthError:
                return client  # the server asks nobody who he is
            except _StaleTokenError as error:
                raise EtcdError(str(error)) from None
            session.headers["Authorization"] = str(answer.get("token", ""))
        return client

    def _told(self, endpoint: Endpoint, call: Callable[[], Answer]) -> Answer:
        """The call, its failures in our words."""
        import requests

        errors = self._module.exceptions
        try:
            return call()
        except errors.ConnectionFailedError as error:
            raise self._unconnected(endpoint, str(error.detail_text or error)) from None
        except errors.Etcd3Exception as error:
            raise _translated(endpoint, error, errors) from None
        except ValueError:  # requests' JSONDecodeError is one
            raise EtcdError(f"what listens at {endpoint} does not answer as etcd does") from None
        except requests.exceptions.RequestException as error:
            raise EtcdUnreachableError(f"{error}") from None
        except OSError as error:
            raise EtcdError(f"the TLS files for etcd cannot be used: {error}") from None

    def _unconnected(self, endpoint: Endpoint, detail: str) -> EtcdError:
        if "connection refused" in detail.lower():
            return EtcdUnreachableError("connection refused")
        from holdfast.rendezvous.etcd_tls import open_context, untrusted, why_closed

        _, failed, why = detail.partition("certificate verify failed: ")
        if failed:  # not asked again: without a CA file requests trusts others than Python does
            return untrusted(endpoint, why.partition(" (_ssl")[0])
        return why_closed(endpoint, open_context(self._options)) or EtcdUnreachableError(_shortened(detail))


class TenureV3:
    """The key is ours as long as it was made at our revision."""

    def __init__(self, api: ApiV3, lease: str, revision: int, memory: Memory | None) -> None:
        self._api = api
        self._lease = lease
        self._revision = revision
        self._memory_lease: str | None = None
        self.predecessor = memory

    def renew(self) -> bool:
        if not self._api.keep_alive(self._lease):
            return False
        if self._memory_lease is not None and not self._api.keep_alive(self._memory_lease):
            self._memory_lease = None
        return True

    def remember(self, memory: Memory) -> bool:
        api = self._api
        if self._memory_lease is None:
            self._memory_lease = api.grant(MEMORY_TTL_S)
        return api.change(self._revision, [self._put(memory, self._memory_lease)])

    def resign(self, memory: Memory | None) -> None:
        api = self._api
        forget = {"request_delete_range": {"key": encode(api.leader_key)}}
        if memory is None:
            api.change(self._revision, [forget, {"request_delete_range": {"key": encode(api.memory_key)}}])
        else:
            lease = self._memory_lease or api.grant(MEMORY_TTL_S)
            api.change(self._revision, [forget, self._put(memory, lease)])
        api.revoke(self._lease)

    def _put(self, memory: Memory, lease: str) -> dict[str, Any]:
        value = encode(write_record(memory))
        return {"request_put": {"key": encode(self._api.memory_key), "value": value, "lease": lease}}


class _NoAuthError(EtcdError):
    """Authentication is not enabled on the server."""


class _StaleTokenError(EtcdError):
    """The server does not know our token any more."""


def encode(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _compare(key: str, revision: int) -> dict[str, Any]:
    return {"key": encode(key), "result": "EQUAL", "target": "CREATE", "create_revision": str(revision)}


def _first(answer: dict[str, Any]) -> bytes | None:
    found = answer.get("kvs")
    return base64.b64decode(found[0].get("value", "")) if found else None


def _translated(endpoint: Endpoint, error: Any, errors: Any) -> EtcdError:
    detail = str(error.detail_text or error)
    text = detail.lower()
    if isinstance(error, errors.ConnectionTimeoutError):
        return EtcdUnreachableError(f"no answer within {CALL_S_MAX:g} s")
    if "authentication is not enabled" in text:
        return _NoAuthError(f"etcd at {endpoint} has no users")
    if "invalid auth token" in text or "invalid auth revision" in text or "revision of auth store is old" in text:
        return _StaleTokenError(f"etcd at {endpoint} does not take the token it gave")
    if "user name is empty" in text or "authentication failed" in text or "permission denied" in text:
        said = _shortened(detail)
        return EtcdError(f"etcd at {endpoint} refuses user and password (rdzv-conf user, password_file): {said}")
    if error.args and str(error.args[0]).lower() == "not found" and "etcdserver" not in text:
        return _NoSuchApiError(f"etcd at {endpoint} does not serve API v3 ({API_PATH})")
    if any(words in text for words in PASSING):
        return EtcdUnreachableError(_shortened(detail))
    if isinstance(error, errors.InternalServerError):
        return EtcdUnreachableError(_shortened(detail))
    return EtcdError(f"etcd at {endpoint} refuses: {_shortened(detail)}")


def _shortened(detail: str) -> str:
    """The gateway's message out of its JSON; one line."""
    import json

    with contextlib.suppress(ValueError):
        said = json.loads(detail)
        if isinstance(said, dict):
            detail = str(said.get("message") or said.get("error") or detail)
    return " ".join(detail.split())[-200:]
