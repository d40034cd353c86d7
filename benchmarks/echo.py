"""What a server on asyncio costs that only sends 14 bytes back: `python -m benchmarks.echo 1000 950`, with 1,000
connections that together send 950 messages per second. To be compared with the coordinator's load (docs/scale.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing import get_context

from benchmarks.harness import cpu_s
from benchmarks.scale import PROCESSES, own_address
from holdfast.runtime.connection import READ_BYTES, tune
from holdfast.inherited import raise_limit

DIALLED_PER_S = 1500.0
MEASURED_S = 20.0
MESSAGE = bytes(14)


class Server(asyncio.BufferedProtocol):
    def __init__(self, buffer: bytearray) -> None:
        self._buffer = buffer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        tune(transport.get_extra_info("socket"))

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 - asyncio's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._transport.write(bytes(self._buffer[:nbytes]))


async def serve(listening: socket.socket) -> None:
    buffer = bytearray(READ_BYTES)
    await asyncio.get_running_loop().create_server(lambda: Server(buffer), sock=listening, backlog=4096)
    await asyncio.Event().wait()


async def send(port: int, numbers: range, interval_s: float) -> None:
    """A message on each of these connections in every interval."""
    loop = asyncio.get_running_loop()

    def again(transport: asyncio.Transport) -> None:
        transport.write(MESSAGE)
        loop.call_later(interval_s, again, transport)

    for number in numbers:
        place = own_address(number), 0
        transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port, local_addr=place)
        loop.call_later(interval_s * random.random(), again, transport)
    await asyncio.Event().wait()


def main(connections: int, per_s: float) -> None:
    raise_limit()
    context = get_context("fork")
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listening:

        def start(work: Callable[[], Awaitable[None]]) -> int:
            process = context.Process(target=lambda: asyncio.run(work()))  # type: ignore[arg-type]
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            assert process.pid is not None
            return process.pid

        pid, port = start(lambda: serve(listening)), listening.getsockname()[1]
        for part in range(PROCESSES):
            numbers = range(1 + connections * part // PROCESSES, 1 + connections * (part + 1) // PROCESSES)
            start(lambda numbers=numbers: send(port, numbers, connections / per_s))
        time.sleep(2 + connections / DIALLED_PER_S)
        before_s = cpu_s(pid)
        time.sleep(MEASURED_S)
        spent_s = cpu_s(pid) - before_s
    print(f"load {100 * spent_s / MEASURED_S:.1f} %, {1e6 * spent_s / MEASURED_S / per_s:.1f} us for each message")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
