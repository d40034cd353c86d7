from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from holdfast.protocol.codec import STORE_MAGIC
from holdfast.protocol.options import Endpoint
from holdfast.protocol.policy import JobSpec
from holdfast.rendezvous.bind import claim
from holdfast.runtime.connection import dial
from holdfast.runtime.listener import Listener, StoreProxy
from tests.runtime.peers import NODE, PATIENCE_S, Talk, service
from tests.support.limits import limit_s

JOB = JobSpec(run_id="run-a", min_nodes=1, max_nodes=1, backend="static", fixed_ranks=True)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Front:
    """The endpoint: a coordinator's listener with a proxy behind."""

    def __init__(self, hold_s_max: float) -> None:
        self.claim = claim(Endpoint(host="127.0.0.1", port=0))
        self.lines: list[str] = []
        self.proxy = StoreProxy(self.lines.append, hold_s_max=hold_s_max)
        self.listener = Listener(
            self.claim.sockets, JOB, None, lambda connection, _: connection.abort(), self.lines.append, self.proxy.take
        )

    async def client(self) -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.claim.port)
        writer.write(STORE_MAGIC)
        return reader, writer


@contextlib.asynccontextmanager
async def front(hold_s_max: float = PATIENCE_S) -> AsyncIterator[Front]:
    opened = Front(hold_s_max)
    await opened.listener.start()
    try:
        yield opened
    finally:
        opened.listener.close()
        await opened.proxy.close()
        await asyncio.sleep(0.01)  # the loop closes the sockets in its next rounds


@contextlib.asynccontextmanager
async def store(talk: Talk) -> AsyncIterator[int]:
    """Something in the store's place, which has read the magic bytes already."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(STORE_MAGIC)) == STORE_MAGIC
        await talk(reader, writer)

    async with service(serve) as endpoint:
        yield endpoint.port


async def finish(streams: Streams) -> None:
    streams[1].close()
    with contextlib.suppress(OSError):
        await streams[1].wait_closed()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write(b"bye")
    await writer.drain()


async def within(work: Awaitable[bytes]) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return await work


async def test_a_half_close_goes_through_and_the_answer_comes_back() -> None:
    async with front() as opened, store(echo) as port:
        opened.proxy.set_target("127.0.0.1", port)
        reader, writer = await opened.client()
        writer.write(b"words")
        assert await within(reader.readexactly(5)) == b"words"
        writer.write_eof()
        assert await within(reader.read()) == b"bye"
        await finish((reader, writer))
        assert opened.lines == []


async def test_a_client_that_comes_early_is_held() -> None:
    async with front() as opened, store(echo) as port:
        reader, writer = await opened.client()
        writer.write(b"early")
        await asyncio.sleep(0.05)
        opened.proxy.set_target("127.0.0.1", port)
        assert await within(reader.readexactly(5)) == b"early"
        await finish((reader, writer))


async def test_a_client_is_not_held_for_ever() -> None:
    async with front(hold_s_max=0.05) as opened:
        reader, writer = await opened.client()
        with contextlib.suppress(ConnectionResetError):
            assert await within(reader.read()) == b""
        await finish((reader, writer))
        assert opened.lines == ["dropped a client of the store: no store was ready within 0.05 s"]


async def test_a_store_that_is_gone_is_told(free_port: Callable[[], int]) -> None:
    async with front() as opened:
        opened.proxy.set_target("127.0.0.1", free_port())
        reader, writer = await opened.client()
        with contextlib.suppress(ConnectionResetError):
            assert await within(reader.read()) == b""
        await finish((reader, writer))
        assert len(opened.lines) == 1
        assert "cannot be reached" in opened.lines[0]


async def test_a_dying_store_is_felt_by_its_clients() -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.transport.abort()

    async with front() as opened, store(die) as port:
        opened.proxy.set_target("127.0.0.1", port)
        reader, writer = await opened.client()
        writer.write(b"x")
        with contextlib.suppress(ConnectionResetError):
            assert await within(reader.read()) == b""
        await finish((reader, writer))


async def test_a_dying_client_is_felt_by_the_store() -> None:
    over = asyncio.Event()

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(100):
                pass
        finally:
            over.set()

    async with front() as opened, store(watch) as port:
        opened.proxy.set_target("127.0.0.1", port)
        _, writer = await opened.client()
        await asyncio.sleep(0.02)
        writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            await over.wait()


async def test_a_slow_reader_holds_the_writer_back() -> None:
    """Far more than any buffer on the way is offered; only what was read may have been taken from the writer."""
    offered = 200 * 1024 * 1024

    sent = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while sent < offered:
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    async with front() as opened, store(pour) as port:
        opened.proxy.set_target("127.0.0.1", port)
        reader, writer = await opened.client()
        await within(reader.readexactly(1000))
        before = -1
        async with asyncio.timeout(PATIENCE_S):
            while sent != before:  # until all buffers are full
                before = sent
                await asyncio.sleep(0.1)
        assert sent < offered // 4
        await within(reader.readexactly(20 * 1024 * 1024))  # and it goes on once there is room
        await finish((reader, writer))


async def test_a_new_generation_has_a_new_store() -> None:
    def named(name: bytes) -> Talk:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(name)
            await reader.read()

        return talk

    async with front() as opened, store(named(b"old")) as old, store(named(b"new")) as new:
        opened.proxy.set_target("127.0.0.1", old)
        first = await opened.client()
        assert await within(first[0].readexactly(3)) == b"old"
        opened.proxy.set_target("127.0.0.1", new)
        second = await opened.client()
        assert await within(second[0].readexactly(3)) == b"new"
        await finish(first)
        await finish(second)


STORE_AND_CLIENTS = """
import os, sys, threading
from datetime import timedelta
from torch.distributed import TCPStore

reads, writes = os.pipe()
if os.fork() == 0:
    os.close(writes)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    print(store.port, flush=True)
    os.read(reads, 1)  # until the clients have ended
    os._exit(0)

def client():
    return TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timeout=timedelta(seconds=float(sys.argv[2])), wait_for_workers=False)

clients = [client() for _ in range(4)]
clients[0].set("key", "x" * 300_000)
assert all(each.get("key") == b"x" * 300_000 for each in clients)
waiters = [threading.Thread(target=each.wait, args=(["later"],)) for each in clients[1:]]
for thread in waiters: thread.start()
clients[0].set("later", "1")
for thread in waiters: thread.join()
totals = []
adders = [threading.Thread(target=lambda each=each: totals.extend(each.add("n", 1) for _ in range(50))) for each in clients]
for thread in adders: thread.start()
for thread in adders: thread.join()
assert sorted(totals) == list(range(1, 201)), totals
assert clients[1].compare_set("key2", "", "v") == b"v"
assert clients[2].check(["key", "key2"]) and clients[3].delete_key("key2")
print("clients are content", flush=True)
os.close(writes)
os.wait()
"""


async def test_clients_of_torch_do_not_notice() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")

    async with front() as opened:
        line = [sys.executable, "-c", STORE_AND_CLIENTS, str(opened.claim.port), str(PATIENCE_S)]
        clients = await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.PIPE)
        try:
            assert clients.stdout is not None
            opened.proxy.set_target("127.0.0.1", int(await clients.stdout.readline()))
            async with asyncio.timeout(limit_s(60)):
                told, _ = await clients.communicate()
            assert (clients.returncode, told) == (0, b"clients are content\n")
            (await dial(opened.claim.endpoint, JOB, NODE)).abort()  # and the coordinator is still there
        finally:
            if clients.returncode is None:
                clients.kill()
                await clients.wait()
        assert opened.lines == []
