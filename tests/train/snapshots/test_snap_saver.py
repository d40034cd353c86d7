"""The saver without an agent: what is saved when workers, launchers and savers die, and what ends with what."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import memory_folder, seqpacket
from holdfast.linux import process_stat
from holdfast.protocol import train_contract
from holdfast.protocol.errors import (
    SaverLostError,
    SnapshotIncompleteError,
    SnapshotMemoryError,
)
from holdfast.train.snapshots import changes, saver_client, saver_connection, slots
from holdfast.train.snapshots import folder as snapshots
from holdfast.train.snapshots import saver as saver_module
from holdfast.train.snapshots.changes import SaveRequest
from holdfast.train.snapshots.flush import rescue_attempt
from holdfast.train.snapshots.layout import record_file
from holdfast.train.snapshots.saver import Saver
from holdfast.train.snapshots.saver_client import SaverClient
from holdfast.train.snapshots.saver_connection import SaverAddress
from tests.support.limits import limit_s, until
from tests.train.snapshots.saves import SIZE, WAIT_S, Bench, Memory, savers

WORKER = """
import os, signal, sys, time
from pathlib import Path
from holdfast.train.snapshots.changes import SaveRequest, begin
from holdfast.train.snapshots.saver_client import SaverClient
from holdfast.train.snapshots.saver_connection import SaverAddress

FOLDER, SIZE = sys.argv[1], 2 << 20
LIMIT_S = 20 * float(os.environ["TEST_SLOWNESS"])
place = SaverAddress.find()
saver = SaverClient(place)
own = saver.slots

def stage(step, rescue=0):
    memory = own.stage(step, SIZE)
    memory[:] = bytes([step % 251]) * SIZE
    saver.commit(SaveRequest(FOLDER, step, rescue, 0, 1, metadata={"kept": step}) if rescue else None)

def persist(step):
    stage(step)
    saver.persist(SaveRequest(FOLDER, step, begin(FOLDER, step), 0, 1, metadata={"loss": 0.5}))

def say(*words):
    os.write(1, (" ".join(map(str, (place.folder, *words))) + "\\n").encode())  # one line, whoever else writes

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(*line: str) -> subprocess.CompletedProcess[str]:
    """What this Python prints."""
    return subprocess.run([sys.executable, *line], capture_output=True, text=True, timeout=limit_s(60))


def run_worker(body: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run("-c", WORKER + body, str(folder))


def committed(folder: Path) -> dict[int, dict[str, Any]]:
    """Step -> metadata."""
    found = [path for path in folder.glob("step_*") if path.is_dir()] if folder.is_dir() else []
    return {int(path.name[5:14]): json.loads((path / "MANIFEST.json").read_bytes())["metadata"] for path in found}


def content(folder: Path, step: int) -> bytes:
    (path,) = folder.glob(f"step_{step:09d}.*/rank_00000.safetensors")
    return path.read_bytes()


# --- in this process --------------------------------------------------------------------------------------------------


def test_what_was_handed_over_is_on_the_disk(bench: Bench) -> None:
    bench.persist(1)
    bench.save(2)
    assert committed(bench.folder) == {1: {"step": 1}, 2: {"step": 2}}
    assert content(bench.folder, 2) == b"\2" * SIZE
    assert not bench.client.busy


def test_a_failure_comes_out_at_the_next_call_as_what_it_is(bench: Bench) -> None:
    bench.hand_over(SaveRequest(str(bench.folder / "no"), 1, 1, 0, 1))
    with pytest.raises(SnapshotIncompleteError, match="is not there"):
        bench.client.wait(WAIT_S)
    bench.client.check()
    bench.save(2)
    assert list(committed(bench.folder)) == [2]


def test_a_killed_saver_is_told_and_replaced(bench: Bench) -> None:
    first = bench.saver
    # Of two ranks, of which one never comes: it is not done before it is killed, however fast the disk is.
    bench.hand_over(SaveRequest(str(bench.folder), 1, changes.begin(bench.folder, 1), 0, 2), 64 << 20)
    until(
        lambda: [path for path in bench.folder.glob("attempt.*/rank_00000.safetensors") if path.stat().st_size],
        "it writes",
    )
    os.kill(first, signal.SIGKILL)
    with pytest.raises(SaverLostError, match="step 1 was not saved"):
        bench.client.wait(WAIT_S)
    bench.client.check()
    bench.save(2)
    assert list(committed(bench.folder)) == [2]
    assert bench.saver != first


def test_rank_0_does_not_wait_for_a_rank_whose_saver_was_killed(bench: Bench) -> None:
    number = changes.begin(bench.folder, 1)
    ranks = [SaveRequest(str(bench.folder), 1, number, rank, 2) for rank in range(2)]
    saver = bench.saver
    os.kill(saver, signal.SIGSTOP)
    bench.hand_over(ranks[1])
    os.kill(saver, signal.SIGKILL)
    with pytest.raises(SaverLostError):
        bench.client.wait(WAIT_S)
    changes.write_rank(ranks[0], bytes(SIZE))
    with pytest.raises(SnapshotIncompleteError, match="rank 1: step 1 was not saved: the process that wrote it"):
        changes.commit(ranks[0])


def test_a_part_that_was_written_stays_when_its_saver_is_killed(bench: Bench) -> None:
    number = changes.begin(bench.folder, 1)
    ranks = [SaveRequest(str(bench.folder), 1, number, rank, 2) for rank in range(2)]
    bench.hand_over(ranks[1])
    until((ranks[1].attempt_path / record_file(1)).exists, "it is written")
    os.kill(bench.saver, signal.SIGKILL)
    with contextlib.suppress(SaverLostError):  # the report of the saver may have come before its end
        bench.client.wait(WAIT_S)
    changes.write_rank(ranks[0], bytes(SIZE))
    changes.commit(ranks[0])
    assert list(committed(bench.folder)) == [1]


def test_a_save_ends_with_the_saver_of_rank_0(bench: Bench) -> None:
    request = SaveRequest(str(bench.folder), 1, changes.begin(bench.folder, 1), 0, 2)
    bench.hand_over(request)
    until((request.attempt_path / record_file(0)).exists, "it waits for rank 1")
    os.kill(bench.saver, signal.SIGKILL)
    with pytest.raises(SaverLostError):
        bench.client.wait(WAIT_S)
    until(lambda: not request.attempt_path.exists(), "the space of all parts is freed")


def test_a_saver_that_died_between_saves_is_nobody_s_error(bench: Bench) -> None:
    bench.save(1)
    saver = bench.saver
    os.kill(saver, signal.SIGKILL)
    # A process that ends has no command line before its connections are closed.
    until(lambda: (stat := process_stat(saver)) is None or stat.state == "Z", "it has ended")
    bench.save(2)
    assert sorted(committed(bench.folder)) == [1, 2]


def test_a_stopped_saver_stalls_nobody(bench: Bench) -> None:
    """Back-pressure: two saves are taken, then there is no slot, at once; nothing is lost."""
    bench.save(1)
    os.kill(bench.saver, signal.SIGSTOP)
    bench.persist(2)
    for step in range(3, 20):
        bench.stage(step)  # the memory tier goes on with the other slot
        bench.client.check()
    bench.persist(20)
    assert bench.slots.stage(21, SIZE) is None
    assert not bench.client.wait_for_slot(0.05)
    assert bench.client.writing == [2, 20]
    os.kill(bench.saver, signal.SIGCONT)
    assert bench.client.wait_for_slot(WAIT_S)
    bench.stage(22)
    bench.client.wait(WAIT_S)
    assert sorted(committed(bench.folder)) == [1, 2, 20]
    assert content(bench.folder, 2) == b"\2" * SIZE


def test_a_slot_that_nobody_saves_is_waited_for_with_a_limit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node reads both, or a process that was forked at the wrong moment keeps their locks."""
    monkeypatch.setattr(saver_client, "PATIENCE_S", 0.05)
    locks = [slots.lend(bench.stage(step)) for step in (1, 2)]
    os.kill(bench.saver, signal.SIGKILL)
    until(lambda: (bench.client._receive(), bench.client._sock is None)[1], "its end is seen")
    with pytest.raises(SnapshotIncompleteError, match="step 3 was not saved"):
        bench.client.stage(3, SIZE, wait=True)
    for each in locks:
        slots.release(each)
    assert bench.client.stage(3, SIZE, wait=True) is not None


def test_a_saver_that_just_starts_is_waited_for_only_by_who_needs_its_address(bench: Bench) -> None:
    saver = bench.saver
    os.kill(saver, signal.SIGSTOP)
    bench.client.serve("a life", "127.0.0.1", 0, str(bench.folder), (0, 1))
    assert bench.client.port == 0
    os.kill(saver, signal.SIGCONT)
    bench.client.await_served()
    port = bench.client.port
    assert port > 0
    bench.client.serve("the next", "127.0.0.1", 0, str(bench.folder), (0, 1))
    bench.client.await_served()
    assert (bench.client.port, bench.client.copy_error) == (port, "")
    bench.client.serve("the next", "256.0.0.1", 0, str(bench.folder), (0, 1))
    bench.client.await_served()
    assert bench.client.port == 0
    assert "256.0.0.1" in bench.client.copy_error
    os.kill(saver, signal.SIGKILL)
    until(lambda: saver not in savers(bench.place.folder), "it is gone")
    bench.client.check()
    bench.client.await_served()  # nobody will answer


def test_a_successor_waits_for_its_previous_leader_s_saves(bench: Bench) -> None:
    saver = bench.saver
    os.kill(saver, signal.SIGSTOP)
    bench.persist(1)
    bench.persist(2)
    bench.client.close()
    bench.connect()
    assert bench.slots.stage(3, SIZE) is None
    assert not bench.client.wait_for_slot(0.05)
    os.kill(saver, signal.SIGCONT)
    assert bench.client.wait_for_slot(WAIT_S)
    bench.stage(3)
    until(lambda: sorted(committed(bench.folder)) == [1, 2], "both are on the disk")


def test_what_waits_for_ranks_that_never_come_holds_up_no_successor(bench: Bench) -> None:
    """A node was lost in the middle of a save: this one has written its part, and the attempt will never be whole."""
    number = changes.begin(bench.folder, 1)
    bench.hand_over(SaveRequest(str(bench.folder), 1, number, 0, 2))
    bench.client.close()
    bench.connect()
    bench.client.await_previous_worker(WAIT_S)
    bench.save(2)
    assert sorted(committed(bench.folder)) == [2]
    # The job goes on without it, and clears it away.
    snapshots.clear_debris(snapshots.survey(bench.folder))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        until(lambda: (bench.client.check(), heard)[1], "the commit was given up")
    assert "step 1 was not saved" in str(heard[0].message)


def test_a_slot_that_was_staged_into_since_is_refused(bench: Bench) -> None:
    bench.save(1)
    bench.stage(2)
    bench.stage(3)
    with pytest.raises(ValueError, match="staged into since"):
        bench.client.persist(SaveRequest(str(bench.folder), 1, 2, 0, 1))


def test_nonsense_ends_its_sender_s_connection_and_nothing_else(bench: Bench) -> None:
    good = {"do": "persist", "id": 1, "sequence": 1, "request": {}, "patience_s": 1.0}
    nonsense: list[Any] = [
        b"",
        b"\xff\0",
        b"[]",
        b"{",
        b"[" * 50_000,
        {"do": "x"},
        {"do": "hello"},
        {"do": "hello", "local_rank": "0", "generation": 0},
        good,
        {**good, "request": {"folder": [], "step": 1, "attempt": 1, "rank": 0, "world": 1}},
        {**good, "request": {"folder": "x", "step": 1, "attempt": 1, "rank": 0, "world": 1, "more": 1}},
        {**good, "request": {"folder": "x", "step": 1, "attempt": 1, "rank": 0, "world": 1, "metadata": []}},
        {**good, "id": None},
    ]
    for each in nonsense:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(bench.place.folder / memory_folder.SOCKET))
            sock.settimeout(WAIT_S)
            if isinstance(each, dict) and "local_rank" not in each:
                seqpacket.send(sock, {"do": "hello", "local_rank": 5, "generation": 0})
            with open("/dev/null") as null:
                socket.send_fds(sock, [each if isinstance(each, bytes) else json.dumps(each).encode()], [null.fileno()])
            assert sock.recv(100) == b"", each
    bench.save(1)
    assert list(committed(bench.folder)) == [1]


def test_a_descriptor_that_is_no_slot_is_an_error(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100_000))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, (tmp_path / "file").open("rb") as file:
        sock.connect(str(bench.place.folder / memory_folder.SOCKET))
        sock.settimeout(WAIT_S)
        seqpacket.send(sock, {"do": "hello", "local_rank": 5, "generation": 0})
        request = SaveRequest(str(bench.folder), 1, 1, 0, 1).to_json()
        packet = {"do": "persist", "id": 7, "sequence": 1, "request": request, "patience_s": 1.0}
        seqpacket.send(sock, packet, [file.fileno()])
        got = seqpacket.receive(sock)
        assert got is not None
        assert (got[0]["is"], got[0]["id"], got[0]["code"]) == ("failed", 7, "HF401")


@contextlib.contextmanager
def saver_here(memory: Memory) -> Iterator[tuple[Saver, SaverClient]]:
    """A saver that runs in this process, after the block, and a worker that has connected to it."""
    saver = Saver(memory.path, memory_folder.listen(memory.path / memory_folder.SOCKET), None)
    with contextlib.closing(SaverClient(SaverAddress(memory.path, 0, 0, 0))) as client:
        yield saver, client
    saver.run()
    memory.held.remove()


def test_a_save_waits_where_the_machine_allows_no_more_threads(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saver ended by it, and with it the saves of all ranks of the node."""
    monkeypatch.setattr(saver_module, "START_AGAIN_S", 0.01)
    start, refusals = threading.Thread.start, [RuntimeError("can't start new thread")] * 3

    def refused_at_first(thread: threading.Thread) -> None:
        if refusals:
            raise refusals.pop()
        start(thread)

    with saver_here(memory) as (_, client):
        assert client.stage(1, SIZE) is not None
        client.commit(None)
        client.persist(SaveRequest(str(tmp_path), 1, changes.begin(tmp_path, 1), 0, 1))
        monkeypatch.setattr(threading.Thread, "start", refused_at_first)
    assert refusals == []
    assert list(committed(tmp_path)) == [1]


def test_a_saver_that_has_no_descriptor_left_serves_a_worker_all_the_same(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", none_left)
    pauses: list[float] = []
    with saver_here(memory) as (saver, _):
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", none_left)
            patch.setattr(saver_module.time, "sleep", pauses.append)
            saver._accept_all()
        assert pauses == [saver_module.ACCEPT_AGAIN_S], "its loop would spin"
        saver._accept_all()
        (worker,) = saver._workers
        saver._read(worker)
        assert (worker.local_rank, worker.pidfd) == (0, -1)


def test_a_successor_is_told_of_the_newest_failures(memory: Memory) -> None:
    """Its previous worker had failures all day, and then the save failed that was made after its end."""
    with saver_here(memory) as (saver, client):
        for number in range(2 * saver_module.NEWS_MAX):
            saver._keep_news(0, f"failure {number}")
        saver._accept_all()
        (worker,) = saver._workers
        saver._read(worker)
        client._receive()
        assert client._news == [
            f"failure {number}" for number in range(saver_module.NEWS_MAX, 2 * saver_module.NEWS_MAX)
        ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_turned_away(bench: Bench) -> None:
    program = f"""
import os, socket
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    sock.connect({str(bench.place.folder / memory_folder.SOCKET)!r})
    print(sock.recv(100))
except OSError as error:
    print(type(error).__name__)
"""
    line = ("-I", "-S", "-c", program)
    assert run(*line).stdout == "PermissionError\n"
    os.chmod(bench.place.folder, 0o711)
    os.chmod(bench.place.folder / memory_folder.SOCKET, 0o777)
    answers = ("b''\n", "ConnectionResetError\n")
    try:
        assert run(*line).stdout in answers
    finally:
        os.chmod(bench.place.folder, 0o700)  # its saver removes only what is this user's alone


# --- a worker's death -------------------------------------------------------------------------------------------------


def test_a_worker_killed_after_persist_returned_loses_nothing(tmp_path: Path) -> None:
    """0 to 60 ms after; from the first save of a fresh saver on."""
    for number, after_ms in enumerate((0, 0, 3, 15, 60)):
        folder = tmp_path / str(number)
        done = run_worker(f"say()\npersist(7)\ntime.sleep({after_ms / 1000})\ndie()", folder)
        assert done.returncode == -signal.SIGKILL, done.stderr
        until(lambda folder=folder: list(committed(folder)) == [7], f"killed after {after_ms} ms")
        assert content(folder, 7) == b"\7" * SIZE
        until(lambda done=done: not Path(done.stdout.strip()).exists(), "the shared-memory folder is gone")


def test_a_newer_memory_step_is_written_after_a_crash(tmp_path: Path) -> None:
    number = rescue_attempt()
    body = f"persist(20)\nsaver.wait(LIMIT_S)\nstage(30, {number})\nstage(40, {number})\nsay()\ndie()"
    done = run_worker(body, tmp_path)
    until(lambda: sorted(committed(tmp_path)) == [20, 40], "the newest in memory is saved")
    assert committed(tmp_path) == {20: {"loss": 0.5}, 40: {"kept": 40}}
    assert content(tmp_path, 40) == bytes([40]) * SIZE
    assert (tmp_path / f"step_000000040.{number}").is_dir()
    until(lambda: not Path(done.stdout.strip()).exists(), "the shared-memory folder is gone")


@pytest.mark.parametrize(
    "body",
    [
        "stage(40, 7)\nsaver.close()\ndie()",  # it has said goodbye
        "stage(40)\ndie()",  # nobody has said where
        "stage(20, 7)\npersist(40)\nsaver.wait(LIMIT_S)\ndie()",  # the disk has a newer one
        "stage(40, 7)\nstage(40, 7)\nos.makedirs(FOLDER + '/step_000000040.0001')\ndie()",
    ],
)
def test_nothing_is_written_that_need_not_be(tmp_path: Path, body: str) -> None:
    done = run_worker("say()\n" + body, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    until(lambda: not Path(done.stdout.strip()).exists(), "the shared-memory folder is gone")
    assert not list(tmp_path.glob("*.*7"))


# --- under another launcher -------------------------------------------------------------------------------------------

LAUNCHER = """
import os, subprocess, sys
env = {**os.environ, "TORCHELASTIC_RUN_ID": "team/x", "LOCAL_RANK": "3"}
for count, body in enumerate(sys.argv[3:]):
    subprocess.run([sys.executable, "-c", sys.argv[1] + body, sys.argv[2]],
                   env={**env, "TORCHELASTIC_RESTART_COUNT": str(count)})
"""


def run_lives(folder: Path, *bodies: str) -> subprocess.CompletedProcess[str]:
    """One worker after the other, under one launcher."""
    return run("-c", LAUNCHER, WORKER, str(folder), *bodies)


def test_a_restarted_worker_finds_its_slots_under_torchrun(tmp_path: Path) -> None:
    first = "say('first')\nstage(20)\nstage(40)\nown.stage(60, SIZE)\ndie()"
    second = "found = own.committed()[0]\nsay(found.step, found.generation, found.local_rank, found.data[0], place.generation)"
    done = run_lives(tmp_path, first, second)
    one, two = (text.split() for text in done.stdout.splitlines())
    assert one[0] == two[0]
    assert two[1:] == ["40", "0", "3", "40", "1"]
    until(lambda: not Path(one[0]).exists(), "the shared-memory folder is gone with the launcher")


HEARS = f"""
import warnings
end = time.monotonic() + {WAIT_S}
with warnings.catch_warnings(record=True) as heard:
    while not heard and time.monotonic() < end: saver.check(); time.sleep(0.01)
say(*(each.message for each in heard))
"""
"""A life that waits for the news of the one before."""


def test_a_failure_of_a_dead_worker_s_save_is_its_successor_s_news(tmp_path: Path) -> None:
    first = "stage(1)\nsaver.persist(SaveRequest('/nowhere', 1, 1, 0, 1))\nsay()\ndie()"
    done = run_lives(tmp_path, first, HEARS)
    told = done.stdout.splitlines()[1]
    assert "rank 0, after its end: " in told, done.stderr
    assert "is not there" in told
    until(lambda: not Path(told.split()[0]).exists(), "the shared-memory folder is gone")


@pytest.mark.parametrize(("stops", "rescued"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_value_that_is_not_finite_is_said_though_the_worker_is_gone(
    tmp_path: Path, stops: bool, rescued: bool
) -> None:
    """`rescued`: the worker has handed over nothing, and the saver writes the state in memory by itself."""
    folder = tmp_path / "snaps"
    folder.mkdir()
    handed_over = "saver.commit(None)\nsaver.persist(SaveRequest(FOLDER, 1, begin(FOLDER, 1), 0, 1, **about))\n"
    in_memory = f"saver.commit(SaveRequest(FOLDER, 1, {rescue_attempt()}, 0, 1, **about))\n"
    first = (
        "from holdfast.train.snapshots.layout import Image, TensorEntry\n"
        "image = Image.plan([TensorEntry('weight', 'F32', (1 << 18,))])\n"
        "memory = own.stage(1, image.size_bytes)\n"
        "memory[:] = image.header.ljust(image.size_bytes, b'\\0')\n"
        "memory[-4:] = b'\\0\\0\\xc0\\x7f'\n"  # nan
        "parts = [[len(image.header), image.size_bytes, 'float32']]\n"
        f"about = dict(trained=parts, stops_not_finite={stops})\n"
        f"{in_memory if rescued else handed_over}"
        "say()\ndie()"
    )
    done = run_lives(folder, first, HEARS)
    told = done.stdout.splitlines()[1]
    assert "rank 0, after its end: weight of rank 0 has values that are not finite after step 1" in told, done.stderr
    assert committed(folder) == ({} if stops else {1: {"finite": False}})
    until(lambda: not Path(told.split()[0]).exists(), "the shared-memory folder is gone")


def test_workers_that_start_at_once_share_one_saver(tmp_path: Path) -> None:
    many = """
import os, subprocess, sys
env = {**os.environ, "TORCHELASTIC_RUN_ID": "x"}
line = [sys.executable, "-c", sys.argv[1] + sys.argv[3], sys.argv[2]]
for process in [subprocess.Popen(line, env={**env, "LOCAL_RANK": str(rank)}) for rank in range(6)]:
    process.wait()
"""
    body = """
saver.await_previous_worker(LIMIT_S)
count = 0
for name in os.listdir("/proc"):
    try:
        line = open(f"/proc/{name}/cmdline", errors="replace").read() if name.isdigit() else ""
    except OSError:
        continue
    count += "holdfast.train.snapshots.saver" in line and str(place.folder) in line
say(count)
saver.close()
"""
    done = run("-c", many, WORKER, str(tmp_path), body)
    told = [text.split() for text in done.stdout.splitlines()]
    assert len(told) == 6, done.stderr
    assert {each[1] for each in told} == {"1"}
    assert len({each[0] for each in told}) == 1
    until(lambda: not Path(told[0][0]).exists(), "the shared-memory folder is gone")


def test_a_child_that_is_forked_while_a_saver_starts_keeps_no_other_from_starting(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data loader's process has the descriptors of that moment as long as it lives."""
    inherited: list[int] = []

    def forked_meanwhile(*_: object) -> None:
        files = [
            path for path in Path("/proc/self/fd").iterdir() if path.exists() and path.readlink().name == "starting"
        ]
        inherited.extend(os.dup(int(path.name)) for path in files)

    monkeypatch.setattr(saver_connection, "START_LIMIT_S", 0.0)
    monkeypatch.setattr(saver_connection, "_run_apart", forked_meanwhile)
    for _ in range(2):
        saver_connection.start_saver(memory.address()).close()
    assert len(inherited) >= 2
    for each in inherited:
        os.close(each)
    memory.held.remove()


def test_without_memory_to_write_to_the_caller_is_told(tmp_path: Path) -> None:
    with pytest.raises(SnapshotMemoryError, match="cannot be used"):
        SaverAddress.find({}, tmp_path / "no")
    with pytest.raises(SnapshotMemoryError, match="the agent's saver cannot be reached"):
        SaverClient(SaverAddress.find({train_contract.SAVER_VARIABLE: f"{tmp_path}@4@2"}))
    place = SaverAddress.find({train_contract.SAVER_VARIABLE: "/dev/shm/a@b@4@2"})
    assert (place.folder, place.generation, place.local_rank) == (Path("/dev/shm/a@b"), 4, 2)


def test_slots_of_two_plain_processes_have_nothing_in_common(tmp_path: Path) -> None:
    first, second = (run_worker("stage(1)\nsay(own.committed()[0].step)\nsaver.close()", tmp_path) for _ in range(2))
    assert first.stdout.split()[1] == second.stdout.split()[1] == "1"
    assert first.stdout.split()[0] != second.stdout.split()[0]
    for each in (first, second):
        until(lambda each=each: not Path(each.stdout.split()[0]).exists(), "the shared-memory folder is gone")


def test_reading_slots_of_a_memory_folder_that_is_gone() -> None:
    assert memory_folder.local_ranks(Path("/dev/shm/holdfast-no-such")) == []
    assert slots.committed_slots(Path("/dev/shm/holdfast-no-such"), 0) == []
