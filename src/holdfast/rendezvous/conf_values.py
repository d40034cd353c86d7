"""The values of `--rdzv-conf`: one function for each kind, from the text to a typed value.

Each gets key and text of an entry, and raises RendezvousConfigError for a bad one. backends.py says which key has which
kind.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.protocol.errors import RendezvousConfigError

Value = int | float | bool | str
Parser = Callable[[str, str], Value]

LEASE_TTL_S_MIN = 2
"""The shortest lease that etcd grants with its default election time-out."""
LEASE_TTL_S_MAX = 60
SECONDS_MAX = 366 * 24 * 3600.0

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y"})
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n"})


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
