"""TLS with etcd: the context made of the PEM files, and why a server that is there closes our connections.

Knows what people get wrong about certificates and how OpenSSL says it. Asks etcd nothing.
"""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

from holdfast.core.errors import EtcdError
from holdfast.rendezvous.etcd import CALL_S_MAX

if TYPE_CHECKING:
    from holdfast.core.options import Endpoint, EtcdOptions


def open_context(options: EtcdOptions) -> ssl.SSLContext | None:
    """None: no TLS is asked for. Raises EtcdError when the files are no certificates."""
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
    """To be asked after a connection was closed or its TLS failed: what will not get better by waiting, if anything.

    A connection of its own that sends no request: one that writes meanwhile may lose the server's last words, and a
    server that refuses our certificate says so after the handshake (TLS 1.3). Blocks, a few times CALL_S_MAX at most.
    """
    try:
        with (
            socket.create_connection((endpoint.host, endpoint.port), timeout=CALL_S_MAX) as plain,
            (context or _credulous()).wrap_socket(plain, server_hostname=endpoint.host) as secured,
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
    except OSError:  # time-outs too: nothing was said against us
        return None
    return None


def untrusted(endpoint: Endpoint, why: str) -> EtcdError:
    return EtcdError(f"the certificate of etcd at {endpoint} does not hold (rdzv-conf cacert, etcd-v2: ca_cert): {why}")


def _refused(endpoint: Endpoint, reason: str) -> EtcdError:
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        remedy = "rdzv-conf cert and key, etcd-v2: ssl_cert and ssl_cert_key"
        return EtcdError(f"etcd at {endpoint} wants a client certificate that it trusts ({remedy}): {reason}")
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return _without_tls(endpoint)
    return EtcdError(f"no TLS with etcd at {endpoint}: {reason}")


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


def _credulous() -> ssl.SSLContext:
    """To learn whether TLS is spoken; nothing is sent over it."""
    made = ssl.create_default_context()
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    return made
