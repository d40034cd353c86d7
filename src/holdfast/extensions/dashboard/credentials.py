"""What a dashboard's process needs to begin: its packages, its listening socket, and the keys that its users show."""

from __future__ import annotations

import hashlib
import socket
from importlib import import_module
from importlib.util import find_spec

import msgspec

from holdfast.protocol.errors import MissingPackageError
from holdfast.protocol.options import Endpoint

LISTENING_FD = 4
"""Its listening socket, beside a job."""
MODULES = ("starlette.applications", "starlette.responses", "uvicorn", "uvicorn.protocols.http.h11_impl")
"""What its server is made of. uvicorn loads the last one only when it serves."""
INSTALL = "pip install 'holdfast[dashboard]'"


def check_packages() -> None:
    """Raises MissingPackageError where the dashboard cannot run."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise MissingPackageError(f"the dashboard needs starlette and uvicorn: {INSTALL}")


def import_packages() -> None:
    """Import them, in the dashboard's own process. Raises MissingPackageError, also for a package that is installed and
    cannot be imported."""
    check_packages()
    for name in MODULES:
        try:
            import_module(name)
        except Exception as error:  # half an installation may raise anything
            package, why = name.partition(".")[0], f"{type(error).__name__}: {error}".partition("\n")[0]
            again = INSTALL.replace("install", "install --force-reinstall")
            raise MissingPackageError(f"{package} is installed and cannot be imported ({why}): {again}") from error


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
