from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from holdfast.protocol.codec import encode, frame, preamble
from holdfast.protocol.errors import (
    CoordinatorUnreachableError,
    PortInUseError,
    ProtocolError,
    RefusedError,
    UnresolvedHostError,
)
from holdfast.protocol.messages import FromAgent, FromCoordinator, Ping, Pong, Waiting
from holdfast.protocol.options import Endpoint
from holdfast.protocol.policy import JobSpec
from holdfast.protocol.session import Hello
from holdfast.runtime import connection as connection_module
from holdfast.runtime.connection import Connection, dial
from tests.runtime.peers import JOB, NODE, TOKEN, Door, Talk, service
from tests.support.limits import limit_s, settled


class Coordinator(Door):
    """A listener that sends a welcome, and answers pings."""

    def _on_connection(self, connection: Connection[FromAgent], hello: Hello) -> None:
        assert hello.member == NODE.member
        super()._on_connection(connection, hello)
        connection.send(Waiting(text="welcome"))

    def on_message(self, connection: Connection[FromAgent], message: FromAgent) -> None:
        super().on_message(connection, message)
        if isinstance(message, Ping):
            connection.send(Pong(number=message.number))


@contextlib.asynccontextmanager
async def coordinator(host: str = "127.0.0.1", token: bytes | None = None) -> AsyncIterator[Coordinator]:
    served = Coordinator(host, token)
    async with served.opened():
        yield served


class Agent:
    """A dialled connection with its mail."""

    def __init__(self, connection: Connection[FromCoordinator]) -> None:
        self.connection = connection
        self.received: list[FromCoordinator] = []
        self.closed: list[str] = []
        connection.start(self.received.append, self.closed.append)

    async def leave(self) -> None:
        self.connection.close()
        await settled(lambda: bool(self.closed))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("token", [None, TOKEN])
async def test_messages_go_both_ways(host: str, token: bytes | None) -> None:
    async with coordinator(host, token) as served:
        agent = Agent(await dial(served.endpoint, JOB, NODE, token))
        for number in range(3):
            agent.connection.send(Ping(number=number))
        await settled(lambda: len(agent.received) == 4)
        assert agent.received == [Waiting(text="welcome"), *(Pong(number=number) for number in range(3))]
        assert served.received == [Ping(number=number) for number in range(3)]
        assert agent.connection.peer_address == served.endpoint.host
        assert served.connections[0].peer_address == agent.connection.local_address
        await agent.leave()
        await settled(lambda: bool(served.closed))
        assert agent.closed == ["closed here"]
        assert served.closed == ["the peer closed the connection"]
        assert served.lines == []


async def test_small_messages_are_not_held_back() -> None:
    async with coordinator() as served:
        agent = Agent(await dial(served.endpoint, JOB, NODE))
        await settled(lambda: bool(served.connections))
        for side in (agent.connection, served.connections[0]):
            transport = side._transport
            assert transport is not None
            sock = transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await agent.leave()


async def test_messages_wait_for_start() -> None:
    async with coordinator() as served:
        connection = await dial(served.endpoint, JOB, NODE)
        for number in range(3):
            connection.send(Ping(number=number))
        await settled(lambda: len(served.received) == 3)
        served.connections[0].close()
        await settled(lambda: bool(served.closed))
        agent = Agent(connection)
        await settled(lambda: bool(agent.closed))
        assert [type(each) for each in agent.received] == [Waiting, Pong, Pong, Pong]
        assert agent.closed == ["the peer closed the connection"]


async def test_a_peer_that_does_not_read_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "WRITE_BUFFER_BYTES_MAX", 1_000_000)

    async with coordinator() as served:
        connection = await dial(served.endpoint, JOB, NODE)  # not started: it stops reading after the welcome
        await settled(lambda: bool(served.connections))
        for _ in range(1000):
            served.connections[0].send(Waiting(text="x" * 100_000))
            if not served.connections[0].open:
                break
        await settled(lambda: bool(served.closed))
        assert served.closed == ["the peer does not read what is sent to it"]
        connection.abort()


async def test_the_reason_is_told_once_and_the_first_one_counts() -> None:
    async with coordinator() as served:
        agent = Agent(await dial(served.endpoint, JOB, NODE))
        agent.connection.abort("first")
        agent.connection.abort("second")
        agent.connection.close("third")
        agent.connection.send(Ping(number=1))
        assert agent.closed == []  # never from within a call
        await settled(lambda: bool(agent.closed))
        await asyncio.sleep(0.01)
        assert agent.closed == ["first"]


async def test_no_message_comes_after_close() -> None:
    async with coordinator() as served:
        connection = await dial(served.endpoint, JOB, NODE)
        for number in range(3):
            connection.send(Ping(number=number))
        await settled(lambda: len(served.received) == 3)
        served.connections[0].close()
        received: list[FromCoordinator] = []
        closed: list[str] = []

        def on_message(message: FromCoordinator) -> None:
            received.append(message)
            connection.close()

        await asyncio.sleep(0.02)  # all of them are here before the first is handed on
        connection.start(on_message, closed.append)
        await settled(lambda: bool(closed))
        assert received == [Waiting(text="welcome")]


async def test_what_came_before_garbage_still_counts() -> None:
    async with coordinator() as served:
        agent = Agent(await dial(served.endpoint, JOB, NODE))
        transport = agent.connection._transport
        assert transport is not None
        transport.write(frame(encode(Ping(number=1))) + frame(b"garbage") + frame(encode(Ping(number=2))))
        await settled(lambda: bool(served.closed))
        assert served.received == [Ping(number=1)]
        await settled(lambda: bool(agent.closed))


async def test_garbage_after_the_handshake_ends_the_connection() -> None:
    async with coordinator() as served:
        agent = Agent(await dial(served.endpoint, JOB, NODE))
        await settled(lambda: bool(served.connections))
        transport = agent.connection._transport
        assert transport is not None
        transport.write(b"\x00\x00\x00\x01\xc1")
        await settled(lambda: bool(served.closed))
        assert "not a message of an agent" in served.closed[0]
        await settled(lambda: bool(agent.closed))


@pytest.mark.parametrize(
    ("job", "token", "words"),
    [
        (JobSpec(run_id="run-b", min_nodes=1, max_nodes=2000, backend="c10d"), None, "'run-b'"),
        (JobSpec(run_id="run-a", min_nodes=2, max_nodes=3, backend="c10d"), None, "--nnodes 2:3"),
        (JOB, TOKEN, "has a job token"),
    ],
)
async def test_a_refusal_comes_through(job: JobSpec, token: bytes | None, words: str) -> None:
    async with coordinator() as served:
        with pytest.raises(RefusedError, match=words):
            await dial(served.endpoint, job, NODE, token)
        assert len(served.lines) == 1
        assert words in served.lines[0]


async def test_a_wrong_token_is_told_on_both_sides() -> None:
    async with coordinator(token=TOKEN) as served:
        with pytest.raises(RefusedError, match="differ"):
            await dial(served.endpoint, JOB, NODE, b"wrong")
        await settled(lambda: bool(served.lines))
        assert "differ" in served.lines[0]


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(UnresolvedHostError, match=r"no-such-host\.invalid:1 does not resolve"):
        asyncio.run(dial(Endpoint(host="no-such-host.invalid", port=1), JOB, NODE))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_nobody_there(host: str, free_port: Callable[[], int]) -> None:
    with pytest.raises(CoordinatorUnreachableError, match="refused"):
        asyncio.run(dial(Endpoint(host=host, port=free_port()), JOB, NODE))


async def _http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await writer.drain()


async def _silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)


async def _old_holdfast(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(preamble(0))
    await writer.drain()
    await reader.read()


async def _broken_holdfast(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(preamble() + b"\xff\xff\xff\xff")
    await writer.drain()
    await reader.read()


@pytest.mark.parametrize(
    ("talk", "error", "words"),
    [
        (_http, PortInUseError, r"an HTTP answer.*held by pid PID"),
        (_silence, PortInUseError, r"no answer within [\d.]+ s.*held by pid PID"),
        (_hang_up, CoordinatorUnreachableError, "before the handshake was done"),
        (_old_holdfast, RefusedError, "version 0"),
        (_broken_holdfast, ProtocolError, "over the limit"),
    ],
)
async def test_somebody_else_is_there(talk: Talk, error: type[Exception], words: str) -> None:
    async with service(talk) as endpoint:
        with pytest.raises(error, match=words.replace("PID", str(os.getpid()))):
            await dial(endpoint, JOB, NODE, handshake_s_max=limit_s(0.1 if talk is _silence else 20))


async def test_the_next_address_is_tried_when_the_first_is_somebody_else() -> None:
    async with coordinator("::1") as served, service(_http, port=served.endpoint.port):
        agent = Agent(await dial(Endpoint(host="localhost", port=served.endpoint.port), JOB, NODE))
        assert agent.connection.peer_address == "::1"
        await agent.leave()


async def test_dialling_can_be_cancelled() -> None:
    async with service(_silence) as endpoint:
        task = asyncio.create_task(dial(endpoint, JOB, NODE))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_thousand_agents_come_at_once() -> None:
    async with coordinator(token=TOKEN) as served:
        connections = await asyncio.gather(*(dial(served.endpoint, JOB, NODE, TOKEN) for _ in range(1000)))
        agents = [Agent(connection) for connection in connections]
        for agent in agents:
            agent.connection.send(Ping(number=1))
        await settled(lambda: all(len(agent.received) == 2 for agent in agents))
        for agent in agents:
            agent.connection.abort()
        await settled(lambda: len(served.closed) == 1000)
        assert served.lines == []
