"""A coordinator's listener for tests of connections, and any other service on a port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from holdfast.protocol.messages import FromAgent
from holdfast.protocol.options import Endpoint
from holdfast.protocol.policy import JobSpec, NodeSpec
from holdfast.protocol.session import Hello
from holdfast.rendezvous.bind import claim
from holdfast.runtime.connection import Connection, dial
from holdfast.runtime.listener import Listener
from tests.support.limits import limit_s, settled

JOB = JobSpec(run_id="run-a", min_nodes=1, max_nodes=2000, backend="c10d")
NODE = NodeSpec(member="node7#1", host="node7", nproc=1)
TOKEN = b"correct horse"
PATIENCE_S = limit_s(20.0)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Door:
    """A listener with its log, its connections, and what they have sent."""

    def __init__(self, host: str = "127.0.0.1", token: bytes | None = None, **options: object) -> None:
        self.claim = claim(Endpoint(host=host, port=0))
        self.endpoint = self.claim.endpoint
        self.lines: list[str] = []
        self.hellos: list[Hello] = []
        self.received: list[FromAgent] = []
        self.closed: list[str] = []
        self.connections: list[Connection[FromAgent]] = []
        self.token = token
        self.listener = Listener(
            self.claim.sockets,
            JOB,
            token,
            self._on_connection,
            self.lines.append,
            **options,  # type: ignore[arg-type]
        )

    def _on_connection(self, connection: Connection[FromAgent], hello: Hello) -> None:
        self.hellos.append(hello)
        self.connections.append(connection)
        connection.start(lambda message: self.on_message(connection, message), self.closed.append)

    def on_message(self, connection: Connection[FromAgent], message: FromAgent) -> None:
        self.received.append(message)

    async def lets_a_good_node_in(self) -> None:
        known = len(self.hellos)
        connection = await dial(self.endpoint, JOB, NODE, self.token)
        assert len(self.hellos) == known + 1
        connection.abort()
        await settled(lambda: len(self.closed) == len(self.connections))

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        await self.listener.start()
        try:
            yield
        finally:
            self.listener.close()
            for each in self.connections:
                each.abort()
            await settled(lambda: len(self.closed) == len(self.connections))


@contextlib.asynccontextmanager
async def service(talk: Talk, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Endpoint]:
    """Some other service on a port of ours."""
    tasks: list[asyncio.Task[object]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            await talk(reader, writer)

    server = await asyncio.start_server(serve, host, port)
    try:
        yield Endpoint(host=host, port=server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0.01)  # a closed transport lets go of its socket in the loop's next rounds
