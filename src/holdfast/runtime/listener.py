"""The coordinator's port: admits nodes of this job, and pipes clients of torch's store to the store. A shell.

`Listener` accepts connections. Any input, garbage or silence, costs only that connection and one log line; the job is
not affected.

`StoreProxy`: with static rendezvous torchrun promises that MASTER_ADDR:MASTER_PORT is the endpoint itself, where our
coordinator listens. Every generation has a new store on another port, so the proxy connects the two. It does not know
the store's protocol: it copies bytes in both directions, passes on half-closes and errors, and reads no faster than it
can write.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.protocol.codec import PROTOCOL_VERSION, STORE_MAGIC, decode_from_agent, read_preamble
from holdfast.protocol.errors import HoldfastError, ProtocolError
from holdfast.protocol.messages import FromAgent
from holdfast.protocol.policy import JobSpec
from holdfast.protocol.session import Accepted, Hello, ServerHandshake, Session
from holdfast.runtime.connection import HANDSHAKE_S_MAX, READ_BYTES, Connection, fresh_nonce, plain_address, tune

ARRIVALS_MAX = 4096
"""Number of connections whose handshake is not done; also at most three quarters of the allowed descriptors."""
BACKLOG = 4096
"""Connections that may wait to be accepted."""
ACCEPTED_AT_ONCE = 64
"""Number of connections that are accepted before handshakes go on. The others wait in the backlog: when thousands of
agents start at once, none of them loses its connection."""
LOG_LINES_MAX = 10
"""Number of lines about dropped connections that are logged in each window; the others are only counted."""
LOG_WINDOW_S = 10.0

AgentConnection = Connection[FromAgent]
TakeOver = Callable[[asyncio.Transport, bytes], None]
"""Gets a connection that is not ours, with the bytes already read from it."""


class Listener:
    """Delivers accepted connections to `on_connection(connection, hello)`, which must `start` them.

    `other` gets the connections of torch TCPStore clients (static rendezvous); without it they are dropped. `decode`
    decodes the messages of the delivered connections. `answer` makes the Accepted for a peer. `job` None: any job is
    welcome. The sockets already listen and are closed by `close`.
    """

    def __init__(
        self,
        sockets: Iterable[socket.socket],
        job: JobSpec | None,
        token: bytes | None,
        on_connection: Callable[[Connection[Any], Hello], None],
        log: Callable[[str], None],
        other: TakeOver | None = None,
        *,
        answer: Callable[[Hello], Accepted] = lambda _: Accepted(PROTOCOL_VERSION),
        decode: Callable[[bytes], object] = decode_from_agent,
        handshake_s_max: float = HANDSHAKE_S_MAX,
        arrivals_max: int = ARRIVALS_MAX,
    ) -> None:
        self._sockets = tuple(sockets)
        self._job = job
        self._token = token
        self._log = log
        self._answer = answer
        self.decode = decode
        self.on_connection = on_connection
        self.other = other
        self.handshake_s_max = handshake_s_max
        self._arrivals_max = min(arrivals_max, resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4)
        self._arrivals: dict[_Arrival, None] = {}
        """Connections whose handshake is not done, the oldest first."""
        self._servers: list[asyncio.Server] = []
        self._drops: _LineLimiter | None = None
        self.buffer = bytearray(READ_BYTES)
        """The buffer for reads, which all connections of the loop share."""
        self._closed = False

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._drops = _LineLimiter(self._log, loop.time)
        for listening in self._sockets:
            # For asyncio the backlog is also the number of connections that it accepts at once.
            server = await loop.create_server(lambda: _Arrival(self), sock=listening, backlog=ACCEPTED_AT_ONCE)
            listening.listen(BACKLOG)
            self._servers.append(server)

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
        return ServerHandshake(self._job, self._token, fresh_nonce(), self._answer)

    def enter(self, arrival: _Arrival) -> None:
        self._arrivals[arrival] = None
        if self._closed:  # accepted in the same moment
            arrival.drop("")
        elif len(self._arrivals) > self._arrivals_max:
            # Drop the oldest: honest peers are done within milliseconds, so it is hardly one of them.
            next(iter(self._arrivals)).drop("too many connections are waiting for their handshake")

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
        """The connection ended before it was identified. One that sent nothing was a probe of the port, and gets no
        line in the log."""
        self._end("closed by the peer before its first message was complete" if self._first else "")

    def drop(self, why: str) -> None:
        """Cut the connection. `why` empty: no line is logged."""
        if self._end(why) and self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> bool:
        """Leave the listener. `why` empty: no line is logged. Returns False if it has left before."""
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
        """Whether this is, or may still become, a client of torch's store. One that is was passed on."""
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
                return  # dropped meanwhile: by its timer, or to make room
            if error is None:
                assert handshake.hello is not None
                self._listener.on_connection(connection, handshake.hello)

        connection = Connection(Session(handshake, self._listener.decode), on_handshake, self._listener.buffer)
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        connection.data_received(self._first)


class _LineLimiter:
    """Passes a limited number of lines per window, counts the rest, and reports the count when the window is over."""

    def __init__(self, log: Callable[[str], None], now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self._window_end_s = 0.0
        self._logged = 0
        """Number of lines of this window that were logged."""
        self._held_back = 0
        """Number of lines of this window that were not logged."""

    def say(self, line: str) -> None:
        if self._now() >= self._window_end_s:
            self.flush()
            self._window_end_s = self._now() + LOG_WINDOW_S
            self._logged = 0
        if self._logged < LOG_LINES_MAX:
            self._logged += 1
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


HOLD_S_MAX = 60.0
"""Limit for a client to wait until the generation's store is known (s)."""
HELD_MAX = 4096
"""Number of clients that may wait for a store, or for the connection to it."""
CONNECT_S_MAX = 5.0


class StoreProxy:
    """Pipes clients to the store. Give `take` to the Listener as `other`; `set_target` sets the store of the
    generation."""

    def __init__(self, log: Callable[[str], None], *, hold_s_max: float = HOLD_S_MAX) -> None:
        self._log = log
        self._hold_s_max = hold_s_max
        self._target: tuple[str, int] | None = None
        self._target_known = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[_End] = set()

    def set_target(self, host: str, port: int) -> None:
        """Pipe new clients there, and those that are held; connections to an older store live as long as that store."""
        self._target = (host, port)
        self._target_known.set()

    def take(self, transport: asyncio.Transport, first: bytes) -> None:
        """Take a connection over, with the bytes already read from it."""
        transport.pause_reading()  # what the client sends meanwhile waits in the kernel, not in our memory
        client = _End(self._ends)
        transport.set_protocol(client)
        client.connection_made(transport)
        if len(self._tasks) >= HELD_MAX:
            self._log("dropped a client of the store: too many are waiting for it")
            transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._join(client, first))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cut all connections, held and piped."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in tuple(self._ends):
            end.abort()

    async def _join(self, client: _End, first: bytes) -> None:
        try:
            async with asyncio.timeout(self._hold_s_max):
                await self._target_known.wait()
        except TimeoutError:
            self._log(f"dropped a client of the store: no store was ready within {self._hold_s_max:g} s")
            client.abort()
            return
        assert self._target is not None
        host, port = self._target
        loop = asyncio.get_running_loop()
        store = _End(self._ends, peer=client)
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                await loop.create_connection(lambda: store, host, port)
        except OSError as error:  # TimeoutError is one
            self._log(f"dropped a client of the store: the store at {host}:{port} cannot be reached: {error}")
            client.abort()
            return
        store.transport.write(first)
        client.pipe_with(store)


class _End(asyncio.Protocol):
    """One of the two connections of a pipe. Its peer writes what it reads."""

    transport: asyncio.Transport

    def __init__(self, ends: set[_End], peer: _End | None = None) -> None:
        self._ends = ends
        self._peer = peer
        self._lost = False
        self._ended = False

    def pipe_with(self, store: _End) -> None:
        """Join client and store; if the client has gone meanwhile, cut the store's connection."""
        if self._lost or store._lost:
            self.abort()
            store.abort()
            return
        self._peer = store
        self.transport.resume_reading()

    def abort(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._ends.add(self)
        tune(transport.get_extra_info("socket"))  # the store's protocol sends one small question after the other

    def data_received(self, data: bytes) -> None:
        if self._peer is not None:
            self._peer.transport.write(data)

    def eof_received(self) -> bool:
        """Pass a half-close on; the second one ends the pipe, once all is written. True: stay open."""
        self._ended = True
        peer = self._peer
        if peer is None or peer._lost:
            return False
        peer.transport.write_eof()
        if peer._ended:
            peer.transport.close()
        return not peer._ended

    def pause_writing(self) -> None:
        if self._peer is not None and not self._peer._lost:
            self._peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._peer is not None and not self._peer._lost:
            self._peer.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._ends.discard(self)
        if self._peer is not None and not self._peer._lost:
            if exc is None:
                self._peer.transport.close()
            else:
                self._peer.abort()
