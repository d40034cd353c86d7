"""The store host with torch's own clients, over generations, and without any; a saver that cannot be started, or ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast import memory_folder, seqpacket
from holdfast.journal import Journal
from holdfast.memory_folder import SOCKET
from holdfast.protocol import train_contract
from holdfast.protocol.policy import HeldStates
from holdfast.supervisor import processes
from holdfast.supervisor.client import ProcessEnded
from holdfast.supervisor.service_host import CONTROL_FD, SaverHost, StoreHost
from holdfast.train.snapshots.slots import SlotOwner, Slots
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
        self.host = StoreHost(bench.supervisor, python, lambda *word: self.lost.append(word), eager=eager)
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


class PretendSupervisor:
    """Starts nothing; the test has the service's end of the socket."""

    def __init__(self) -> None:
        self.alive = True
        self.key = ""
        self.control = socket.socket()
        self.started = asyncio.Event()

    def spawn(self, key: str, argv: object, *, fds: Mapping[int, int], **_: object) -> None:
        self.control.close()
        self.key, self.control = key, socket.socket(fileno=os.dup(fds[CONTROL_FD]))
        self.started.set()

    def remove_at_end(self, path: str) -> None:
        pass


async def test_what_a_saver_has_sent_is_shown_though_its_end_is_reported_first() -> None:
    notices: list[str] = []
    supervisor: Any = PretendSupervisor()
    host = SaverHost(supervisor, "job", notices.append, Journal(None))
    folder = host.environment(1, 0)[train_contract.SAVER_VARIABLE].partition("@")[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.connect(f"{folder}/{SOCKET}")
        await asyncio.wait_for(supervisor.started.wait(), limit_s(20))
    for text in ("the first", "the second"):
        seqpacket.send(supervisor.control, {"is": "news", "text": text})
    supervisor.control.close()
    host.handle(ProcessEnded(supervisor.key, 1, 0))
    assert notices == ["snapshots: the first", "snapshots: the second"]
    supervisor.alive = False  # starts no other saver for the connection that still waits
    await host.close()


async def test_a_saver_that_cannot_be_started_is_reported_once(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    host = SaverHost(bench.supervisor, "job", notices.append, Journal(None))
    bench.supervisor._on_event = host.handle
    monkeypatch.setattr(train_contract.sys, "executable", "/no/such/python")
    folder = host.environment(1, 0)[train_contract.SAVER_VARIABLE].partition("@")[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.connect(f"{folder}/{SOCKET}")
        await bench.until(lambda: bool(notices))
    await host.close()
    (notice,) = notices
    assert "could not be started: No such file or directory" in notice
    assert os.path.basename(folder) not in os.listdir(os.path.dirname(folder))


async def test_what_a_saver_gives_is_known_until_it_ends() -> None:
    supervisor: Any = PretendSupervisor()
    host = SaverHost(supervisor, "job", print, Journal(None))
    folder = Path(host.environment(1, 0)[train_contract.SAVER_VARIABLE].partition("@")[0])
    assert host.states() is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.connect(f"{folder}/{SOCKET}")
        await asyncio.wait_for(supervisor.started.wait(), limit_s(20))
    (folder / memory_folder.COPIES).mkdir()
    for rank in (6, 7, 8):
        copies = Slots(folder / memory_folder.COPIES, SlotOwner(rank), 2)
        memory = copies.stage(3, 10)
        assert memory is not None
        if rank < 8:
            copies.commit()
        copies.close()
    (folder / memory_folder.COPIES / "9.owner").touch()

    async def said(word: str, *ranks: int, port: int = 4_000, folder: str = "/runs") -> HeldStates | None:
        about = {"is": "serving", "host": "10.0.0.1", "port": port, "word": word, "folder": folder, "world": 8}
        for rank in ranks:
            seqpacket.send(supervisor.control, {**about, "rank": rank})
        seqpacket.send(supervisor.control, {"is": "up"})
        await asyncio.sleep(0.05)
        return host.states()

    assert await said("a life", 0, 1) == HeldStates("10.0.0.1", 4_000, "a life", "/runs", 8, (0, 1, 6, 7))
    assert await said("the next", 1) == HeldStates("10.0.0.1", 4_000, "the next", "/runs", 8, (1, 6, 7))
    assert await said("one that cannot", 1, port=0) is None
    assert await said("one whose folder no message can hold", 1, folder="/runs\udcff") is None
    supervisor.alive = False
    supervisor.control.close()
    host.handle(ProcessEnded(supervisor.key, 1, 0))
    assert host.states() is None
    await host.close()


async def test_the_saver_gets_its_order_before_any_worker_comes() -> None:
    supervisor: Any = PretendSupervisor()
    host = SaverHost(supervisor, "job", print, Journal(None))
    host.prefetch({0: 4, 1: 5}, ())
    assert not supervisor.started.is_set(), "nobody has anything"
    has = HeldStates("10.0.0.1", 4_000, "a life", "/runs", 8, (1, 5))
    host.prefetch({0: 4, 1: 5}, (has,))
    folder = host.environment(1, 0)[train_contract.SAVER_VARIABLE].partition("@")[0]
    assert (Path(folder) / memory_folder.PREFETCH).is_dir()
    await asyncio.wait_for(supervisor.started.wait(), limit_s(20))
    received = seqpacket.receive(supervisor.control)
    assert received is not None
    assert received[0] == {"do": "prefetch", "states": [[1, 5, [["10.0.0.1", 4_000, "a life", "/runs"]]]]}
    supervisor.alive = False
    supervisor.control.close()
    host.handle(ProcessEnded(supervisor.key, 1, 0))
    assert not (Path(folder) / memory_folder.PREFETCH).exists(), "nobody waits for a saver that has ended"
    await host.close()
