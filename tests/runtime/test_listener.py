from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast.protocol.codec import HELLO_BYTES_MAX, STORE_MAGIC, encode, frame, preamble
from holdfast.protocol.messages import Ping
from holdfast.protocol.policy import NodeSpec
from holdfast.protocol.session import NONCE_BYTES, ClientHandshake
from holdfast.runtime.connection import dial
from holdfast.runtime.listener import ACCEPTED_AT_ONCE, LOG_LINES_MAX, TakeOver
from tests.runtime.peers import JOB, NODE, PATIENCE_S, TOKEN, Door
from tests.support.limits import limit_s, settled

HANDSHAKE_S = limit_s(0.25)


@contextlib.asynccontextmanager
async def door(**options: Any) -> AsyncIterator[Door]:
    opened = Door(**options)
    async with opened.opened():
        yield opened


async def say(port: int, data: bytes, *, end: bool = False) -> bytes:
    """Sends these bytes and returns what comes until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def hello(token: bytes | None = None, node: NodeSpec = NODE) -> bytes:
    return preamble() + frame(ClientHandshake(JOB, node, token, b"n" * NONCE_BYTES).opening()[0])


BAD = [
    ("garbage", b"\xde\xad\xbe\xef" * 10, "not the holdfast protocol"),
    ("http", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "an HTTP request"),
    ("tls", b"\x16\x03\x01\x02\x00\x01\x00", "a TLS client"),
    ("torch store", STORE_MAGIC + b"\r*\x00\x00\x00", "a torch TCPStore client"),
    ("nearly right", b"HOLDFASX\x00\x01", "not the holdfast protocol"),
    ("oversized", preamble() + (HELLO_BYTES_MAX + 1).to_bytes(4, "big"), "over the limit"),
    ("no message", preamble() + frame(b"\xc1\xc1"), "malformed handshake"),
    ("empty frame", preamble() + frame(b""), "malformed handshake"),
    ("old version", preamble(0) + frame(b"whatever it said then"), "version 0"),
]


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize(("data", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
async def test_bad_bytes_cost_that_connection_and_one_line(data: bytes, words: str, token: bytes | None) -> None:
    async with door(token=token) as opened:
        await say(opened.claim.port, data)
        assert len(opened.lines) == 1
        assert opened.lines[0].startswith("dropped a connection from 127.0.0.1:")
        assert words in opened.lines[0]
        assert "\n" not in opened.lines[0]
        await opened.lets_a_good_node_in()
        assert len(opened.lines) == 1


@pytest.mark.parametrize("length", [1, 9, 10, 13, 40])
async def test_a_torn_hello_costs_one_line(length: int) -> None:
    async with door() as opened:
        await say(opened.claim.port, hello()[:length], end=True)
        await settled(lambda: bool(opened.lines))
        await opened.lets_a_good_node_in()
        assert len(opened.lines) == 1
        assert "closed the connection" in opened.lines[0]


async def test_an_old_version_is_told_why() -> None:
    async with door() as opened:
        answer = await say(opened.claim.port, preamble(0) + frame(b"x"))
        assert answer.startswith(preamble())
        assert b"REFUSED\nHF111\nthe coordinator speaks version 1" in answer


async def test_a_wrong_proof_is_dropped_and_told() -> None:
    async with door(token=TOKEN) as opened:
        answer = await say(opened.claim.port, hello(TOKEN) + frame(b"\x92\xa5proof\xc4\x01x"))
        assert b"REFUSED\nHF305\n" in answer
        assert len(opened.lines) == 1
        assert "differ" in opened.lines[0]
        await opened.lets_a_good_node_in()


@pytest.mark.parametrize(
    "first", [b"", b"HOLD", preamble(), hello()[:30]], ids=["nothing", "part", "preamble", "hello"]
)
async def test_one_who_says_too_little_is_dropped_in_time(first: bytes) -> None:
    async with door(handshake_s_max=HANDSHAKE_S) as opened:
        await say(opened.claim.port, first)  # returns because the other side closes
        assert opened.lines
        assert f"no handshake within {HANDSHAKE_S:g} s" in opened.lines[0]
        assert len(opened.lines) == 1
        opened.listener.handshake_s_max = PATIENCE_S  # a good node may be slow
        await opened.lets_a_good_node_in()


async def test_an_accepted_node_is_not_under_the_time_limit() -> None:
    handshake_s = limit_s(1)  # its own handshake has to be done by then
    async with door(handshake_s_max=handshake_s) as opened:
        connection = await dial(opened.claim.endpoint, JOB, NODE)
        await asyncio.sleep(1.2 * handshake_s)
        connection.send(Ping(number=1))
        await settled(lambda: bool(opened.received))
        connection.abort()


async def test_a_port_probe_is_not_worth_a_line() -> None:
    async with door() as opened:
        await say(opened.claim.port, b"", end=True)
        await opened.lets_a_good_node_in()
        assert opened.lines == []


async def test_a_crowd_at_the_door_does_not_keep_good_nodes_out() -> None:
    async with door(arrivals_max=8) as opened:
        crowd = [await asyncio.open_connection("127.0.0.1", opened.claim.port) for _ in range(30)]
        await opened.lets_a_good_node_in()
        assert "too many connections" in opened.lines[0]
        for _, writer in crowd:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in crowd), return_exceptions=True)


async def test_a_job_that_starts_on_many_nodes_at_once_loses_no_connection() -> None:
    """All have sent their hello before the coordinator reads the first one."""
    async with door(arrivals_max=4 * ACCEPTED_AT_ONCE) as opened, contextlib.AsyncExitStack() as stack:
        nodes = [stack.enter_context(socket.socket()) for _ in range(8 * ACCEPTED_AT_ONCE)]
        for node in nodes:
            node.connect(("127.0.0.1", opened.claim.port))
            node.sendall(hello())
        await settled(lambda: len(opened.hellos) == len(nodes))
        assert opened.lines == []


async def test_lines_are_limited() -> None:
    async with door() as opened:
        for _ in range(LOG_LINES_MAX + 7):
            await say(opened.claim.port, b"garbage")
        assert len(opened.lines) == LOG_LINES_MAX
    assert opened.lines[LOG_LINES_MAX:] == ["dropped 7 more connections like these"]


async def test_messages_right_behind_the_handshake_are_not_lost() -> None:
    async with door() as opened:
        pings = [Ping(number=1), Ping(number=2)]
        await say(opened.claim.port, hello() + b"".join(frame(encode(ping)) for ping in pings), end=True)
        await settled(lambda: bool(opened.closed))
        assert opened.received == pings


@pytest.mark.parametrize("size", [1, 3])
async def test_bytes_may_come_one_by_one(size: int) -> None:
    async with door() as opened:
        loop = asyncio.get_running_loop()
        with socket.create_connection(("127.0.0.1", opened.claim.port)) as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            data = hello()
            for at in range(0, len(data), size):
                await loop.sock_sendall(sock, data[at : at + size])
                await asyncio.sleep(0)
            await settled(lambda: bool(opened.hellos))
        await settled(lambda: bool(opened.closed))


@pytest.mark.parametrize("cut", [1, 4, 5, 6])
async def test_store_clients_are_handed_over_with_their_first_bytes(cut: int) -> None:
    words = STORE_MAGIC + b"\r*\x14\x00\x00"

    taken: list[bytes] = []

    def take(transport: asyncio.Transport, first: bytes) -> None:
        taken.append(first)
        transport.close()

    other: TakeOver = take
    async with door(other=other) as opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", opened.claim.port)
        writer.write(words[:cut])
        await asyncio.sleep(0.02)
        writer.write(words[cut:])
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        assert len(taken) == 1
        assert words.startswith(taken[0])
        assert len(taken[0]) >= len(STORE_MAGIC)
        assert opened.lines == []
        await opened.lets_a_good_node_in()


async def test_garbage_is_dropped_with_a_store_behind_as_well() -> None:
    async with door(other=lambda transport, first: pytest.fail("handed over")) as opened:
        await say(opened.claim.port, b"\x00\xce\xf7nonsense")
        assert len(opened.lines) == 1
        await opened.lets_a_good_node_in()


async def test_after_close_nobody_comes_in() -> None:
    async with door() as opened:
        _, writer = await asyncio.open_connection("127.0.0.1", opened.claim.port)
        await asyncio.sleep(0.02)
        opened.listener.close()
        with pytest.raises(OSError, match="111"):
            await asyncio.open_connection("127.0.0.1", opened.claim.port)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        assert opened.lines == []
