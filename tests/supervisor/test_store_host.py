"""The store host with torch's own clients, over generations, and without any."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.supervisor import processes
from holdfast.supervisor.client import ProcessEnded
from holdfast.supervisor.store_host import StoreHost
from tests.support.limits import limit_s

# One client process for all generations: torch takes seconds to load. Each line is evaluated, its result printed.
CLIENT_LIMIT_S = limit_s(90.0)
CLIENT = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
def connect(port):
    return TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=float(sys.argv[1])))
def works(store):
    try:
        store.set("probe", "1")
        return store.get("probe") == b"1"
    except RuntimeError:
        return False
stores = {}
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


class Client:
    """torch's TCPStore, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls) -> Client:
        pytest.importorskip("torch")
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", CLIENT, str(CLIENT_LIMIT_S), stdin=pipe, stdout=pipe, stderr=null
            )
        )

    async def ask(self, expression: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{expression}\n".encode())
        return eval(await asyncio.wait_for(self.process.stdout.readline(), CLIENT_LIMIT_S))

    async def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


class Rig:
    """A store host on a supervisor's bench."""

    def __init__(self, bench: Any, *, python: str = sys.executable, eager: bool = False) -> None:
        self.lost: list[tuple[int, str]] = []
        self.supervisor = bench.supervisor
        self.host = StoreHost(lambda: bench.supervisor, python, lambda *word: self.lost.append(word), eager=eager)
        bench.supervisor._on_event = self.host.handle

    def open(self, generation: int, *, loopback_only: bool) -> int:
        port = self.host.reserve(loopback_only=loopback_only)
        assert self.host.open(generation) == port
        return port

    @property
    def servers(self) -> list[int]:
        return processes.descendants(self.supervisor.handle.pid)


async def test_two_generations_have_nothing_in_common_but_the_server(bench: Any) -> None:
    rig = Rig(bench)
    client = await Client.start()
    first = rig.open(1, loopback_only=False)
    assert await client.ask(f"stores.setdefault(1, connect({first})).set('stale', 'x')") is None
    servers = rig.servers
    assert len(servers) == 1
    second = rig.open(2, loopback_only=True)
    assert await client.ask(f"stores.setdefault(2, connect({second})).check(['stale'])") is False
    assert await client.ask("works(stores[1]), works(stores[2])") == (False, True)
    assert rig.servers == servers
    rig.host.close_generation()
    while await client.ask("works(stores[2])"):
        pass
    assert rig.lost == []
    # The server dies in the third generation, and another one serves the fourth.
    third = rig.open(3, loopback_only=True)
    assert await client.ask(f"works(stores.setdefault(3, connect({third})))") is True
    os.kill(servers[0], signal.SIGKILL)
    await bench.until(lambda: bool(rig.lost))
    assert [generation for generation, _ in rig.lost] == [3]
    fourth = rig.open(4, loopback_only=True)
    assert await client.ask(f"works(stores.setdefault(4, connect({fourth})))") is True
    assert len(rig.lost) == 1
    await client.end()
    rig.host.close()
    await bench.until(lambda: not rig.servers)
    assert len(rig.lost) == 1


async def test_the_port_of_the_next_store_is_bound_while_the_present_one_continues(bench: Any) -> None:
    rig = Rig(bench)
    client = await Client.start()
    first = rig.open(1, loopback_only=True)
    assert await client.ask(f"works(stores.setdefault(1, connect({first})))") is True
    given_up = rig.host.reserve(loopback_only=True)
    second = rig.host.reserve(loopback_only=True)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", given_up)) != 0
    with socket.socket() as early:  # a client on another node whose workers start first
        early.connect(("127.0.0.1", second))
        assert await client.ask("works(stores[1])") is True
        assert rig.host.open(2) == second
        assert await client.ask(f"works(stores.setdefault(2, connect({second})))") is True
    while await client.ask("works(stores[1])"):
        pass
    await client.end()
    unused = rig.host.reserve(loopback_only=True)
    rig.host.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", unused)) != 0
    assert rig.lost == []


async def test_a_late_word_about_a_dead_server_does_not_end_the_next_generation(bench: Any) -> None:
    """Its control socket is closed at once; that it was reaped is said later, on a busy machine much later."""

    rig = Rig(bench)
    late: list[Any] = []
    bench.supervisor._on_event = late.append
    with socket.socket() as probe:
        probe.connect(("127.0.0.1", rig.open(1, loopback_only=True)))
        await bench.until(lambda: bool(rig.servers))
        os.kill(rig.servers[0], signal.SIGKILL)
        await bench.until(lambda: bool(rig.lost))
    port = rig.open(2, loopback_only=True)
    await bench.until(lambda: any(isinstance(event, ProcessEnded) for event in late))
    for event in late:
        rig.host.handle(event)
    assert [generation for generation, _ in rig.lost] == [1]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) == 0
    rig.host.close()


async def test_nothing_is_started_when_nobody_connects(bench: Any) -> None:
    rig = Rig(bench)
    ports = {rig.open(generation, loopback_only=True) for generation in (1, 2, 3)}
    await asyncio.sleep(0.05)
    assert rig.servers == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", rig.open(4, loopback_only=True))) == 0
        await bench.until(lambda: len(rig.servers) == 1)
    rig.host.close()
    assert len(ports) == 3


async def test_an_eager_host_starts_with_the_first_generation(bench: Any) -> None:
    rig = Rig(bench, eager=True)
    assert rig.servers == []
    rig.open(1, loopback_only=True)
    await bench.until(lambda: len(rig.servers) == 1)
    rig.host.close()
    await bench.until(lambda: not rig.servers)
    assert rig.lost == []


@pytest.mark.parametrize("python", ["no-such-python", "/bin/false"])
async def test_a_server_that_cannot_run_is_told_and_clients_are_refused(bench: Any, python: str) -> None:
    rig = Rig(bench, python=python, eager=True)
    port = rig.open(7, loopback_only=True)
    await bench.until(lambda: bool(rig.lost))
    assert rig.lost[0][0] == 7
    with socket.socket() as probe:
        await bench.until(lambda: probe.connect_ex(("127.0.0.1", port)) != 0)


async def test_a_python_without_torch_is_told(bench: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no site-packages
    python.chmod(0o755)

    rig = Rig(bench, python=str(python), eager=True)
    rig.open(1, loopback_only=True)
    await bench.until(lambda: bool(rig.lost))
    assert rig.lost[0][0] == 1
    assert "has no torch" in rig.lost[0][1]
    rig.host.close()


async def test_listening_addresses(bench: Any) -> None:
    rig = Rig(bench)
    rig.open(1, loopback_only=True)
    assert rig.host._listening is not None
    assert rig.host._listening.getsockname()[0] == "127.0.0.1"
    port = rig.open(2, loopback_only=False)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) == 0
    rig.host.close()
