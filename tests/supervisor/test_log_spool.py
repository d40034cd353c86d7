"""A worker's output on its way to the disk, and disks that do not take it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.seqpacket import is_readable
from holdfast.supervisor import log_spool
from holdfast.supervisor.log_spool import LogMover, Spool
from holdfast.supervisor.log_tail import NOTIFICATIONS_BYTES_MAX, ChangeWatch
from holdfast.supervisor.supervisor import move_rest
from tests.support.limits import limit_s, until


class Stream:
    """One spool that is moved, and a worker's descriptor."""

    def __init__(self, path: Path) -> None:
        self.said: list[str] = []
        self.mover = LogMover(self.said.append)
        self.spool = Spool(path)
        self.fd = self.spool.writer()
        self.mover.add([self.spool])

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.fd, data) :]

    def end(self) -> bool:
        os.close(self.fd)
        done = self.mover.finish(limit_s(5))
        self.mover.close()
        return done


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "attempt_0" / "0" / "stdout.log"


def refuse(number: int) -> Callable[..., Any]:
    def refusing(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    return refusing


@pytest.mark.parametrize("call", ["open", "sendfile"])
@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EFBIG, errno.ENOENT, errno.ESTALE],
)
def test_whatever_the_disk_says_the_worker_goes_on_and_the_file_is_complete_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    monkeypatch.setattr(log_spool, "RETRY_S", 0.02)
    stream = Stream(path)
    stream.write(b"before\n")
    until(lambda: path.exists() and path.read_bytes() == b"before\n", "it in the file")
    with monkeypatch.context() as patch:
        if call == "open":
            stream.spool._made = False
            patch.setattr(log_spool, "create", refuse(number))
        else:
            patch.setattr(log_spool.os, "sendfile", refuse(number))
        stream.write(b"meanwhile\n" * 1000)
        until(lambda: len(stream.said) == 1, "the message")
        assert stream.spool.last(10) == (b"meanwhile\n", 10_007)
        assert str(path) in stream.said[0]
        assert os.strerror(number) in stream.said[0]
    until(lambda: len(stream.said) == 2, "the other message")
    stream.write(b"after\n")
    assert stream.end()
    assert path.read_bytes() == b"before\n" + b"meanwhile\n" * 1000 + b"after\n"


def test_what_no_disk_takes_is_bounded_and_what_is_missing_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_spool, "RETRY_S", 0.02)
    monkeypatch.setattr(log_spool, "BACKLOG_BYTES_MAX", 1 << 20)
    stream = Stream(path)
    lines = [b"%07d\n" % number for number in range(1 << 20)]  # 8 MiB
    with monkeypatch.context() as patch:
        patch.setattr(log_spool.os, "sendfile", refuse(errno.ENOSPC))
        stream.write(lines[0])
        until(lambda: stream.said, "the message")
        for begin in range(1, len(lines), 4096):
            stream.write(b"".join(lines[begin : begin + 4096]))
        allocated = lambda: os.fstat(stream.spool.memory_fd).st_blocks * 512  # noqa: E731
        until(lambda: allocated() <= 3 << 20, lambda: f"{allocated()} bytes")
    stream.write(b"last\n")
    assert stream.end()
    head, note, tail = path.read_bytes().partition(b"\nholdfast: ")
    missing, rest = tail.split(b" bytes of output are missing here: this disk took nothing\n")
    assert note
    whole = b"".join(lines) + b"last\n"
    assert whole.startswith(head)
    assert whole.endswith(rest)
    assert len(head) + int(missing) + len(rest) == len(whole)
    assert len(rest) >= 1 << 19


def test_what_no_disk_takes_of_ended_workers_is_bounded_for_all_together(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest output is dropped; a line in its file says so."""
    monkeypatch.setattr(log_spool, "RETRY_S", 0.02)
    monkeypatch.setattr(log_spool, "BACKLOG_ENDED_BYTES_MAX", 5 << 20)
    said: list[str] = []
    mover = LogMover(said.append)
    spools = [Spool(path.with_name(f"{number}.log")) for number in range(4)]
    allocated = lambda: [os.fstat(spool.memory_fd).st_blocks * 512 for spool in spools]  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(log_spool.os, "sendfile", refuse(errno.ENOSPC))
        for spool in spools:
            fd = spool.writer()
            mover.add([spool])
            os.write(fd, b"x" * (4 << 20))
            os.close(fd)
            mover.retire([spool])
        until(lambda: allocated()[0] <= 2 << 20 and allocated()[1] <= 2 << 20, lambda: str(allocated()))
        assert allocated()[3] == 4 << 20
    assert mover.finish(limit_s(5))
    mover.close()
    assert b"bytes of output are missing here" in spools[0].path.read_bytes()
    assert spools[3].path.read_bytes() == b"x" * (4 << 20)


def test_a_healthy_disk_loses_nothing_and_frees_memory(path: Path) -> None:
    stream = Stream(path)
    piece = os.urandom(1 << 20)
    for _ in range(40):
        stream.write(piece)
    until(lambda: stream.spool.waiting_bytes == 0, "all to be moved")
    assert os.fstat(stream.spool.memory_fd).st_blocks * 512 < 2 << 20
    begin, got = 0, []
    while begin < 40 << 20:
        data, begin = stream.spool.read(begin, 1 << 20)  # from the file, then from memory
        got.append(data)
    assert b"".join(got) == piece * 40
    assert stream.end()
    assert path.read_bytes() == piece * 40


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_sendfile_gets_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "sendfile", refuse(number))
    text = os.urandom(3 << 20)
    stream = Stream(path)
    stream.write(text)
    assert stream.end()
    assert (path.read_bytes(), stream.said) == (text, [])
    memory = os.memfd_create("left")
    os.write(memory, b"moved, left")
    os.lseek(memory, 7, os.SEEK_SET)
    with path.open("ab") as file:
        move_rest(memory, file.fileno())
    os.close(memory)
    assert path.read_bytes() == text + b"left"


def test_what_a_worker_truncates_stays_in_its_file(path: Path) -> None:
    stream = Stream(path)
    stream.write(b"a longer line\n")
    until(lambda: path.exists() and path.read_bytes() == b"a longer line\n", "it in the file")
    os.truncate(f"/proc/self/fd/{stream.fd}", 0)  # > /dev/stdout
    stream.write(b"new\n")
    until(lambda: path.read_bytes().endswith(b"new\n"), "it in the file")
    os.ftruncate(stream.fd, 0)
    stream.write(b".\n")
    assert stream.end()
    kept, note, new = path.read_bytes().partition(
        b"\nholdfast: the worker emptied its output here, and lines may be missing: in a shell script use >> /dev/stdout "
        b"and tee -a /dev/stdout\n"
    )
    assert (kept, bool(note), new) == (b"a longer line\n", True, b"new\n.\n"), "it is said once"
    (said,) = stream.said
    assert said.startswith(f"a worker emptied its output ({path}), and lines may be missing: in a shell script use >>")


def test_at_the_end_a_disk_that_takes_nothing_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(path)
    with monkeypatch.context() as patch:
        patch.setattr(log_spool.os, "sendfile", refuse(errno.EDQUOT))
        stream.write(b"x" * 1234)
        assert not stream.end()
    assert stream.said[-1] == f"1234 bytes of output are not in the log files: {path}: {os.strerror(errno.EDQUOT)}"


KILLED = """
import os, signal, sys
from pathlib import Path
from holdfast.supervisor.supervisor import fork_supervisor
handle = fork_supervisor()
if sys.argv[2] == "suspended":
    os.kill(handle.pid, signal.SIGSTOP)
Path(sys.argv[3]).write_text(str(handle.pid))
from holdfast import seqpacket
from holdfast.supervisor.log_spool import Spool
path = Path(sys.argv[1])
for number, name in enumerate(("stdout.log", "stderr.log")):
    spool = Spool(path.with_name(name))
    worker = spool.writer()
    message = {"do": "logs", "paths": [str(spool.path)], "first": number == 0, "ended": []}
    seqpacket.send(handle.sock, message, [spool.memory_fd])
    os.write(worker, b"moved\\n")
    spool.move()
    os.write(worker, b"not moved\\n" * 100_000)
    if len(sys.argv) > 5:
        os.write(worker, b"dropped\\n" * 4_000_000)
        spool.shed(1 << 20)
        os.write(worker, b"last\\n")
doomed = Path(sys.argv[4])
doomed.mkdir(mode=0o700)
seqpacket.send(handle.sock, {"do": "remove", "path": str(doomed)})
os.kill(os.getpid(), signal.SIGKILL)
"""
STATES = ("running", "suspended")
"""Of the supervisor, which was just forked: a suspended one has read no message when the agent is killed."""


@pytest.mark.parametrize("state", STATES)
def test_the_supervisor_moves_and_removes_what_a_killed_agent_has_not(path: Path, tmp_path: Path, state: str) -> None:
    pid, doomed = tmp_path / "pid", tmp_path / "doomed"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), state, str(pid), str(doomed)], timeout=limit_s(30))
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):  # where it had come so far, the agent's death has continued it
        os.kill(int(pid.read_text()), signal.SIGCONT)
    whole = b"moved\n" + b"not moved\n" * 100_000
    for name in ("stdout.log", "stderr.log"):
        until(lambda name=name: path.with_name(name).read_bytes() == whole, f"all of it in {name}")
    until(lambda: not doomed.exists(), "the folder is removed")


def test_what_the_agent_had_dropped_is_said_by_the_supervisor(path: Path, tmp_path: Path) -> None:
    """It is a hole in the memory: of the file's bytes none is a zero."""
    line = [sys.executable, "-c", KILLED, path, "running", tmp_path / "pid", tmp_path / "doomed", "sheds"]
    assert subprocess.run(line, timeout=limit_s(60)).returncode == -signal.SIGKILL
    for name in ("stdout.log", "stderr.log"):
        until(lambda name=name: path.with_name(name).read_bytes().endswith(b"\nlast\n"), f"all of it in {name}")
        text = path.with_name(name).read_bytes()
        assert b"\0" not in text
        missing = re.findall(rb"\nholdfast: (\d+) bytes of output are missing here: ", text)
        assert len(missing) == 1
        note = re.search(rb"\nholdfast: .*\n", text)
        assert note is not None
        whole_bytes = len(b"moved\n" + b"not moved\n" * 100_000 + b"dropped\n" * 4_000_000 + b"last\n")
        assert len(text) - len(note[0]) + int(missing[0]) == whole_bytes


def test_many_notifications_are_read_one_piece_at_a_time(tmp_path: Path) -> None:
    """New ones may come as fast as they are read: a read to the last one would never end."""
    watch = ChangeWatch()
    with (tmp_path / "one").open("wb", buffering=0) as one, (tmp_path / "other").open("wb", buffering=0) as other:
        watch.add(tmp_path / "one")
        watch.add(tmp_path / "other")
        for _ in range(NOTIFICATIONS_BYTES_MAX // 32 + 1):  # two of 16 bytes each
            one.write(b"x")
            other.write(b"x")
        watch.drain()
        assert is_readable(watch.fd), "the rest wakes the caller again"
        watch.drain()
        assert not is_readable(watch.fd)
    watch.close()
