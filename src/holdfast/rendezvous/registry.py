"""The rendezvous backends by name. PURE: knows names and default ports, no sockets."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.errors import RendezvousConfigError


class Backend(NamedTuple):
    default_port: int | None
    """None: the endpoint must name one."""


BACKENDS = {
    "c10d": Backend(default_port=29400),
    "static": Backend(default_port=None),
    "etcd": Backend(default_port=2379),
    "etcd-v2": Backend(default_port=2379),
}


def check_backend(name: str) -> None:
    """Raises RendezvousConfigError for a name that is not known."""
    if name not in BACKENDS:
        import difflib  # only a typing error pays for it

        nearest = difflib.get_close_matches(name, BACKENDS, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(BACKENDS)}"
        raise RendezvousConfigError(f"--rdzv-backend {name!r} is unknown; {hint}")


def default_port(name: str) -> int | None:
    """The port of an endpoint that names none; None when it has to. `name` must be known."""
    return BACKENDS[name].default_port
