"""Finding and ending process trees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from holdfast.supervisor import processes


def start(script: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A Python child that prints the pids it made."""
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, [int(pid) for pid in child.stdout.readline().split()]


def test_descendants_are_found_whatever_their_session_and_name() -> None:
    child, (session, grandchild) = start(
        """
        import ctypes, os, time
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # a subreaper, as every root is whose tree we kill
        read, write = os.pipe()
        first = os.fork()
        if first == 0:
            os.setsid()
            ctypes.CDLL(None).prctl(15, b") Z 1 (", 0, 0, 0)
            second = os.fork()
            if second:
                os.write(write, f"{os.getpid()} {second}".encode())
            time.sleep(1000)
        print(os.read(read, 100).decode(), flush=True)
        time.sleep(1000)
        """
    )
    try:
        assert sorted(processes.descendants(child.pid)) == sorted([session, grandchild])
        assert child.pid in processes.descendants(os.getpid())
        assert processes.descendants(child.pid, spare=[session]) == []
        assert processes.kill_descendants(child.pid) == []
        assert processes.is_alive(child.pid)
    finally:
        child.kill()
        child.communicate()


def test_zombies_are_not_alive_but_a_leader_that_ended_before_its_threads_is() -> None:
    child, (zombie, threaded) = start(
        """
        import ctypes, os, threading, time
        zombie = os.fork()
        if zombie == 0:
            os._exit(0)
        os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
        threaded = os.fork()
        if threaded == 0:
            threading.Thread(target=time.sleep, args=(1000,)).start()
            ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone
        while open(f"/proc/{threaded}/stat").read().split(") ")[1][0] != "Z":
            time.sleep(0.01)
        print(zombie, threaded, flush=True)
        time.sleep(1000)
        """
    )
    try:
        assert not processes.is_alive(zombie)
        assert processes.is_alive(threaded)
        assert processes.descendants(child.pid) == [threaded]
        assert processes.kill_descendants(child.pid) == []
        assert not processes.is_alive(threaded)
    finally:
        child.kill()
        child.communicate()


def test_own_children_are_reaped_when_killed() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    others = [other for other in processes.descendants(os.getpid()) if other != pid]
    assert processes.kill_descendants(os.getpid(), spare=others) == []
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "a kernel without pidfd"])
def test_a_process_that_got_the_number_of_a_dead_one_is_not_killed(
    monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    """As if it had happened between the look and the signal."""
    if not pidfd:
        monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    stranger, _ = start("import time; print(flush=True); time.sleep(1000)")
    child, (below,) = start(
        """
        import os, time
        below = os.fork()
        if below == 0:
            time.sleep(1000)
        print(below, flush=True)
        time.sleep(1000)
        """
    )
    really = processes.descendants
    looks = iter([[stranger.pid, below]])
    monkeypatch.setattr(processes, "descendants", lambda *given: next(looks, None) or really(*given))
    try:
        assert processes.kill_descendants(child.pid) == []
        assert not processes.is_alive(below)
        assert processes.is_alive(stranger.pid)
    finally:
        for each in (stranger, child):
            each.kill()
            each.communicate()


def no_pidfd(*_: object) -> int:
    raise OSError(38, "not implemented")


def test_what_does_not_die_is_reported_after_the_limit() -> None:
    child, _ = start("import time; print(flush=True); time.sleep(1000)")
    try:
        # No time at all: the same answer as for a process that is stuck in the kernel.
        assert processes.kill_descendants(os.getpid(), limit_s=-1.0) != []
        assert processes.is_alive(child.pid)
    finally:
        child.kill()
        child.communicate()


def test_a_process_that_never_was_is_not_alive() -> None:
    assert not processes.is_alive(2**22 + 1)
    assert processes.descendants(2**22 + 1) == []


def test_a_kernel_that_does_not_say_where_the_command_line_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As qemu-user's: it has the first fields only. The process keeps the line that it has."""
    line = Path("/proc/self/cmdline").read_bytes()
    stat = processes.process_stat("self")
    assert stat is not None
    monkeypatch.setattr(processes, "process_stat", lambda _: stat._replace(fields=stat.fields[:41]))
    processes.set_command_line(b"another")
    assert Path("/proc/self/cmdline").read_bytes() == line


def test_a_worker_s_files_on_a_disk_that_stalls_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker has many files open, and their numbers are above that of the file for stacks."""

    stat = os.stat

    def status(path: str) -> os.stat_result:
        assert os.readlink(path).startswith("/memfd:"), "the status of any other file may wait for its disk"
        return stat(path)

    stacks = os.memfd_create("stacks")
    with (tmp_path / "shard").open("wb"), monkeypatch.context() as patch:
        patch.setattr(os, "stat", status)
        assert processes.has_open(os.getpid(), stacks)
    os.close(stacks)
