"""The rendezvous backends by name, and `--rdzv-endpoint` and `--rdzv-conf` by torchrun's grammar as typed values.

Knows the keys of each backend and their meaning for holdfast; opens no socket.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from holdfast.protocol.errors import EndpointError, RendezvousConfigError
from holdfast.protocol.options import Endpoint
from holdfast.protocol.policy import Limits

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "holdfast.rendezvous"
"""Entry points of this group are backends; third_party.py has the contract."""


class RegisteredBackend(NamedTuple):
    """What the command line must know of a built-in backend."""

    default_port: int | None
    """The port if the endpoint names none; None: the endpoint must name one."""


BACKENDS = {
    "c10d": RegisteredBackend(default_port=29400),
    "static": RegisteredBackend(default_port=None),
    "etcd": RegisteredBackend(default_port=2379),
    "etcd-v2": RegisteredBackend(default_port=2379),
}
"""The built-in backends. Packages cannot use their names."""


def is_built_in(name: str) -> bool:
    return name in BACKENDS


def check_backend(name: str) -> None:
    """Raise RendezvousConfigError for a name that is neither built in nor known from an installed package."""
    if is_built_in(name):
        return
    installed = {entry.name for entry in installed_backends()}
    if name in installed:
        return
    import difflib  # only for a mistyped name

    known = [*BACKENDS, *sorted(installed - BACKENDS.keys())]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
    raise RendezvousConfigError(f"--rdzv-backend {name!r} is unknown; {hint}")


def default_port(name: str) -> int | None:
    """The default port of a built-in backend; None: the endpoint must name one."""
    return BACKENDS[name].default_port


def installed_backends() -> list[EntryPoint]:
    """The backends of installed packages.

    Reading the metadata of all packages takes milliseconds, so this is only called for a name that is not built in, or
    for a message that lists the names.
    """
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))


PORT_MAX = 65535

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
    """Host and port, split at the last colon unless the whole is one address in brackets."""
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
Value = int | float | bool | str

STATIC_JOIN_S = 900.0
"""The `timeout` that torchrun sets for the static backend."""
FENCE_PER_LEASE = 2 / 3
"""The fence as a share of the lease: an agent that is cut off kills its workers well before it counts as lost."""
PINGS_PER_LEASE = 6
"""Number of an agent's pings in a lease, at least."""
RENEWALS_PER_FENCE = 8
"""Number of a leader's renewals in a fence, at least."""
LEASE_TTL_S_MIN = 2
"""The shortest lease that etcd grants with its default election time-out."""
LEASE_TTL_S_MAX = 60
SECONDS_MAX = 366 * 24 * 3600.0

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y"})
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n"})

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
            raise RendezvousConfigError(f"--rdzv-conf {text!r} must be in the format key=value,key=value")
        if not value:
            raise RendezvousConfigError(f"--rdzv-conf key {key!r} must have a value: {key}=VALUE")
        if key in _FLAGS:
            raise RendezvousConfigError(f"--rdzv-conf key {key!r} is not allowed; use {_FLAGS[key]}")
        conf[key] = value
    return conf


def whole_number(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RendezvousConfigError(f"--rdzv-conf {key}={text}: not a whole number") from None


def seconds(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise RendezvousConfigError(f"--rdzv-conf {key}={text}: not a number of seconds") from None
    if not 0 < value <= SECONDS_MAX:
        raise RendezvousConfigError(f"--rdzv-conf {key}={text}: must be positive (and at most a year)")
    return value


def whole_seconds(key: str, text: str) -> float:
    return seconds(key, str(whole_number(key, text)))


def positive_number(key: str, text: str) -> int:
    value = whole_number(key, text)
    if value < 1:
        raise RendezvousConfigError(f"--rdzv-conf {key}={text}: must be positive")
    return value


def flag(key: str, text: str) -> bool:
    """One of torchrun's words for true and false."""
    if text.lower() in TRUE_WORDS | FALSE_WORDS:
        return text.lower() in TRUE_WORDS
    raise RendezvousConfigError(f"--rdzv-conf {key}={text}: neither true (1, t, yes, y) nor false (0, f, no, n)")


def plain_text(_: str, text: str) -> str:
    return text


def store_type(key: str, text: str) -> str:
    if text.lower() == "tcp":
        return text
    if text.lower() == "file":
        raise RendezvousConfigError(
            "--rdzv-conf store_type=file is not supported: agents meet at an address; use --rdzv-endpoint HOST:PORT "
            "of one of the nodes, or --standalone on a single node"
        )
    raise RendezvousConfigError(f"--rdzv-conf {key}={text}: must be tcp")


def on_or_off(key: str, text: str) -> bool:
    if text.lower() not in ("on", "off"):
        raise RendezvousConfigError(f"--rdzv-conf {key}={text}: must be on or off")
    return text.lower() == "on"


def protocol(key: str, text: str) -> str:
    if text not in ("http", "https"):
        raise RendezvousConfigError(f"--rdzv-conf {key}={text}: must be http or https")
    return text


def lease_ttl(key: str, text: str) -> int:
    value = whole_number(key, text)
    if not LEASE_TTL_S_MIN <= value <= LEASE_TTL_S_MAX:
        limits = f"{LEASE_TTL_S_MIN} to {LEASE_TTL_S_MAX}"
        raise RendezvousConfigError(f"--rdzv-conf {key}={text}: a lease in etcd lasts {limits} whole seconds")
    return value


Parser = Callable[[str, str], Value]
"""Gets key and value of an entry of the configuration. Raises RendezvousConfigError."""

THIRD_PARTY = "third-party"
"""The entry of KEYS for all backends of installed packages: keys of holdfast that they have beside their own."""

SLOW_PER_REPORT = 4
"""Multiple of hang_report after which ranks that may only be slow are reported."""

_HOLDFAST: dict[str, Parser] = {
    "token_file": plain_text,
    "lease": seconds,
    "hang_report": seconds,
    "hang_report_max": seconds,
}
_DYNAMIC: dict[str, Parser] = {
    "join_timeout": whole_seconds,
    "last_call_timeout": whole_seconds,
    "heartbeat_timeout": whole_seconds,
    "keep_alive_interval": whole_seconds,
    "keep_alive_max_attempt": positive_number,
    "settle": seconds,
    **_HOLDFAST,
}
_ETCD: dict[str, Parser] = {
    "protocol": protocol,
    "endpoints": plain_text,
    "etcd_prefix": plain_text,
    "lease_ttl": lease_ttl,
    "user": plain_text,
    "password": plain_text,
    "password_file": plain_text,
}
KEYS: dict[str, dict[str, Parser]] = {
    "c10d": {**_DYNAMIC, "is_host": flag, "store_type": store_type, "succession": on_or_off},
    "static": {"timeout": whole_seconds, **_HOLDFAST},
    "etcd-v2": {
        **_DYNAMIC,
        **_ETCD,
        "ssl_cert": plain_text,
        "ssl_cert_key": plain_text,
        "ca_cert": plain_text,
    },
    "etcd": {
        "timeout": whole_seconds,
        "last_call_timeout": whole_seconds,
        **_ETCD,
        "cert": plain_text,
        "key": plain_text,
        "cacert": plain_text,
        "settle": seconds,
        **_HOLDFAST,
    },
    THIRD_PARTY: {**_DYNAMIC, "lease_ttl": lease_ttl},
}
"""The known keys by backend, each with its parser."""

_WITHOUT_EFFECT: dict[str, Parser] = {"close_timeout": whole_seconds, "read_timeout": whole_seconds}
_WITHOUT_EFFECT_BY_BACKEND = {"c10d": _WITHOUT_EFFECT, "etcd-v2": _WITHOUT_EFFECT}
"""Keys of torchrun for waits that holdfast lacks. They are checked as torchrun does, then reported as without
effect."""

_TIMEOUT_KEYS = {"timeout": "join_timeout", "join_timeout": "timeout"}
"""The two names of the time to wait for other nodes. torchrun has one of them for each backend; holdfast accepts
both."""

_OTHER_NAMES = {
    "c10d": {"heartbeat": "heartbeat_timeout"},
    "etcd-v2": {"heartbeat": "heartbeat_timeout"},
    "static": {"rank": "--node-rank", "is_host": "--node-rank"},
    "etcd": {},
    THIRD_PARTY: {"heartbeat": "heartbeat_timeout"},
}
"""Keys, or options, that have another name with this backend."""


def with_own_timeout_key(backend: str, conf: Conf) -> Conf:
    """The configuration with the backend's own name for the time to wait for other nodes.

    A value that is not a time is not changed: it has no effect, as with torchrun.
    """
    for other, own in _TIMEOUT_KEYS.items():
        if other in conf and own not in conf and own in KEYS[backend] and other not in KEYS[backend]:
            try:
                whole_seconds(other, conf[other])
            except RendezvousConfigError:
                return conf
            return {own if key == other else key: value for key, value in conf.items()}
    return conf


def read_conf(backend: str, conf: Conf) -> dict[str, Value]:
    """The known keys with their typed values. Raises RendezvousConfigError on the first bad value."""
    parsers = KEYS[backend] | _WITHOUT_EFFECT_BY_BACKEND.get(backend, {})
    return {key: parse(key, conf[key]) for key, parse in parsers.items() if key in conf}


def read_is_host(conf: Conf) -> bool | None:
    """`is_host` of c10d; None: not given."""
    return flag("is_host", conf["is_host"]) if "is_host" in conf else None


def read_succession(conf: Conf) -> bool:
    """`succession` of c10d: whether the nodes elect another coordinator."""
    return on_or_off("succession", conf.get("succession", "on"))


def unknown_key_notices(backend: str, conf: Conf, *, name: str = "", own: Collection[str] = ()) -> list[str]:
    """One line for each key without effect with this backend, with the most similar known key.

    `name` and `own` are the name and the own keys of a third party's backend.
    """
    known = {*KEYS[backend], *own}
    conf = with_own_timeout_key(backend, conf)
    idle = _WITHOUT_EFFECT_BY_BACKEND.get(backend, {})
    notices = []
    for key in conf:
        if key in known:
            continue
        if key in idle:
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
    if plain in _OTHER_NAMES[backend]:
        return _OTHER_NAMES[backend][plain]
    import difflib  # only for a key without effect

    matches = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def limits_from_conf(backend: str, conf: Conf, base: Limits) -> Limits:
    """`base` with the values of the configuration. Raises RendezvousConfigError on any bad value."""
    values = read_conf(backend, with_own_timeout_key(backend, conf))
    numbers = {key: float(value) for key, value in values.items() if not isinstance(value, str)}
    limits = base
    if backend in ("static", "etcd"):
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
