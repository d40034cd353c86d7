"""etcd's HTTP API v2, as far as holdfast needs it, on the standard library alone.

The leader's key lives by its TTL and is guarded by its own value, which nobody uses twice. API v2 changes one key at
a time, so the memory is guarded by its own index: who comes to office rewrites it first, which shuts out whoever held
that index before.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from holdfast.core.errors import EtcdError, EtcdUnreachableError
from holdfast.rendezvous.etcd import (
    CALL_S_MAX,
    MEMORY_TTL_S,
    Leader,
    Memory,
    Servers,
    leader_key,
    memory_key,
    read_record,
    write_record,
)
from holdfast.rendezvous.etcd_tls import open_context, why_closed

if TYPE_CHECKING:
    from holdfast.core.options import Endpoint, EtcdOptions

ANSWER_BYTES_MAX = 1024 * 1024
ATTEMPTS_MAX = 8
"""Changes of the memory by somebody else while we come to office."""

NOT_FOUND = 100
COMPARE_FAILED = 101
NOT_A_FILE = 102
EXISTS = 105
UNAUTHORIZED = 110
"""API v2's own error codes, in the body of an answer."""
_PASSING = range(300, 500)
"""Raft's trouble and the watcher's: no leader now, perhaps in a second."""


class ApiV2:
    """One client. Connections are made for each call: calls are rare, and a server may be gone by the next."""

    def __init__(self, options: EtcdOptions, run_id: str, notice: str = "") -> None:
        self.notice = notice
        self._options = options
        self._run_id = run_id
        self._servers = Servers(options.endpoints)
        self._tls = open_context(options)
        self._headers = {"Content-Type": "application/x-www-form-urlencoded"}
        if options.user is not None:
            secret = f"{options.user}:{options.password or ''}".encode()
            self._headers["Authorization"] = "Basic " + base64.b64encode(secret).decode()
        self.leader_key = leader_key(options, run_id)
        self.memory_key = memory_key(options, run_id)

    def leader(self) -> Leader | None:
        node = self._get(self.leader_key)
        return None if node is None else read_record(Leader, self.leader_key, _value(node), self._run_id)

    def take(self, me: Leader) -> TenureV2 | None:
        value = write_record(me).decode()
        answer = self.call("PUT", self.leader_key, {"prevExist": "false"}, {"value": value, "ttl": self.ttl})
        if _code(answer) == EXISTS:
            return None
        self._check(answer, self.leader_key)
        return TenureV2(self, value, self._run_id)

    def close(self) -> None:
        """Nothing is open between two calls."""

    # For the tenure

    @property
    def ttl(self) -> int:
        return self._options.lease_ttl_s

    def memory(self) -> tuple[Memory, int] | None:
        """What is remembered, and the index by which to change it."""
        node = self._get(self.memory_key)
        if node is None:
            return None
        return read_record(Memory, self.memory_key, _value(node), self._run_id), int(node.get("modifiedIndex", 0))

    def changed(self, answer: dict[str, Any], key: str) -> bool:
        """Whether a conditional change was made."""
        if _code(answer) in (COMPARE_FAILED, NOT_FOUND, EXISTS):
            return False
        self._check(answer, key)
        return True

    def call(self, method: str, key: str, query: dict[str, Any], form: dict[str, Any] | None = None) -> dict[str, Any]:
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

    def _get(self, key: str) -> dict[str, Any] | None:
        answer = self.call("GET", key, {"quorum": "true"})
        if _code(answer) == NOT_FOUND:
            return None
        self._check(answer, key)
        node = answer.get("node")
        if not isinstance(node, dict) or node.get("dir"):
            raise EtcdError(f"the etcd key {key} is a folder, which holdfast did not make; choose another etcd_prefix")
        return node

    def _check(self, answer: dict[str, Any], key: str) -> None:
        code = _code(answer)
        if code == UNAUTHORIZED:
            raise EtcdError(f"etcd refuses user and password (rdzv-conf user, password_file) for {key}")
        if code:
            raise EtcdError(f"etcd refuses {key}: {answer.get('message', '')} ({code}, {answer.get('cause', '')})")


class TenureV2:
    """The key is ours as long as it has our value."""

    def __init__(self, api: ApiV2, value: str, run_id: str) -> None:
        self._api = api
        self._value = value
        self._run_id = run_id
        self._index = 0
        self.predecessor: Memory | None = None
        try:
            self._come_to_office()
        except EtcdError:
            with contextlib.suppress(EtcdError):
                self._give_back()
            raise

    def renew(self) -> bool:
        api = self._api
        query = {"prevValue": self._value}
        ours = api.changed(
            api.call("PUT", api.leader_key, query, {"ttl": api.ttl, "refresh": "true"}),
            api.leader_key,
        )
        if ours:
            self._change({"prevIndex": self._index}, {"ttl": MEMORY_TTL_S, "refresh": "true"})
        return ours

    def remember(self, memory: Memory) -> bool:
        return self._write(memory, {"prevIndex": self._index})

    def resign(self, memory: Memory | None) -> None:
        api = self._api
        if memory is not None:
            self.remember(memory)
        else:
            api.call("DELETE", api.memory_key, {"prevIndex": self._index})
        self._give_back()
        if memory is None:  # the folder goes if it is empty
            api.call("DELETE", api.leader_key.rpartition("/")[0], {"dir": "true"})

    def _give_back(self) -> None:
        self._api.call("DELETE", self._api.leader_key, {"prevValue": self._value})

    def _come_to_office(self) -> None:
        """Rewrite what is remembered: from now on the index is ours, and a leader that lost the key cannot write."""
        for _ in range(ATTEMPTS_MAX):
            found = self._api.memory()
            if found is None:
                fresh = Memory(run_id=self._run_id, generation=0, tail_s=0.0)
                if self._write(fresh, {"prevExist": "false"}):
                    return
                continue
            memory, index = found
            if self._write(memory, {"prevIndex": index}):
                self.predecessor = memory
                return
        raise EtcdUnreachableError(f"the key {self._api.memory_key} changes all the time")

    def _write(self, memory: Memory, condition: dict[str, Any]) -> bool:
        return self._change(condition, {"value": write_record(memory).decode(), "ttl": MEMORY_TTL_S})

    def _change(self, condition: dict[str, Any], form: dict[str, Any]) -> bool:
        """Change the memory; a refresh, too, moves its index."""
        answer = self._api.call("PUT", self._api.memory_key, condition, form)
        if not self._api.changed(answer, self._api.memory_key):
            return False
        self._index = int(answer["node"]["modifiedIndex"])
        return True


def _code(answer: dict[str, Any]) -> int:
    """0: no error."""
    code = answer.get("errorCode", 0)
    return code if isinstance(code, int) else 0


def _value(node: dict[str, Any]) -> bytes:
    return str(node.get("value", "")).encode()


def _read(response: http.client.HTTPResponse) -> bytes:
    """Raises IncompleteRead, which a read with a limit does not."""
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
