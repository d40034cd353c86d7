"""A node's answer to a look: the samples of its workers, and the test connection to the store."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.extensions.hangs import node as node_module
from holdfast.extensions.hangs.messages import Look, Looked
from holdfast.extensions.hangs.node import OnNode
from holdfast.protocol.rank_progress import RankSample
from tests.support.limits import limit_s

SAMPLES = (RankSample(0, 4711, "S", 1.0),)


class MadeUpNode:
    """A node named b, on which generation 3 runs."""

    host = "b"

    def __init__(self, master: tuple[str, int]) -> None:
        self._master = master
        self.work: Coroutine[Any, Any, None] | None = None

    def workers(self, generation: int) -> Any:
        return SimpleNamespace(master=self._master) if generation == 3 else None

    async def samples(self) -> tuple[RankSample, ...]:
        return SAMPLES

    def start(self, _extension: str, work: Coroutine[Any, Any, None]) -> None:
        self.work = work


def looked(look: Look, address: str = "127.0.0.1", port: int = 1) -> Looked:
    """The only answer to this look."""
    sent: list[Any] = []
    node: Any = MadeUpNode((address, port))
    OnNode(node, sent.append).heard(look)

    async def run() -> None:
        async with asyncio.timeout(limit_s(20)):
            await node.work

    asyncio.run(run())
    (answer,) = sent
    assert (answer.generation, answer.number) == (look.generation, look.number)
    return answer


def reached(address: str, port: int, *, wanted: bool = True) -> tuple[str, ...]:
    answer = looked(Look(3, 7, wanted), address, port)
    assert answer.samples == SAMPLES
    return answer.reach


def test_where_another_generation_runs_or_none_nobody_is_sampled() -> None:
    assert looked(Look(2, 1, store=True)) == Looked(2, 1)


def test_a_store_that_answers_is_not_worth_a_word() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert reached("127.0.0.1", server.getsockname()[1]) == ()


def test_nobody_is_connected_to_unasked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        assert reached("127.0.0.1", server.getsockname()[1], wanted=False) == ()
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_closed_port(free_port: Callable[[], int]) -> None:
    port = free_port()
    assert reached("127.0.0.1", port) == (f"b cannot reach 127.0.0.1:{port}: connection refused",)


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    told = "b cannot reach no-such-host.invalid:29500: the name is not known here (Name or service not known)"
    assert reached("no-such-host.invalid", 29500) == (told,)


def test_a_connection_that_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full: what comes is dropped, as a firewall does."""
    monkeypatch.setattr(node_module, "REACH_S_MAX", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        crowd = [socket.socket() for _ in range(4)]
        for each in crowd:
            each.setblocking(False)
            each.connect_ex(address)
        try:
            assert reached(*address) == (f"b cannot reach 127.0.0.1:{address[1]}: timed out",)
        finally:
            for each in crowd:
                each.close()
