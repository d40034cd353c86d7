"""The dashboard's process, a service of the node that hosts the coordinator (service_host.py).

The agent binds the socket and keeps it: a dashboard that ends unexpectedly is started again at the same address, where
open pages connect by themselves. Only the end of the job waits for it, for at most FINISH_LIMIT_S. The dashboard reads
what the commands read; its socket to the agent only carries credentials and the end. Knows no web framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec

import msgspec

from holdfast import seqpacket
from holdfast.journal import Journal
from holdfast.listening import bind_named
from holdfast.protocol.errors import MissingPackageError, PortInUseError
from holdfast.protocol.options import Endpoint
from holdfast.protocol.outcome import Outcome
from holdfast.supervisor.client import SupervisorClient, SupervisorEvent
from holdfast.supervisor.service_host import ServiceProcess
from holdfast.text import is_loopback

DASHBOARD = "dashboard"
LISTENING_FD = 4
FINISH_LIMIT_S = 2.0
"""Limit for the browsers to get the end of the job (s)."""
STARTS_MAX = 4
"""A dashboard that ends as often as this is not started again."""


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


class DashboardHost:
    """Starts and ends the dashboard's process. Pass every event of the supervisor to `handle`."""

    def __init__(
        self,
        supervisor: SupervisorClient,
        place: Endpoint,
        run_id: str,
        folder: str,
        journal: Journal,
        say: Callable[[str], None],
    ) -> None:
        """`folder`: the run folder; empty: there is none. `say` shows a line to users. Raises MissingPackageError."""
        check_packages()
        self._process = ServiceProcess(supervisor, DASHBOARD, self._on_packet, self._on_silent)
        self._place = place
        self._about = {"agent": os.getpid(), "run_id": run_id, "folder": folder}
        self._credentials = Credentials.make(once=is_loopback(place.host))
        self._journal = journal
        self._say = say
        self._listening: socket.socket | None = None
        self._starts = 0
        self._gone = asyncio.Event()

    def open(self) -> None:
        """Start it, and print the login link. Where the port is in use, another one is taken: no job waits for that."""
        if self._listening is not None:
            return
        try:
            self._listening = bind_named(self._place, "--dashboard")
        except PortInUseError as error:
            self._say(f"{error}; another port is used")
            try:
                self._listening = bind_named(Endpoint(host=self._place.host, port=0), "--dashboard")
            except PortInUseError as second:
                self._say(f"no dashboard: {second}")
                return
        address = Endpoint(host=self._place.host, port=self._listening.getsockname()[1])
        self._journal.write("serving", what=[DASHBOARD], address=str(address))
        self._say(f"dashboard {login_link(address, self._credentials.token)}")
        self._start()

    def handle(self, event: SupervisorEvent) -> None:
        """React to its end; events about other processes are ignored."""
        if why := self._process.why_ended(event):
            self._process.drop()
            self._gone.set()
            self._journal.write("dashboard_ended", why=why)
            self._start_again(why)

    def renew(self, supervisor: SupervisorClient) -> None:
        """Use another supervisor; the dashboard died with the previous one."""
        self._process.supervisor = supervisor
        if self._process.running:
            self._process.drop()
            self._start()

    async def close(self, outcome: Outcome | None) -> None:
        """Send the browsers how the job has ended, and end the dashboard. `outcome` None: a fault of ours ends this
        agent."""
        if self._process.running and outcome is not None:
            with contextlib.suppress(OSError, TimeoutError):  # the end of the job does not wait for one that stalls
                self._process.send({"do": "finish", "outcome": msgspec.to_builtins(outcome)})
                async with asyncio.timeout(FINISH_LIMIT_S):
                    await self._gone.wait()
        self._starts = STARTS_MAX  # an end that is reported later starts no other one
        self._process.drop()
        if self._listening is not None:
            self._listening.close()

    def _start(self) -> None:
        assert self._listening is not None
        self._starts += 1
        self._gone.clear()
        argv = [sys.executable, "-P", "-m", "holdfast.dashboard"]
        self._process.start(argv, {LISTENING_FD: self._listening.fileno()})
        with contextlib.suppress(OSError):  # an event will report its end
            self._process.send({**self._about, "credentials": msgspec.to_builtins(self._credentials)})

    def _start_again(self, why: str) -> None:
        if self._starts < STARTS_MAX:
            self._start()
        elif self._starts == STARTS_MAX:
            self._say(f"the dashboard {why}, and is not started again; `holdfast dashboard` opens one")

    def _on_packet(self, packet: seqpacket.Message) -> None:
        if packet.get("is") == "used":
            self._credentials = msgspec.structs.replace(self._credentials, token="")
        elif packet.get("is") == "fault":
            self._journal.write("observer_fault", what=DASHBOARD, error=str(packet.get("text")))

    def _on_silent(self) -> None:
        self._gone.set()
