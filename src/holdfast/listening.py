"""A listening socket at an address that the user has named by an option."""

from __future__ import annotations

import socket

from holdfast.protocol.errors import PortInUseError
from holdfast.protocol.options import Endpoint

BACKLOG = 32
"""Number of connections that may wait to be accepted."""


def bind_named(place: Endpoint, option: str) -> socket.socket:
    """Open a listening socket. Raises PortInUseError with the option's name if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((place.host, place.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise PortInUseError(f"{option}: cannot listen on {place}: {error.strerror or error}") from error
    sock.setblocking(False)
    return sock
