"""`--rdzv-endpoint`: text to Endpoint, by torchrun's grammar. PURE."""

from __future__ import annotations

import re

from holdfast.core.errors import EndpointError
from holdfast.core.options import Endpoint

PORT_MAX = 65535

_HOST = re.compile(r"[\w.:-]+")
_PORT = re.compile(r"[0-9]{1,5}")
_HEX_GROUP = re.compile(r"[0-9a-fA-F]{0,4}|[0-9.]+")


def parse_endpoint(text: str, default_port: int | None) -> Endpoint:
    """`host[:port]`, `[v6]` or `[v6]:port`; empty means localhost. Port 0 means: pick a free one.

    Raises EndpointError when malformed, or when it names no port and there is no default (static).
    """
    text = text.strip()
    host, port_text = _split(text)
    if port_text is None:
        if default_port is None:
            raise EndpointError(f"the endpoint {text!r} names no port; add one (host:port) or give --master-port")
        port = default_port
    elif _PORT.fullmatch(port_text) and int(port_text) <= PORT_MAX:
        port = int(port_text)
    else:
        raise EndpointError(f"the endpoint {text!r} has port {port_text!r}; a port is a number from 0 to {PORT_MAX}")
    if not host:
        raise EndpointError(f"the endpoint {text!r} names no host; write host:port")
    if not _HOST.fullmatch(host):
        raise EndpointError(f"the endpoint {text!r} has host {host!r}, which is neither a name nor an address")
    if ":" in host and not _looks_like_v6(host):
        raise EndpointError(f"the endpoint {text!r} is ambiguous; write an IPv6 address in brackets: [address]:port")
    return Endpoint(host=host, port=port)


def _split(text: str) -> tuple[str, str | None]:
    """At the last colon, unless the whole is one address in brackets."""
    if not text:
        return "localhost", None
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], None
    host, colon, port_text = text.rpartition(":")
    if not colon:
        return text, None
    if len(host) > 1 and host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host, port_text


def _looks_like_v6(host: str) -> bool:
    """Good enough to tell `fe80::1` from what is left of it when its last group was taken for a port."""
    groups = host.split(":")
    if not all(_HEX_GROUP.fullmatch(group) for group in groups):
        return False
    if host.count("::") > 1 or ":::" in host:
        return False
    if "::" in host:
        return len(groups) <= 9 and (not host.endswith(":") or host.endswith("::"))
    return len(groups) == 8
