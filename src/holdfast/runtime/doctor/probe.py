"""What is tried between two nodes: is it the right one, how long is a round trip, how fast, what time is it there.

Both ends: the listener that every node opens at the address by which the others see it, and the probe that connects.
Everything is bounded, in bytes and in time; whoever does not know the visit's key gets no answer.

    probe     MAGIC key ──▶                 listener
              ◀── index, 4 bytes
              P ──▶                         a ping
              ◀── its time, 8 bytes
              B ──▶ bytes, end of file      a transfer
              ◀── bytes and seconds, 8 + 8
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import socket
import struct
import time
from collections.abc import Callable, Iterable
from statistics import median

from holdfast.core.doctor import NodePath, Reached
from holdfast.runtime.doctor.channel import connect, why
from holdfast.runtime.doctor.messages import KEY_BYTES, Peer

MAGIC = b"HFDOCTOR"
INDEX, CLOCK, TRANSFER = struct.Struct("!I"), struct.Struct("!d"), struct.Struct("!Qd")
CHUNK_BYTES = 256 * 1024
READ_BYTES = 1024 * 1024
TRANSFER_BYTES_MAX = 64 * 1024 * 1024
TRANSFER_S_MAX = 0.5
PINGS = 9
PROBE_S_MAX = 10.0
"""One probe, from connect to its last answer."""
CLOSE_S_MAX = 2.0
GUESTS_MAX = 1024
"""Connections at once."""


class ProbeServer:
    """Answers probes until it is closed. Knows its index and key once the roster is there; probes wait for that."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._guests: dict[asyncio.Task[object] | None, asyncio.StreamWriter] = {}
        self._known = asyncio.Event()
        self._me, self._key = 0, b""
        self.port = 0

    async def open(self, addresses: Iterable[str]) -> None:
        """At one port on all of them. Raises OSError when none of them is this machine's."""
        for address in addresses:
            server = await asyncio.start_server(self._serve, address, self.port, limit=READ_BYTES)
            self._servers.append(server)
            self.port = server.sockets[0].getsockname()[1]

    def introduce(self, me: int, key: bytes) -> None:
        self._me, self._key = me, key
        self._known.set()

    async def close(self) -> None:
        """Nobody is served any more when it returns."""
        for server in self._servers:
            server.close()
        for writer in self._guests.values():
            writer.transport.abort()
        serving = [task for task in self._guests if task is not None]
        if serving:
            await asyncio.wait(serving, timeout=CLOSE_S_MAX)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._guests) >= GUESTS_MAX:
            writer.transport.abort()
            return
        me = asyncio.current_task()
        self._guests[me] = writer
        try:
            async with asyncio.timeout(PROBE_S_MAX + TRANSFER_S_MAX):
                await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the probe itself tells of it
        finally:
            self._guests.pop(me, None)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.readexactly(len(MAGIC) + KEY_BYTES)
        await self._known.wait()
        if not hmac.compare_digest(hello, MAGIC + self._key):
            return
        writer.write(INDEX.pack(self._me))
        while command := await reader.read(1):
            if command == b"P":
                writer.write(CLOCK.pack(time.time()))
            elif command == b"B":
                writer.write(TRANSFER.pack(*await self._take(reader)))
            await writer.drain()

    async def _take(self, reader: asyncio.StreamReader) -> tuple[int, float]:
        taken, began = 0, time.monotonic()
        while chunk := await reader.read(READ_BYTES):
            taken += len(chunk)
            if taken > TRANSFER_BYTES_MAX:
                raise ConnectionAbortedError(errno.ECONNABORTED, "a transfer over its limit")
        return taken, time.monotonic() - began


class Broken(Exception):  # noqa: N818 - it is no error of the program but an answer
    """The peer was reached, and then it was not, or was not who it should be."""

    def __init__(self, reached: Reached, text: str) -> None:
        super().__init__(text)
        self.reached = reached


async def probe(
    peer: Peer, index: int, key: bytes, *, transfer_s: float, clock: Callable[[], float] = time.time
) -> NodePath:
    """Everything about the way to one peer but names. transfer_s: seconds for the bandwidth, 0 for none. Never raises."""
    shown = f"[{peer.address}]:{peer.port}" if ":" in peer.address else f"{peer.address}:{peer.port}"
    link = NodePath(to=index, reached=Reached.SILENT, address=shown)
    try:
        sock = await connect(*numeric(peer.address, peer.port))
    except TimeoutError as error:
        return replaced(link, reached=Reached.SILENT, error=why(error))
    except OSError as error:
        reached = Reached.REFUSED if error.errno == errno.ECONNREFUSED else Reached.UNREACHABLE
        if error.errno == errno.ETIMEDOUT:
            reached = Reached.SILENT
        return replaced(link, reached=reached, error=why(error))
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        async with asyncio.timeout(PROBE_S_MAX):
            return await _examine(reader, writer, link, key, transfer_s, clock)
    except Broken as error:
        return replaced(link, reached=error.reached, error=str(error))
    except asyncio.IncompleteReadError:
        return replaced(link, reached=Reached.STRANGER, error="it closed the connection instead of an answer")
    except TimeoutError:
        return replaced(link, reached=Reached.BROKEN, error=f"connected, but no answer within {PROBE_S_MAX:g} s")
    except OSError as error:
        return replaced(link, reached=Reached.BROKEN, error=why(error))
    finally:
        writer.transport.abort()


async def _examine(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    link: NodePath,
    key: bytes,
    transfer_s: float,
    clock: Callable[[], float],
) -> NodePath:
    writer.write(MAGIC + key)
    (index,) = INDEX.unpack(await reader.readexactly(INDEX.size))
    if index != link.to:
        raise Broken(Reached.STRANGER, f"node {index} of this visit answered in its place")
    trips: list[tuple[float, float]] = []
    for _ in range(PINGS):
        began, began_here = time.monotonic(), clock()
        writer.write(b"P")
        (there,) = CLOCK.unpack(await reader.readexactly(CLOCK.size))
        trip = time.monotonic() - began
        trips.append((trip, there - (began_here + trip / 2)))
    found = replaced(
        link, reached=Reached.YES, latency_s=median(trip for trip, _ in trips), clock_offset_s=min(trips)[1]
    )
    if transfer_s <= 0:
        return found
    return replaced(found, bytes_s=await _transfer(reader, writer, min(transfer_s, TRANSFER_S_MAX)))


async def _transfer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_s: float) -> float:
    """Bytes per second by the other's clock, from its first byte to its last."""
    chunk = bytes(CHUNK_BYTES)
    sent, until = 0, time.monotonic() + limit_s
    writer.write(b"B")
    while sent < TRANSFER_BYTES_MAX and time.monotonic() < until:
        writer.write(chunk)
        await writer.drain()
        sent += CHUNK_BYTES
    writer.write_eof()
    taken, seconds = TRANSFER.unpack(await reader.readexactly(TRANSFER.size))
    return float(taken) / max(float(seconds), 1e-6)


def numeric(address: str, port: int) -> tuple[int, tuple[str, int] | tuple[str, int, int, int]]:
    """Family and socket address. Raises OSError for what is no address."""
    if ":" in address:
        socket.inet_pton(socket.AF_INET6, address)
        return socket.AF_INET6, (address, port, 0, 0)
    socket.inet_pton(socket.AF_INET, address)
    return socket.AF_INET, (address, port)


def replaced(link: NodePath, **changes: object) -> NodePath:
    from msgspec.structs import replace

    return replace(link, **changes)
