"""A saver that cannot be started, or ends; what it gives to other nodes, and what it has to fetch."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import memory_folder, seqpacket
from holdfast.extensions.saver.messages import HeldStates, Holds, StateSources
from holdfast.extensions.saver.node import OnNode
from holdfast.journal import Journal
from holdfast.memory_folder import SOCKET
from holdfast.protocol import train_contract
from holdfast.protocol.messages import Assign, Start
from holdfast.runtime.node_extension import GenerationPrepared, WorkersStarted
from holdfast.supervisor.client import ProcessEnded
from holdfast.supervisor.service_process import CONTROL_FD
from holdfast.train.snapshots.slots import SlotOwner, Slots
from tests.supervisor.conftest import bench  # noqa: F401 - a fixture
from tests.support.limits import limit_s


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


def place(generation: int) -> Assign:
    """The place of a node with ranks 4 and 5 of 8."""
    return Assign(generation, 0, 2, 4, 4, 8, 4, 8, hosts_store=False)


def saver_of(
    supervisor: Any, say: Callable[[str], object] = print, send: Callable[[Any], None] = lambda _message: None
) -> OnNode:
    node: Any = SimpleNamespace(
        supervisor=supervisor,
        run_id="job",
        options=SimpleNamespace(token=None, nproc=2),
        say=say,
        write=Journal(None).write,
    )
    return OnNode(node, send)


async def test_what_a_saver_has_sent_is_shown_though_its_end_is_reported_first() -> None:
    notices: list[str] = []
    supervisor: Any = PretendSupervisor()
    host = saver_of(supervisor, notices.append)
    folder = host.environment(1, 0)[train_contract.SAVER_VARIABLE].partition("@")[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.connect(f"{folder}/{SOCKET}")
        await asyncio.wait_for(supervisor.started.wait(), limit_s(20))
    for text in ("the first", "the second"):
        seqpacket.send(supervisor.control, {"is": "news", "text": text})
    supervisor.control.close()
    host.supervisor(ProcessEnded(supervisor.key, 1, 0))
    assert notices == ["snapshots: the first", "snapshots: the second"]
    supervisor.alive = False  # starts no other saver for the connection that still waits
    await host.close(None)


async def test_a_saver_that_cannot_be_started_is_reported_once(
    bench: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notices: list[str] = []
    host = saver_of(bench.supervisor, notices.append)
    bench.supervisor._on_event = host.supervisor
    monkeypatch.setattr(train_contract.sys, "executable", "/no/such/python")
    folder = host.environment(1, 0)[train_contract.SAVER_VARIABLE].partition("@")[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.connect(f"{folder}/{SOCKET}")
        await bench.until(lambda: bool(notices))
        worker.settimeout(limit_s(20))
        assert seqpacket.receive(worker) is None, "it is not left waiting for answers"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker, pytest.raises(ConnectionRefusedError):
        worker.connect(f"{folder}/{SOCKET}")
    await host.close(None)
    (notice,) = notices
    assert "could not be started: No such file or directory" in notice
    assert os.path.basename(folder) not in os.listdir(os.path.dirname(folder))


async def test_what_a_saver_gives_is_known_until_it_ends() -> None:
    sent: list[Holds] = []
    supervisor: Any = PretendSupervisor()
    host = saver_of(supervisor, send=sent.append)
    folder = Path(host.environment(1, 0)[train_contract.SAVER_VARIABLE].partition("@")[0])
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

    host.happened(GenerationPrepared(place(3)))
    assert sent == [], "it gives nothing"

    async def said(word: str, *ranks: int, port: int = 4_000, folder: str = "/runs") -> HeldStates | None:
        about = {"is": "serving", "host": "10.0.0.1", "port": port, "word": word, "folder": folder, "world": 8}
        for rank in ranks:
            seqpacket.send(supervisor.control, {**about, "rank": rank})
        seqpacket.send(supervisor.control, {"is": "up"})
        await asyncio.sleep(0.05)
        sent.clear()
        host.happened(GenerationPrepared(place(3)))
        assert all(each.generation == 3 for each in sent)
        return sent[0].states if sent else None

    assert await said("a life", 0, 1) == HeldStates("10.0.0.1", 4_000, "a life", "/runs", 8, (0, 1, 6, 7))
    assert await said("the next", 1) == HeldStates("10.0.0.1", 4_000, "the next", "/runs", 8, (1, 6, 7))
    assert await said("one that cannot", 1, port=0) is None
    assert await said("one whose folder no message can hold", 1, folder="/runs\udcff") is None
    supervisor.alive = False
    supervisor.control.close()
    host.supervisor(ProcessEnded(supervisor.key, 1, 0))
    sent.clear()
    host.happened(GenerationPrepared(place(4)))
    assert sent == []
    await host.close(None)


async def test_the_saver_gets_its_order_before_any_worker_comes() -> None:
    supervisor: Any = PretendSupervisor()
    host = saver_of(supervisor)
    has = HeldStates("10.0.0.1", 4_000, "a life", "/runs", 8, (1, 5))
    for generation, known in ((2, StateSources(1, (has,))), (3, StateSources(3))):
        host.heard(known)
        host.happened(WorkersStarted(place(generation), Start(generation, "10.0.0.1", 1)))
        assert not supervisor.started.is_set(), "nobody has anything"
    host.heard(StateSources(4, (has,)))
    host.happened(WorkersStarted(place(4), Start(4, "10.0.0.1", 1)))
    folder = host.environment(1, 0)[train_contract.SAVER_VARIABLE].partition("@")[0]
    assert (Path(folder) / memory_folder.PREFETCH).is_dir()
    await asyncio.wait_for(supervisor.started.wait(), limit_s(20))
    received = seqpacket.receive(supervisor.control)
    assert received is not None
    assert received[0] == {"do": "prefetch", "states": [[1, 5, [["10.0.0.1", 4_000, "a life", "/runs"]]]]}
    supervisor.alive = False
    supervisor.control.close()
    host.supervisor(ProcessEnded(supervisor.key, 1, 0))
    assert not (Path(folder) / memory_folder.PREFETCH).exists(), "nobody waits for a saver that has ended"
    await host.close(None)
