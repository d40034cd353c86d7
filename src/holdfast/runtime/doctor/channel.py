"""One connection between a visitor and the desk: a run's handshake and frames, the doctor's messages. A shell."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from typing import Any

from holdfast.core.errors import (
    CoordinatorUnreachableError,
    HoldfastError,
    NoAnswerError,
    PeerError,
    PortInUseError,
    ProtocolError,
    UnresolvedHostError,
)
from holdfast.core.options import Endpoint
from holdfast.core.policy import JobSpec, NodeSpec
from holdfast.runtime.connection import plain_address
from holdfast.runtime.doctor.messages import Message, decode, encode
from holdfast.runtime.driver import run_detached
from holdfast.wire.framing import frame
from holdfast.wire.handshake import NONCE_BYTES, ClientHandshake, ServerHandshake
from holdfast.wire.session import Session

HANDSHAKE_S_MAX = 5.0
CONNECT_S_MAX = 5.0
"""Per address; long enough for two lost SYNs."""
CHUNK_BYTES = 64 * 1024
CLOSE_S_MAX = 2.0


class Channel:
    """Messages over one accepted connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handshake: ClientHandshake | ServerHandshake,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._handshake = handshake
        self._session: Session[Message] = Session(handshake, decode)
        self._waiting: list[Message] = []
        self.peer_address = plain_address(writer.get_extra_info("peername"))
        """Numeric, as this side sees the other."""
        self.local_address = plain_address(writer.get_extra_info("sockname"))

    async def shake_hands(self) -> None:
        """Raises RefusedError, AuthenticationError, ProtocolError, PeerError or NoAnswerError."""
        self._writer.write(self._session.opening())
        try:
            async with asyncio.timeout(HANDSHAKE_S_MAX):
                while not self._session.established:
                    await self._read()
        except TimeoutError:
            raise NoAnswerError(f"{self.peer_address} accepts connections and says nothing") from None

    @property
    def met(self) -> bool:
        """The other side is a holdfast."""
        return self._session.met

    def send(self, message: Message) -> None:
        """Dropped when the connection is over: `receive` tells. Raises ProtocolError when it is too large."""
        payload = encode(message)
        seal = self._handshake.seal
        self._writer.write(frame(payload if seal is None else seal.seal(payload)))

    async def receive(self) -> Message:
        """The next message. Raises PeerError at the end, ProtocolError for nonsense."""
        while not self._waiting:
            await self._read()
        return self._waiting.pop(0)

    async def close(self) -> None:
        """What was sent is on its way, or the time for it is over."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                self._writer.close()
                await self._writer.wait_closed()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def _read(self) -> None:
        try:
            data = await self._reader.read(CHUNK_BYTES)
        except OSError as error:
            raise PeerError(f"the connection broke: {error}") from None
        if not data:
            raise PeerError("the other side closed the connection")
        self._writer.write(self._session.feed(data))
        self._waiting += self._session.take()
        if self._session.error is not None:
            raise self._session.error


async def dial(endpoint: Endpoint, job: JobSpec, node: NodeSpec, token: bytes | None) -> Channel:
    """A connection to the desk, by the first of the endpoint's addresses that has it.

    Raises UnresolvedHostError or CoordinatorUnreachableError (try again), and what ends it: RefusedError,
    AuthenticationError, PortInUseError (something else listens there; NoAnswerError: it says nothing).
    """
    met: list[str] = []
    for family, address in await resolve(endpoint):
        try:
            sock = await connect(family, address)
        except (OSError, TimeoutError) as error:
            met.append(f"{address[0]}: {why(error)}")
            continue
        reader, writer = await asyncio.open_connection(sock=sock)
        channel = Channel(reader, writer, ClientHandshake(job, node, token, os.urandom(NONCE_BYTES)))
        try:
            await channel.shake_hands()
        except HoldfastError as error:
            channel.abort()
            if isinstance(error, ProtocolError) and not channel.met:
                raise PortInUseError(f"another service listens at {endpoint}: {error}") from None
            if type(error) is not PeerError:
                raise
            met.append(f"{address[0]}: {error}")
        except BaseException:
            channel.abort()
            raise
        else:
            return channel
    raise CoordinatorUnreachableError("; ".join(met))


async def resolve(endpoint: Endpoint) -> list[tuple[int, tuple[Any, ...]]]:
    """Families and socket addresses to try. Raises UnresolvedHostError."""
    try:
        found = await run_detached(lambda: socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnresolvedHostError(f"{endpoint.host} does not resolve here: {text}") from None
    return list(dict.fromkeys((int(family), tuple(address)) for family, _, _, _, address in found))


async def connect(family: int, address: tuple[Any, ...], limit_s: float = CONNECT_S_MAX) -> socket.socket:
    """Raises OSError or TimeoutError."""
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, socket.IPPROTO_TCP)
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.get_running_loop().sock_connect(sock, address)
        refuse_itself(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def refuse_itself(sock: socket.socket) -> None:
    """Where nobody listens on a port that the kernel may pick for clients, it can join a socket to itself."""
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def why(error: OSError | TimeoutError) -> str:
    """The system's words: asyncio puts its own in their place."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return f"no answer within {CONNECT_S_MAX:g} s" if isinstance(error, TimeoutError) else str(error)
