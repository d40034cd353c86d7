"""The rendezvous backends by name: the one table of the built-in ones, and the names that installed packages add.

A backend with a value that all nodes can read and exchange is a file with a `Backend` (third_party.py) and a row of
`BACKENDS`. All else follows from the row: the names in `--help`, in the completion and in messages, the keys of
`--rdzv-conf`, and the page of options. The table of options imports this file, so it loads no third-party package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from holdfast.protocol.errors import RendezvousConfigError
from holdfast.rendezvous import conf_values as kind
from holdfast.rendezvous.conf_values import Parser

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "holdfast.rendezvous"
"""Entry points of this group are backends; third_party.py has the contract."""


class Row(NamedTuple):
    """What is known of a backend before it is loaded."""

    keys: Mapping[str, Parser]
    """The keys of --rdzv-conf that holdfast reads, each with its kind. A shared value's own ones are in its class."""
    default_port: int | None = None
    """The port if the endpoint names none; None: the endpoint must name one."""
    shared_value: str = ""
    """`module:class` of a Backend, which is imported when a job names it; its endpoint is a text of any form. Empty:
    the endpoint is an address, and election_for.py knows the election, if there is one."""
    idle_keys: Mapping[str, Parser] = {}
    """Keys of torchrun for waits that holdfast lacks. They are checked as torchrun does, then reported as without
    effect."""
    other_names: Mapping[str, str] = {}
    """Keys, or options, that have another name with this backend."""


_HOLDFAST: dict[str, Parser] = {
    "token_file": kind.plain_text,
    "lease": kind.seconds,
    "hang_report": kind.seconds,
    "hang_report_max": kind.seconds,
}
_DYNAMIC: dict[str, Parser] = {
    "join_timeout": kind.whole_seconds,
    "last_call_timeout": kind.whole_seconds,
    "heartbeat_timeout": kind.whole_seconds,
    "keep_alive_interval": kind.whole_seconds,
    "keep_alive_max_attempt": kind.positive_number,
    "settle": kind.seconds,
    **_HOLDFAST,
}
_ETCD: dict[str, Parser] = {
    "protocol": kind.protocol,
    "endpoints": kind.plain_text,
    "etcd_prefix": kind.plain_text,
    "lease_ttl": kind.lease_ttl,
    "user": kind.plain_text,
    "password": kind.plain_text,
    "password_file": kind.plain_text,
}
_IDLE: dict[str, Parser] = {"close_timeout": kind.whole_seconds, "read_timeout": kind.whole_seconds}
_HEARTBEAT = {"heartbeat": "heartbeat_timeout"}

BY_VALUE = Row(keys={**_DYNAMIC, "lease_ttl": kind.lease_ttl}, other_names=_HEARTBEAT)
"""The row of every backend of an installed package. A built-in one with a shared value has the same, with its class:
`BY_VALUE._replace(shared_value="module:class")`."""

BACKENDS = {
    "c10d": Row(
        keys={**_DYNAMIC, "is_host": kind.flag, "store_type": kind.store_type, "succession": kind.on_or_off},
        default_port=29400,
        idle_keys=_IDLE,
        other_names=_HEARTBEAT,
    ),
    "static": Row(
        keys={"timeout": kind.whole_seconds, **_HOLDFAST},
        other_names={"rank": "--node-rank", "is_host": "--node-rank"},
    ),
    "etcd": Row(
        keys={
            "timeout": kind.whole_seconds,
            "last_call_timeout": kind.whole_seconds,
            **_ETCD,
            "cert": kind.plain_text,
            "key": kind.plain_text,
            "cacert": kind.plain_text,
            "settle": kind.seconds,
            **_HOLDFAST,
        },
        default_port=2379,
    ),
    "etcd-v2": Row(
        keys={
            **_DYNAMIC,
            **_ETCD,
            "ssl_cert": kind.plain_text,
            "ssl_cert_key": kind.plain_text,
            "ca_cert": kind.plain_text,
        },
        default_port=2379,
        idle_keys=_IDLE,
        other_names=_HEARTBEAT,
    ),
}
"""The built-in backends, in the order in which they are named to users. Packages cannot use their names."""


def row_of(name: str) -> Row:
    """The row of a backend whose name has been checked."""
    return BACKENDS.get(name, BY_VALUE)


def is_built_in(name: str) -> bool:
    return name in BACKENDS


def has_shared_value(name: str) -> bool:
    """Whether the agents find the coordinator by a shared value, and not at an address."""
    return not is_built_in(name) or bool(BACKENDS[name].shared_value)


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
    """The default port of a backend; None: the endpoint must name one."""
    return row_of(name).default_port


def installed_backends() -> list[EntryPoint]:
    """The backends of installed packages.

    Reading the metadata of all packages takes milliseconds, so this is only called for a name that is not built in, or
    for a message that lists the names.
    """
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))
