"""An exception of ours ends the agent wherever it is raised; what asyncio meets alone does not."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from holdfast.authority.sole import Sole
from holdfast.coordinator.coordinator import Coordinator
from holdfast.journal import Journal
from holdfast.protocol.errors import BindingError, HoldfastError, InternalError, PlatformError
from holdfast.protocol.messages import FromAgent, FromCoordinator, Join, Joined, Leave, Ping, Pong
from holdfast.protocol.policy import JobSpec, Limits, NodeSpec
from holdfast.runtime.connection import Connection
from holdfast.runtime.coordinator_service import CoordinatorService
from holdfast.runtime.driver import REPORT_INTERVAL_S, Driver, Troubles, as_error, fault_of
from tests.support.limits import limit_s, settled
from tests.support.simulator.nodes import simple_judge

NO_FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Echo:
    """A machine whose only command is the event itself."""

    def __init__(self, *, broken: Exception | None = None) -> None:
        self.broken = broken
        self.handled: list[str] = []

    def handle(self, now: float, event: str) -> Iterable[str]:
        if self.broken is not None:
            raise self.broken
        self.handled.append(event)
        return [event]

    def next_deadline(self) -> float | None:
        return None


def fault_at(machine: Echo, execute: Callable[[str], None]) -> tuple[HoldfastError, list[tuple[HoldfastError, str]]]:
    """What feeding one event raises, and what `on_fault` was given."""
    told: list[tuple[HoldfastError, str]] = []

    async def run() -> HoldfastError:
        driver = Driver(machine, "tick", execute, on_fault=lambda error, event: told.append((error, event)))
        with pytest.raises(HoldfastError) as caught:
            driver.feed("poison")
        driver.feed("later")
        assert "later" not in machine.handled, "a broken machine handles nothing more"
        return caught.value

    return asyncio.run(run()), told


@pytest.mark.parametrize("error", [NO_FILES, KeyError("n1"), OverflowError("int too big"), AssertionError("broken")])
def test_whatever_a_machine_raises_is_a_fault_of_ours(error: Exception) -> None:
    fault, told = fault_at(Echo(broken=error), lambda _: None)
    assert isinstance(fault, InternalError)
    assert fault.exit_code == 70
    assert "poison" in str(fault), "the story is told"
    assert told == [(fault, "poison")]


def test_whatever_a_command_raises_is_a_fault_of_ours() -> None:
    def no_room(_: str) -> None:
        raise NO_FILES

    fault, told = fault_at(Echo(), no_room)
    assert isinstance(fault, InternalError)
    assert "Too many open files" in str(fault)
    assert told == [(fault, "poison")]


def test_an_error_of_the_callers_stays_one() -> None:
    def refuse(_: str) -> None:
        raise BindingError("no device")

    fault, _ = fault_at(Echo(), refuse)
    assert isinstance(fault, BindingError)


async def test_a_broken_coordinator_answers_no_ping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agents have received the end of the job; an answer would confirm a coordinator that decides nothing more."""
    job = JobSpec(run_id="t", min_nodes=1, max_nodes=1, backend="c10d")
    now = asyncio.get_running_loop().time()
    machine = Coordinator(job, Limits(), simple_judge, now, Sole(Limits(), now))
    journal = Journal(tmp_path / "events.jsonl")
    service = CoordinatorService(machine, journal, lambda _: None)
    received: list[FromCoordinator] = []
    service.connect_locally().start(received.append, lambda _: None)
    service.connect_locally()

    async def answers(message: FromAgent) -> list[type[FromCoordinator]]:
        received.clear()
        service.heard(1, message)
        await asyncio.sleep(0)
        return [type(each) for each in received]

    assert Joined in await answers(Join(NodeSpec(member="a#1", host="a", nproc=1)))
    assert await answers(Ping(1)) == [Pong]
    monkeypatch.setattr(machine, "_on_message", lambda now, link, message: 1 // 0)
    with pytest.raises(InternalError):
        service.heard(2, Leave("poison"))
    await asyncio.sleep(0)
    assert await answers(Ping(2)) == []
    journal.close()


class OpenSession:
    """A session whose every byte is a message."""

    established, met, error, torn = True, True, None, False

    def __init__(self) -> None:
        self._messages: list[bytes] = []

    def opening(self) -> bytes:
        return b""

    def only(self, data: bytes) -> bytes:
        return data

    def feed(self, data: bytes) -> bytes:
        self._messages.append(data)
        return b""

    def take(self) -> list[bytes]:
        messages, self._messages = self._messages, []
        return messages


def test_an_oserror_at_a_message_is_no_lost_connection() -> None:
    """asyncio swallows an OSError from a protocol and closes the connection, which then is dialled again for ever."""

    def no_room(_: Any) -> None:
        raise NO_FILES

    async def run() -> Exception | None:
        loop = asyncio.get_running_loop()
        met: asyncio.Future[Exception | None] = loop.create_future()
        loop.set_exception_handler(lambda _, context: met.done() or met.set_result(fault_of(context)))
        connection: Connection[Any] = Connection(OpenSession(), lambda *_: None)  # type: ignore[arg-type]
        server = await loop.create_server(lambda: connection, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x")
        await settled(lambda: connection.open)
        connection.start(no_room, lambda _: None)
        async with asyncio.timeout(limit_s(20)):
            found = await met
        writer.close()
        connection.abort()
        server.close()
        await asyncio.sleep(0)
        return found

    assert isinstance(asyncio.run(run()), InternalError)


def raised_here() -> OSError:
    try:
        raise NO_FILES.with_traceback(None)
    except OSError as error:
        return error


def test_an_oserror_without_our_code_is_the_systems() -> None:
    assert fault_of({"message": "socket.accept() out of system resource", "exception": raised_here()}) is None
    assert fault_of({"message": "Task was destroyed but it is pending!"}) is None
    error = ValueError("ours")
    assert fault_of({"exception": error}) is error


def test_the_same_trouble_is_said_once_in_a_while() -> None:
    said: list[str] = []
    clock = [100.0]
    troubles = Troubles(said.append, lambda: clock[0])
    for _ in range(10_000):
        troubles.report({"message": "socket.accept() out of system resource", "exception": NO_FILES})
    assert len(said) == 1
    assert "Too many open files" in said[0]
    clock[0] += REPORT_INTERVAL_S
    troubles.report({"message": "socket.accept() out of system resource", "exception": NO_FILES})
    assert len(said) == 2


def test_no_room_for_a_thread_is_the_machines() -> None:
    error = as_error(RuntimeError("can't start new thread"))
    assert isinstance(error, PlatformError)
    assert "ulimit -u" in str(error)


def test_no_room_for_a_thread_is_the_cause_of_what_follows_from_it() -> None:
    """As asyncio.run does: it joins the thread that it could not start."""

    def give_up() -> None:
        try:
            raise RuntimeError("can't start new thread")
        finally:
            threading.Thread(target=print).join()

    with pytest.raises(RuntimeError, match="cannot join") as raised:
        give_up()
    assert isinstance(as_error(raised.value), PlatformError)


def test_the_first_of_a_group_is_told() -> None:
    group = ExceptionGroup("tasks", [ExceptionGroup("inner", [NO_FILES]), ValueError("second")])
    error = as_error(group)
    assert isinstance(error, InternalError)
    assert error.__cause__ is NO_FILES
    assert as_error(error) is error
