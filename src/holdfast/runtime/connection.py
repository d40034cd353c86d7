"""One TCP connection between agent and coordinator, and how an agent gets one. A shell: makes no decisions.

Knows asyncio and sockets; protocol/session.py knows the meaning of the bytes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from msgspec import Struct

from holdfast.detached import run_detached
from holdfast.protocol.codec import decode_from_coordinator
from holdfast.protocol.errors import (
    CoordinatorUnreachableError,
    HoldfastError,
    InternalError,
    NoAnswerError,
    PeerError,
    PortInUseError,
    ProtocolError,
    UnresolvedHostError,
)
from holdfast.protocol.messages import FromCoordinator
from holdfast.protocol.options import Endpoint
from holdfast.protocol.policy import JobSpec, NodeSpec
from holdfast.protocol.session import NONCE_BYTES, Accepted, ClientHandshake, Session
from holdfast.rendezvous.bind import who_holds
from holdfast.runtime.driver import describe
from holdfast.text import is_loopback

HANDSHAKE_S_MAX = 5.0
CONNECT_S_MAX = 3.0
"""Limit for a connection to one address (s); long enough for one lost SYN."""
READ_BYTES = 64 * 1024
"""Size of our buffer for reads. asyncio's own reads get memory from the system and return it, each time: a third of a
ping's cost."""
CLOSE_S_MAX = 5.0
"""Limit for a closed connection to send the rest (s); then it is cut."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 30, 10, 3
"""TCP keep-alive: the first probe after this silence (s), the time between probes (s), and their number."""
TURNS_MAX = 4
"""Number of agents in a row that may answer that the coordinator is elsewhere."""
WRITE_BUFFER_BYTES_MAX = 8 * 1024 * 1024
"""Length of unsent data from which a peer that does not read is treated as lost (bytes)."""

Received = TypeVar("Received")
P = ParamSpec("P")


def fresh_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


class Connection(asyncio.BufferedProtocol, Generic[Received]):
    """Typed messages over one socket.

    `on_handshake` is called exactly once: with None when the peer is accepted, else with the reason for the refusal
    (the connection is then over). The owner of an accepted connection calls `start`; until then messages wait, and
    nothing more is read from the peer.
    """

    def __init__(
        self,
        session: Session[Received],
        on_handshake: Callable[[Connection[Received], HoldfastError | None], None],
        buffer: bytearray | None = None,
    ) -> None:
        """`buffer`: the buffer for reads; connections of one loop may share it."""
        self._session = session
        self._buffer = memoryview(buffer or bytearray(READ_BYTES))
        self._on_handshake: Callable[[Connection[Received], HoldfastError | None], None] | None = on_handshake
        self._on_message: Callable[[Received], None] | None = None
        self._on_closed: Callable[[str], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Received] = deque()
        """Messages that were received and not delivered yet."""
        self._reason = ""
        """The first reason to end the connection; empty: it is open."""
        self._lost = False
        """The transport is over."""
        self._close_timer: asyncio.TimerHandle | None = None
        self.peer_address = ""
        """The peer's numeric address, as the kernel reports it."""
        self.peer_port = 0
        self.local_address = ""
        self.ended_by_peer = False
        """The peer's side has closed the connection: its process has ended, or wanted to."""

    @property
    def open(self) -> bool:
        """Whether messages may still be sent. The first reason to end wins and makes this False."""
        return self._transport is not None and not self._reason

    @property
    def accepted(self) -> Accepted:
        """The answer of the side that accepted, about itself."""
        return self._session.accepted

    @property
    def peer_is_holdfast(self) -> bool:
        """Whether the peer has proved to be a holdfast process, perhaps of another version."""
        return self._session.met

    def start(self, on_message: Callable[[Received], None], on_closed: Callable[[str], None]) -> None:
        """Deliver messages to `on_message` in order, including earlier ones. At the end `on_closed` is called exactly
        once with the reason, whichever side ended the connection. Neither is called from within `start`."""
        if self._on_message is not None:
            raise InternalError("a connection was started twice")
        self._on_message, self._on_closed = on_message, on_closed
        asyncio.get_running_loop().call_soon(self._begin)

    def send(self, message: Struct) -> None:
        """Send a message without waiting. It is dropped when the connection is over: `on_closed` reports that."""
        transport = self._transport
        if transport is None or self._reason:
            return
        if not self._session.established:
            raise InternalError("a message was sent before the handshake was done")
        transport.write(self._session.pack(message))
        if transport.get_write_buffer_size() > WRITE_BUFFER_BYTES_MAX:
            self.abort("the peer does not read what is sent to it")

    def close(self, reason: str = "closed here") -> None:
        """End the connection once all messages are sent, after at most CLOSE_S_MAX. No message is delivered after
        it."""
        self._waiting.clear()
        self._shut(reason)

    def abort(self, reason: str = "aborted here") -> None:
        """End the connection at once; unsent messages are lost. No message is delivered after it."""
        self._waiting.clear()
        if self._transport is None:
            return
        self._reason = self._reason or reason
        self._transport.abort()

    # asyncio.BufferedProtocol

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.peer_address, self.peer_port = plain_address(peer), peer[1] if peer else 0
        self.local_address = plain_address(transport.get_extra_info("sockname"))
        tune(transport.get_extra_info("socket"))
        transport.write(self._session.opening())

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or self._reason:
            return

        # The short way for a ping: exactly one message, with no other before it.
        if self._on_message is not None and not self._waiting:
            message = self._session.only(data)
            if message is not None:
                self._waiting.append(message)
                self._deliver()
                return

        answer = self._session.feed(data)
        if answer:
            transport.write(answer)
        self._waiting.extend(self._session.take())
        if self._on_handshake is not None and self._session.established:
            self._end_handshake(None)
        if self._on_message is None and self._waiting:  # not started yet: a peer must not fill our memory
            transport.pause_reading()
        self._deliver()
        if self._session.error is not None:
            self._shut(str(self._session.error))
            self._end_handshake(self._session.error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._transport = None
        if self._close_timer is not None:
            self._close_timer.cancel()
        if not self._reason:
            self.ended_by_peer = exc is None or isinstance(exc, (ConnectionResetError, BrokenPipeError))
            torn = " in the middle of a frame" if self._session.torn else ""
            self._reason = f"the connection broke: {exc}" if exc else f"the peer closed the connection{torn}"
        self._end_handshake(PeerError(self._reason))
        self._deliver()

    def _shut(self, reason: str) -> None:
        """Close the transport once all is sent, if this is the first reason to end."""
        if self._transport is None or self._reason:
            return
        self._reason = reason
        self._close_timer = asyncio.get_running_loop().call_later(CLOSE_S_MAX, self._transport.abort)
        self._transport.close()

    def _begin(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()
        self._deliver()

    def _deliver(self) -> None:
        """Deliver the received messages, and then the end, if the connection is started."""
        if self._on_message is None:
            return
        try:
            while self._waiting:
                self._on_message(self._waiting.popleft())
        except OSError as error:
            raise _fault(error) from error
        if self._lost and self._on_closed is not None:
            on_closed, self._on_closed = self._on_closed, None
            _call(on_closed, self._reason)

    def _end_handshake(self, error: HoldfastError | None) -> None:
        if self._on_handshake is not None:
            on_handshake, self._on_handshake = self._on_handshake, None
            _call(on_handshake, self, error)


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and detect a peer that vanished even when no messages are sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def _call(callback: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call back, and turn an OSError into a fault of ours. asyncio takes an OSError from a protocol for the end of its
    connection and hides it, but a fault in handling a message must be reported."""
    try:
        callback(*args, **kwargs)
    except OSError as error:
        raise _fault(error) from error


def _fault(error: OSError) -> InternalError:
    return InternalError(f"holdfast failed at a message of a peer: {describe(error)}")


async def dial(
    endpoint: Endpoint,
    job: JobSpec,
    node: NodeSpec,
    token: bytes | None = None,
    *,
    handshake_s_max: float = HANDSHAKE_S_MAX,
) -> Connection[FromCoordinator]:
    """Return an accepted connection to the job's coordinator. An agent that does not have the coordinator answers where
    it is, and is not the end of the search.

    Raises what `dial_endpoint` raises.
    """
    for _ in range(TURNS_MAX):
        connection = await dial_agent(endpoint, job, node, token, handshake_s_max=handshake_s_max)
        accepted = connection.accepted
        if not accepted.absent:
            return connection
        connection.close()
        if not accepted.port and accepted.witness:
            raise CoordinatorUnreachableError(f"the witness at {endpoint} knows no coordinator yet")
        if not accepted.port:
            raise CoordinatorUnreachableError(
                f"the coordinator is not at {endpoint} any more, and no other is known yet"
            )
        endpoint = Endpoint(host=seen_from_here(accepted.address, connection.peer_address), port=accepted.port)
    raise CoordinatorUnreachableError(f"the coordinator moved {TURNS_MAX} times while a connection was attempted")


async def dial_agent(
    endpoint: Endpoint,
    job: JobSpec,
    node: NodeSpec,
    token: bytes | None = None,
    *,
    handshake_s_max: float = HANDSHAKE_S_MAX,
) -> Connection[FromCoordinator]:
    """Return an accepted connection to an agent or witness of this job, wherever the coordinator is. Raises what
    `dial_endpoint` raises."""

    def session() -> Session[FromCoordinator]:
        return Session(ClientHandshake(job, node, token, fresh_nonce()), decode_from_coordinator)

    return await dial_endpoint(endpoint, session, handshake_s_max)


async def dial_endpoint(
    endpoint: Endpoint, session: Callable[[], Session[Received]], handshake_s_max: float = HANDSHAKE_S_MAX
) -> Connection[Received]:
    """Return an accepted connection to the process at the endpoint, by the first of its addresses that accepts.

    Raises the most informative of the errors that occurred:
      RefusedError                  final: another job, configuration, version or token
      PortInUseError                final: another program listens there
      NoAnswerError                 a process listens and does not answer; try again
      CoordinatorUnreachableError   no process listens, or it went away; try again
      UnresolvedHostError           the name does not resolve (yet); try again
    """
    errors: list[HoldfastError] = []
    for family, address in await resolved(endpoint):
        try:
            return await _dial_address(family, address, endpoint, session(), handshake_s_max)
        except (CoordinatorUnreachableError, PortInUseError) as error:
            errors.append(error)
    # A program that answers in another way says more than one that is silent, and both say more than no listener.
    foreign = [error for error in errors if isinstance(error, PortInUseError)]
    if foreign:
        raise next((error for error in foreign if not isinstance(error, NoAnswerError)), foreign[0])
    raise CoordinatorUnreachableError(f"no coordinator at {endpoint}: {'; '.join(map(str, errors))}")


async def resolved(endpoint: Endpoint) -> list[tuple[int, tuple[Any, ...]]]:
    """Families and socket addresses to try. Numeric addresses and localhost need no thread. Raises
    UnresolvedHostError."""
    host, port = endpoint.host, endpoint.port
    if host == "localhost":
        return [numeric("127.0.0.1", port), numeric("::1", port)]
    try:
        return [numeric(host, port)]
    except OSError:
        pass  # a name
    try:
        found = await run_detached(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnresolvedHostError(f"the host of the endpoint {endpoint} does not resolve: {text}") from None
    return list(dict.fromkeys((int(family), tuple(address)) for family, _, _, _, address in found))


def numeric(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Family and socket address. Avoids getaddrinfo, whose first call costs milliseconds even for a number.

    Raises OSError for a name.
    """
    if ":" in host:
        socket.inet_pton(socket.AF_INET6, host)
        return socket.AF_INET6, (host, port, 0, 0)
    socket.inet_pton(socket.AF_INET, host)
    return socket.AF_INET, (host, port)


async def _dial_address(
    family: int, address: tuple[Any, ...], endpoint: Endpoint, session: Session[Received], handshake_s_max: float
) -> Connection[Received]:
    loop = asyncio.get_running_loop()
    try:
        sock = await connect(family, address)
    except OSError as missed:
        raise CoordinatorUnreachableError(f"{address[0]}: {why(missed)}") from None
    outcome: asyncio.Future[HoldfastError | None] = loop.create_future()

    def on_handshake(_: Connection[Received], error: HoldfastError | None) -> None:
        if not outcome.done():
            outcome.set_result(error)

    connection = Connection(session, on_handshake)
    try:
        await loop.create_connection(lambda: connection, sock=sock)
        async with asyncio.timeout(handshake_s_max):
            error = await outcome
    except TimeoutError:
        connection.abort()
        what = f"something accepts connections at {endpoint} but gave no answer within {handshake_s_max:g} s"
        holder = _holder(connection, endpoint.port)
        # A silent coordinator may only be busy or stopped; another program on this machine will not become a
        # coordinator.
        foreign = bool(holder) and "holdfast" not in holder
        raise (PortInUseError if foreign else NoAnswerError)(what + holder) from None
    except BaseException:  # cancelled: nothing else closes the socket
        connection.abort()
        raise
    if error is None:
        return connection
    connection.close()
    if isinstance(error, ProtocolError) and not connection.peer_is_holdfast:
        what = f"another service listens at {endpoint}: {error}"
        raise PortInUseError(what + _holder(connection, endpoint.port))
    if type(error) is PeerError:
        raise CoordinatorUnreachableError(f"{address[0]}: {error} before the handshake was done")
    raise error


async def connect(family: int, address: tuple[Any, ...], limit_s: float = CONNECT_S_MAX) -> socket.socket:
    """Connect. Raises OSError, also TimeoutError, which is one; `why` puts it into words."""
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, socket.IPPROTO_TCP)
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.get_running_loop().sock_connect(sock, address)
        _check_not_itself(sock)
    except TimeoutError:
        sock.close()
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
    except BaseException:
        sock.close()
        raise
    return sock


async def nobody_listens(endpoint: Endpoint, limit_s: float) -> bool:
    """Whether the endpoint's machine answers that no process listens there. False: one does, or nothing answers."""
    places = await resolved(endpoint)
    for family, address in places:
        try:
            (await connect(family, address, limit_s)).close()
        except ConnectionRefusedError:
            continue
        except OSError:
            return False
        return False
    return bool(places)


def why(error: OSError) -> str:
    """The system's words for this error, which asyncio replaces by its own."""
    return os.strerror(error.errno).lower() if error.errno else str(error)


def _check_not_itself(sock: socket.socket) -> None:
    """Refuse a socket that is connected to itself. The kernel can do that at a port that it may pick for clients, when
    no process listens there."""
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _holder(connection: Connection[Any], port: int) -> str:
    """The process that holds a port, in words; empty: it is unknown, or the port is another machine's."""
    if connection.peer_address != connection.local_address:
        return ""
    holder = who_holds(port)
    return f" (held by {holder})" if holder else ""


def seen_from_here(address: str, peer_address: str) -> str:
    """The address that a peer names, as seen from here: its loopback is the peer's own machine."""
    return peer_address if is_loopback(address) else address


def plain_address(name: Any) -> str:
    """The numeric address of a socket name; IPv4 as such even where it came through an IPv6 socket."""
    address = str(name[0]) if name else ""
    return address.removeprefix("::ffff:") if "." in address else address
