"""Client of etcd's HTTP API v2, as far as holdfast needs it, with the standard library only.

Each key has a TTL. The index of its last change is its version; a refresh is a change, too.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from holdfast.protocol.errors import EtcdError, EtcdUnreachableError
from holdfast.rendezvous.elections import CALL_S_MAX
from holdfast.rendezvous.etcd import Servers, open_context, why_closed

if TYPE_CHECKING:
    from holdfast.protocol.options import Endpoint, EtcdOptions

ANSWER_BYTES_MAX = 1024 * 1024

NOT_FOUND = 100
COMPARE_FAILED = 101
NOT_A_FILE = 102
EXISTS = 105
UNAUTHORIZED = 110
"""API v2's own error codes, in the body of an answer."""
_PASSING = range(300, 500)
"""Temporary errors of Raft and of watches, such as a missing leader."""


class StoreV2:
    """One client. Each call uses a new connection: calls are rare, and the server may be gone before the next one."""

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
        """Does nothing, since no connection is open between two calls."""

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
            passing = EtcdUnreachableError(f"it closes the connection ({type(error).__name__})")
            raise why_closed(endpoint, self._tls) or passing from None
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
    if status == 404 and not text.lstrip().startswith(b"{"):
        raise EtcdError(
            f"etcd at {endpoint} does not serve API v2: start it with --enable-v2, or use --rdzv-backend etcd (API v3)"
        )
    if status == 401 and not text.lstrip().startswith(b"{"):
        raise EtcdError(f"etcd at {endpoint} refuses user and password (rdzv-conf user, password_file)")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        if status >= 500:
            raise EtcdUnreachableError(f"HTTP status {status}")
        raise EtcdError(f"what listens at {endpoint} does not answer as etcd does (HTTP status {status})")
    if _code(answer) in _PASSING:
        raise EtcdUnreachableError(str(answer.get("message", "")).lower())
    if status == 401:
        raise EtcdError(f"etcd at {endpoint} refuses user and password (rdzv-conf user, password_file)")
    if "errorCode" not in answer and "node" not in answer:
        if status >= 500:
            raise EtcdUnreachableError(f"HTTP status {status}")
        raise EtcdError(f"what listens at {endpoint} does not answer as etcd does (HTTP status {status})")
    return answer
