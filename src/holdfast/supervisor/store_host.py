"""The process that serves a generation's TCPStore, on the node of rank 0.

The agent binds the listening socket first and publishes its port after, so that no other process can take it. The next
generation's socket is bound while the store of the present one continues. The server (train/store_server.py) is started
when the first client connects: that connection waits in the socket's backlog and is handed over with it. The server is
forked from the fork server where torch is preloaded. Otherwise it has to load torch itself, so it is started at once if
the script imports torch. Each generation gets a new store: no key of an earlier one can be read.

Knows sockets and the supervisor; must not know torch.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing

from holdfast import seqpacket
from holdfast.protocol.train_contract import STORE_SERVER
from holdfast.supervisor.client import SupervisorClient, SupervisorEvent
from holdfast.supervisor.service_process import CONTROL_FD, ServiceProcess

STORE = "store"
BACKLOG = 16_384
"""Connections that may wait for the store's server: all ranks of a large job. The kernel has its own maximum."""

LostCallback = Callable[[int, str], None]


class StoreHost:
    """The store of one node, over all generations. Pass every event of the supervisor to `handle`."""

    def __init__(
        self,
        supervisor: Callable[[], SupervisorClient],
        python: str,
        on_lost: LostCallback,
        *,
        eager: bool = False,
        warm_argv: Sequence[str] = (),
    ) -> None:
        """`python`: interpreter that has torch; empty: ours. `on_lost(generation, why)` is called when a store is lost.

        `eager`: start the server with the first `open`, not with the first client. `warm_argv`: the command line with
        which the fork server runs a script under a worker's Python; empty: there is no fork server.
        """
        self._server = ServiceProcess(
            supervisor, STORE, self._on_packet, lambda: self._lose("the store's server has gone")
        )
        self._python = python or sys.executable
        self._on_lost = on_lost
        self._eager = eager
        self._warm_argv = list(warm_argv)
        self._loop = asyncio.get_running_loop()
        self._generation: int | None = None
        self._listening: socket.socket | None = None
        self._reserved: socket.socket | None = None
        """The next generation's listening socket."""

    def reserve(self, *, loopback_only: bool) -> int:
        """Bind the port of the next generation's store, and return it; the present store continues. Raises OSError when
        it cannot bind."""
        # A newer assignment may have taken the place of one whose port was never used.
        self._release_reserved()
        self._reserved = _listen(loopback_only)
        return _port(self._reserved)

    def open(self, generation: int) -> int:
        """Begin a generation's store at the reserved port, end the previous one, return the port."""
        assert self._reserved is not None
        self.close_generation()
        self._generation = generation
        self._listening, self._reserved = self._reserved, None
        port = _port(self._listening)
        if self._eager or self._server.running:
            self._hand_over()
        else:  # many jobs never use the store: its server is not started before a client comes
            self._loop.add_reader(self._listening, self._hand_over)
        return port

    def close_generation(self) -> None:
        """End the store of the current generation, if any; its clients are disconnected. The server stays."""
        self._close_listening()
        if self._generation is not None and self._server.running:
            self._send(self._generation, [])
        self._generation = None

    def close(self) -> None:
        """End the server too, and release the reserved port."""
        self._release_reserved()
        self.close_generation()
        self._server.drop()

    def handle(self, event: SupervisorEvent) -> None:
        """React to the server's end; events about other processes are ignored."""
        if why := self._server.why_ended(event):
            self._lose(f"the store's server {why}")

    def _hand_over(self) -> None:
        """Give the listening socket to the server, which is started if it does not run."""
        assert self._listening is not None
        assert self._generation is not None
        self._loop.remove_reader(self._listening)
        if not self._server.running:
            program = self._warm_argv or [self._python, "-u"]
            self._server.start([*program, STORE_SERVER, str(CONTROL_FD)], warm=bool(self._warm_argv))
        self._send(self._generation, [self._listening.fileno()])
        # The server's copy is the only one left: when the server dies, clients are refused at once.
        self._close_listening()

    def _send(self, generation: int, fds: Sequence[int]) -> None:
        try:
            self._server.send({"generation": generation}, fds)
        except BlockingIOError:  # hundreds of packets wait in the socket, one or two for each generation
            self._lose("the store's server does not read")
        except OSError:
            pass  # an event will report its end

    def _on_packet(self, packet: seqpacket.Message) -> None:
        if "failed" in packet and packet["failed"] == self._generation:
            self._generation = None
            self._on_lost(packet["failed"], packet["text"])

    def _lose(self, why: str) -> None:
        self._server.drop()
        generation, self._generation = self._generation, None
        self._close_listening()
        if generation is not None:
            self._on_lost(generation, why)

    def _release_reserved(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def _close_listening(self) -> None:
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None


def _port(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def _listen(loopback_only: bool) -> socket.socket:
    """A listening socket at a free port, for both families if there is IPv6. Raises OSError."""
    if loopback_only:
        return _bound(socket.AF_INET, "127.0.0.1")
    try:
        return _bound(socket.AF_INET6, "::")
    except OSError:
        return _bound(socket.AF_INET, "0.0.0.0")


def _bound(family: socket.AddressFamily, address: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, 0))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def free_port(loopback_only: bool) -> int:
    """A port that is free now, at which rank 0's worker serves its own store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).

    Another process may take the port first: that is why the agent's own store is the default.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as sock:
        sock.bind(("127.0.0.1" if loopback_only else "", 0))
        return int(sock.getsockname()[1])
