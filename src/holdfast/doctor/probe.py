"""Tests a node's network to its peers: connections, round trips, bandwidth, clocks, and an all-reduce.

Every node has a ProbeServer at the address by which the others see it. Everything has a limit, in bytes and
in time. Only a client that knows the key of this check gets an answer.

    client    MAGIC key ──▶                 server
              ◀── index, 4 bytes
              P ──▶                         a ping
              ◀── its time, 8 bytes
              B ──▶ bytes, end of file      a transfer
              ◀── bytes and seconds, 8 + 8
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.doctor.facts import ERROR_CHARS_MAX, addresses_of, end, last_json
from holdfast.doctor.findings import NodePath, Reached, Reduced
from holdfast.protocol.errors import UnresolvedHostError
from holdfast.protocol.options import Endpoint
from holdfast.protocol.policy import Port
from holdfast.protocol.train_contract import CHECKUP
from holdfast.runtime.connection import connect, resolved, why
from holdfast.supervisor.attached import attached

MAGIC, KEY_BYTES = b"HFDOCTOR", 16
INDEX, CLOCK, TRANSFER = struct.Struct("!I"), struct.Struct("!d"), struct.Struct("!Qd")
CHUNK_BYTES = 256 * 1024
READ_BYTES = 1024 * 1024
TRANSFER_BYTES_MAX = 64 * 1024 * 1024
TRANSFER_S_MAX = 0.5
"""Duration of one bandwidth measurement."""
TRANSFERS_S_MAX = 10.0
"""Limit for all transfers of one node together."""
PINGS = 9
CONNECT_S_MAX = 5.0
"""Limit for a connection: time enough for two lost SYNs, which are repeated after 1 s and 3 s."""
PROBE_S_MAX = 10.0
"""Limit of one probe, from the connection to its last answer."""
CLOSE_S_MAX = 2.0
AT_ONCE_MAX = 128
"""Limit of probes at the same time, and of name look-ups."""
NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors of a machine without IPv6: a kernel without it, and one in which it is switched off."""
CLIENTS_MAX = 1024
"""Limit of connections at the same time."""


class Peer(Struct, frozen=True, array_like=True):
    """A node of the check, as one other node reaches its ProbeServer."""

    name: str
    host: str
    address: str
    port: Port

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(host=self.address, port=self.port)


class ProbeServer:
    """Answers probes until it is closed. Probes wait until `introduce` has set the index of this node."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._clients: dict[asyncio.Task[object] | None, asyncio.StreamWriter] = {}
        self._known = asyncio.Event()
        """Set when `_me` and `_key` are known."""
        self._me, self._key = 0, b""
        self.port = 0
        """The port of all addresses; 0 before `open`."""

    async def open(self, addresses: Iterable[str]) -> None:
        """Listen on all addresses, at the same port. A machine without IPv6 leaves out `::` after others. Raises
        OSError when an address cannot be bound."""
        for address in addresses:
            try:
                server = await asyncio.start_server(self._serve, address, self.port, limit=READ_BYTES)
            except OSError as error:
                if self._servers and address == "::" and error.errno in NO_IPV6:
                    continue
                raise
            self._servers.append(server)
            self.port = server.sockets[0].getsockname()[1]

    def introduce(self, me: int, key: bytes) -> None:
        self._me, self._key = me, key
        self._known.set()

    async def close(self) -> None:
        """Stop serving. No client is served any more when it returns."""
        for server in self._servers:
            server.close()
        for writer in self._clients.values():
            writer.transport.abort()
        serving = [task for task in self._clients if task is not None]
        if serving:
            await asyncio.wait(serving, timeout=CLOSE_S_MAX)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= CLIENTS_MAX:
            writer.transport.abort()
            return
        me = asyncio.current_task()
        self._clients[me] = writer
        # Ports of the nodes are open to others, too: each client has a time limit, and their number has one.
        try:
            async with asyncio.timeout(PROBE_S_MAX + TRANSFER_S_MAX):
                await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client reports it
        finally:
            self._clients.pop(me, None)
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


async def probe_all(me: int, key: bytes, peers: Sequence[Peer], limit_s: float) -> tuple[NodePath, ...]:
    """Probe all peers at the same time, then measure the bandwidth of those that answered, one after the other.

    Each node starts with its next neighbour, so that few transfers coincide. A peer that could not be tried within
    `limit_s` is silent: many that do not answer must not cost the report of this node.
    """
    # Apart: a name server that is down takes longer than a connection, and must not keep peers from being tried.
    looking_up, connecting = asyncio.Semaphore(AT_ONCE_MAX), asyncio.Semaphore(AT_ONCE_MAX)
    others = [(me + turn) % len(peers) for turn in range(1, len(peers))]
    deadline = asyncio.get_running_loop().time() + limit_s

    async def name_of(peer: Peer) -> tuple[tuple[str, ...], str]:
        try:
            async with asyncio.timeout_at(deadline), looking_up:
                return await addresses_of(peer.host)
        except TimeoutError:
            return (), f"not looked up within {limit_s:g} s"

    async def path_to(index: int) -> NodePath:
        try:
            async with asyncio.timeout_at(deadline), connecting:
                return await probe(peers[index], index, key, transfer_s=0.0)
        except TimeoutError:
            error = f"not tried within {limit_s:g} s: too many others do not answer"
            return NodePath(to=index, reached=Reached.SILENT, address=str(peers[index].endpoint), error=error)

    async def one(index: int) -> NodePath:
        (names, error), path = await asyncio.gather(name_of(peers[index]), path_to(index))
        return replace(path, names=names, name_error=error)

    paths = dict(zip(others, await asyncio.gather(*map(one, others)), strict=True))
    transfer_s = min(TRANSFER_S_MAX, TRANSFERS_S_MAX / max(1, len(others)))
    for index in others:
        if paths[index].reached is Reached.YES:
            again = await probe(peers[index], index, key, transfer_s=transfer_s)
            paths[index] = replace(paths[index], bytes_s=again.bytes_s)
    return tuple(paths[index] for index in sorted(paths))


async def probe(
    peer: Peer, index: int, key: bytes, *, transfer_s: float, clock: Callable[[], float] = time.time
) -> NodePath:
    """Measure the path to one peer. `transfer_s` is the duration of the bandwidth measurement; 0: none. Never
    raises."""
    path = NodePath(to=index, reached=Reached.UNREACHABLE, address=str(peer.endpoint))
    try:
        sock = await _connected(peer)
    except UnresolvedHostError:
        return replace(path, error=f"this node does not know the name {peer.address}")
    except TimeoutError as error:
        return replace(path, reached=Reached.SILENT, error=why(error))
    except ConnectionRefusedError as error:
        return replace(path, reached=Reached.REFUSED, error=why(error))
    except OSError as error:
        return replace(path, error=why(error))

    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        async with asyncio.timeout(PROBE_S_MAX):
            return await _examine(reader, writer, replace(path, reached=Reached.YES), key, transfer_s, clock)
    except asyncio.IncompleteReadError:
        # The doctor of that node answers everyone who has the key, so this is another program or another check.
        return replace(path, reached=Reached.STRANGER, error="it closed the connection instead of an answer")
    except TimeoutError:
        return replace(path, reached=Reached.BROKEN, error=f"connected, but no answer within {PROBE_S_MAX:g} s")
    except OSError as error:
        return replace(path, reached=Reached.BROKEN, error=why(error))
    finally:
        writer.transport.abort()


async def _connected(peer: Peer) -> socket.socket:
    """Connect to the first of its addresses that answers: --local-addr may be a name, which each node looks up, as
    ranks do with MASTER_ADDR. Raises UnresolvedHostError, and OSError for the last one."""
    async with asyncio.timeout(CONNECT_S_MAX):
        *others, last = await resolved(peer.endpoint)
    for place in others:
        with contextlib.suppress(OSError):
            return await connect(*place, CONNECT_S_MAX)
    return await connect(*last, CONNECT_S_MAX)


async def _examine(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    path: NodePath,
    key: bytes,
    transfer_s: float,
    clock: Callable[[], float],
) -> NodePath:
    writer.write(MAGIC + key)
    (index,) = INDEX.unpack(await reader.readexactly(INDEX.size))
    if index != path.to:  # two nodes behind one address, or one address given to two nodes
        return replace(path, reached=Reached.STRANGER, error=f"node {index} of this check answered in its place")
    trips: list[tuple[float, float]] = []
    for _ in range(PINGS):
        began, began_here = time.monotonic(), clock()
        writer.write(b"P")
        (there,) = CLOCK.unpack(await reader.readexactly(CLOCK.size))
        trip = time.monotonic() - began
        trips.append((trip, there - (began_here + trip / 2)))
    # The clocks are compared in the shortest trip, in which the answer was least delayed.
    found = replace(path, latency_s=median(trip for trip, _ in trips), clock_offset_s=min(trips)[1])
    if transfer_s <= 0:
        return found
    return replace(found, bytes_s=await _transfer(reader, writer, min(transfer_s, TRANSFER_S_MAX)))


async def _transfer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_s: float) -> float:
    """Send as much as fits into the time. Returns bytes per second, by the receiver's clock from the first byte to the
    last: the sender's ends when the data is in buffers."""
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


class Reducer:
    """The process for the all-reduce. It imports torch immediately, on all nodes at the same time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, python: str, rank: int, world: int, limit_s: float) -> Reducer:
        """Start the process. Raises OSError when it cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *attached([python, CHECKUP, "reduce", str(rank), str(world), str(limit_s)]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process)

    async def store_port(self) -> int:
        """The port of the store, which rank 0 has; 0: none."""
        return int((await self._answer()).get("port", 0))

    def join(self, host: str, port: int) -> None:
        """Give the store's address to the process, on the other ranks."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{host} {port}\n".encode())

    async def result(self) -> Reduced:
        """Wait for the result of the all-reduce on this node."""
        answer = await self._answer()
        if answer.get("ok"):
            return Reduced(ok=True, seconds=float(answer.get("seconds", 0.0)))
        error = str(answer.get("error") or "its process ended without an answer")
        return Reduced(ok=False, error=error[:ERROR_CHARS_MAX])

    async def close(self) -> None:
        await end(self._process)

    async def _answer(self) -> dict[str, Any]:
        """The next JSON object of its output; empty at the end of the process."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = last_json(line.decode(errors="replace"))
            if answer is not None:
                return answer
        return {}
