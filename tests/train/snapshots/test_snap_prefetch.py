"""States that a node without any fetches while its workers start: what they find then, and what is left when it fails."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.linux import process_stat
from holdfast.memory_folder import KEY, PREFETCH
from holdfast.protocol.errors import CopyError
from holdfast.train.snapshots import disk
from holdfast.train.snapshots.copy_connection import CopyConnection, CopyPaths
from holdfast.train.snapshots.copy_service import Prefetch, WantedState, prefetch
from holdfast.train.snapshots.saver_connection import key_of_life
from holdfast.train.snapshots.slots import committed_slots
from tests.support.limits import until
from tests.train.snapshots.saves import Bench
from tests.train.snapshots.test_snap_copies import HOST, OTHERS, SIZE, Between, Node, content, pair

__all__ = ["pair"]
WORD = "a life"


@pytest.fixture
def newcomer(pair: tuple[Node, Node], tmp_path: Path) -> Path:
    """A node that has nothing; the pair has a life whose key it can know."""
    folder = tmp_path / "c"
    (folder / PREFETCH).mkdir(mode=0o700, parents=True)
    for node in pair:
        node.service.serve(key_of_life(folder, WORD), HOST, 0)
    return folder


def fetched(folder: Path, *ports: int, rank: int = 0, word: str = WORD) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    prefetch(folder, WantedState(0, rank, [(HOST, each, word, "/runs") for each in ports]), CopyPaths(), found.append)
    (answer,) = found
    return answer


def test_the_newest_copy_is_the_worker_s_own_slot_then(pair: tuple[Node, Node], newcomer: Path) -> None:
    a, b = pair
    for step in (3, 4):
        a.send(a.stage(step), b.port)
    answer = fetched(newcomer, b.port)
    about = {"local_rank": 0, "rank": 0, "step": 4, "of": HOST, "state": (4, 7, 4)}
    assert (answer.pop("took_s") > 0, answer) == (True, about)
    (slot,) = committed_slots(newcomer, 0)
    assert (slot.step, slot.rank, slot.world, slot.local_rank, slot.generation) == (4, 0, 2, 0, 1)
    assert bytes(slot.data) == content(4, SIZE)
    assert committed_slots(newcomer / PREFETCH, 0) == []


def test_a_node_gives_its_own_state_as_well(pair: tuple[Node, Node], newcomer: Path) -> None:
    _, b = pair
    b.stage(7)
    b.stage(8)
    assert fetched(newcomer, b.port, rank=1)["step"] == 8


def test_who_does_not_have_it_is_passed_over(pair: tuple[Node, Node], newcomer: Path) -> None:
    a, b = pair
    a.send(a.stage(4), b.port)
    a.slots.discard()
    assert fetched(newcomer, a.port, b.port)["step"] == 4


def test_what_the_worker_has_itself_is_not_replaced(pair: tuple[Node, Node], newcomer: Path) -> None:
    a, b = pair
    a.send(a.stage(4), b.port)
    own = Node(newcomer, 0)
    own.stage(9)
    assert fetched(newcomer, b.port) == {}
    assert [each.step for each in committed_slots(newcomer, 0)] == [9]
    own.close()


@pytest.mark.parametrize("fault", ["nobody", "another life", "not there", "another token"])
def test_what_cannot_be_fetched_leaves_nothing(pair: tuple[Node, Node], newcomer: Path, fault: str) -> None:
    a, b = pair
    a.send(a.stage(4), b.port)
    if fault == "another token":
        (newcomer / KEY).write_bytes(b"x" * 32)
    with socket.create_server((HOST, 0)) as free:
        nobody = free.getsockname()[1]
    port = nobody if fault == "nobody" else b.port
    word = "another" if fault == "another life" else WORD
    assert fetched(newcomer, port, rank=5 if fault == "not there" else 0, word=word) == {}
    assert committed_slots(newcomer, 0) == []


def test_a_source_that_dies_on_the_way_leaves_nothing(pair: tuple[Node, Node], newcomer: Path) -> None:
    a, b = pair
    a.send(a.stage(4), b.port)

    class Back(Between):
        """What is cut is the way back."""

        def _back(self, saver: socket.socket, caller: socket.socket) -> None:
            got = 0
            while got < SIZE // 2:
                data = saver.recv(1 << 16)
                caller.sendall(data)
                got += len(data)
            caller.shutdown(socket.SHUT_RDWR)

    assert fetched(newcomer, Back(b.port, 1 << 60, lambda *_: None).port) == {}
    assert committed_slots(newcomer, 0) == []
    assert fetched(newcomer, b.port)["step"] == 4, "what is left of it is in the way of nobody"


def test_a_new_life_does_not_end_what_a_newcomer_fetches(pair: tuple[Node, Node], newcomer: Path) -> None:
    a, b = pair
    a.send(a.stage(4), b.port)
    with CopyConnection.call((HOST, b.port), key_of_life(newcomer, WORD), disk.chunk_crc) as connection:
        connection.say(do="get", folder="/runs", state=None, rank=0)
        connection.hear("found")
        b.service.serve(OTHERS, HOST, 0)
        memory = memoryview(bytearray(SIZE))
        connection.receive_state(SIZE, memory)
    assert bytes(memory) == content(4, SIZE)
    with pytest.raises(CopyError, match="does not know the key"):
        CopyConnection.call((HOST, b.port), key_of_life(newcomer, WORD)).close()


class Hand:
    """Runs what a saver would run in threads, when it is called."""

    def __init__(self, folder: Path) -> None:
        self.prefetch = Prefetch(folder, self._in_thread)
        self.works: list[Callable[[], None]] = []

    def _in_thread(self, work: Callable[[Any], None], *, tell: Any) -> None:
        self.works.append(lambda: work(tell))


def test_workers_wait_until_all_is_there(pair: tuple[Node, Node], newcomer: Path) -> None:
    a, b = pair
    a.send(a.stage(4), b.port)
    b.stage(5)
    hand = Hand(newcomer)
    wanted = [(local, local, [(HOST, b.port, WORD, "/runs")]) for local in (0, 1)]
    hand.prefetch.begin({"states": wanted})
    answers: dict[int, dict[str, Any]] = {}
    hand.prefetch.when_over(0, lambda packet: answers.update({0: packet}))
    hand.works[0]()
    assert not answers
    hand.works[1]()
    assert answers[0]["fetched"]["step"] == 4
    assert (newcomer / PREFETCH).exists(), "the other one does not know yet what there is"
    hand.prefetch.when_over(1, lambda packet: answers.update({1: packet}))
    assert answers[1]["fetched"]["step"] == 5
    assert not (newcomer / PREFETCH).exists()


def test_a_worker_does_not_wait_for_a_saver_without_an_order(bench: Bench) -> None:
    """The one that had it was killed, and another one is started in its place."""
    folder = bench.place.folder
    bench.client.close()
    killed = bench.saver
    os.kill(killed, signal.SIGKILL)
    # Its command line is gone before its socket is closed, to which the next worker could still connect.
    until(lambda: (stat := process_stat(killed)) is None or stat.state == "Z", "it is gone")
    (folder / PREFETCH).mkdir(mode=0o700)
    bench.connect()
    assert bench.client.prefetched == {}
    until(lambda: not (folder / PREFETCH).exists(), "the next worker need not ask")
    bench.persist(1)
    bench.client.wait()
