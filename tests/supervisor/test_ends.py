"""What a dead worker leaves, whole or torn."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from holdfast.protocol.outcome import TEXT_BYTES_MAX, Failure
from holdfast.supervisor import ends
from holdfast.supervisor.ends import (
    MESSAGE_BYTES_MAX,
    OomWatch,
    Recorded,
    facts_for,
    failure_of_spawn,
    in_thread,
    left_with_zero,
    read_error_file,
    read_tail,
    with_evidence,
)
from holdfast.supervisor.log_fold import without_text
from holdfast.supervisor.log_spool import Spool, StreamFds, WorkerStreams
from tests.supervisor.conftest import no_threads
from tests.support.tables import tables

TABLES = tables(__file__)


def moved(path: Path) -> Spool:
    """A stream that is in its file, and not in memory any more."""
    spool = Spool(path)
    spool.leave()
    return spool


WHOLE = {"message": {"message": "a.B: text", "extraInfo": {"py_callstack": "Traceback", "timestamp": "17"}}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (WHOLE, Recorded(error_type="a.B", message="a.B: text", traceback="Traceback", timestamp=17)),
        ({"message": "plain text", "timestamp": "18"}, Recorded(message="plain text", timestamp=18)),
        ({"message": {"message": "E: x"}}, Recorded(error_type="E", message="E: x")),
        ({"message": {"message": "E", "extraInfo": None}}, Recorded(error_type="E", message="E")),
        (
            {"message": {"message": "E: x", "extraInfo": {"timestamp": "soon"}}},
            Recorded(error_type="E", message="E: x"),
        ),
        ({"other": 1}, Recorded()),
        ([], Recorded()),
        ("text", Recorded()),
        (None, Recorded()),
    ],
)
def test_forms_of_an_error_file(tmp_path: Path, content: Any, expected: Recorded) -> None:
    (tmp_path / "error.json").write_text(json.dumps(content))
    assert read_error_file(str(tmp_path / "error.json")) == expected


def test_a_message_with_a_lone_surrogate_is_the_one_on_stderr(tmp_path: Path) -> None:
    """Else the traceback would be shown twice: on the last screen, and among the lines."""
    text = "ValueError: bad \ud800 text"
    content = {"message": {"message": text, "extraInfo": {"py_callstack": text}}}
    (tmp_path / "error.json").write_text(json.dumps(content))
    recorded = read_error_file(str(tmp_path / "error.json"))
    assert recorded.message == recorded.traceback == "ValueError: bad \\ud800 text"
    on_stderr = text.encode(errors="backslashreplace") + b"\n"
    assert without_text(on_stderr, recorded.traceback) == without_text(on_stderr, text) == b""


def test_every_torn_error_file_is_tolerated(tmp_path: Path) -> None:
    raw = json.dumps(WHOLE).encode()
    for size in range(len(raw)):
        (tmp_path / "error.json").write_bytes(raw[:size])
        assert read_error_file(str(tmp_path / "error.json")) == Recorded()
    for bad in (b"\xff\xfe", b"[" * 100_000, b"\0" * 10):
        (tmp_path / "error.json").write_bytes(bad)
        assert read_error_file(str(tmp_path / "error.json")) == Recorded()
    assert read_error_file("") == read_error_file(str(tmp_path)) == read_error_file("/no/such") == Recorded()


def test_long_texts_are_cut_in_the_middle(tmp_path: Path) -> None:
    long = "first\n" + "\u00fc" * 50_000 + "\nlast"
    data = {"message": {"message": "E: " + long, "extraInfo": {"py_callstack": long}}}
    (tmp_path / "error.json").write_text(json.dumps(data))
    recorded = read_error_file(str(tmp_path / "error.json"))
    assert MESSAGE_BYTES_MAX - 10 < len(recorded.message.encode()) <= MESSAGE_BYTES_MAX
    assert len(recorded.traceback.encode()) <= TEXT_BYTES_MAX
    for text in (recorded.message, recorded.traceback):
        assert "first" in text[:10]
        assert text.endswith("last")
    assert "[...]" in recorded.message


@pytest.mark.parametrize(("log", "tail"), TABLES["tails"])
def test_tail_of_a_log(tmp_path: Path, log: str, tail: str) -> None:
    (tmp_path / "log").write_bytes(log.encode())
    assert read_tail(moved(tmp_path / "log")) == tail


def test_tail_of_odd_logs(tmp_path: Path) -> None:
    assert read_tail(None) == read_tail(moved(tmp_path)) == read_tail(moved(Path("/no/such"))) == ""
    (tmp_path / "log").write_bytes(b"\xff\xfe\n" + b"x" * 3 * TEXT_BYTES_MAX)
    assert len(read_tail(moved(tmp_path / "log")).encode()) <= TEXT_BYTES_MAX


# --- out of memory ----------------------------------------------------------------------------------------------------


def machine(root: Path, cgroup: str, files: dict[str, int]) -> OomWatch:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, kills in files.items():
        put(root / name, kills)
    return OomWatch(root)


def put(file: Path, kills: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"low 0\noom 9\noom_kill_disable 0\noom_kill {kills}\noom_group_kill 0\n")


@pytest.mark.parametrize(("cgroup", "counter"), TABLES["counters"])
def test_where_the_kernel_counts(tmp_path: Path, cgroup: str, counter: str) -> None:
    watch = machine(tmp_path, cgroup, {counter: 3})
    assert not watch.struck()
    put(tmp_path / counter, 4)
    assert watch.struck()
    watch.renew()
    assert not watch.struck()


def test_no_counter_means_no(tmp_path: Path) -> None:
    assert not machine(tmp_path, "0::/\n", {}).struck()
    assert not OomWatch().struck()  # this machine: nothing was killed in the last microseconds


# --- failures ---------------------------------------------------------------------------------------------------------


def failure(
    error_file: Path | None = None, stderr_file: Path | None = None, *, oom: bool = False, **changes: Any
) -> Failure:
    known = {"rank": 5, "local_rank": 1, "host": "n1", "pid": 77, "exit_code": 1, "lived_s": 2.5, "timestamp": 99}
    stderr = moved(stderr_file) if stderr_file is not None else None
    streams = WorkerStreams(StreamFds(None, None), None, stderr_file, error_file, None, stderr)
    return with_evidence(Failure(**{**known, **changes}), streams, out_of_memory=lambda: oom)


def test_a_failure_with_all_its_evidence(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(json.dumps(WHOLE))
    (tmp_path / "stderr.log").write_text("last words\n")
    found = failure(tmp_path / "error.json", tmp_path / "stderr.log")
    assert (found.error_type, found.message, found.traceback) == ("a.B", "a.B: text", "Traceback")
    assert (found.stderr_tail, found.timestamp, found.started) == ("last words", 17, True)
    assert found.error_file == str(tmp_path / "error.json")


def test_the_last_words_of_a_worker_that_left_stay_with_their_stream(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").write_text("hello\nrank 1 is done\n")
    (tmp_path / "stderr.log").write_text("")
    bare = Failure(rank=1, local_rank=1, host="n1", pid=77, exit_code=0)
    out, err = (moved(tmp_path / name) for name in ("stdout.log", "stderr.log"))
    streams = WorkerStreams(StreamFds(None, None), None, tmp_path / "stderr.log", None, out, err)
    found = left_with_zero(bare, streams)
    assert (found.stdout_tail, found.stderr_tail) == ("hello\nrank 1 is done", "")


def test_a_failure_without_any(tmp_path: Path) -> None:
    found = failure(tmp_path / "error.json", exit_code=-11)
    assert (found.message, found.error_file, found.timestamp, found.status) == ("", "", 99, 139)


@pytest.mark.parametrize(
    ("exit_code", "after_stop", "expected"),
    [
        (-signal.SIGKILL, False, True),
        (-signal.SIGKILL, True, False),
        (-signal.SIGTERM, False, False),
        (1, False, False),
    ],
)
def test_out_of_memory_is_a_sigkill_that_nobody_sent(exit_code: int, after_stop: bool, expected: bool) -> None:
    assert failure(exit_code=exit_code, after_stop=after_stop, oom=True).out_of_memory is expected


@pytest.mark.parametrize(("number", "code"), [(2, 127), (13, 126), (8, 126), (11, 1), (12, 1), (24, 1)])
def test_a_program_that_did_not_start(number: int, code: int) -> None:
    bare = Failure(rank=0, local_rank=0, host="n1", pid=0, exit_code=0)
    found = failure_of_spawn(bare, error_number=number, text="No such file or directory: x")
    assert (found.exit_code, found.started, found.pid) == (code, False, 0)
    assert found.message == "No such file or directory: x"


# --- what a failed worker's node adds: only what the failure's words ask for ------------------------------------------


def test_nothing_is_gathered_for_a_plain_exception() -> None:
    assert facts_for("ValueError: the batch is empty", 1) == {}


def test_a_lost_connection_asks_for_nothing() -> None:
    assert (
        facts_for("RuntimeError: gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40364", 1) == {}
    )


@pytest.mark.parametrize(("words", "name", "part"), TABLES["words"])
def test_words_ask_for_a_fact(words: str, name: str, part: str) -> None:
    found = facts_for(words, 1)
    assert list(found) == [name]
    assert part in found[name]
    assert "\n" not in found[name]


def test_a_bus_error_asks_without_words() -> None:
    assert "shm" in facts_for("", -signal.SIGBUS)


def test_who_holds_the_port() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        words = f"DistNetworkError: The server socket has failed to listen. port: {port}, code: -98, name: EADDRINUSE"
        assert f"port {port} is held by pid {os.getpid()}" in facts_for(words, 1)["port"]
    assert "port" not in facts_for("EADDRINUSE without a number", 1)


def test_what_cannot_be_found_out_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "SHM", "/no/such/place")
    assert "shm" not in facts_for("insufficient shared memory", 1)


def test_the_failure_carries_them(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_text("OSError: [Errno 24] Too many open files\n")
    assert "nofile" in failure(stderr_file=log).facts
    assert failure(stderr_file=log, after_stop=True).facts == {}


def test_the_disk_that_the_words_name_is_looked_at() -> None:
    assert "/proc/self " not in facts_for("OSError: [Errno 28] No space left on device", 1)["disks"]
    words = "OSError: [Errno 28] No space left on device: '/proc/self/step_900.pt'"
    assert "/proc/self 0% full" in ends.disks("", words)


@pytest.mark.parametrize(
    "says",
    [
        "OSError: [Errno 28] No space left on device: '/proc/self/gone/deeper/a.pt'",
        "OSError: [Errno 28] No space left on device: 'self/gone/a.pt'",
        "OSError: [Errno 122] Disk quota exceeded: '/gone/a.pt' -> 'self/a.pt'",
        "SnapshotWriteError: cannot write /proc/self/a/rank_0.safetensors: No space left on device; 0 MB are free there",
    ],
)
def test_the_disk_of_the_file_that_the_error_names_comes_first(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder may be gone: a save that failed removes what it has written."""
    monkeypatch.chdir("/proc")
    assert ends.disks("", f"loading /dev/shm/x.bin\n{says}\n").startswith("/proc/self 0% full, ")


def test_a_disk_that_the_error_names_is_listed_once_and_with_its_size(tmp_path: Path) -> None:
    said = ends.disks("", f"[Errno 28] No space left on device: '{tmp_path}/gone/a.pt'")
    assert re.match(rf"{tmp_path} \d+% full(?: \(\d+% of its inodes\))? of [\d.]+ [KMG]iB, ", said)
    assert said.count(str(tmp_path)) == 1


def test_disks_that_may_never_answer_or_cannot_be_written_are_not_looked_for(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda / ext4 rw,relatime 0 0\nproc /proc proc rw 0 0\nhead:/home /home nfs4 rw 0 0\n"
        "/dev/sr0 /cd ext4 ro,nosuid 0 0\n/dev/sdb /my\\040data xfs rw 0 0\ngcs /b fuse.gcsfuse rw 0 0\n"
    )
    assert ends.mounted(str(mounts)) == ["/", "/my data"]
    assert ends.mounted(str(tmp_path / "none")) == []


@pytest.mark.parametrize(
    "words",
    [
        "AttributeError: module 'random' has no attribute 'shuffle'",
        "ImportError: cannot import name 'shuffle' from 'random' ({folder}/random.py)",
        "ImportError: cannot import name 'x' from partially initialized module 'random.x' ({folder}/random.py)",
        "ModuleNotFoundError: No module named 'random.core'",
    ],
)
def test_a_file_beside_the_script_that_has_the_name_of_a_library_is_named(tmp_path: Path, words: str) -> None:
    traceback = f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 3, in <module>\n'
    words = traceback + words.format(folder=tmp_path)
    assert "hides" not in facts_for(words, 1)
    (tmp_path / "random.py").touch()
    assert facts_for(words, 1)["hides"] == f"{tmp_path}/random.py hides the library random"


def test_a_module_that_is_no_library_hides_none_and_what_is_imported_from_a_library_is_not_hidden(
    tmp_path: Path,
) -> None:
    for name in ("utils_of_mine.py", "random.py"):
        (tmp_path / name).touch()
    place = f'  File "{tmp_path}/train.py", line 3, in <module>\n'
    assert "hides" not in facts_for(f"{place}AttributeError: module 'utils_of_mine' has no attribute 'f'", 1)
    whole = "ImportError: cannot import name 'f' from 'random' (/usr/lib/python3/dist-packages/random.py)"
    assert "hides" not in facts_for(place + whole, 1)


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ([["default_pg", 6, "all_reduce", "[8] float32", False, False, [[0, 1, 1]]]], 1),
        ([["default_pg", 6, "all_reduce"]] * 100, 64),
        ([["default_pg", -1, "all_reduce"]], 0),
        ([["default_pg", 6, "all_reduce", "", False, False, [[0, 1, 0]]]], 0),
        ("6", 0),
        (None, 0),
    ],
)
def test_collectives_in_an_error_file_are_read_if_they_are_ones(tmp_path: Path, written: Any, count: int) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "a.B: text", "extraInfo": {"recorded_collectives": written}}}))
    found = read_error_file(str(path))
    assert (found.message, len(found.collectives)) == ("a.B: text", count)


async def test_evidence_is_read_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason why the workers failed: the first of them takes the thread that there is."""
    with no_threads(monkeypatch):
        assert await in_thread(lambda: "read") == "read"
