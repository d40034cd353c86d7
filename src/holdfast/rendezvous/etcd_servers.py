"""The servers of etcd, what a client of either API offers, and TLS: explains common errors with certificates from
OpenSSL's messages.

Knows neither the keys of a lease (etcd.py) nor the APIs (etcd_stores.py).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Protocol, TypeVar

from holdfast.protocol.errors import EtcdError, EtcdUnreachableError
from holdfast.protocol.options import Endpoint, EtcdOptions
from holdfast.rendezvous.elections import CALL_S_MAX

Answer = TypeVar("Answer")


class Store(Protocol):
    """One client of one API. Raises EtcdError, or EtcdUnreachableError when trying again may help.

    Each change of a key gives it a new version. A missing key has version 0.
    """

    notice: str
    """A line for the console of this node; empty: none."""

    def read(self, key: str) -> tuple[bytes, int] | None:
        """The value and its version."""

    def write(self, key: str, value: bytes, ttl_s: int, version: int) -> int | None:
        """Replace the value of this version. Returns the new version; None: the version differs, nothing is changed."""

    def refresh(self, key: str, ttl_s: int, version: int) -> int | None:
        """Start the time to live of this agent's value again. Returns its version now; None: it is gone."""

    def delete(self, key: str, version: int) -> None:
        """Delete the key if it has this version."""

    def close(self) -> None: ...


class Servers:
    """The addresses of one etcd cluster in the order of attempts: the one that answered last comes first."""

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._endpoints = list(endpoints)

    def ask(self, question: Callable[[Endpoint], Answer]) -> Answer:
        """The first answer. Raises EtcdUnreachableError, with the reason of each server, if none answers."""
        why: list[str] = []
        for _ in range(len(self._endpoints)):
            endpoint = self._endpoints[0]
            try:
                return question(endpoint)
            except EtcdUnreachableError as error:
                why.append(f"{endpoint}: {error}")
                self._endpoints.append(self._endpoints.pop(0))
        raise EtcdUnreachableError(f"no etcd answers at {'; '.join(why)}")


def open_context(options: EtcdOptions) -> ssl.SSLContext | None:
    """The TLS context; None: TLS is not requested. Raises EtcdError when the files are not certificates."""
    if not options.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
        if options.cert_file is not None:
            context.load_cert_chain(options.cert_file, options.key_file)
    except (OSError, ssl.SSLError) as error:
        raise EtcdError(f"the TLS files for etcd cannot be used: {error}") from None
    return context


def why_closed(endpoint: Endpoint, context: ssl.SSLContext | None) -> EtcdError | None:
    """The permanent error behind a closed connection or a failed TLS handshake; None: another attempt may succeed.

    It uses a new connection without a request: a client that writes may lose the server's last message, and with TLS
    1.3 a server refuses a client certificate after the handshake. Blocks for a few times CALL_S_MAX at most.
    """
    try:
        with (
            socket.create_connection((endpoint.host, endpoint.port), timeout=CALL_S_MAX) as plain,
            (context or _without_verification()).wrap_socket(plain, server_hostname=endpoint.host) as secured,
        ):
            if context is None:
                return EtcdError(f"etcd at {endpoint} speaks TLS: --rdzv-conf protocol=https")
            secured.recv(1)
    except ssl.SSLCertVerificationError as error:
        return untrusted(endpoint, error.verify_message)
    except (ssl.SSLEOFError, ConnectionResetError):  # in the middle of the handshake
        return _without_tls(endpoint) if context is not None and _speaks_http(endpoint) else None
    except ssl.SSLError as error:
        return None if context is None else _refused(endpoint, error.reason or str(error))
    except OSError:  # time-outs too: the server has refused nothing
        return None
    return None


def untrusted(endpoint: Endpoint, why: str) -> EtcdError:
    return EtcdError(
        f"the certificate of etcd at {endpoint} is not trusted (rdzv-conf cacert, etcd-v2: ca_cert): {why}"
    )


def _refused(endpoint: Endpoint, reason: str) -> EtcdError:
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        remedy = "rdzv-conf cert and key, etcd-v2: ssl_cert and ssl_cert_key"
        return EtcdError(f"etcd at {endpoint} requires a client certificate that it trusts ({remedy}): {reason}")
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return _without_tls(endpoint)
    return EtcdError(f"TLS with etcd at {endpoint} failed: {reason}")


def _without_tls(endpoint: Endpoint) -> EtcdError:
    return EtcdError(f"etcd at {endpoint} does not speak TLS: leave out --rdzv-conf protocol=https")


def _speaks_http(endpoint: Endpoint) -> bool:
    import http.client

    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=CALL_S_MAX)
    try:
        connection.request("GET", "/version")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _without_verification() -> ssl.SSLContext:
    """A context without verification, to test whether the server uses TLS; no data is sent over it."""
    made = ssl.create_default_context()
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    return made
