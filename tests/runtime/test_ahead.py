"""A child that works while its agent imports modules, with real processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from holdfast.runtime.ahead import RESULT_FD, Ahead, fork_ahead
from tests.support.limits import until

LONG = b"x" * 1_000_000
"""More than a pipe holds."""


def forked(work: Callable[[], bytes]) -> Ahead:
    child = fork_ahead(work)
    assert child is not None
    return child


def fails() -> bytes:
    raise RuntimeError("the driver is broken")


def sleeps() -> bytes:
    time.sleep(60)
    return b""


@pytest.mark.parametrize(("work", "result"), [(lambda: LONG, LONG), (lambda: b"", b""), (fails, b"")])
async def test_the_agent_gets_what_the_child_has_found_and_nothing_from_one_that_fails(
    work: Callable[[], bytes], result: bytes
) -> None:
    child = forked(work)
    assert await child.result() == result
    with pytest.raises(ProcessLookupError):  # it was reaped
        os.kill(child.pid, 0)


async def test_a_child_that_is_killed_has_no_result() -> None:
    child = forked(sleeps)
    os.kill(child.pid, signal.SIGKILL)
    assert await child.result() == b""


async def test_the_child_holds_no_descriptor_of_the_agent_and_no_ctrl_c_ends_it() -> None:
    """The supervisor ends with the agent's end of its socket: a child that held it would keep it alive."""
    reader, writer = os.pipe()
    go_reader, go_writer = os.pipe()

    def lists() -> bytes:
        os.kill(os.getpid(), signal.SIGINT)
        return ",".join(sorted(os.listdir("/proc/self/fd"), key=int)).encode()

    child = forked(lists)
    for fd in (writer, go_reader, go_writer):
        os.close(fd)
    assert os.read(reader, 1) == b""
    os.close(reader)
    listing = RESULT_FD + 1
    assert (await child.result()).decode() == ",".join(map(str, range(listing + 1)))


def test_without_pidfd_there_is_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuses(pid: int) -> int:
        asked.append(pid)
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuses)
    assert fork_ahead(sleeps) is None
    (pid,) = asked
    with pytest.raises(ProcessLookupError):  # it was ended and reaped
        os.kill(pid, 0)


def test_the_child_ends_with_its_agent() -> None:
    program = (
        "import os, time\n"
        "from holdfast.runtime.ahead import fork_ahead\n"
        "child = fork_ahead(lambda: time.sleep(60) or b'')\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    agent.kill()
    agent.wait()
    agent.stdout.close()
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the child")
