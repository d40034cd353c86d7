"""Accepts connections for the coordinator and admits only nodes of this job. A shell.

Any input, garbage or silence, costs only that connection and one log line; the job is not affected.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.protocol.codec import STORE_MAGIC, decode_from_agent, read_preamble
from holdfast.protocol.errors import HoldfastError, ProtocolError
from holdfast.protocol.messages import FromAgent
from holdfast.protocol.policy import JobSpec
from holdfast.protocol.session import Hello, ServerHandshake, Session
from holdfast.runtime.connection import HANDSHAKE_S_MAX, Connection, fresh_nonce, plain_address

ARRIVALS_MAX = 4096
"""Connections whose handshake is not done; never more than three quarters of the allowed descriptors."""
BACKLOG = 4096
LOG_LINES_MAX = 10
LOG_WINDOW_S = 10.0
"""In each window only some lines about dropped connections are logged, and then the number of the others."""

AgentConnection = Connection[FromAgent]
TakeOver = Callable[[asyncio.Transport, bytes], None]
"""Gets a connection that is not ours, with the bytes already read from it."""


class Listener:
    """Delivers accepted connections to `on_connection(connection, hello)`, which must `start` them.

    `other` gets the connections of torch TCPStore clients (static rendezvous); without it they are dropped. `decode`
    decodes the messages of the delivered connections. The sockets already listen and are closed by `close`.
    """

    def __init__(
        self,
        sockets: Iterable[socket.socket],
        job: JobSpec,
        token: bytes | None,
        on_connection: Callable[[Connection[Any], Hello], None],
        log: Callable[[str], None],
        other: TakeOver | None = None,
        *,
        decode: Callable[[bytes], object] = decode_from_agent,
        handshake_s_max: float = HANDSHAKE_S_MAX,
        arrivals_max: int = ARRIVALS_MAX,
        nonces: Callable[[], bytes] = fresh_nonce,
    ) -> None:
        self._sockets = tuple(sockets)
        self._job = job
        self._token = token
        self._nonces = nonces
        self._log = log
        self.decode = decode
        self.on_connection = on_connection
        self.other = other
        self.handshake_s_max = handshake_s_max
        self._arrivals_max = min(arrivals_max, resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4)
        self._arrivals: dict[_Arrival, None] = {}
        self._servers: list[asyncio.Server] = []
        self._drops: _LineLimiter | None = None
        self._closed = False

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._drops = _LineLimiter(self._log, loop.time)
        for listening in self._sockets:
            self._servers.append(await loop.create_server(lambda: _Arrival(self), sock=listening, backlog=BACKLOG))

    def close(self) -> None:
        """Accept no more connections. Connections already delivered belong to their receivers."""
        self._closed = True
        for server in self._servers:
            server.close()
        for arrival in tuple(self._arrivals):
            arrival.drop("")
        if self._drops is not None:
            self._drops.flush()

    # For arrivals

    def handshake(self) -> ServerHandshake:
        return ServerHandshake(self._job, self._token, self._nonces())

    def enter(self, arrival: _Arrival) -> None:
        self._arrivals[arrival] = None
        if self._closed:  # accepted in the same moment
            arrival.drop("")
        elif len(self._arrivals) > self._arrivals_max:
            # Drop the oldest: honest peers are done within milliseconds, so it is hardly one of them.
            next(iter(self._arrivals)).drop("too many connections are waiting to be let in")

    def leave(self, arrival: _Arrival) -> None:
        self._arrivals.pop(arrival, None)

    def dropped(self, peer: str, why: str) -> None:
        assert self._drops is not None
        self._drops.say(f"dropped a connection from {peer}: {why}")


class _Arrival(asyncio.Protocol):
    """A connection from accept until its first bytes identify it and, if it belongs to the job, until it is
    admitted."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._first = b""
        self._peer = ""
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._peer = _peer_text(transport.get_extra_info("peername"))
        limit_s = self._listener.handshake_s_max
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.drop, f"no handshake within {limit_s:g} s")
        self._listener.enter(self)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._first += data
        if self._listener.other is not None and self._maybe_store():
            return
        try:
            read_preamble(self._first)
        except ProtocolError as error:
            self.drop(str(error))
            return
        self._become_connection()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The connection ended before it was identified. If it sent nothing, it was a port probe: no line."""
        self._end("closed by the peer in the middle of its first words" if self._first else "")

    def drop(self, why: str) -> None:
        """Cut the connection; logs no line when there is nothing to report."""
        if self._end(why) and self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> bool:
        """Leave the listener, once; logs a line when there is something to report."""
        if self._over:
            return False
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._listener.leave(self)
        if why:
            self._listener.dropped(self._peer, why)
        return True

    def _maybe_store(self) -> bool:
        """Whether this is, or may still become, a client of torch's store."""
        if self._first.startswith(STORE_MAGIC):
            assert self._transport is not None
            assert self._listener.other is not None
            self._end("")
            self._listener.other(self._transport, self._first)
            return True
        return STORE_MAGIC.startswith(self._first)

    def _become_connection(self) -> None:
        assert self._transport is not None
        handshake = self._listener.handshake()

        def on_handshake(connection: Connection[Any], error: HoldfastError | None) -> None:
            if not self._end("" if error is None else str(error)):
                return
            if error is None:
                assert handshake.hello is not None
                self._listener.on_connection(connection, handshake.hello)

        connection = Connection(Session(handshake, self._listener.decode), on_handshake)
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(self._first)


class _LineLimiter:
    """Passes a limited number of lines per window, counts the rest, and reports the count when the window is over."""

    def __init__(self, log: Callable[[str], None], now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self._window_end_s = 0.0
        self._said = 0
        self._held_back = 0

    def say(self, line: str) -> None:
        if self._now() >= self._window_end_s:
            self.flush()
            self._window_end_s = self._now() + LOG_WINDOW_S
            self._said = 0
        if self._said < LOG_LINES_MAX:
            self._said += 1
            self._log(line)
        else:
            self._held_back += 1

    def flush(self) -> None:
        if self._held_back:
            self._log(f"dropped {self._held_back} more connections like these")
            self._held_back = 0


def _peer_text(name: Any) -> str:
    address = plain_address(name)
    return (f"[{address}]" if ":" in address else address) + (f":{name[1]}" if name else "")
