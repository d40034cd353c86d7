"""Pipes clients of torch's store, which connect to the coordinator's port, to the real store. A shell.

With static rendezvous torchrun promises that MASTER_ADDR:MASTER_PORT is the endpoint itself, where our coordinator
listens. Every generation has a new store on another port; this proxy connects the two. It does not know the store's
protocol: it copies bytes in both directions, passes on half-closes and errors, and reads no faster than it can write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.runtime.connection import tune

HOLD_S_MAX = 60.0
"""A client that comes before the generation's store is known waits this long for it."""
HELD_MAX = 4096
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

    def clear_target(self) -> None:
        """Hold clients until the next `set_target`."""
        self._target = None
        self._target_known.clear()

    def take(self, transport: asyncio.Transport, first: bytes) -> None:
        """Take a connection over, with the bytes already read from it."""
        transport.pause_reading()
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
