"""Copies of memory slots on other nodes: what arrives, what is refused, and what is left when something breaks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import memory_folder
from holdfast.cli import main
from holdfast.memory_folder import COPIES, FETCHED, KEY, remove_folder
from holdfast.protocol.errors import CopyError, SnapshotMemoryError
from holdfast.train.snapshots import copy_connection, copy_service, disk, mapping, slots
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.copy_connection import CopyConnection, RateLimit
from holdfast.train.snapshots.copy_service import CopyService, all_slots, fetch
from holdfast.train.snapshots.mapping import Mappings
from holdfast.train.snapshots.saver_connection import key_of_life
from holdfast.train.snapshots.slots import COUNT_MAX, Slot, SlotOwner, Slots, lend
from tests.supervisor.conftest import no_threads
from tests.support.limits import limit_s, until
from tests.train.snapshots.saves import put

HOST = "127.0.0.1"
OURS, OTHERS = b"k" * 32, b"o" * 32
SIZE = 9 << 20
"""Three chunks."""


class Node:
    """A saver's service, and the slots of one rank."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder, self.rank = folder, rank
        self.service = CopyService(folder, Mappings())
        self.port = self.service.serve(OURS, HOST, 0)
        self.slots = Slots(folder, SlotOwner(0, rank, 2, 1), COUNT_MAX)

    def stage(self, step: int, attempt: int = 7, size: int = SIZE) -> Slot:
        request = SaveRequest("/runs", step, attempt, self.rank, 2, {"save": step})
        return put(self.slots, step, content(step, size), request)

    def send(self, slot: Slot, port: int, keep: int | None = None) -> None:
        assert slot.request is not None
        kept = None if keep is None else (keep, 7, keep)
        self.service.send(lend(slot), slot.sequence, slot.request, (HOST, port), kept)

    def copied(self, rank: int) -> list[int]:
        """The steps of this rank that it keeps; all whole."""
        found = slots.committed_slots(self.folder / COPIES, rank)
        assert all(bytes(each.data) == content(each.step, len(each.data)) for each in found)
        return sorted(each.step for each in found)

    def close(self) -> None:
        self.slots.close()
        self.service.close()


def content(step: int, size: int) -> bytes:
    return bytes([step % 251]) * size


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    made = Node(tmp_path / "a", 0), Node(tmp_path / "b", 1)
    yield made
    for each in made:
        each.close()
        until(lambda each=each: not each.service._open, "no connection is left")


class Between:
    """A connection to a saver through which only so many bytes go; then it is `broken`."""

    def __init__(
        self, port: int, bytes_max: int, broken: Callable[[socket.socket, socket.socket, bytes], None]
    ) -> None:
        self._to, self._left, self._broken = port, bytes_max, broken
        self._listening = socket.create_server((HOST, 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        caller, _ = self._listening.accept()
        saver = socket.create_connection((HOST, self._to))
        threading.Thread(target=self._back, args=(saver, caller), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := caller.recv(1 << 16):
                if len(data) > self._left:
                    self._left = 1 << 60
                    self._broken(caller, saver, data)
                else:
                    saver.sendall(data)
                    self._left -= len(data)

    def _back(self, saver: socket.socket, caller: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := saver.recv(1 << 16):
                caller.sendall(data)


def test_a_copy_arrives_and_can_be_fetched(pair: tuple[Node, Node], tmp_path: Path) -> None:
    a, b = pair
    a.send(a.stage(4), b.port)
    assert b.copied(0) == [4]
    newcomer = tmp_path / "c"
    newcomer.mkdir(mode=0o700)
    fetch(newcomer, (HOST, b.port), OURS, "/runs", (4, 7, 4), 0)
    ((folder, found),) = all_slots(newcomer)
    assert (folder.name, found.step, found.rank, found.world, found.generation) == (FETCHED, 4, 0, 2, 1)
    assert bytes(found.data) == content(4, SIZE)
    assert found.request is not None
    assert found.request.identity == (4, 7, 4)
    remove_folder(newcomer)
    assert not newcomer.exists()
    fetch(a.folder, (HOST, a.port), OURS, "/runs", (4, 7, 4), 0)  # its own state, from itself
    with pytest.raises(CopyError, match="step 5 of rank 0 is not here"):
        fetch(a.folder, (HOST, b.port), OURS, "/runs", (5, 7, 5), 0)
    with pytest.raises(CopyError, match="is not here"):
        fetch(a.folder, (HOST, b.port), OURS, "/other", (4, 7, 4), 0)


def test_the_state_that_all_have_stays(pair: tuple[Node, Node]) -> None:
    a, b = pair
    a.send(a.stage(1), b.port)
    a.send(a.stage(2), b.port, keep=1)
    a.send(a.stage(3), b.port, keep=1)
    assert b.copied(0) == [1, 3]
    a.send(a.stage(4), b.port, keep=3)
    assert b.copied(0) == [3, 4]


def test_a_sequence_number_may_come_again(pair: tuple[Node, Node]) -> None:
    """The states of a life were dropped, and it ended before the next one."""
    a, b = pair
    a.send(a.stage(1), b.port)
    a.slots.forget(above_step=0)
    a.slots.close()
    a.slots = Slots(a.folder, SlotOwner(0, a.rank, 2, 2), COUNT_MAX)
    again = a.stage(2, attempt=8)
    assert again.sequence == 1
    assert again.request is not None
    a.service.send(lend(again), again.sequence, again.request, (HOST, b.port), None)
    assert 2 in b.copied(0)


def test_a_state_that_is_held_is_not_staged_into(pair: tuple[Node, Node]) -> None:
    a, _ = pair
    a.stage(1)
    a.slots.hold((1, 7, 1))
    for step in (2, 3, 4, 5):
        a.stage(step)
        assert 1 in [each.step for each in a.slots.committed()]
    a.slots.hold((5, 7, 5))
    a.stage(6)
    assert sorted(each.step for each in a.slots.committed()) == [4, 5, 6]
    a.slots.hold((5, 7, 5), (6, 7, 6))
    for step in (7, 8):
        a.stage(step)
        assert sorted(each.step for each in a.slots.committed()) == [5, 6, step]


@pytest.mark.parametrize("lacks", ["the address", "threads"])
def test_what_cannot_be_served_now_is_served_later(
    pair: tuple[Node, Node], lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = pair[0]
    packet = {"word": "a life", "host": HOST, "bytes_s": 0.0}
    if lacks == "threads":
        node.service.close()
        node.service = CopyService(node.folder, Mappings())
        with no_threads(monkeypatch):
            answer = node.service.served(packet)
        assert "no more threads" in answer["text"]
    else:
        answer = node.service.served({**packet, "host": "256.0.0.1"})
    assert answer["port"] == 0
    answer = node.service.served(packet)
    assert (answer["port"] > 0, answer["text"]) == (True, "")


def test_copies_of_earlier_lives_go_when_all_have_one_of_this(pair: tuple[Node, Node]) -> None:
    a, b = pair
    before = Slots(b.folder / COPIES, SlotOwner(5))
    a.send(a.stage(1), b.port)
    os.makedirs(b.folder / COPIES, exist_ok=True)
    put(before, 9, bytes(100), SaveRequest("/runs", 9, 3, 5, 6))
    before.close()
    a.send(a.stage(2), b.port)
    assert memory_folder.local_ranks(b.folder / COPIES) == [0, 5]
    a.send(a.stage(3), b.port, keep=2)
    assert memory_folder.local_ranks(b.folder / COPIES) == [0]
    beside = Node(b.folder.parent / "c", 3)
    beside.send(beside.stage(2, attempt=8), b.port)
    a.send(a.stage(3, attempt=8), b.port, keep=2)  # of life 7: rank 3 has none of that here, but one of this life
    assert memory_folder.local_ranks(b.folder / COPIES) == [0, 3]
    beside.close()
    b.service.forget(2)
    assert b.copied(0) == [2]


def reset(caller: socket.socket, saver: socket.socket, _: bytes) -> None:
    for each in (caller, saver):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        each.close()


def flip(_: socket.socket, saver: socket.socket, data: bytes) -> None:
    saver.sendall(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("after", [10, 500, 3 << 20, SIZE - 1000])
@pytest.mark.parametrize("broken", [reset, flip])
def test_a_torn_or_altered_copy_is_none(
    pair: tuple[Node, Node], after: int, broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.send(a.stage(1), b.port)
    a.send(a.stage(2), b.port, keep=1)
    monkeypatch.setattr(copy_connection, "STALL_S", 0.5)  # a length was altered, or `Between` holds its socket
    with pytest.raises(CopyError):
        a.send(a.stage(3), Between(b.port, after, broken).port, keep=1)
    until(lambda: not b.service._open, "the connection is over")
    assert set(b.copied(0)) in ({1}, {1, 2})  # never 3, and what all have is there
    monkeypatch.undo()
    a.send(a.stage(4), b.port, keep=1)
    assert b.copied(0) == [1, 4]


def forge(_: socket.socket, saver: socket.socket, data: bytes) -> None:
    saver.sendall(forged(data))


def forged(data: bytes) -> bytes:
    """Other bytes with the same CRC: its polynomial changes nothing."""
    bits, at = f"{0x104C11DB7:b}", len(data) // 2
    change = bytes(int(bits[begin : begin + 8][::-1], 2) for begin in range(0, len(bits), 8))
    return data[:at] + bytes(map(int.__xor__, data[at : at + 5], change)) + data[at + 5 :]


def test_with_a_job_token_nobody_forges_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert zlib.crc32(forged(b"0123456789")) == zlib.crc32(b"0123456789")
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / KEY).write_bytes(b"derived from the token")
    a, b = Node(tmp_path / "a", 0), Node(tmp_path / "b", 1)
    with monkeypatch.context() as patch:
        patch.setattr(copy_connection, "STALL_S", limit_s(0.5))  # `Between` holds its socket
        with pytest.raises(CopyError):
            a.send(a.stage(1), Between(b.port, 3 << 20, forge).port)
    assert b.copied(0) == []
    a.send(a.stage(2), b.port)
    assert b.copied(0) == [2]
    for each in (a, b):
        each.close()


def test_the_crc_of_zlib_ng_is_that_of_zlib() -> None:
    """Nodes may differ in what they have."""
    from zlib_ng import zlib_ng

    data = memoryview(random.Random(1).randbytes(1 << 16))
    for begin in (0, 1, 15):
        for size in (*range(300), 1023, 1024, 65_000):
            part = data[begin : begin + size]
            assert zlib_ng.crc32(part) == zlib.crc32(part), (begin, size)
    assert disk.fast is zlib_ng
    assert disk.chunk_crc(data) == f"{zlib.crc32(data):08x}"


def test_memory_that_has_changed_since_is_not_handed_on(pair: tuple[Node, Node], tmp_path: Path) -> None:
    a, b = pair
    a.send(a.stage(1), b.port)
    with (b.folder / COPIES / "0.0").open("r+b") as file:
        file.seek(slots.HEADER_BYTES + 5 * 1000 * 1000 + 77)  # where no sample is
        file.write(b"x")
    (tmp_path / "c").mkdir()
    with pytest.raises(CopyError, match="a chunk has changed"):
        fetch(tmp_path / "c", (HOST, b.port), OURS, "/runs", (1, 7, 1), 0)
    assert list(all_slots(tmp_path / "c")) == []


def test_without_the_key_nothing_is_taken_or_given(pair: tuple[Node, Node]) -> None:
    a, b = pair
    slot = a.stage(1)
    for key in (OTHERS, b""):
        with pytest.raises(CopyError, match="does not know the key"):
            fetch(a.folder, (HOST, b.port), key, "/runs", (1, 7, 1), 0)
    with socket.create_connection((HOST, b.port)) as sock:  # a caller that skips our proof
        sock.sendall(copy_connection.MAGIC + bytes(16) + bytes(48) + b"\0\0\0\2{}")
        sock.settimeout(limit_s(10))
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1000):
                pass
    with socket.create_connection((HOST, b.port)) as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n" * 4)
        sock.settimeout(limit_s(10))
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1000) == b""
    a.service.serve(OTHERS, HOST, 0)
    with pytest.raises(CopyError, match="does not know the key"):
        a.send(slot, b.port)
    assert b.copied(0) == []


def test_the_key_comes_from_the_job_token_and_from_rank_0(tmp_path: Path) -> None:
    without = key_of_life(tmp_path, "word")
    (tmp_path / KEY).write_bytes(b"derived from the token")
    assert len({without, key_of_life(tmp_path, "word"), key_of_life(tmp_path, "another")}) == 3


def test_a_new_life_ends_the_connections_of_the_one_before(pair: tuple[Node, Node]) -> None:
    a, b = pair
    with CopyConnection.call((HOST, b.port), OURS) as connection:
        request = SaveRequest("/runs", 1, 7, 0, 2)
        connection.say(do="put", request=request.to_json(), size_bytes=SIZE, generation=1, keep=None)
        connection.hear("ready")
        assert b.service.serve(OTHERS, HOST, 0) == b.port
        with pytest.raises(CopyError):  # noqa: PT012 - which of both depends on the kernel's buffers
            connection.send_state(memoryview(content(1, SIZE)))
            connection.hear("kept")
    with pytest.raises(CopyError, match="does not know the key"):
        a.send(a.stage(1), b.port)
    assert b.copied(0) == []


def test_a_partner_that_is_gone_stopped_or_slow_costs_a_copy(
    pair: tuple[Node, Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(CopyError, match="refused"):
        a.send(a.stage(1), port)
    program = (
        "import sys, time; from pathlib import Path; from holdfast.train.snapshots.copy_service import CopyService;"
        "from holdfast.train.snapshots.mapping import Mappings;"
        f"print(CopyService(Path(sys.argv[1]), Mappings()).serve(b'k' * 32, '{HOST}', 0), flush=True); time.sleep(600)"
    )
    (tmp_path / "c").mkdir()
    with subprocess.Popen([sys.executable, "-c", program, tmp_path / "c"], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        a.send(a.stage(2), port)
        other.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:  # not for the copy before: it has to succeed, however slow the machine is
            patch.setattr(copy_connection, "STALL_S", limit_s(0.3))
            with pytest.raises(CopyError, match="does not answer, or takes nothing"):
                a.send(a.stage(3), port)
        other.kill()
        with pytest.raises(CopyError):
            a.send(a.stage(4), port)
    assert [each.step for each in slots.committed_slots(tmp_path / "c" / COPIES, 0)] == [2]


def test_without_memory_a_copy_is_refused(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair
    a.send(a.stage(1, size=1000), b.port)

    def none(_: int) -> None:
        raise OSError(12, "too little memory is available")

    slot = a.stage(2)
    monkeypatch.setattr(mapping, "check_memory", none)
    with pytest.raises(CopyError, match=r"refused: .* no room for a copy of 9 MB: too little memory"):
        a.send(slot, b.port)
    assert b.copied(0) == [1]
    with pytest.raises(SnapshotMemoryError):
        fetch(b.folder, (HOST, a.port), OURS, "/runs", (2, 7, 2), 0)


def test_memory_that_ends_while_a_state_is_fetched_leaves_none(
    pair: tuple[Node, Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    a.stage(3)
    pwrite = os.pwrite

    def short(fd: int, data: memoryview, at: int) -> int:
        if at > disk.CHUNK_BYTES:
            raise OSError(28, "no space left")
        return pwrite(fd, data, at)

    own = Slots(tmp_path, SlotOwner(0, 0, 2))
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", short)
        with pytest.raises(SnapshotMemoryError, match="no space left"):
            fetch(tmp_path, (HOST, a.port), OURS, "/runs", (3, 7, 3), 0, own)
    assert own.committed() == []
    assert memory_folder.slot_path(tmp_path, 0, 0).stat().st_size < slots.HEADER_BYTES, "what was taken is given back"
    fetch(tmp_path, (HOST, a.port), OURS, "/runs", (3, 7, 3), 0, own)
    assert [bytes(each.data) for each in own.committed()] == [content(3, SIZE)]
    own.close()


def test_what_was_received_is_given_from_the_same_memory(
    pair: tuple[Node, Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saver that was started again has to map it."""
    a, b = pair
    a.send(a.stage(3), b.port)
    opened: list[bool] = []
    read = copy_service.read_descriptor

    def noted(*given: Any, **named: Any) -> Slot | None:
        opened.append(True)
        return read(*given, **named)

    monkeypatch.setattr(copy_service, "read_descriptor", noted)
    for times, service in enumerate((b.service, CopyService(b.folder, Mappings()))):
        port = service.serve(OURS, HOST, 0)
        fetch(tmp_path, (HOST, port), OURS, "/runs", (3, 7, 3), 0)
        ((_, found),) = all_slots(tmp_path)
        assert bytes(found.data) == content(3, SIZE)
        assert len(opened) == times
    service.close()


def test_the_bandwidth_is_what_all_threads_have_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(copy_service.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(copy_service.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    pace = RateLimit(1000.0)
    for _ in range(11):
        pace.spend(500)
    assert now[0] == pytest.approx(105.0)
    RateLimit(0).spend(1 << 40)
    assert now[0] == pytest.approx(105.0)


def test_snaps_ls_shows_what_this_host_has_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_folder, "ROOT", tmp_path)
    runs = tmp_path / "runs"
    runs.mkdir()
    with contextlib.ExitStack() as closing:
        one, two = (Node(tmp_path / memory_folder.name_of("a-run", key), rank) for rank, key in enumerate("xy"))
        for node in (one, two):
            closing.callback(node.close)
        slot = put(one.slots, 4, bytes(4096), SaveRequest(str(runs), 4, 7, 0, 2, {"save": 4}))
        two.stage(9)  # of another folder
        one.send(slot, two.port)
        assert main(["snaps", "ls", "--json", str(runs)]) == 0
        found = json.loads(capsys.readouterr().out)["memory"]
        assert [(each["step"], each["rank"], each["copy"], each["run"]) for each in found] == [
            (4, 0, False, "a-run"),
            (4, 0, True, "a-run"),
        ]
        assert all(0 <= each["age_s"] < 600 for each in found)
        assert main(["snaps", "ls", str(runs)]) == 0
        told = capsys.readouterr().out
        assert "this node" in told
        assert "another node" in told


# --- callers that prove nothing ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def silent(port: int, count: int, host: str = HOST) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    with contextlib.ExitStack() as made:
        yield [
            made.enter_context(socket.create_connection((HOST, port), source_address=(host, 0))) for _ in range(count)
        ]


def test_silent_connections_keep_no_copy_out(pair: tuple[Node, Node]) -> None:
    """They took all places, for 20 s each, and needed no key for it."""
    a, b = pair
    with silent(b.port, copy_service.STRANGERS_MAX + 20):
        until(lambda: len(b.service._strangers) == copy_service.STRANGERS_MAX, "the service to be full of them")
        a.send(a.stage(4), b.port)
        assert b.copied(0) == [4]
        assert len(b.service._strangers) <= copy_service.STRANGERS_MAX


def test_those_of_another_machine_are_dropped_first(pair: tuple[Node, Node]) -> None:
    """Of two machines, one has far more of them: one that is slow on the other keeps its place."""
    _, b = pair
    with silent(b.port, 1, "127.0.0.2") as slow, silent(b.port, copy_service.STRANGERS_MAX + 20, "127.0.0.3"):
        until(lambda: len(b.service._strangers) == copy_service.STRANGERS_MAX, "the service to be full of them")
        until(lambda: "127.0.0.2" in b.service._strangers.values(), "the slow one to be there")
        with CopyConnection.call((HOST, b.port), OURS) as connection:
            connection.say(do="measure")
            connection.hear("found")
        assert "127.0.0.2" in b.service._strangers.values()
        slow[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            slow[0].recv(1)


def test_a_proof_that_comes_byte_by_byte_is_not_waited_for(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and all of them together never."""
    monkeypatch.setattr(copy_connection, "HANDSHAKE_S", 0.3)
    _, b = pair
    with silent(b.port, 1) as (slow,):
        slow.settimeout(0.01)

        def ended() -> bool:
            try:
                slow.sendall(b"H")
                return not slow.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True

        until(ended, "the end of the connection")


def test_a_lack_of_descriptors_or_threads_ends_no_service(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that accepts ended with the first error, and nothing could be copied to this node any more."""
    a, b = pair
    start, missing = threading.Thread.start, ["files", "threads"]
    monkeypatch.setattr(socket.socket, "accept", lacking_once(socket.socket.accept, missing, "files"))

    def lacking_threads(thread: threading.Thread) -> None:
        if "threads" in missing and thread.daemon:
            missing.remove("threads")
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", lacking_threads)

    def sent() -> bool:
        try:
            a.send(a.stage(4), b.port)
        except CopyError:
            return False
        return True

    until(sent, "a copy to arrive")
    until(sent, "another one")
    assert missing == []
    assert set(b.copied(0)) == {4}


def lacking_once(accept: Callable[[socket.socket], Any], missing: list[str], what: str) -> Callable[..., Any]:
    def accepted(listening: socket.socket) -> Any:
        if what in missing:
            missing.remove(what)
            raise OSError(24, "Too many open files")
        return accept(listening)

    return accepted


def test_where_a_caller_comes_from() -> None:
    assert copy_service._origin("10.0.0.1") == "10.0.0.1"
    assert copy_service._origin("::ffff:10.0.0.1") == "10.0.0.1", "a socket for both protocols shows it so"
    assert copy_service._origin("2001:db8::1") == copy_service._origin("2001:db8::ffff:2")
    assert copy_service._origin("2001:db8::1") != copy_service._origin("2001:db8:0:1::1")
    assert copy_service._origin("fe80::1%eth0") == copy_service._origin("fe80::2%eth0")
