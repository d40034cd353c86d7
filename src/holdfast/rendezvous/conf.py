"""Reads `--rdzv-endpoint` and `--rdzv-conf` by torchrun's grammar, and what the keys of a backend mean for holdfast.

backends.py has the keys of each backend, conf_values.py the kinds of their values. Opens no socket.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from holdfast.protocol.errors import EndpointError, RendezvousConfigError
from holdfast.protocol.options import Endpoint
from holdfast.protocol.policy import Limits
from holdfast.rendezvous.backends import row_of
from holdfast.rendezvous.conf_values import Value, flag, on_or_off, whole_seconds
from holdfast.text import without_passwords

PORT_MAX = 65535
LOOPBACK = "localhost"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HOST = re.compile(r"[\w.:-]+")
_PORT = re.compile(r"[0-9]{1,5}")
_HEX_GROUP = re.compile(r"[0-9a-fA-F]{0,4}|[0-9.]+")


def parse_endpoint(text: str, default_port: int | None) -> Endpoint:
    """Read `host[:port]`, `[v6]` or `[v6]:port`; empty means localhost. Port 0 means: pick a free one.

    Raises EndpointError when malformed, or when it names no port and there is no default (static).
    """
    text = text.strip()
    if scheme := _SCHEME.match(text):
        rest = text[scheme.end() :].partition("/")[0]
        raise EndpointError(f"the endpoint {text!r} is a URL; write {rest or 'host:port'}, without {scheme[0]}")

    host, port_text = _split(text)
    if port_text is None:
        if default_port is None:
            raise EndpointError(f"the endpoint {text!r} names no port; write host:port")
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
    # A name in capital letters is the same name; whether the port is open to other machines depends on this one.
    return Endpoint(host=LOOPBACK if host.lower() == LOOPBACK else host, port=port)


def _split(text: str) -> tuple[str, str | None]:
    """Host and port, split at the last colon unless the whole is one address in brackets."""
    if not text:
        return LOOPBACK, None
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], None
    host, colon, port_text = text.rpartition(":")
    if not colon:
        return text, None
    if len(host) > 1 and host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host, port_text


def _looks_like_v6(host: str) -> bool:
    """Whether this may be the rest of an IPv6 address such as `fe80::1` whose last group was taken for a port."""
    groups = host.split(":")
    if not all(_HEX_GROUP.fullmatch(group) for group in groups):
        return False
    if host.count("::") > 1 or ":::" in host:
        return False
    if "::" in host:
        return len(groups) <= 9 and (not host.endswith(":") or host.endswith("::"))
    return len(groups) == 8


Conf = Mapping[str, str]

STATIC_JOIN_S = 900.0
"""The `timeout` that torchrun sets for the static backend; also that of etcd."""
FENCE_PER_LEASE = 2 / 3
"""The fence as a share of the lease: an agent that is cut off kills its workers well before it counts as lost."""
PINGS_PER_LEASE = 6
"""Number of an agent's pings in a lease, at least."""
RENEWALS_PER_FENCE = 8
"""Number of a leader's renewals in a fence, at least."""

_FLAGS = {
    "backend": "--rdzv-backend",
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}
"""Keys that would repeat a flag, with that flag."""


def parse_conf(text: str) -> dict[str, str]:
    """Read `k=v,k=v`, without quoting; the last of two equal keys wins; unknown keys stay.

    Raises RendezvousConfigError when malformed, or for a key that has its own flag.
    """
    conf: dict[str, str] = {}
    if not text.strip():
        return conf
    for item in text.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if not key:
            shown = without_passwords(text)
            raise RendezvousConfigError(f"--rdzv-conf {shown!r} must be in the format key=value,key=value")
        if not value:
            raise RendezvousConfigError(f"--rdzv-conf key {key!r} must have a value: {key}=VALUE")
        if key in _FLAGS:
            raise RendezvousConfigError(f"--rdzv-conf key {key!r} is not allowed; use {_FLAGS[key]}")
        conf[key] = value
    return conf


SLOW_PER_REPORT = 4
"""Multiple of hang_report after which ranks that may only be slow are reported."""

_TIMEOUT_KEYS = {"timeout": "join_timeout", "join_timeout": "timeout"}
"""The two names of the time to wait for other nodes. torchrun has one of them for each backend; holdfast accepts
both."""


def with_own_timeout_key(backend: str, conf: Conf) -> Conf:
    """The configuration with the backend's own name for the time to wait for other nodes.

    A value that is not a time is not changed: it has no effect, as with torchrun.
    """
    known = row_of(backend).keys
    for other, own in _TIMEOUT_KEYS.items():
        if other in conf and own not in conf and own in known and other not in known:
            try:
                whole_seconds(other, conf[other])
            except RendezvousConfigError:
                return conf
            return {own if key == other else key: value for key, value in conf.items()}
    return conf


def read_conf(backend: str, conf: Conf) -> dict[str, Value]:
    """The known keys with their typed values. Raises RendezvousConfigError on the first bad value."""
    row = row_of(backend)
    parsers = {**row.keys, **row.idle_keys}
    return {key: parse(key, conf[key]) for key, parse in parsers.items() if key in conf}


def read_is_host(conf: Conf) -> bool | None:
    """`is_host` of c10d; None: not given."""
    return flag("is_host", conf["is_host"]) if "is_host" in conf else None


def read_succession(conf: Conf) -> bool:
    """`succession` of c10d: whether the nodes elect another coordinator."""
    return on_or_off("succession", conf.get("succession", "on"))


def unknown_key_notices(backend: str, conf: Conf, *, name: str = "", own: Collection[str] = ()) -> list[str]:
    """One line for each key without effect with this backend, with the most similar known key.

    `own` are the keys of a shared value's class; `name` is the backend's for users, if that is another one.
    """
    row = row_of(backend)
    known = {*row.keys, *own}
    conf = with_own_timeout_key(backend, conf)
    notices = []
    for key in conf:
        if key in known:
            continue
        if key in row.idle_keys:
            notices.append(f"--rdzv-conf {key} has no effect: holdfast has no such wait")
            continue
        if _TIMEOUT_KEYS.get(key) in conf:
            notices.append(f"--rdzv-conf {key} has no effect: {_TIMEOUT_KEYS[key]} has the same meaning and is used")
            continue
        nearest = _nearest(backend, key, known)
        hint = f"; did you mean {nearest}?" if nearest else ""
        notices.append(f"--rdzv-conf {key} has no effect with backend {name or backend}{hint}")
    return notices


def _nearest(backend: str, key: str, known: Collection[str]) -> str | None:
    plain = key.strip("'\" ").lower().replace("-", "_")
    if plain in known:
        return plain
    if other := row_of(backend).other_names.get(plain):
        return other
    import difflib  # only for a key without effect

    matches = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def limits_from_conf(backend: str, conf: Conf, base: Limits) -> Limits:
    """`base` with the values of the configuration. Raises RendezvousConfigError on any bad value."""
    values = read_conf(backend, with_own_timeout_key(backend, conf))
    numbers = {key: float(value) for key, value in values.items() if not isinstance(value, str)}
    limits = base
    if "timeout" in row_of(backend).keys:
        limits = replace(limits, join_s=numbers.get("timeout", STATIC_JOIN_S))
    elif join_s := numbers.get("join_timeout"):
        limits = replace(limits, join_s=join_s)
    if last_call_s := numbers.get("last_call_timeout"):
        limits = replace(limits, last_call_s=last_call_s)
    if settle_s := numbers.get("settle"):
        limits = replace(limits, settle_s=settle_s)
    if hang_report_s := numbers.get("hang_report"):
        # Two samples must fit into the time, or there is nothing to compare.
        look_gap_s = min(limits.look_gap_s, hang_report_s / 2)
        slow_report_s = SLOW_PER_REPORT * hang_report_s
        limits = replace(limits, hang_report_s=hang_report_s, look_gap_s=look_gap_s, slow_report_s=slow_report_s)
    if hang_report_max_s := numbers.get("hang_report_max"):
        limits = replace(limits, hang_report_max_s=hang_report_max_s)
    return _with_lease_and_fence(numbers, limits)


def _with_lease_and_fence(numbers: Mapping[str, float], limits: Limits) -> Limits:
    """The limits with lease and fence, and the intervals that follow from them.

    `lease` has priority over torchrun's interval times attempts. A given `heartbeat_timeout` is the age of an
    unanswered ping at which an agent kills its workers.
    """
    lease_s, heartbeat_s = numbers.get("lease"), numbers.get("heartbeat_timeout")
    if lease_s is None and numbers.keys() & {"keep_alive_interval", "keep_alive_max_attempt"}:
        lease_s = numbers.get("keep_alive_interval", 5.0) * numbers.get("keep_alive_max_attempt", 3.0)
    fence_s = limits.fence_s if lease_s is None else lease_s * FENCE_PER_LEASE
    if heartbeat_s is not None:
        fence_s = heartbeat_s if lease_s is None else min(fence_s, heartbeat_s)
        lease_s = lease_s or max(limits.lease_s, heartbeat_s / FENCE_PER_LEASE)
    if lease_s is None:
        return limits

    ping_interval_s = min(limits.ping_interval_s, lease_s / PINGS_PER_LEASE, fence_s * FENCE_PER_LEASE / 2)
    renew_interval_s = min(limits.renew_interval_s, fence_s / RENEWALS_PER_FENCE)
    intervals = {"ping_interval_s": ping_interval_s, "renew_interval_s": renew_interval_s}
    return replace(limits, lease_s=lease_s, fence_s=fence_s, **intervals)
