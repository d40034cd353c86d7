"""What a child process finds out while the agent still imports its modules.

A start is mostly imports, which use one processor. What has to be known before the first generation, and needs modules
of its own, would come on top: with the checks of `--preflight quick` a script began 19 % later. A child that is forked
before these imports has ended when the nodes have met.

A child that fails, or is killed, has no result: the agent does the work itself then, and shows the fault.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NoReturn

from holdfast.supervisor.processes import PR_SET_PDEATHSIG, close_all_but, prctl

RESULT_FD = 3
"""The descriptor of the result, in the child."""


class Ahead:
    """A child of this process that is at work, or has ended."""

    def __init__(self, pid: int, ended_fd: int, result_fd: int) -> None:
        self.pid = pid
        self._ended_fd = ended_fd
        """A pidfd: readable when the child has ended."""
        self._result_fd = result_fd
        """Memory that both share: a pipe could be full, and its reader is busy with imports."""

    async def result(self) -> bytes:
        """The bytes that it has found out; empty: it has failed. Call it once."""
        import asyncio  # the child is forked before the agent imports it

        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._ended_fd, ended.set)
        try:
            await ended.wait()
            _, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222 - it has ended
            return b"" if status else os.pread(self._result_fd, os.fstat(self._result_fd).st_size, 0)
        finally:
            loop.remove_reader(self._ended_fd)
            os.close(self._ended_fd)
            os.close(self._result_fd)


def fork_ahead(work: Callable[[], bytes]) -> Ahead | None:
    """Fork a child that does this. None: no process can be started here, or its end would not be noticed.

    Call it while there are no other threads. The child ends with this process.
    """
    agent = os.getpid()
    result_fd = os.memfd_create("holdfast-ahead")
    # The child never unblocks them: a Ctrl-C is for the agent, and SIGKILL ends the child.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _work(work, result_fd, agent)
    except OSError:
        os.close(result_fd)
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        return Ahead(pid, os.pidfd_open(pid), result_fd)
    except OSError:  # a kernel without pidfd, or no descriptor is left
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(result_fd)
        return None


def _work(work: Callable[[], bytes], result_fd: int, agent: int) -> NoReturn:
    """Work in the child. Never returns to the agent's code above it."""
    status = os.EX_SOFTWARE
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == agent:
            _keep_only(result_fd)
            os.write(RESULT_FD, work())
            status = os.EX_OK
    finally:
        os._exit(status)  # also with an exception: the agent shows it when it does the work itself


def _keep_only(result_fd: int) -> None:
    """Close all others. A copy of the agent's end of a socket or a pipe would hide from the other end that the agent
    has ended."""
    os.dup2(result_fd, RESULT_FD, inheritable=False)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    close_all_but(RESULT_FD)
