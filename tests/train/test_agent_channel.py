"""A worker's channel to its agent, with an agent's socket that the test holds; and the cut of a group's sockets."""

from __future__ import annotations

import _thread
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import seqpacket
from holdfast.protocol.board_layout import BOARD_VARIABLE, INTERRUPT_SIGNAL, channel_name
from holdfast.train.agent_channel import (
    MODULE_CALL,
    AgentChannel,
    ChannelLostError,
    Go,
    GroupSockets,
    Release,
    open_sockets,
)
from tests.support.limits import limit_s, until


class Interrupted(BaseException):
    pass


class AgentEnd:
    def __init__(self, board: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(channel_name(os.stat(board.rpartition("@")[0]).st_ino))
        self._listening.listen()
        self.channel = AgentChannel.open({BOARD_VARIABLE: board})
        assert self.channel is not None
        self.connection, _ = self._listening.accept()

    def order(self, **message: object) -> None:
        seqpacket.send(self.connection, dict(message))

    def next(self) -> dict[str, object]:
        self.connection.settimeout(limit_s(30))
        received = seqpacket.receive(self.connection)
        assert received is not None
        return received[0]

    def close(self) -> None:
        self.channel.close()
        self.connection.close()
        self._listening.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentEnd]:
    (tmp_path / "board").touch()
    end = AgentEnd(f"{tmp_path}/board@16")
    yield end
    end.close()


def test_without_an_agent_there_is_no_channel(tmp_path: Path) -> None:
    assert AgentChannel.open({}) is None
    assert AgentChannel.open({BOARD_VARIABLE: f"{tmp_path}/board@16"}) is None
    (tmp_path / "board").touch()
    assert AgentChannel.open({BOARD_VARIABLE: f"{tmp_path}/board@16"}) is None


def test_a_worker_is_released_waits_at_the_gate_and_goes_on(agent: AgentEnd) -> None:
    channel = agent.channel
    channel.say("can_go_on", generation=0)
    assert agent.next() == {"is": "can_go_on", "generation": 0}
    assert channel.released is None
    agent.order(do="release", generation=2, at_once=True)
    assert channel.await_immediate(limit_s(30)) == Release(2, at_once=True)
    places: list[Go] = []
    waiting = threading.Thread(target=lambda: places.append(channel.await_go()))
    waiting.start()
    assert agent.next() == {"is": "waits", "generation": 2}
    agent.order(do="go", generation=2, environment={"RANK": "1"})
    waiting.join()
    assert places == [Go(2, {"RANK": "1"})]
    assert channel.released is None


def test_a_generation_that_is_given_up_is_answered_and_its_place_is_not_taken(agent: AgentEnd) -> None:
    places: list[Go] = []
    waiting = threading.Thread(target=lambda: places.append(agent.channel.await_go()))
    agent.order(do="release", generation=2, at_once=True)
    waiting.start()
    assert agent.next()["generation"] == 2
    agent.order(do="release", generation=3, at_once=True)
    assert agent.next()["generation"] == 3
    agent.order(do="go", generation=3, environment={})
    waiting.join()
    assert places == [Go(3, {})]


def test_a_message_that_has_arrived_is_found_without_the_thread(agent: AgentEnd) -> None:
    agent.order(do="release", generation=2, at_once=False)
    assert agent.channel.catch_up() == Release(2, at_once=False)


def test_a_loss_on_the_way_to_a_safe_point_is_waited_for(agent: AgentEnd) -> None:
    """The peer is gone before the news of it comes: what its loss raises here is no fault of this worker."""
    agent.order(do="release", generation=2, at_once=False)
    until(lambda: agent.channel.released == Release(2, at_once=False), "the first order has come")
    later = threading.Timer(0.05, lambda: agent.order(do="release", generation=3, at_once=True))
    later.start()
    assert agent.channel.await_immediate(limit_s(30)) == Release(3, at_once=True)
    later.join()


def test_the_end_of_the_agent_ends_the_waits(agent: AgentEnd) -> None:
    agent.connection.close()
    assert agent.channel.await_immediate(limit_s(30)) is None
    with pytest.raises(ChannelLostError):
        agent.channel.await_go()


def test_the_loss_of_a_worker_cuts_the_group(agent: AgentEnd) -> None:
    cut = threading.Event()
    agent.channel.train(cut.set, lambda: False, Interrupted)
    agent.order(do="release", generation=2, at_once=True)
    assert cut.wait(limit_s(30))
    agent.channel.arrive()


def test_the_main_thread_does_not_go_on_while_its_group_is_being_cut(agent: AgentEnd) -> None:
    """It would open the sockets of the next group, which would be cut as well."""
    begun = threading.Event()
    done = []

    def cut() -> None:
        begun.set()
        time.sleep(0.1)
        done.append("cut")

    agent.channel.train(cut, lambda: False, Interrupted)
    agent.order(do="release", generation=2, at_once=True)
    assert begun.wait(limit_s(30))
    agent.channel.arrive()
    assert done == ["cut"]


def test_a_thread_that_is_late_does_not_cut_the_next_group(agent: AgentEnd) -> None:
    """The main thread has waited, and trains in the next generation, before the thread gets the processor."""
    channel, cut = agent.channel, threading.Event()
    agent.order(do="release", generation=2, at_once=True)
    late = channel.await_immediate(limit_s(30))
    agent.order(do="go", generation=2, environment={})
    assert channel.await_go() == Go(2, {})
    channel.train(cut.set, lambda: False, Interrupted)
    channel._free_main_thread(late)  # as the thread does then
    channel.arrive()
    assert not cut.is_set()


def test_a_loss_on_the_way_into_a_generation_is_cut_until_the_main_thread_comes_back(agent: AgentEnd) -> None:
    """It may open one connection after the other until it finds that one of them was cut."""
    channel, cuts = agent.channel, threading.Semaphore(0)
    agent.order(do="go", generation=2, environment={})
    assert channel.await_go(cuts.release) == Go(2, {})
    agent.order(do="release", generation=3, at_once=True)
    for _ in range(3):
        assert cuts.acquire(timeout=limit_s(30))
    channel.arrive()
    agent.order(do="go", generation=3, environment={})
    assert channel.await_go() == Go(3, {})
    while cuts.acquire(blocking=False):
        pass
    agent.order(do="release", generation=4, at_once=True)
    assert channel.await_immediate(limit_s(30)) == Release(4, at_once=True)
    channel.close()  # waits for the thread, which has handled the message
    assert not cuts.acquire(blocking=False), "who waits is left alone"


def test_a_channel_is_closed_although_a_rank_was_lost_on_the_way(agent: AgentEnd) -> None:
    cut = threading.Event()
    agent.order(do="go", generation=2, environment={})
    agent.channel.await_go(cut.set)
    agent.order(do="release", generation=3, at_once=True)
    assert cut.wait(limit_s(30))
    agent.channel.close()
    assert not agent.channel._thread.is_alive()


def test_a_regroup_without_a_loss_cuts_nothing(agent: AgentEnd) -> None:
    cut = threading.Event()
    agent.channel.train(cut.set, lambda: False, Interrupted)
    agent.order(do="release", generation=2, at_once=False)
    until(lambda: agent.channel.released == Release(2, at_once=False), "the order has come")
    agent.channel.arrive()
    agent.channel.close()  # waits for the thread, which has handled the message
    assert not cut.is_set()


def released(agent: AgentEnd) -> bool:
    return agent.channel.released is not None


def call_module(work: Callable[[], object]) -> None:
    """As torch calls a module's `forward`."""
    names = {"__name__": MODULE_CALL[0]}
    exec(f"def {MODULE_CALL[1]}(work):\n    work()\n", names)
    names[MODULE_CALL[1]](work)


def works(agent: AgentEnd, allowed: threading.Event) -> None:
    deadline_s = time.monotonic() + limit_s(60)
    while time.monotonic() < deadline_s:
        if released(agent):
            allowed.set()  # the optimizer is done
        time.sleep(0.001)


def test_a_main_thread_that_does_not_come_is_interrupted_in_the_call_of_a_module(agent: AgentEnd) -> None:
    allowed = threading.Event()
    agent.channel.train(lambda: None, allowed.is_set, Interrupted)
    agent.order(do="release", generation=2, at_once=True)
    with pytest.raises(Interrupted):
        call_module(lambda: works(agent, allowed))
    agent.channel.arrive()


def test_code_outside_of_modules_is_not_interrupted(agent: AgentEnd, tmp_path: Path) -> None:
    """A file that is being written is written to its end."""
    file = tmp_path / "rows"
    asked: list[None] = []
    agent.channel.train(lambda: None, lambda: asked.append(None) is None, Interrupted)
    agent.order(do="release", generation=2, at_once=True)
    with file.open("w") as out:
        while len(asked) < 20:  # so often would it have been interrupted
            out.write("row\n")
            time.sleep(0.001)
        out.write("end\n")
    assert file.read_text().endswith("end\n")
    with pytest.raises(Interrupted):
        call_module(lambda: works(agent, threading.Event()))
    agent.channel.arrive()


def test_after_the_arrival_nothing_is_interrupted(agent: AgentEnd) -> None:
    asked = threading.Event()

    def refuses() -> bool:
        asked.set()
        return False

    agent.channel.train(lambda: None, refuses, Interrupted)
    agent.order(do="release", generation=2, at_once=True)
    until(asked.is_set, "it would have been interrupted")
    agent.channel.arrive()
    agent.channel._may_interrupt = lambda: True
    _thread.interrupt_main(INTERRUPT_SIGNAL)  # one that was on its way
    call_module(lambda: time.sleep(0))
    agent.order(do="release", generation=3, at_once=True)
    until(lambda: agent.channel.released == Release(3, at_once=True), "the thread reads on")


def test_the_signal_s_handler_goes_with_the_channel(agent: AgentEnd) -> None:
    before = signal.getsignal(INTERRUPT_SIGNAL)
    agent.channel.train(lambda: None, lambda: True, Interrupted)
    assert signal.getsignal(INTERRUPT_SIGNAL) != before
    agent.channel.close()
    assert signal.getsignal(INTERRUPT_SIGNAL) == before


def test_a_group_s_connections_are_shut_for_reading_and_stay_open_for_the_peer() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    other, theirs_of_other = socket.socketpair()  # opened before the group
    sockets = GroupSockets()
    with sockets.noting():
        ours = socket.create_connection(listening.getsockname())
        own_listening = socket.create_server(("127.0.0.1", 0))
    theirs, _ = listening.accept()
    number = ours.fileno()
    assert sockets.cut() == 1
    assert ours.recv(1) == b""
    ours.close()  # as gloo does when a wait has ended
    theirs.settimeout(0.2)
    with pytest.raises(TimeoutError):
        theirs.recv(1)  # the connection is not closed yet
    theirs.send(b"x")
    socket.create_connection(own_listening.getsockname()).close()  # it listens still
    theirs_of_other.send(b"y")
    assert other.recv(1) == b"y"
    sockets.forget()
    theirs.settimeout(limit_s(30))
    with pytest.raises(ConnectionError):  # its byte was never read
        theirs.recv(1)
    for each in (listening, own_listening, theirs, other, theirs_of_other):
        each.close()
    assert number not in open_sockets()


def test_a_group_is_cut_while_it_is_being_made() -> None:
    sockets = GroupSockets()
    with sockets.noting():
        with sockets.noting():  # as where a group of the program's own is made
            first, its_peer = socket.socketpair()
        second, other = socket.socketpair()
        assert sockets.cut() == 4
        third, another = socket.socketpair()
        assert sockets.cut() == 6, "what was opened since, and nothing twice"
        assert [each.recv(1) for each in (first, second, third)] == [b""] * 3
    later, beside = socket.socketpair()
    assert sockets.cut() == 6
    sockets.forget()
    for each in (first, its_peer, second, other, third, another, later, beside):
        each.close()


def test_a_number_that_another_socket_has_now_is_left_alone() -> None:
    sockets = GroupSockets()
    with sockets.noting():
        first, its_peer = socket.socketpair()
    second, other = socket.socketpair()
    os.dup2(second.fileno(), first.fileno())
    its_peer.close()
    assert sockets.cut() == 0
    other.send(b"x")
    assert first.recv(1) == b"x"
    for each in (first, second, other):
        each.close()
