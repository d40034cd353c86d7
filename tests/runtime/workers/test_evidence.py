"""What a dead worker leaves, whole or torn."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.outcome import TEXT_BYTES_MAX, Failure
from holdfast.runtime.workers.ends import (
    MESSAGE_BYTES_MAX,
    TAIL_LINES_MAX,
    OomWatch,
    Recorded,
    failure_of_spawn,
    read_error_file,
    read_tail,
    with_evidence,
)

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
    for text, bytes_max in ((recorded.message, MESSAGE_BYTES_MAX), (recorded.traceback, TEXT_BYTES_MAX)):
        assert bytes_max - 10 < len(text.encode()) <= bytes_max
        assert "first" in text[:10]
        assert text.endswith("last")
        assert "[...]" in text


@pytest.mark.parametrize(
    ("log", "tail"),
    [
        ("", ""),
        ("one\ntwo\n\n\n", "one\ntwo"),
        ("no newline", "no newline"),
        ("10%\r20%\r30%\nnext\r\n", "30%\nnext"),
        ("".join(f"{n}\n" for n in range(100)), "\n".join(str(n) for n in range(100 - TAIL_LINES_MAX, 100))),
        ("torn" * TEXT_BYTES_MAX + "\nwhole\n", "whole"),
    ],
)
def test_tail_of_a_log(tmp_path: Path, log: str, tail: str) -> None:
    (tmp_path / "log").write_bytes(log.encode())
    assert read_tail(str(tmp_path / "log")) == tail


def test_tail_of_odd_logs(tmp_path: Path) -> None:
    assert read_tail("") == read_tail(str(tmp_path)) == read_tail("/no/such") == ""
    (tmp_path / "log").write_bytes(b"\xff\xfe\n" + b"x" * 3 * TEXT_BYTES_MAX)
    assert len(read_tail(str(tmp_path / "log")).encode()) <= TEXT_BYTES_MAX


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


@pytest.mark.parametrize(
    ("cgroup", "counter"),
    [
        ("0::/job/one\n", "sys/fs/cgroup/job/one/memory.events"),
        ("0::/\n", "sys/fs/cgroup/memory.events"),
        ("0::/hidden/from/inside\n", "sys/fs/cgroup/memory.events"),
        ("4:cpu,memory:/job\n0::/\n", "sys/fs/cgroup/memory/job/memory.oom_control"),
        ("4:memory:/outer\n", "sys/fs/cgroup/memory/memory.oom_control"),
        ("0::/job\n", "sys/fs/cgroup/unified/job/memory.events"),
        ("0::/\n", "proc/vmstat"),
    ],
)
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


def failure(**changes: Any) -> Any:
    files = {"error_file": "", "stderr_file": "", "now_epoch_s": 99, "out_of_memory": False}
    known = {"rank": 5, "local_rank": 1, "host": "n1", "pid": 77, "exit_code": 1, "lived_s": 2.5}
    read = {name: changes.pop(name, value) for name, value in files.items()}
    return with_evidence(Failure(**{**known, **changes}), **read)


def test_a_failure_with_all_its_evidence(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(json.dumps(WHOLE))
    (tmp_path / "stderr.log").write_text("last words\n")
    found = failure(error_file=str(tmp_path / "error.json"), stderr_file=str(tmp_path / "stderr.log"))
    assert (found.error_type, found.message, found.traceback) == ("a.B", "a.B: text", "Traceback")
    assert (found.stderr_tail, found.timestamp, found.started) == ("last words", 17, True)
    assert found.error_file == str(tmp_path / "error.json")


def test_a_failure_without_any(tmp_path: Path) -> None:
    found = failure(exit_code=-11, error_file=str(tmp_path / "error.json"))
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
    assert failure(exit_code=exit_code, after_stop=after_stop, out_of_memory=True).out_of_memory is expected


@pytest.mark.parametrize(("number", "code"), [(2, 127), (13, 126), (8, 126), (11, 1), (12, 1), (24, 1)])
def test_a_program_that_did_not_start(number: int, code: int) -> None:
    bare = Failure(rank=0, local_rank=0, host="n1", pid=0, exit_code=0)
    found = failure_of_spawn(bare, error_number=number, text="No such file or directory: x", now_epoch_s=9)
    assert (found.exit_code, found.started, found.pid) == (code, False, 0)
    assert found.message == "No such file or directory: x"
