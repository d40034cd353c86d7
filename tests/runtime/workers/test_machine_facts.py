"""What a failed worker's node adds to its words: only what they ask for, and nothing where it cannot be found out."""

from __future__ import annotations

import os
import resource
import signal
import socket
from pathlib import Path

import pytest

from holdfast.core.outcome import Failure
from holdfast.runtime.workers import machine_facts
from holdfast.runtime.workers.ends import with_evidence
from holdfast.runtime.workers.machine_facts import facts_for


def test_nothing_is_gathered_for_a_plain_exception() -> None:
    assert facts_for("ValueError: the batch is empty", 1) == {}


def test_a_lost_connection_asks_for_nothing() -> None:
    assert (
        facts_for("RuntimeError: gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:40364", 1) == {}
    )


@pytest.mark.parametrize(
    ("words", "name", "part"),
    [
        ("NCCL error, unhandled system error", "interfaces", "127.0.0.1"),
        ("unable to open shared memory object </torch_1>", "shm", "/dev/shm has "),
        ("OSError: [Errno 28] No space left on device", "disks", "% full"),
        ("OSError: [Errno 24] Too many open files", "nofile", str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])),
        ("RuntimeError: can't start new thread", "pids", "user"),
        ("MemoryError: ", "memory", "memory free"),
    ],
)
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
    monkeypatch.setattr(machine_facts, "SHM", "/no/such/place")
    assert "shm" not in facts_for("insufficient shared memory", 1)


def failure(folder: Path, *, after_stop: bool) -> dict[str, str]:
    log = folder / "stderr.log"
    log.write_text("OSError: [Errno 24] Too many open files\n")
    bare = Failure(rank=0, local_rank=0, host="a", pid=1, exit_code=1, lived_s=1.0, after_stop=after_stop)
    return with_evidence(bare, error_file="", stderr_file=str(log), now_epoch_s=0).facts


def test_the_failure_carries_them(tmp_path: Path) -> None:
    assert "nofile" in failure(tmp_path, after_stop=False)
    assert failure(tmp_path, after_stop=True) == {}


def test_the_disk_that_the_words_name_is_looked_at() -> None:
    assert "/proc/self " not in facts_for("OSError: [Errno 28] No space left on device", 1)["disks"]
    words = "OSError: [Errno 28] No space left on device: '/proc/self/step_900.pt'"
    assert "/proc/self 0% full" in machine_facts.disks("", words)


def test_disks_that_may_never_answer_or_cannot_be_written_are_not_looked_for(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda / ext4 rw,relatime 0 0\nproc /proc proc rw 0 0\nhead:/home /home nfs4 rw 0 0\n"
        "/dev/sr0 /cd ext4 ro,nosuid 0 0\n/dev/sdb /my\\040data xfs rw 0 0\ngcs /b fuse.gcsfuse rw 0 0\n"
    )
    assert machine_facts.mounted(str(mounts)) == ["/", "/my data"]
    assert machine_facts.mounted(str(tmp_path / "none")) == []


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
