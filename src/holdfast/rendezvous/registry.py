"""The rendezvous backends by name. PURE: knows names and default ports, no sockets."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.errors import RendezvousConfigError


class Backend(NamedTuple):
    default_port: int | None
    """None: the endpoint must name one."""
    available: bool


BACKENDS = {
    "c10d": Backend(default_port=29400, available=True),
    "static": Backend(default_port=None, available=True),
    "etcd": Backend(default_port=2379, available=True),
    "etcd-v2": Backend(default_port=2379, available=True),
}


def check_backend(name: str) -> None:
    """Raises RendezvousConfigError when this version cannot rendezvous by that name."""
    backend = BACKENDS.get(name)
    if backend is None:
        import difflib  # only a typing error pays for it

        nearest = difflib.get_close_matches(name, BACKENDS, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(BACKENDS)}"
        raise RendezvousConfigError(f"--rdzv-backend {name!r} is unknown; {hint}")
    if not backend.available:
        raise RendezvousConfigError(
            f"--rdzv-backend {name} is not in this version of holdfast; "
            "use c10d (needs no extra service) with --rdzv-endpoint HOST:PORT of one of the nodes"
        )


def default_port(name: str) -> int | None:
    """The port of an endpoint that names none; None when it has to. `name` must be known."""
    return BACKENDS[name].default_port
