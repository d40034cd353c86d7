"""The dashboard's process, on the node that hosts the coordinator.

The agent binds the socket and keeps it: a dashboard that ends unexpectedly is started again at the same address, where
open pages connect by themselves. Only the end of the job waits for it, for at most FINISH_LIMIT_S. The dashboard reads
what the commands read; its socket to the agent only carries credentials and the end. Knows no web framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

import msgspec

from holdfast import seqpacket
from holdfast.extensions.dashboard.credentials import LISTENING_FD, Credentials, check_packages, login_link
from holdfast.listening import bind_named
from holdfast.protocol.errors import PortInUseError
from holdfast.protocol.options import Endpoint
from holdfast.protocol.outcome import Outcome
from holdfast.runtime.node_extension import (
    CoordinatorHosted,
    Node,
    NodeExtension,
    NodeHappened,
    Send,
    SupervisorReplaced,
)
from holdfast.supervisor.client import SupervisorEvent
from holdfast.supervisor.service_process import ServiceProcess
from holdfast.text import is_loopback

DASHBOARD = "dashboard"
FINISH_LIMIT_S = 2.0
"""Limit for the browsers to get the end of the job (s)."""
STARTS_MAX = 4
"""A dashboard that ends as often as this is not started again."""


class OnNode(NodeExtension):
    """Starts and ends the dashboard's process, where the coordinator runs."""

    def __init__(self, node: Node, send: Send) -> None:
        """Raises MissingPackageError."""
        super().__init__(node, send)
        check_packages()
        assert node.options.dashboard is not None
        self._gone = asyncio.Event()
        self._process = ServiceProcess(lambda: node.supervisor, DASHBOARD, self._on_packet, self._gone.set)
        self._place = node.options.dashboard
        self._about = {"agent": os.getpid(), "run_id": node.run_id, "folder": str(node.folder or "")}
        self._credentials = Credentials.make(once=is_loopback(self._place.host))
        self._listening: socket.socket | None = None
        self._starts = 0

    def happened(self, event: NodeHappened) -> None:
        if isinstance(event, CoordinatorHosted):
            self.open()

    def open(self) -> None:
        """Start it, and print the login link. Where the port is in use, another one is taken: no job waits for that."""
        if self._listening is not None:
            return
        try:
            self._listening = bind_named(self._place, "--dashboard")
        except PortInUseError as error:
            self.node.say(f"{error}; another port is used")
            try:
                self._listening = bind_named(Endpoint(host=self._place.host, port=0), "--dashboard")
            except PortInUseError as second:
                self.node.say(f"no dashboard: {second}")
                return
        address = Endpoint(host=self._place.host, port=self._listening.getsockname()[1])
        self.node.write("serving", what=[DASHBOARD], address=str(address))
        self.node.say(f"dashboard {login_link(address, self._credentials.token)}")
        self._start()

    def supervisor(self, event: SupervisorEvent | SupervisorReplaced) -> None:
        if isinstance(event, SupervisorReplaced):
            self._renew()
        elif why := self._process.why_ended(event):
            self._process.drop()
            self._gone.set()
            self.node.write("dashboard_ended", why=why)
            self._start_again(why)

    def _renew(self) -> None:
        """Start it below another supervisor; it died with the previous one."""
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
            self.node.say(f"the dashboard {why}, and is not started again; `holdfast dashboard` opens one")

    def _on_packet(self, packet: seqpacket.Message) -> None:
        if packet.get("is") == "used":
            self._credentials = msgspec.structs.replace(self._credentials, token="")
        elif packet.get("is") == "unusable":
            self._starts = STARTS_MAX + 1  # another one would end in the same way
            self.node.say(f"no dashboard: {packet.get('text')}")
        elif packet.get("is") == "fault":
            self.node.write("observer_fault", what=DASHBOARD, error=str(packet.get("text")))
