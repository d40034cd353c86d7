"""The store host: serves a generation's TCPStore at MASTER_ADDR:MASTER_PORT, from a process of its own.

The agent binds the listening socket first and publishes its port after; nothing else can take it. The server process
(train/store_server.py) is started when the first client connects, whose connection waits in the socket's backlog and is
handed over with it; it is forked from the nursery where torch is preloaded. Where it has to load torch for itself it is
started at once if the script is seen to import torch. The process lives on over generations; each gets a fresh store, so no key of an earlier one can be read.

Knows sockets and the keeper; must not know torch.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from holdfast.runtime.workers.keeper_client import KeeperClient, KeeperEvent, ProcessEnded, SpawnFailed

KEY = "store#"
"""The servers' keys at the keeper begin so; each server has its own, so that a late word about a dead one is ignored."""
SERVER = str(Path(__file__).resolve().parents[2] / "train" / "store_server.py")
BACKLOG = 16_384
"""Connections that may wait for the server to come up: all ranks of a large job; the kernel has its own maximum."""
PACKET_BYTES_MAX = 4096

LostCallback = Callable[[int, str], None]


class StoreHost:
    """The store of one node, over all generations. Every event of the keeper has to be passed to `handle`."""

    def __init__(
        self,
        keeper: KeeperClient,
        python: str,
        on_lost: LostCallback,
        *,
        eager: bool = False,
        warm_argv: Sequence[str] = (),
    ) -> None:
        """`python`: interpreter that has torch; empty: ours. `on_lost(generation, why)`: the store of an open generation is gone.

        `eager`: start the server with the first `open`, not with the first client. `warm_argv`: how the nursery runs a
        script of a worker's Python; empty: there is no nursery.
        """
        self._keeper = keeper
        self._python = python or sys.executable
        self._on_lost = on_lost
        self._eager = eager
        self._warm_argv = list(warm_argv)
        self._loop = asyncio.get_running_loop()
        self._generation: int | None = None
        self._listening: socket.socket | None = None
        self._control: socket.socket | None = None
        self._servers = 0

    def open(self, generation: int, *, loopback_only: bool) -> int:
        """Begin a generation's store, end the one before; returns its port. Raises OSError when nothing can be bound."""
        self.close_generation()
        self._generation = generation
        self._listening = _listen(loopback_only)
        port: int = self._listening.getsockname()[1]
        if self._eager or self._control is not None:
            self._hand_over()
        else:
            self._loop.add_reader(self._listening, self._hand_over)
        return port

    def close_generation(self) -> None:
        """End the store of the current generation, if any; its clients are disconnected. The server stays."""
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        if self._generation is not None and self._control is not None:
            self._send(self._generation, [])
        self._generation = None

    def close(self) -> None:
        """End the server too."""
        self.close_generation()
        self._drop_control()

    def handle(self, event: KeeperEvent) -> None:
        """Take notice of the server's end; events about other processes are ignored."""
        if self._control is None:
            return  # its control socket has said so before, and the next generation's socket may be open already
        if isinstance(event, ProcessEnded) and event.key == self._key:
            self._lose(f"the store's server ended with exit code {event.exit_code}")
        elif isinstance(event, SpawnFailed) and event.key == self._key:
            self._lose(f"the store's server could not be started: {event.text}")

    # --- the server ---------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        assert self._listening is not None
        assert self._generation is not None
        self._loop.remove_reader(self._listening)
        if self._control is None:
            self._start_server()
        self._send(self._generation, [self._listening.fileno()])
        # The server's copy is the only one left: when it dies, clients are refused and not left waiting.
        self._listening.close()
        self._listening = None

    @property
    def _key(self) -> str:
        return f"{KEY}{self._servers}"

    def _start_server(self) -> None:
        self._servers += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open("/dev/null", "r+b", buffering=0) as null:
            control = 3
            self._keeper.spawn(
                self._key,
                [*(self._warm_argv or [self._python, "-u"]), SERVER, str(control)],
                fds={0: null.fileno(), 1: null.fileno(), 2: null.fileno(), control: theirs.fileno()},
                service=True,
                warm=bool(self._warm_argv),
            )
        ours.setblocking(False)
        self._control = ours
        self._loop.add_reader(ours, self._readable)

    def _send(self, generation: int, fds: Iterable[int]) -> None:
        assert self._control is not None
        packet = json.dumps({"generation": generation}).encode()
        try:
            socket.send_fds(self._control, [packet], list(fds))
        except OSError as error:
            # Its end is on the way as an event; a full socket means that it has hung for hundreds of generations.
            if isinstance(error, BlockingIOError):
                self._lose("the store's server does not read")

    def _readable(self) -> None:
        assert self._control is not None
        try:
            packet = self._control.recv(PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except ConnectionResetError:
            packet = b""
        if not packet:
            self._lose("the store's server has gone")
            return
        answer = json.loads(packet)
        if "failed" in answer and answer["failed"] == self._generation:
            self._generation = None
            self._on_lost(answer["failed"], answer["text"])

    def _lose(self, why: str) -> None:
        self._drop_control()
        generation, self._generation = self._generation, None
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        if generation is not None:
            self._on_lost(generation, why)

    def _drop_control(self) -> None:
        if self._control is not None:
            self._loop.remove_reader(self._control)
            self._control.close()
            self._control = None


def _listen(loopback_only: bool) -> socket.socket:
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
    """A port that is free now, for rank 0's worker to serve its own store at (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).

    Racy by nature: that is why the agent's own store is the default.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as sock:
        sock.bind(("127.0.0.1" if loopback_only else "", 0))
        return int(sock.getsockname()[1])
