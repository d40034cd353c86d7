"""The rendezvous backends by name: the built-in ones and those of installed packages. Opens no socket.

Packages are only searched for a name that is not built in, or for a message that lists the names, because reading the
metadata of all installed packages takes milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.protocol.errors import HoldfastError, RendezvousConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from holdfast.rendezvous.third_party import Backend as ThirdPartyBackend

GROUP = "holdfast.rendezvous"
"""Entry points of this group are backends; contract: third_party.py."""


class RegisteredBackend(NamedTuple):
    default_port: int | None
    """None: the endpoint must name one."""


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
    """Raises RendezvousConfigError for a name that is neither built in nor known from an installed package."""
    if is_built_in(name):
        return
    installed = {entry.name for entry in _entry_points()}
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


def load_third_party(name: str) -> ThirdPartyBackend:
    """The backend that an installed package offers under this name.

    Raises RendezvousConfigError, naming the package, if there is none, if two packages use the name, or if the entry
    point cannot be loaded or is not a Backend.
    """
    from holdfast.rendezvous.third_party import Backend as ThirdPartyBackend

    entry = _entry_point(name)
    who = f"--rdzv-backend {name!r} ({_offer(entry)})"
    try:
        offered = entry.load()
        made = offered() if callable(offered) else offered
    except HoldfastError:
        raise
    except Exception as error:  # foreign code may raise anything; the message names the package
        raise RendezvousConfigError(f"{who} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(made, ThirdPartyBackend):
        kind = type(made).__name__
        raise RendezvousConfigError(f"{who} is a {kind}, not a holdfast.rendezvous.third_party.Backend")
    keys = made.conf_keys
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise RendezvousConfigError(f"{who}: conf_keys must be a collection of names, not {keys!r}")
    return made


def _entry_point(name: str) -> EntryPoint:
    offers = {entry.value: entry for entry in _entry_points() if entry.name == name}
    if not offers:
        raise RendezvousConfigError(f"--rdzv-backend {name!r}: no installed package offers it")
    if len(offers) > 1:
        both = " and ".join(sorted(_offer(entry) for entry in offers.values()))
        raise RendezvousConfigError(f"--rdzv-backend {name!r} is offered by {both}; uninstall one of them")
    return next(iter(offers.values()))


def _entry_points() -> list[EntryPoint]:
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))


def _offer(entry: EntryPoint) -> str:
    package = f" of {entry.dist.name}" if entry.dist is not None else ""
    return f"{entry.value}{package}"
