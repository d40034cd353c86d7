"""The two clients of etcd: API v3, by etcd3gw and its JSON gateway, and HTTP API v2, with the standard library only.

v3: each key that this client writes has an etcd lease of its own and lives as long as that; the revision of a key's
last change is its version. v2: each key has a TTL; the index of its last change is its version, and a refresh is a
change, too.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from holdfast.protocol.errors import EtcdError, EtcdUnreachableError, MissingPackageError
from holdfast.protocol.options import Endpoint, EtcdOptions
from holdfast.rendezvous.elections import CALL_S_MAX
from holdfast.rendezvous.etcd_servers import Servers, Store, open_context, untrusted, why_closed

ANSWER_BYTES_MAX = 1024 * 1024

NOT_FOUND = 100
COMPARE_FAILED = 101
NOT_A_FILE = 102
EXISTS = 105
UNAUTHORIZED = 110
"""API v2's own error codes, in the body of an answer."""
TEMPORARY_CODES = range(300, 500)
"""Temporary errors of Raft and of watches, such as a missing leader."""


class StoreV2:
    """A client of API v2; implements Store.

    Each call uses a new connection: calls are rare, and the server may be gone before the next one.
    """

    def __init__(self, options: EtcdOptions, notice: str = "") -> None:
        self.notice = notice
        self._servers = Servers(options.endpoints)
        self._tls = open_context(options)
        self._headers = {"Content-Type": "application/x-www-form-urlencoded"}
        if options.user is not None:
            secret = f"{options.user}:{options.password or ''}".encode()
            self._headers["Authorization"] = "Basic " + base64.b64encode(secret).decode()

    def read(self, key: str) -> tuple[bytes, int] | None:
        answer = self._call("GET", key, {"quorum": "true"})
        if _code(answer) == NOT_FOUND:
            return None
        _check(answer, key)
        node = answer.get("node")
        if not isinstance(node, dict) or node.get("dir"):
            raise EtcdError(f"the etcd key {key} is a folder, which holdfast did not make; choose another etcd_prefix")
        return str(node.get("value", "")).encode(), int(node.get("modifiedIndex", 0))

    def write(self, key: str, value: bytes, ttl_s: int, version: int) -> int | None:
        return self._change(key, version, {"value": value.decode(), "ttl": ttl_s})

    def refresh(self, key: str, ttl_s: int, version: int) -> int | None:
        return self._change(key, version, {"ttl": ttl_s, "refresh": "true"})

    def delete(self, key: str, version: int) -> None:
        """Delete the key, and its folder if that is empty then."""
        self._call("DELETE", key, {"prevIndex": version})
        self._call("DELETE", key.rpartition("/")[0], {"dir": "true"})

    def close(self) -> None:
        """Do nothing: no connection is open between two calls."""

    def _change(self, key: str, version: int, form: dict[str, Any]) -> int | None:
        condition: dict[str, Any] = {"prevIndex": version} if version else {"prevExist": "false"}
        answer = self._call("PUT", key, condition, form)
        if _code(answer) in (COMPARE_FAILED, NOT_FOUND, EXISTS):
            return None
        _check(answer, key)
        return int(answer["node"]["modifiedIndex"])

    def _call(self, method: str, key: str, query: dict[str, Any], form: dict[str, Any] | None = None) -> dict[str, Any]:
        path = f"/v2/keys{quote(key)}?{urlencode(query)}"
        body = urlencode(form).encode() if form is not None else None
        return self._servers.ask(lambda endpoint: self._ask(endpoint, method, path, body))

    def _ask(self, endpoint: Endpoint, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        if self._tls is None:
            connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=CALL_S_MAX)
        else:
            connection = http.client.HTTPSConnection(
                endpoint.host, endpoint.port, timeout=CALL_S_MAX, context=self._tls
            )
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            status, text = response.status, _read(response)
        except TimeoutError:
            raise EtcdUnreachableError(f"no answer within {CALL_S_MAX:g} s") from None
        except (ssl.SSLError, ConnectionResetError, BrokenPipeError, http.client.IncompleteRead) as error:
            temporary = EtcdUnreachableError(f"the server closed the connection ({type(error).__name__})")
            raise why_closed(endpoint, self._tls) or temporary from None
        except http.client.HTTPException as error:
            raise EtcdError(f"what listens at {endpoint} does not speak HTTP: {error!r}") from None
        except OSError as error:
            raise EtcdUnreachableError((error.strerror or str(error)).lower()) from None
        finally:
            connection.close()
        return _decode(endpoint, status, text)


def _check(answer: dict[str, Any], key: str) -> None:
    code = _code(answer)
    if code == UNAUTHORIZED:
        raise EtcdError(f"etcd refuses user and password (rdzv-conf user, password_file) for {key}")
    if code:
        raise EtcdError(f"etcd refuses {key}: {answer.get('message', '')} ({code}, {answer.get('cause', '')})")


def _code(answer: dict[str, Any]) -> int:
    """The error code of an answer; 0: no error."""
    code = answer.get("errorCode", 0)
    return code if isinstance(code, int) else 0


def _read(response: http.client.HTTPResponse) -> bytes:
    """The body. Raises IncompleteRead, which a read with a limit does not."""
    text = response.read(ANSWER_BYTES_MAX)
    if response.length and len(text) < ANSWER_BYTES_MAX:
        raise http.client.IncompleteRead(text, response.length)
    return text


def _decode(endpoint: Endpoint, status: int, text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    is_object = isinstance(answer, dict)
    if is_object and _code(answer) in TEMPORARY_CODES:
        raise EtcdUnreachableError(str(answer.get("message", "")).lower())
    if status == 404 and not is_object:
        raise EtcdError(
            f"etcd at {endpoint} does not serve API v2: start it with --enable-v2, or use --rdzv-backend etcd (API v3)"
        )
    if status == 401:
        raise EtcdError(f"etcd at {endpoint} refuses user and password (rdzv-conf user, password_file)")
    if not is_object or not answer.keys() & {"errorCode", "node"}:
        if status >= 500:
            raise EtcdUnreachableError(f"HTTP status {status}")
        raise EtcdError(f"what listens at {endpoint} does not answer as etcd does (HTTP status {status})")
    return answer  # type: ignore[no-any-return]


API_PATH = "/v3/"
Answer = TypeVar("Answer")

TEMPORARY = (
    "timed out",
    "no leader",
    "leader changed",
    "too many requests",
    "database space exceeded",
    "no space",
    "server stopped",
    "unhealthy cluster",
)
"""Parts of messages about temporary problems: the server is full, or it is starting or stopping.

Text decides here, because text is all that the client's exceptions have.
"""


class _NoSuchApiError(EtcdError):
    """The server does not have the API v3."""


def open_v3(options: EtcdOptions, key: str) -> Store:
    """The v3 client, or the v2 client if the servers have no v3. A read of this key finds out which.

    Raises MissingPackageError, EtcdError.
    """
    store = StoreV3(options)
    try:
        store.read(key)
    except _NoSuchApiError as absent:
        old = StoreV2(options, f"{absent}; API v2 is used instead")
        try:
            old.read(key)
        except EtcdUnreachableError:
            raise
        except EtcdError as error:
            raise EtcdError(f"etcd serves neither API v3 (its JSON gateway) nor v2: {error}") from None
        return old
    return store


class StoreV3:
    """A client of API v3, with an etcd3gw client for each server, made on first use; implements Store."""

    notice = ""

    def __init__(self, options: EtcdOptions) -> None:
        try:
            import etcd3gw
        except ImportError as error:
            raise MissingPackageError(
                f"--rdzv-backend etcd needs the package etcd3gw ({error}): pip install 'holdfast[etcd]'"
            ) from None
        self._module = etcd3gw
        self._options = options
        self._servers = Servers(options.endpoints)
        self._clients: dict[str, Any] = {}
        self._leases: dict[str, str] = {}
        """The etcd leases of the keys that this client wrote."""

    def read(self, key: str) -> tuple[bytes, int] | None:
        found = self._post("kv/range", {"key": _encode(key)}).get("kvs")
        return (base64.b64decode(found[0].get("value", "")), int(found[0]["mod_revision"])) if found else None

    def write(self, key: str, value: bytes, ttl_s: int, version: int) -> int | None:
        lease = self._leases.get(key) or str(self._post("lease/grant", {"TTL": ttl_s, "ID": 0})["ID"])
        self._leases[key] = lease
        put = {"key": _encode(key), "value": _encode(value), "lease": lease}
        revision = self._change(key, version, {"request_put": put})
        # Another agent has the key, so the lease that was made for it is not needed.
        if revision is None and not version:
            with contextlib.suppress(EtcdError):
                self._revoke(key)
        return revision

    def refresh(self, key: str, ttl_s: int, version: int) -> int | None:  # noqa: ARG002 - its lease has it
        lease = self._leases.get(key)
        if lease is None:
            return None
        result = self._post("lease/keepalive", {"ID": lease}).get("result", {})
        if int(result.get("TTL", 0)) > 0:
            return version
        del self._leases[key]
        return None

    def delete(self, key: str, version: int) -> None:
        self._change(key, version, {"request_delete_range": {"key": _encode(key)}})
        self._revoke(key)

    def close(self) -> None:
        for client in self._clients.values():
            client.session.close()
        self._clients.clear()

    def _change(self, key: str, version: int, change: dict[str, Any]) -> int | None:
        """The revision of the change; None: the key has another version."""
        compare = {"key": _encode(key), "result": "EQUAL", "target": "MOD", "mod_revision": str(version)}
        answer = self._post("kv/txn", {"compare": [compare], "success": [change]})
        return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    def _revoke(self, key: str) -> None:
        lease = self._leases.pop(key, None)
        if lease is not None:
            self._post("lease/revoke", {"ID": lease})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        def ask(endpoint: Endpoint) -> dict[str, Any]:
            try:
                return self._post_to(endpoint, path, body)
            except _StaleTokenError:  # etcd's tokens live for five minutes by default: log in once more
                self._clients.pop(str(endpoint)).session.close()
                return self._post_to(endpoint, path, body)

        return self._servers.ask(ask)

    def _post_to(self, endpoint: Endpoint, path: str, body: dict[str, Any]) -> dict[str, Any]:
        client = self._clients.get(str(endpoint))
        if client is None:
            client = self._log_in(endpoint)
            self._clients[str(endpoint)] = client
        answer = self._with_our_errors(endpoint, lambda: client.post(client.get_url(path), json=body))
        if not isinstance(answer, dict):
            raise EtcdError(f"what listens at {endpoint} does not answer as etcd does")
        return answer

    def _log_in(self, endpoint: Endpoint) -> Any:
        import requests

        options = self._options
        session = requests.Session()
        session.trust_env = False  # the cluster's own etcd is not behind the proxy for the internet
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
                answer = self._with_our_errors(
                    endpoint, lambda: client.post(client.get_url("auth/authenticate"), json=login)
                )
            except _NoAuthError:
                return client  # the server has no authentication
            except _StaleTokenError as error:
                raise EtcdError(str(error)) from None
            session.headers["Authorization"] = str(answer.get("token", ""))
        return client

    def _with_our_errors(self, endpoint: Endpoint, call: Callable[[], Answer]) -> Answer:
        """Make the call, and raise its failures as errors of holdfast."""
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
        _, failed, why = detail.partition("certificate verify failed: ")
        if failed:  # not `why_closed`: without a CA file requests trusts other certificates than Python does
            return untrusted(endpoint, why.partition(" (_ssl")[0])
        return why_closed(endpoint, open_context(self._options)) or EtcdUnreachableError(_shortened(detail))


class _NoAuthError(EtcdError):
    """Authentication is not enabled on the server."""


class _StaleTokenError(EtcdError):
    """The server does not accept the client's token any more."""


def _encode(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _translated(endpoint: Endpoint, error: Any, errors: Any) -> EtcdError:
    detail = str(error.detail_text or error)
    text = detail.lower()
    if isinstance(error, errors.ConnectionTimeoutError):
        return EtcdUnreachableError(f"no answer within {CALL_S_MAX:g} s")
    if "authentication is not enabled" in text:
        return _NoAuthError(f"etcd at {endpoint} has no users")
    if "invalid auth token" in text or "invalid auth revision" in text or "revision of auth store is old" in text:
        return _StaleTokenError(f"etcd at {endpoint} does not accept its own token any more")
    if "user name is empty" in text or "authentication failed" in text or "permission denied" in text:
        said = _shortened(detail)
        return EtcdError(f"etcd at {endpoint} refuses user and password (rdzv-conf user, password_file): {said}")
    if error.args and str(error.args[0]).lower() == "not found" and "etcdserver" not in text:
        return _NoSuchApiError(f"etcd at {endpoint} does not serve API v3 ({API_PATH})")
    if any(words in text for words in TEMPORARY):
        return EtcdUnreachableError(_shortened(detail))
    if isinstance(error, errors.InternalServerError):
        return EtcdUnreachableError(_shortened(detail))
    return EtcdError(f"etcd at {endpoint} refuses: {_shortened(detail)}")


def _shortened(detail: str) -> str:
    """The message in the gateway's JSON, as one line."""
    with contextlib.suppress(ValueError):
        said = json.loads(detail)
        if isinstance(said, dict):
            detail = str(said.get("message") or said.get("error") or detail)
    return " ".join(detail.split())[-200:]
