"""What a dashboard's process needs to begin: its packages, its listening socket, and the keys that its users show."""

from __future__ import annotations

import hashlib
import socket
from importlib.util import find_spec

import msgspec

from holdfast.protocol.errors import MissingPackageError
from holdfast.protocol.options import Endpoint

LISTENING_FD = 4
"""Its listening socket, beside a job."""


def check_packages() -> None:
    """Raises MissingPackageError where the dashboard cannot run."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise MissingPackageError("the dashboard needs starlette and uvicorn: pip install 'holdfast[dashboard]'")


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of one dashboard. They are the same for each of its processes: browsers stay logged in when it is
    started again."""

    token: str
    """The token of the login link; empty: it was used, and works only once."""
    secret: str
    """The secret from which the cookie is made."""
    once: bool
    """The token works only once."""

    @classmethod
    def make(cls, *, once: bool) -> Credentials:
        import secrets  # lazily, as hmac: every job loads this module, and few have a dashboard

        return cls(token=secrets.token_urlsafe(24), secret=secrets.token_hex(32), once=once)

    def cookie(self) -> tuple[str, str]:
        """Name and value. The name differs between dashboards: browsers do not tell the ports of a host apart."""
        import hmac

        value = hmac.new(self.secret.encode(), b"cookie", hashlib.sha256).hexdigest()
        return f"holdfast-{hashlib.sha256(self.secret.encode()).hexdigest()[:12]}", value


def login_link(address: Endpoint, token: str) -> str:
    """The link that logs a browser in. `address`: the host and port at which the dashboard is served."""
    host = socket.gethostname() if address.host in ("0.0.0.0", "::") else address.host
    return f"http://{Endpoint(host=host, port=address.port)}/login?token={token}"
